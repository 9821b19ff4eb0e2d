"""The commands of scripts/fid.py on a small run, on one rank and on two."""

import dataclasses
import hashlib
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from dit_train.__main__ import main as train
from eval.extractors import load
from eval.extractors.inception import FIDInception
from eval.features import of_images
from eval.frechet import frechet
from scripts import fid
from tests.docstrings import keys

ROOT = Path(__file__).parent.parent
TINY = ["--model.width", "32", "--model.heads", "2", "--model.depth", "1", "--train.batch", "16"]
RUN = [*TINY, "--score.every", "4", "--score.count", "64", "--sample.batch", "16", "--sample.steps", "2"]
RECORD = set(
    "protocol protocol_reference metric value kid kid_standard_error precision recall density coverage floor floor_kid "
    "n_gen n_ref n_kept "
    "extractor weights_sha256 resize quantize reference reference_sha256 image_shape first_index last_index batch_size "
    "sample_seed labels weights sampler guidance compute_dtype torch".split()
)
"""What must be known of a number before it means anything."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of 4 steps, scored at the last, and its own reference."""
    folder = tmp_path_factory.mktemp("fid")
    base = ["configs/quickstart/base.yaml", *RUN, "--train.steps", "4", "--run.tensorboard", "false"]
    assert train([*base, "--train.compute_dtype", "fp32", "--run.folder", str(folder / "run")]) == 0
    assert fid.main(["reference", f"{folder}/run", "--out", f"{folder}/ref.npz", "--count", "64"]) == 0
    return folder


