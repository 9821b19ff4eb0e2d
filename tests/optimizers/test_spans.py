"""The division of a step's time, by a clock that the parts of a step move by known amounts."""

import copy
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from optimizers import AdamW, BlockMuon, Muon, PeriodicRowMuon
from optimizers.algorithms import adamw
from optimizers.engine import across, directions, driver, momentum, rows, spans
from optimizers.sharding import exchange, gather

PARTS = [
    ("other", 1, driver.Driver, "_task"),
    ("momentum", 10, momentum, "look_ahead"),
    ("orthogonalisation", 100, directions, "orthogonalize_pieces"),
    ("orthogonalisation", 100, directions, "orthogonalize_all"),
    ("exchange", 1000, exchange.Trip, "arrive"),
    ("exchange", 1000, gather, "_all_gather"),
    ("exchange", 1000, dist, "all_reduce"),
    ("update", 10_000, driver, "apply"),
    ("update", 10_000, rows, "decay_and_add"),
    ("update", 10_000, across, "decay_and_add"),
    ("update", 10_000, adamw, "fused_adamw"),
]


@contextmanager
def ledger(**counts_as):
    """A clock that stands still but in ``PARTS``; the seconds that it moved in each kind, or in what that counts as."""
    moved, now = Counter(), [0]

    clock = SimpleNamespace(perf_counter=lambda: now[0], move=lambda seconds: now.__setitem__(0, now[0] + seconds))

    def moving(kind, seconds, function):
        def called(*args, **options):
            clock.move(seconds)
            moved[counts_as.get(kind, kind)] += seconds
            return function(*args, **options)

        return called

    with ExitStack() as stack:
        stack.enter_context(patch.object(spans, "time", clock))
        for kind, seconds, owner, name in PARTS:
            stack.enter_context(patch.object(owner, name, moving(kind, seconds, getattr(owner, name))))
        yield moved


def divided(optimizer, kinds, **counts_as):
    """Take a step; its time has to be divided as the ledger says, into kinds that all took some."""
    optimizer.time_spans()
    with ledger(**counts_as) as moved:
        optimizer.step()
    assert optimizer.span_ms == {kind: 1e3 * moved[kind] for kind in spans.KINDS}
    assert {kind for kind, ms in optimizer.span_ms.items() if ms} == {"other", *kinds.split()}


def weight(*shape):
    made = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    made.grad = torch.ones_like(made)
    return made


ALONE = "momentum orthogonalisation update"


def test_time_is_divided_into_what_it_was_spent_on():
    divided(Muon([weight(8, 6), weight(4, 4)]), ALONE)
    divided(BlockMuon([weight(8, 6)]), ALONE)
    divided(AdamW([weight(8, 6)]), "update")
    periodic = PeriodicRowMuon([weight(8, 6)], period=2)
    divided(periodic, ALONE)
    divided(periodic, "update", momentum="update")
    divided(periodic, ALONE)


def test_a_closure_is_no_part_of_the_step():
    w = weight(8, 6)
    optimizer = Muon([w])
    optimizer.time_spans()
    with ledger() as moved:
        optimizer.step(lambda: (spans.time.move(7), w.square().sum())[1])
    assert sum(optimizer.span_ms.values()) == 1e3 * moved.total()


def test_nothing_is_measured_before_it_is_asked_for_and_after_it_is_ended():
    optimizer = Muon([weight(8, 6)])
    optimizer.step()
    assert optimizer.span_ms == {}
    optimizer.time_spans()
    assert optimizer.span_ms == {}
    optimizer.step()
    first = optimizer.span_ms
    assert set(first) == set(spans.KINDS) and optimizer.span_ms == first
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.span_ms not in ({}, first)
    assert copy.deepcopy(optimizer).span_ms == {}
    optimizer.time_spans(False)
    optimizer.step()
    assert optimizer.span_ms == {}


def test_a_step_that_failed_leaves_no_trace_in_the_next():
    w = weight(8, 6)
    optimizer = Muon([w])
    optimizer.time_spans()
    with ledger(), patch.object(driver, "apply", side_effect=RuntimeError), pytest.raises(RuntimeError):
        optimizer.step()
    divided(optimizer, ALONE)


def test_events_are_waited_for_when_they_are_read_and_not_before():
    recorded, waited = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "the stream"
            recorded.append(self)
            self.time = 2.0 ** len(recorded)

        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, end):
            return end.time - self.time

    measured = spans.Spans(lambda: torch.device("cuda"))
    with patch.object(torch.cuda, "Event", Event), patch.object(torch.cuda, "current_stream", lambda _: "the stream"):
        for _ in range(2):
            recorded.clear()
            with measured.of("other"), measured.of("exchange"), measured.of("momentum"), measured.of("momentum"):
                pass
    assert not waited
    expected = {"exchange": 4.0 + 16, "momentum": 8.0, "other": 2.0 + 32, "orthogonalisation": 0.0, "update": 0.0}
    assert measured.milliseconds() == expected == measured.milliseconds()
    assert waited == recorded[-1:]


@pytest.mark.gpu
def test_on_a_gpu_events_of_the_step_add_up():
    w = nn.Parameter(torch.randn(2048, 2048, device="cuda"))
    w.grad = torch.ones_like(w)
    optimizer = Muon([w])
    optimizer.time_spans()
    optimizer.step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    optimizer.step()
    end.record()
    assert 0 < sum(optimizer.span_ms.values()) <= start.elapsed_time(end)
    assert optimizer.span_ms["orthogonalisation"] == max(optimizer.span_ms.values())
