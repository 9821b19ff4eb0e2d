"""Ranks that meet in a store in which earlier starts have left their words."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dit_train import overlays, preflight
from dit_train.parallel import mesh, roll_call
from dit_train.run import loop
from dit_train.run.stop import StopRequest
from tests.test_clusters import free_port


def start(store: dist.Store, ranks: list[int], size: int, seconds: float = 60.0) -> list:
    """What each of these ranks of one start gets: its part of the store, or the error."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        meetings = [pool.submit(roll_call.meet, store, rank, size, seconds) for rank in ranks]
        return [meeting.exception() or meeting.result() for meeting in meetings]


def test_every_start_has_a_part_of_the_store_of_its_own_and_all_its_ranks_the_same():
    store = dist.HashStore()
    for number in range(3):
        parts = start(store, [0, 1, 2], 3)
        assert not parts[2].check(["word"])
        parts[0].set("word", str(number))
        assert all(part.get("word") == str(number).encode() for part in parts)


@pytest.mark.parametrize("there", [[0], [1], [0, 2], [1, 2]])
def test_a_start_that_lacked_ranks_does_not_mislead_the_next(there):
    store = dist.HashStore()
    start(store, there, 3, seconds=0.3)
    parts = start(store, [0, 1, 2], 3)
    parts[1].set("word", "here")
    assert parts[0].get("word") == parts[2].get("word") == b"here"


def test_ranks_that_do_not_come_are_named_and_those_that_wait_end():
    first, second = start(dist.HashStore(), [0, 2], 4, seconds=0.4)
    assert isinstance(first, roll_call.Absent) and "ranks 1, 3 of 4 did not come within" in str(first)
    assert isinstance(second, roll_call.Absent) and "rank 2 was not let in by rank 0 within" in str(second)


def test_one_rank_alone_waits_for_nobody():
    (part,) = start(dist.HashStore(), [0], 1, seconds=0.0)
    assert not part.check(["anything"])


def test_a_run_that_lacks_a_rank_ends_with_code_1_and_says_which(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(mesh, "_SECONDS_TO_MEET", 1.0)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    agent = dist.TCPStore("127.0.0.1", int(place["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    config = overlays.read(["configs/quickstart/base.yaml"], ["--run.folder", str(tmp_path / "run")])
    with StopRequest() as stop:
        assert loop.train(preflight.check(config, 2), stop) == 1
    line = "rank 1 of 2 did not come within 1 s; look at what the hosts of these say, and give all the same command"
    assert json.loads((tmp_path / "run" / "exit.json").read_text()) == {"code": 1, "message": line}
    assert f"dit_train: {line}\n" in capfd.readouterr().err
    del agent
    with StopRequest() as stop:  # nobody keeps a store there now
        assert loop.train(preflight.check(config, 2), stop) == 1
    assert f"ranks do not meet at 127.0.0.1:{place['MASTER_PORT']}" in capfd.readouterr().err
