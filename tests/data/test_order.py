"""The stream of sample indices: complete epochs, no state, no waiting."""

import numpy as np
import pytest

from dit_train.data import order
from dit_train.data.order import positions
from dit_train.rng import stream


def test_each_epoch_holds_each_image_once_in_an_order_of_its_own():
    first, second = positions(0, 0, 50, 50), positions(0, 50, 50, 50)
    assert first.dtype == np.int64
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()
    assert first.tolist() != list(range(50))
    assert first.tolist() != positions(1, 0, 50, 50).tolist()


@pytest.mark.parametrize("piece", [1, 7, 16, 50, 333])
def test_the_stream_does_not_depend_on_how_it_is_cut(piece):
    whole = positions(3, 20, 400, 50)
    pieces = [positions(3, 20 + start, min(piece, 400 - start), 50) for start in range(0, 400, piece)]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_a_far_position_is_reached_without_walking_there(monkeypatch):
    drawn = []
    monkeypatch.setattr(order, "stream", lambda *keys: drawn.append(keys) or stream(*keys))
    far = positions(77, 10**9 - 10, 20, 1000)
    assert drawn == [(77, "order", 10**6 - 1), (77, "order", 10**6)]
    assert np.array_equal(far[10:], positions(77, 10**9, 10, 1000))
    assert len(drawn) == 2  # the next batch finds the epoch drawn already


def test_the_cached_order_cannot_be_spoilt():
    before = positions(0, 0, 10, 10).copy()
    positions(0, 0, 10, 10)[:] = 0
    assert np.array_equal(positions(0, 0, 10, 10), before)


@pytest.mark.parametrize("arguments", [(-1, 4, 10), (0, -1, 10), (0, 4, 0)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match="stream"):
        positions(0, *arguments)


def test_nothing_asked_is_nothing():
    assert positions(0, 5, 0, 10).shape == (0,)
