"""``scripts/bench_optimizers.py``: structure and exact counts; what it measures is never asserted."""

import getpass
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import bench_optimizers
from optimizer_bench import contenders, link, probes, report
from optimizer_bench.problem import Settings
from optimizer_bench.timing import Sample

import optimizers
from tests.docstrings import keys

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[dict, str]:
    out = tmp_path_factory.mktemp("bench") / "result.json"
    command = [sys.executable, "scripts/bench_optimizers.py", "--ranks", "2", "--smoke", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--no-peers", "--json", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text(), parse_constant=pytest.fail), done.stdout


def row(result: dict, name: str) -> dict:
    return next(r for r in result["optimizers"] if r["name"] == name)


def test_every_contender_has_a_row(smoke):
    result, shown = smoke
    names = [r["name"] for r in result["optimizers"]]
    ours = ["AdamW", "Muon", "MuonBP P=5", "PeriodicRowMuon K=3", "BlockMuon"]
    assert names[:5] == ours
    assert {"torch AdamW default", "torch AdamW foreach", "torch AdamW fused", "floor: batched NS"} <= set(names)
    for r in result["optimizers"]:
        assert f"| {r['name']} " in shown
        assert 0 < r["step"]["min_ms"] <= r["step"]["median_ms"]
        assert bool(r["refresh"]) == (r["period"] > 0) and bool(r["cheap"]) == (r["period"] != 1)
        assert {"x_adamw", "x_fused", "x_muon", "x_floor"} <= set(r)
    assert row(result, "Muon")["x_muon"] == {"median": 1, "min": 1}


def test_every_class_is_measured_and_has_a_line_in_the_readme():
    names = [name for name, *_ in contenders.FAMILY]
    ours = ["AdamW", contenders.MUON, contenders.MUON_BP, contenders.ROW_MUON, "BlockMuon"]
    classes = {cls.__name__ for _, cls, *_ in contenders.FAMILY} | {name.split()[0] for name in ours}
    assert classes == {name for name in optimizers.__all__ if name[0].isupper()}
    measured = (ROOT / "optimizers" / "README.md").read_text().split("| optimizer | ms a step |")[1].split("\n\n")[0]
    assert not [name for name in [*ours, *names] if f"\n| {name} |" not in measured]


def test_the_file_holds_what_the_docstring_lists(smoke):
    assert smoke[0].keys() == keys(bench_optimizers.__doc__, "FILE holds")


def test_bytes_are_exact(smoke):
    result, _ = smoke
    ranks, elements = result["config"]["ranks"], result["config"]["elements"]
    refresh = 4 * elements * (ranks - 1) // ranks**2
    for name, period in (("Muon", 1), ("PeriodicRowMuon K=3", 3), ("MuonBP P=5", 5)):
        sent = row(result, name)
        assert sent["bytes_sent_per_step"]["mean"] == pytest.approx(refresh / period, rel=1e-12), name
        assert sent["bytes_sent_by_step"][1:] == [0] * (period - 1)
        assert sent["collectives_by_step"][1:] == [0] * (period - 1) and sent["collectives_by_step"][0] > 0
        assert sum(sent["bytes_planned_by_step"]) == sum(sent["bytes_sent_by_step"])
    for name in ("BlockMuon", "AdamW", "torch AdamW default"):
        assert row(result, name)["bytes_sent_by_step"] == [0]
    figures = {f["name"]: f for f in result["figures"]}
    assert all(f["met"] for name, f in figures.items() if "bytes" in name)


def test_a_smoke_run_judges_counts_alone(smoke):
    result, shown = smoke
    assert result["config"]["smoke"] is True and "missed" not in shown
    assert {f["met"] for f in result["figures"] if "bytes" not in f["name"]} == {None}
    measured = {**result, "config": {**result["config"], "smoke": False}}
    judged = [f for f in report.figures(measured) if f["required"] is not None]
    assert len(judged) > 8 and all(f["met"] in (True, False) for f in judged)


def test_probes_say_what_they_saw(smoke):
    result, _ = smoke
    assert set(result["row_step"]) == {"fused AdamW", "row step"}
    assert set(result["overlap"]["in_flight"]) == {"1", "2", "3"}
    assert result["overlap"]["buckets"] >= 4
    assert all(times["ratio"] > 0 for times in result["overlap"]["in_flight"].values())
    assert [found["max_in_flight"] for found in result["peak"]] == [1, 2, 3, 2]
    for found in result["peak"]:
        bucket = max(found["bucket_bytes"], 2 * 32 * 128)
        assert found["bound_bytes"] == (2 * found["max_in_flight"] + 6) * bucket // 2
        assert found["peak_bytes"] > 0


def test_the_file_names_kinds_of_machines_only(smoke):
    result, _ = smoke
    assert set(result["machine"]) == {
        "torch", "python", "device", "backend", "world_size", "cores", "threads_per_rank"
    }  # fmt: skip
    text = json.dumps(result)
    for private in (str(ROOT), socket.gethostname(), str(Path.home())):
        assert len(private) < 3 or private not in text
    assert result["machine"]["world_size"] == 2 and getpass.getuser() not in result["machine"]["device"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "1", "--json", "x.json"], "--ranks is 1"),
        (["--ranks", "two", "--json", "x.json"], "--ranks"),
        (["--ranks", "2"], "--json"),
        (["--ranks", "2", "--json", "no/such/folder/x.json"], "--json: no/such/folder/x.json"),
        (["--ranks", "2", "--json", "x.json", "--steps", "4"], "--steps is 4"),
        (["--ranks", "2", "--json", "x.json", "--blocks", "0"], "--blocks is 0"),
        (["--ranks", "99", "--json", "x.json", "--device", "cuda"], "--device cuda"),
    ],
)
def test_a_bad_argument_is_one_line_and_code_2(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_optimizers.py", *arguments])
    try:
        code = bench_optimizers.main()
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and said in error and len(error.splitlines()) == 1


def test_a_step_is_averaged_over_whole_periods():
    assert Sample([9.0, 1.0, 2.0, 6.0, 3.0, 3.0, 100.0]).means(3) == [4.0, 4.0]
    assert Sample([1.0, 2.0]).means(0) == [1.0, 2.0]


def test_the_link_delays_completion_and_nothing_else():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        real = dist.all_to_all_single
        sent, received = torch.arange(8.0), torch.empty(8)
        with link.slow_link(seconds_per_byte=0.2 / sent.nbytes) as seen:
            begin = time.monotonic()
            work = dist.all_to_all_single(received, sent, async_op=True)
            launched = time.monotonic() - begin
            assert not work.is_completed()
            work.wait()
            assert work.is_completed() and time.monotonic() - begin >= 0.2 > launched
            assert dist.all_to_all_single(received, sent) is None
        assert seen == [sent.nbytes] and received.equal(sent) and dist.all_to_all_single is real
    finally:
        dist.destroy_process_group()


def test_memory_inside_a_call_is_what_lives_at_once():
    def step():
        first = torch.empty(2**20)
        second = first + 1
        del first
        return second * 2

    assert 0 <= allocated(step) - 2 * 2**22 < 64  # the scalars take a few bytes
    assert allocated(lambda: None) == 0


def allocated(step) -> int:
    return probes.allocated_inside(step, torch.device("cpu"))


def test_the_floor_does_five_iterations_on_every_matrix():
    matrices = [torch.randn(shape) for shape in ((8, 8), (16, 8), (8, 16), (8, 8))]
    shapes = []
    real, torch.bmm = torch.bmm, lambda x, y, **k: (shapes.append(tuple(x.shape)), real(x, y, **k))[1]
    try:
        contenders.newton_schulz_floor(matrices)()
    finally:
        torch.bmm = real
    assert sorted(shapes) == [(2, 8, 8)] * 5 + [(2, 8, 16)] * 5


def test_ranks_share_the_cores():
    settings = Settings(ranks=2, steps=5, blocks=3, width=32, device="cpu", compile=False, peers=False)
    assert settings.threads == max(1, settings.cores // 2) and settings.elements == 3 * 9 * 32 * 32
    assert settings.largest_bytes == 2 * 4 * 32 * 32
