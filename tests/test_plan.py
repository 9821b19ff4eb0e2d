"""The planner's command: numbers as its docstring promises, and one line for what it cannot plan."""

import json
import sys
from pathlib import Path

import pytest

from dit_train import overlays
from tests.docstrings import keys

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import plan

BASE = "configs/quickstart/base.yaml"
ROWS = "configs/optimizers/periodic_row_muon.yaml"
EIGHT = ["--ranks", "8", "--gpu", "h100"]


def test_it_writes_what_its_docstring_says(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert plan.main([BASE, ROWS, *EIGHT, "--json", str(out), "--model.depth", "2", "--network-gbs", "25"]) == 0
    found = json.loads(out.read_text())
    assert found.keys() == keys(plan.__doc__, "FILE holds ", ".\n") - {"published"}
    (numbers,) = found["plans"]
    assert numbers.keys() == keys(plan.__doc__, "A plan holds ", ". The last") - {"size", "time_if_gathered"}
    peaks = [
        numbers["memory"][f"peak{kind}"]["max"] for kind in ("", "_without_checkpointing", "_with_full_checkpointing")
    ]
    assert peaks[0] == peaks[1] > peaks[2] > numbers["memory"]["parameters"]["max"]
    assert found["machine"]["network_gbs"] == 25 and numbers["smallest_period"] in range(1, 17)
    assert [one["period"] for one in numbers["periods"]] == list(range(1, 17))
    text = capsys.readouterr().out
    assert "smallest period within 5.0%" in text and "GiB a rank" in text
    time, batch = numbers["time"], 8 * numbers["images_a_rank"]
    parts = [time[part] for part in ("forward", "backward", "second_pass", "rest", "optimizer")]
    assert time["step"] == pytest.approx(sum(parts)) and min(parts) == time["second_pass"] == 0
    assert time["optimizer_share"] == pytest.approx(time["optimizer"] / time["step"])
    assert time["images_a_second"] == pytest.approx(batch / time["step"])
    rate = numbers["flops_an_image"]["total"] * batch / 8 / time["step"] / 1e12
    assert time["tflops"] == pytest.approx(rate) and time["mfu"] == pytest.approx(rate / 66.9)  # of fp32


def test_an_auto_period_is_the_smallest_of_that_machine_within_the_budget(tmp_path):
    out, found = tmp_path / "plan.json", []
    auto = [BASE, ROWS, *EIGHT, "--json", str(out), "--optimizer.period", "auto"]
    for more in (["--network-gbs", "25"], ["--node-gbs", "0.02"], ["--optimizer.period_budget", "0.001"]):
        assert plan.main([*auto, *more]) == 0
        (numbers,) = json.loads(out.read_text())["plans"]
        found.append((numbers["period"], numbers["smallest_period"], numbers["budget"]))
        against = numbers["time"]["against_adamw"]
        assert numbers["period"] > 16 or against == numbers["periods"][numbers["period"] - 1]["against_adamw"]
    (fast, slow, strict) = found
    assert fast[0] == fast[1] < slow[0] and strict == (64, None, 0.001)
    assert plan.main([*auto, "--budget", "3%"]) == 0 and json.loads(out.read_text())["plans"][0]["budget"] == 0.03


def test_it_plans_what_the_data_of_the_config_is_if_asked(tmp_path):
    out = tmp_path / "plan.json"
    assert plan.main([BASE, *EIGHT, "--own-data", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["plans"][0]["parameters"] < 400_000  # digits, not latents of 1000 classes


def test_it_plans_a_size_before_there_are_latents(tmp_path):
    out = tmp_path / "plan.json"
    assert plan.main(["configs/scale/S.yaml", "configs/scale/muon.yaml", *EIGHT, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["plans"][0]["parameters"] // 10**6 == 32


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([BASE, "--ranks", "7", "--gpu", "h100"], "train.batch: 128 images do not divide over 7 ranks"),
        ([BASE, *EIGHT, "--model.widht", "64"], "model.width"),
        ([BASE, *EIGHT, "--model.width", str(4 * 10**18)], "model: too large to be built"),
        ([BASE, *EIGHT, "--model.patch", "5"], "model.patch: 5 does not divide the image size 32"),
        ([BASE, *EIGHT, "--parallel.tensor", "8"], "parallel.tensor: 8 does not divide model.heads"),
        ([BASE, "configs/optimizers/muon_bp.yaml", *EIGHT, "--optimizer.block_grid", "3"], "optimizer: "),
        (["nowhere.yaml", *EIGHT], "no such config file"),
        ([BASE, "--ranks", "8", "--gpu", "a100"], "--gpu"),
        ([BASE, *EIGHT, "--efficiency", "0"], "'0' is no number above 0"),
        ([BASE, *EIGHT, "--json", "no/folder/plan.json"], "name a file in a folder that exists"),
        ([BASE, *EIGHT, "--size", "S", "--size", "B"], "--size: several need --compare"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(arguments, said, capsys):
    try:
        code = plan.main(arguments)
    except SystemExit as left:
        code = left.code
    errors = capsys.readouterr().err.splitlines()
    assert code == 2 and said in errors[-1]
    assert all(" building " in line or " steps of " in line or " forward and " in line for line in errors[:-1])


def test_results_that_cannot_be_written_are_printed_all_the_same(tmp_path, capsys):
    out = tmp_path / "plan.json"

    def planned(*_about):
        out.mkdir()
        return "the table", {"plans": []}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "run", planned)
        assert plan.main([BASE, *EIGHT, "--json", str(out)]) == 2
    said = capsys.readouterr()
    assert said.out == "the table\n" and "name another place" in said.err and str(out) in said.err


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["optimizers/muon", "studies/muon_bp_two_blocks"], ["muon", "muon_bp"]),
        (["optimizers/scion", "optimizers/scion_row"], ["scion", "scion_row"]),
        (["optimizers/muon", "scale/muon"], ["optimizers/muon.yaml", "scale/muon.yaml"]),
    ],
)
def test_optimizers_of_one_name_are_told_apart_in_a_comparison(files, names):
    files = [f"{file}.yaml" for file in files]
    optimizers = [overlays.read([file]).optimizer for file in files]
    assert list(plan.named(files, optimizers)) == names


@pytest.mark.long
def test_a_comparison_has_a_row_for_each_and_shares_the_models(tmp_path, capsys):
    picture, out = tmp_path / "plan.png", tmp_path / "plan.json"
    chosen = ["--size", "S", "--size", "B", "--compare", str(picture), "--json", str(out)]
    for name in ("muon", "periodic_row_muon"):
        chosen += ["--optimizer", f"configs/optimizers/{name}.yaml"]
    assert plan.main([BASE, *EIGHT, *chosen]) == 0
    said = capsys.readouterr()
    assert said.err.count("forward and backward") == 4 and picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text())
    rows = [(one["size"], one["activation_checkpointing"], one["optimizer_name"]) for one in found["plans"]]
    assert len(set(rows)) == len(rows) == 8
    assert all(one["time_if_gathered"]["step"] > one["time"]["step"] for one in found["plans"])
    cuts = [row["modelled"] for row in found["published"] if "against muon" in row["what"]]
    assert len(cuts) == 2 and all(float(cut["gather"][:-1]) < float(cut["owner"][:-1]) < 0 for cut in cuts)
    told = {word for row in found["published"] for word in row["published"].split()}
    assert told >= {"-15.7", "-24.3", "105.09", "113.37", "117.30"}  # arXiv 2608.20818, 2510.16981
    assert "published, measured" in said.out and "modelled, owner" in said.out


@pytest.mark.long
def test_the_documented_plans_are_what_the_documented_command_gives(tmp_path):
    out = tmp_path / "plan.json"
    command = "python scripts/plan.py configs/scale/1.3B.yaml --ranks 256 --gpu h100 --compare"
    text = Path("docs/planning.md").read_text()
    assert command in text
    chosen = ["--size", "1.3B", "--compare", str(tmp_path / "plan.png"), "--json", str(out)]
    assert plan.main(["configs/scale/1.3B.yaml", "--ranks", "256", "--gpu", "h100", *chosen]) == 0
    plans = json.loads(out.read_text())["plans"]
    for one, full in zip(plans[:4], plans[4:], strict=True):
        peaks = [each["memory"]["peak"]["max"] / 2**30 for each in (one, full)]
        period = f" (period {one['period']})" if "periods" in one else ""
        row = f"| 1.3B | {one['optimizer_name']}{period} | {peaks[0]:.2f} ({peaks[1]:.2f}) "
        row += f"| {one['optimizer']['bytes_a_step'] / 1e6:,.1f} | {1e3 * one['time']['step']:,.1f} "
        assert f"{row}| {one['time']['against_adamw']:+.1%} | {one['time']['tflops']:,.1f} |" in text
