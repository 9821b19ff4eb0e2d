"""``scripts/bench_training.py``: what it compares and what it writes; what it measures is never asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dit_train.config import ModelConfig
from dit_train.diffusion.objectives import velocity_loss
from dit_train.model.dit import DiT, parameter_count
from tests.docstrings import keys

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_training  # noqa: E402
from training_bench import plain, ratios  # noqa: E402

DOC = bench_training.__doc__.partition("FILE holds")[2]
SPREAD = {"median", "low", "high"}


def promised(of: str) -> set[str]:
    lines = DOC.partition(f"of {of}:")[2].partition("of loop:")[0].strip().splitlines()
    return set().union(*(keys(line.partition(":")[0]) for line in lines))


def checked(path: Path, of: str) -> dict:
    result = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert set(result) == keys(DOC, before=": what ran") | promised(of)
    for name in result:
        if name.startswith("throughput"):
            assert result[name].keys() == SPREAD and 0 < result[name]["low"] <= result[name]["high"]
    return result


@pytest.fixture(scope="module")
def pair():
    dit = DiT(ModelConfig(width=32, depth=2, heads=2), channels=4, image_size=8, num_classes=10)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # adaLN-zero would hide the blocks
        for parameter in dit.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return dit, plain.like(dit)


def test_the_plain_model_computes_what_ours_does_with_as_many_parameters(pair):
    dit, other = pair
    assert sum(p.numel() for p in other.parameters() if p.requires_grad) == parameter_count(dit)
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn((3, 4, 8, 8), generator=generator) for _ in range(2))
    t, labels = torch.rand(3, generator=generator), torch.tensor([0, 7, 10])
    prediction = dit(x, t, labels)
    velocity_loss(prediction, target).mean().backward()
    theirs = other(x, t, labels)
    torch.nn.functional.mse_loss(theirs, target).backward()
    assert torch.allclose(prediction, theirs, rtol=1e-5, atol=1e-5) and prediction.std() > 0.1
    gradients = plain.laid_out(dit, {name: p.grad for name, p in dit.named_parameters()})
    trained = {name: p.grad for name, p in other.named_parameters() if p.requires_grad}
    assert gradients.keys() == trained.keys()
    for name, gradient in trained.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max()), name
        assert gradient.abs().max() > 0, name


def test_a_step_is_measured_in_turns_and_every_promised_number_written(tmp_path):
    out = tmp_path / "step.json"
    command = [sys.executable, "scripts/bench_training.py", "step", "--json", str(out), "--smoke", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--rounds", "3"], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    result = checked(out, "step")
    assert result["ranks"] == 1 and result["rounds"] == 3
    for name in ("ours", "plain"):
        assert result[name].keys() == {"step", "gradients", "update"}
        assert 0 < result[name]["gradients"] <= result[name]["step"]
    assert [line.split()[0] for line in done.stdout.splitlines()] == [k for k in result if k.startswith("throughput")]


@pytest.mark.long
def test_a_loop_is_measured_on_real_ranks_and_its_run_does_not_stay(tmp_path):
    out = tmp_path / "loop.json"
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["loop", "--json", str(out), "--rounds", "2", "--model.width", "32", "--model.depth", "1"]
    command = [*ranks, "scripts/bench_training.py", *arguments, "--train.batch", "4", "--parallel.device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    result = checked(out, "loop")
    assert result["ranks"] == 2 and result["batch"] == 4 and result["dtype"] == "fp32"
    assert min(result[f"{name}_ms"] for name in ("ours", "bare", "bare_averaging")) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["loop.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("step", "--json"),
        ("step --json x.json --rounds 1", "--rounds is 1"),
        ("step configs/quickstart/base.yaml --json x.json", "step takes no configs/quickstart/base.yaml"),
        ("loop --json x.json --model.widht 3", "widht"),
        ("loop --json x.json --train.compute_dtype auto", "train.compute_dtype"),
        ("loop --json x.json --train.micro_batch 2", "train.micro_batch"),
        ("loop --json x.json --parallel.compile true", "parallel.compile: the bare loop has False"),
        ("loop configs/optimizers/muon.yaml --json x.json --train.compute_dtype fp32", "adamw, not muon"),
        ("loop --json x.json --train.batch 0", "train.batch"),
    ],
)
def test_a_bad_argument_is_one_line_and_code_2(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_training.py", *arguments.split()])
    try:
        code = bench_training.main()
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and said in error and len(error.splitlines()) == 1, error
    assert not list(tmp_path.iterdir())


def test_an_earlier_run_in_the_way_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "x.run").mkdir()
    monkeypatch.setattr(sys, "argv", ["bench_training.py", "loop", "--json", str(tmp_path / "x.json")])
    assert bench_training.main() == 2 and "remove it" in capsys.readouterr().err


def test_a_ratio_is_that_of_neighbours():
    assert ratios.ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0]) == {"median": 2.0, "low": 2.0, "high": 2.5}