@pytest.fixture
def arrays(tmp_path):
    """real.npz and made.npz of 12 grey images each, as ADM's tool writes them."""
    for name, seed in (("real", 0), ("made", 1)):
        pixels = np.random.default_rng(seed).integers(0, 256, (12, 8, 8, 1), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", arr_0=pixels)
    return tmp_path


def seen(path):
    """Features of an array of images, past the command line."""
    with np.load(path) as file:
        pixels = torch.from_numpy(file["arr_0"]).permute(0, 3, 1, 2)
    return of_images(pixels, load("digits-cnn"), 128, path.name)


@pytest.fixture(autouse=True)
def no_process_group_left():
    """A command that refuses ends its process, and leaves the group to that; here it goes on."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def call(folder, *words):
    """Exit code and the JSON of a command; every FOLDER in its words is the folder."""
    record = folder / "found.json"
    record.unlink(missing_ok=True)
    code = fid.main([word.replace("FOLDER", str(folder)) for word in (*words, "--json", str(record))])
    return code, json.loads(record.read_text()) if record.exists() else None


def refusal(folder, capsys, *words):
    capsys.readouterr()
    assert call(folder, *words) == (2, None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("fid.py: ")
    return lines[0]


def test_a_run_scored_afterwards_has_the_score_of_its_training(folder, capsys):
    code, record = call(folder, "score", "FOLDER/run", "--reference", "FOLDER/ref.npz", "--batch", "16")
    against = "meant against images held out from training, here against digits held out"
    said = capsys.readouterr().out
    assert f"protocol small: {against}" in said
    assert f"64 images in {record['num_features']} features: compare with the floor only" in said
    rows = map(json.loads, (folder / "run" / "scores.jsonl").read_text().splitlines())
    (trained,) = [row for row in rows if row["kind"] == "score"]
    assert code == 0 and record["step"] == 4
    for key in trained.keys() & record.keys():
        same = pytest.approx(trained[key], rel=1e-9) if isinstance(trained[key], float) else trained[key]
        assert record[key] == same, key
    assert trained.keys() >= RECORD and record.keys() >= RECORD


def test_images_generated_by_two_ranks_after_an_interruption_score_as_those_of_one(folder):
    one, two = folder / "one.npz", folder / "two.npz"
    words = ("--reference", f"{folder}/ref.npz", "--batch", "16")
    assert fid.main(["generate", f"{folder}/run", "--out", str(one), *words]) == 0
    sampler, calls = fid.sampling.Sampler.__call__, []

    def broken(self, indices):
        calls.append(len(indices))
        if len(calls) == 3:
            raise OSError("no space left")
        return sampler(self, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fid.sampling.Sampler, "__call__", broken)
        assert fid.main(["generate", f"{folder}/run", "--out", str(two), *words]) == 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "scripts/fid.py", "generate", f"{folder}/run", "--out", str(two), *words]
    done = subprocess.run(
        [*command, "--json", f"{folder}/made.json"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((folder / "made.json").read_text())["made"] == 32  # of 64, the other half was there
    with np.load(one) as a, np.load(two) as b:
        assert a["arr_0"].shape == (64, 8, 8, 1) and np.array_equal(a["arr_0"], b["arr_0"])
        assert np.array_equal(a["arr_1"], b["arr_1"])
    (_, own), (_, stored) = (
        call(folder, "score", images, "--reference", "FOLDER/ref.npz") for images in ("FOLDER/run", str(two))
    )
    assert stored["value"] == pytest.approx(own["value"], rel=1e-6) and stored["sampler"] == own["sampler"] == "heun-2"


def test_records_are_compared_if_they_were_taken_alike(folder, capsys):
    a, b = folder / "a.json", folder / "b.json"
    words = ["score", f"{folder}/run", "--reference", f"{folder}/ref.npz"]
    assert fid.main([*words, "--json", str(a)]) == fid.main([*words, "--guidance", "2", "--json", str(b)]) == 0
    assert call(folder, "compare", str(a), str(a))[0] == 0
    assert "guidance 1.0 but" in refusal(folder, capsys, "compare", str(a), str(b))
    code, records = call(folder, "compare", str(a), str(b), "--force")
    assert code == 0 and list(records) == [str(a), str(b)]
    out = capsys.readouterr().out
    assert "not alike: " in out and out.count("FD-digits-cnn") == 1 and "floor: other real images" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("score", "FOLDER/nowhere", "--reference", "FOLDER/ref.npz"), "no such folder or file"),
        (("score", "FOLDER/run", "--reference", "FOLDER/none.npz"), "no such file of statistics"),
        (("compare", "FOLDER/run"), "FOLDER/run: a folder, no record of a score; scripts/compare.py compares runs"),
        (("score", "FOLDER/run", "--reference", "FOLDER/ref.npz", "--training", "FOLDER/ref.npz"), "held out from"),
        (("score", "FOLDER/empty", "--reference", "FOLDER/ref.npz"), "FOLDER/empty: no images in it"),
        (("reference", "FOLDER/empty", "--extractor", "digits-cnn", "--out", "FOLDER/x.npz"), "no images in it"),
        (("score", "FOLDER/run", "--reference", "FOLDER/ref.npz", "--count", "63"), "63 images against 64"),
        (
            ("score", "FOLDER/run", "--reference", "FOLDER/ref.npz", "--step", "3"),
            "no checkpoint of step 3; there are 4",
        ),
        (("score", "FOLDER/run", "--reference", "FOLDER/ref.npz", "--protocol", "amd"), "no protocol is named 'amd'"),
        (("score", "FOLDER/run", "--reference", "FOLDER/ref.npz", "--protocol", "edm"), "comes without weights"),
        (("score", "FOLDER/run", "--reference", "FOLDER/ref.npz", "--extractor", "dig"), "known are digits-cnn"),
        (("generate", "FOLDER", "--out", "FOLDER/x", "--count", "8", "--labels", "random"), "no run folder"),
        (("generate", "FOLDER/run", "--out", "FOLDER/x", "--labels", "random"), "--count: protocol small leaves open"),
        (("generate", "FOLDER/run", "--out", "FOLDER/x", "--count", "8"), "--labels reference: needs a --reference"),
        (("reference", "FOLDER/run", "--out", "FOLDER/x.txt"), "must end in .npz"),
        (("reference", "FOLDER/run", "--out", "FOLDER/x.npz", "--count", "3"), "at least 4"),
        (("compare", "FOLDER/run/config.yaml"), "no record of a score"),
        (("reference", "FOLDER/run", "--out", "FOLDER/x.npz", "--name", "a"), "--name: FOLDER/run is a run"),
        (("reference", "FOLDER/run", "--out", "FOLDER/x.npz", "--floor", "a"), "--floor: FOLDER/run is a run"),
        (("reference", "FOLDER/sums.npz", "--out", "FOLDER/x.npz", "--floor", "a"), "--floor: FOLDER/sums.npz holds"),
        (("reference", "FOLDER/sums.npz", "--out", "FOLDER/x.npz", "--name", "a"), "--name: FOLDER/sums.npz holds"),
        (("reference", "FOLDER/sums.npz", "--out", "FOLDER/x.npz", "--count", "9"), "--count: FOLDER/sums.npz holds"),
        (("score", "FOLDER/run", "--reference", "FOLDER/ref.npz", "--lossy"), "--lossy: FOLDER/run is a run"),
        (
            ("score", "FOLDER/eight.npz", "--reference", "FOLDER/ref.npz", "--seed", "0"),
            "--seed: FOLDER/eight.npz holds",
        ),
    ],
)
def test_bad_input_is_one_line(folder, capsys, words, reason):
    (folder / "empty").mkdir(exist_ok=True)
    np.savez(folder / "sums.npz", mu=np.zeros(3), sigma=np.eye(3))
    np.savez(folder / "eight.npz", arr_0=np.zeros((8, 8, 8, 1), np.uint8))
    assert reason.replace("FOLDER", str(folder)) in refusal(folder, capsys, *words)


def test_a_result_that_cannot_be_written_after_all_is_one_line(capsys, tmp_path, monkeypatch):
    record = {"metric": "FID-8", "value": 3.0, "n_gen": 8, "n_ref": None}
    (tmp_path / "a.json").write_text(json.dumps(record))
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr(fid.records, "table", lambda found: (tmp_path / "gone").rmdir())
    code = fid.main(["compare", str(tmp_path / "a.json"), "--json", str(tmp_path / "gone" / "b.json")])
    assert code == 2 and "No such file" in capsys.readouterr().err.splitlines()[-1]


def test_a_score_tells_more_if_it_is_asked(folder, capsys):
    words = ("score", "FOLDER/run", "--reference", "FOLDER/ref.npz", "--intervals", "--classes")
    assert call(folder, "reference", "FOLDER/run", "--out", "FOLDER/others.npz", "--count", "80")[0] == 0
    capsys.readouterr()
    code, record = call(folder, *words, "--training", "FOLDER/others.npz")
    said = capsys.readouterr().out
    assert "with 95 % confidence" in said and "are authentic" in said and "class" in said
    assert code == 0 and record["value_low"] < record["value"] and record["standard_error"] > 0
    assert sum(row["n_ref"] for row in record["classes"]) == 64 and {"share_near", "auth_pct"} <= record.keys()
    assert "64 images, but digits-cnn needs 79 or more" in refusal(folder, capsys, *words[:4], "--infinity")


def test_random_labels_are_functions_of_the_index():
    law = fid._labels("random", 2000, 10, 0, None)
    whole = law(torch.arange(2000))
    assert torch.equal(law(torch.tensor([1999, 3])), whole[[1999, 3]])
    assert whole.bincount(minlength=10).min() > 140
    assert not torch.equal(whole, fid._labels("random", 2000, 10, 1, None)(torch.arange(2000)))


def test_what_is_written_is_what_the_docstring_lists(folder, arrays):
    def listed(command, following):
        return keys(fid.__doc__, f"    {command}  ", f"    {following}  ")

    of_run = call(folder, "reference", "FOLDER/run", "--out", "FOLDER/r.npz", "--count", "64")[1]
    words = ("reference", f"{arrays}/real.npz", "--floor", f"{arrays}/made.npz", "--extractor", "digits-cnn")
    of_files = call(folder, *words, "--out", "FOLDER/r.npz")[1]
    assert of_run.keys() | of_files.keys() == listed("reference", "generate")
    words = ("generate", "FOLDER/run", "--out", f"{arrays}/g.npz", "--count", "8", "--labels", "balanced")
    made = call(folder, *words)[1]
    assert made.keys() == listed("generate", "score") and (made["made"], made["made_not_finite"]) == (8, 0)
    record = call(folder, "score", "FOLDER/run", "--reference", "FOLDER/ref.npz")[1]
    assert record.keys() >= RECORD | made.keys() - {"out", "count", "made", "made_not_finite"}


def test_images_of_another_rounding_do_not_pass_for_a_protocols(folder, capsys):
    words = ("generate", "FOLDER/run", "--out", "FOLDER/round.npz", "--count", "8", "--labels", "balanced")
    assert call(folder, *words)[0] == 0
    words = ("score", "FOLDER/round.npz", "--reference", "FOLDER/ref.npz", "--protocol", "rounded")
    with pytest.MonkeyPatch.context() as patch:
        cut = dataclasses.replace(fid.PROTOCOLS["small"], name="rounded", quantize="truncate")
        patch.setitem(fid.PROTOCOLS, "rounded", cut)
        assert "quantised by 'round', but protocol rounded has 'truncate'" in refusal(folder, capsys, *words)


def test_a_score_can_be_interrupted(folder, monkeypatch):
    monkeypatch.setattr(fid.StopRequest, "asked", True)
    words = ("--reference", f"{folder}/ref.npz", "--batch", "16")
    assert fid.main(["score", f"{folder}/run", *words]) == 85


def test_results_take_the_place_of_nothing_else(folder, capsys):
    images, record, words = folder / "made.npz", folder / "run.json", ("--labels", "random", "--count", "4")
    assert fid.main(["generate", f"{folder}/run", "--out", str(images), *words]) == 0
    assert fid.main(["score", f"{folder}/run", "--reference", f"{folder}/ref.npz", "--json", str(record)]) == 0
    kept = {path: path.read_bytes() for path in (images, record, folder / "made.npz.json", folder / "ref.npz")}
    for line in (
        "score FOLDER/run --reference FOLDER/ref.npz --json FOLDER/ref.npz",
        "generate FOLDER/run --out FOLDER/made.npz --json FOLDER/made.npz.json --labels random --count 4",
        "compare FOLDER/run.json --json FOLDER/run/../run.json",
        "reference FOLDER/run --out FOLDER/made.npz",
        "reference FOLDER/made.npz --extractor digits-cnn --out FOLDER/made.npz",
    ):
        assert fid.main([word.replace("FOLDER", str(folder)) for word in line.split()]) == 2, line
        assert re.search(
            r"--json: .* (must end in .json|is read or written already)|--out: .* is there", capsys.readouterr().err
        )
    assert kept == {path: path.read_bytes() for path in kept}


def test_a_record_outlives_a_terminal_that_is_gone_and_a_disk_that_is_full(folder, monkeypatch, capsys):
    def gone(*words, **how):
        raise BrokenPipeError("Broken pipe")

    words = ["score", "FOLDER/eight.npz", "--reference", "FOLDER/eight_ref.npz", "--json", "FOLDER/kept_still.json"]
    np.savez(folder / "eight.npz", arr_0=np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1), np.uint8))
    words = [word.replace("FOLDER", str(folder)) for word in words]
    assert fid.main(["reference", words[1], "--extractor", "digits-cnn", "--out", words[3]]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(fid, "_say", lambda text: gone() if "KID" in text else None)
        patched.setattr(fid.records, "table", lambda found: "KID")
        assert fid.main(words) == 2
    assert json.loads(Path(words[-1]).read_text())["n_gen"] == 8
    with monkeypatch.context() as patched:
        patched.setattr(fid, "replacing", gone)
        capsys.readouterr()
        assert fid.main(words) == 2
    assert '"n_gen": 8' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "flag"),
    [
        ("say value_range=(0, 1) or value_range=(-1.0, 1.0)", "say --value-range=0..1 or --value-range=-1..1"),
        ("e.g. background='white'", "e.g. --background=white"),
        ("say lossy=True", "say --lossy"),
        ("or say center_crop_adm=SIDE", "or say --center-crop-adm=SIDE"),
        ("say another value_range=", "say another --value-range"),
    ],
)
def test_remedies_are_named_as_the_command_line_knows_them(told, flag):
    assert fid._KEYWORD.sub(fid._as_flag, told) == flag


def test_another_seed_does_not_go_on_with_the_images_of_this_one(folder, capsys):
    words = ("generate", "FOLDER/run", "--out", "FOLDER/png", "--count", "8", "--labels", "balanced", "--batch", "4")
    assert call(folder, *words)[1]["made"] == 8 and call(folder, *words)[1]["made"] == 0
    assert "sample_seed = 1, now it is 2" in refusal(folder, capsys, *words, "--seed", "2")
    assert len(list((folder / "png").glob("*.png"))) == 8


def test_folders_of_images_are_scored_with_a_floor(folder):
    for name, seed in (("real", 0), ("other", 1), ("made", 2)):
        (folder / name).mkdir()
        pixels = np.random.default_rng(seed).integers(0, 256, (12, 8, 8), dtype=np.uint8)
        for i, image in enumerate(pixels):
            Image.fromarray(image).save(folder / name / f"{i}.png")
    words = (
        "reference",
        "FOLDER/real",
        "--extractor",
        "digits-cnn",
        "--out",
        "FOLDER/real.npz",
        "--floor",
        "FOLDER/other",
    )
    code, made = call(folder, *words)
    assert code == 0 and made["n"] == made["n_kept"] == 12 and made["floor"] > 0 and len(made["images_sha256"]) == 64
    code, record = call(folder, "score", "FOLDER/made", "--reference", "FOLDER/real.npz")
    assert code == 0 and record["floor"] == made["floor"] and record["reference_sha256"] == made["images_sha256"]


def test_floats_are_read_by_the_range_that_the_command_line_names(folder, arrays, capsys):
    assert (
        call(folder, "reference", str(arrays / "real.npz"), "--extractor", "digits-cnn", "--out", "FOLDER/r.npz")[0]
        == 0
    )
    with np.load(arrays / "made.npz") as made:
        np.savez(arrays / "floats.npz", arr_0=(made["arr_0"] / 127.5 - 1).astype(np.float32))
    words = ("--reference", "FOLDER/r.npz")
    (_, levels), (code, floats) = (
        call(folder, "score", str(arrays / "made.npz"), *words),
        call(folder, "score", str(arrays / "floats.npz"), *words, "--value-range=-1..1"),
    )
    assert code == 0 and floats["value"] == levels["value"] and floats["conversions"] != levels["conversions"]
    assert "arr_0 is float32" in refusal(folder, capsys, "score", str(arrays / "floats.npz"), *words)


def test_an_array_of_images_alone_becomes_a_reference_that_says_their_number(folder, arrays):
    code, made = call(
        folder, "reference", str(arrays / "real.npz"), "--extractor", "digits-cnn", "--out", "FOLDER/r.npz"
    )
    assert code == 0 and made["n"] == made["n_kept"] == 12
    assert (made["name"], made["image_shape"]) == ("real.npz", [1, 8, 8])
    code, record = call(folder, "score", str(arrays / "made.npz"), "--reference", "FOLDER/r.npz")
    assert code == 0 and record["n_ref"] == 12 and record["reference_sha256"] == made["images_sha256"]


@pytest.mark.parametrize(("tool", "count"), [("pytorch-fid.npz", None), ("edm.npz", None), ("edm.pkl", 12)])
def test_statistics_of_another_tool_are_a_reference_as_they_are(folder, arrays, monkeypatch, tool, count):
    monkeypatch.setitem(fid.PROTOCOLS, "twelve", dataclasses.replace(fid.PROTOCOLS["small"], name="twelve", count=12))
    real, made = (seen(arrays / name).stats for name in ("real.npz", "made.npz"))
    pair = {"mu": real.mean.numpy(), "sigma": real.covariance.numpy()}
    np.savez(arrays / "pytorch-fid.npz", **pair)
    np.savez_compressed(arrays / "edm.npz", **pair)
    (arrays / "edm.pkl").write_bytes(pickle.dumps({"fid": pair, "num_images": 12}))
    words = ("--reference", str(arrays / tool), "--extractor", "digits-cnn", "--protocol", "twelve")
    code, theirs = call(folder, "score", str(arrays / "made.npz"), *words)
    assert code == 0 and theirs["value"] == pytest.approx(frechet(made, real), rel=1e-9) and theirs["value"] > 0
    assert (theirs["n_ref"], theirs["reference"]) == (count, tool)
    assert theirs["reference_sha256"] == hashlib.sha256((arrays / tool).read_bytes()).hexdigest()
    assert not theirs.keys() & {"kid", "precision", "recall"}, "they hold no single images"


def test_adms_protocol_takes_its_file_and_gives_all_its_numbers(folder, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = FIDInception()
        state = network.state_dict() | {"fc.weight": torch.randn(1008, 2048) / 45, "fc.bias": torch.zeros(1008)}
    torch.save(state, tmp_path / "inception.pth")
    draw = np.random.default_rng(0)
    numbers = {"mu": np.zeros(2048), "sigma": np.eye(2048), "mu_s": np.zeros(2023), "sigma_s": np.eye(2023)}
    np.savez(tmp_path / "adm.npz", arr_0=draw.integers(0, 256, (8, 16, 16, 3), dtype=np.uint8), **numbers)
    np.savez(tmp_path / "made.npz", arr_0=draw.integers(0, 256, (12, 16, 16, 3), dtype=np.uint8))
    how = ["--protocol", "adm-imagenet256", "--weights", str(tmp_path / "inception.pth"), "--batch", "4"]
    code, made = call(folder, "reference", str(tmp_path / "adm.npz"), "--out", "FOLDER/adm.npz", *how)
    assert code == 0 and made["n"] is None and made["n_kept"] == 8
    assert made["conversions"] == ["mu and sigma are those of the file"]
    code, record = call(folder, "score", str(tmp_path / "made.npz"), "--reference", "FOLDER/adm.npz", *how)
    assert record["protocol_reference"] == "VIRTUAL_imagenet256_labeled.npz" and record["reference"] == "adm.npz"
    assert code == 0 and record["metric"] == "FID-12" and record["protocol"] == "adm-imagenet256"
    assert {"sfid", "inception_score", "precision", "recall", "kid"} <= record.keys()
    assert (record["n_gen"], record["n_ref"]) == (12, None)
