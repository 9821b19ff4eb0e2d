"""Training on latents: it learns, is scored in images, and says what is missing or wrong before it starts."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dit_train import overlays, preflight
from dit_train.config import ConfigError
from dit_train.parallel.mesh import joined
from dit_train.run import loop, restore, sampling
from dit_train.run.stop import StopRequest
from scripts import encode_latents, fid
from tests.vae import SCALE, SHIFT, SIDE, command, save_images, save_vae

TINY = (
    "--model.width 32 --model.depth 1 --model.heads 2 --train.batch 8 --train.steps 40 --train.compute_dtype fp32 "
    "--optimizer.lr 1e-2 --train.ema_decay 0.9 --schedule.warmup_steps 2 --sample.steps 2 --sample.grid 2 "
    "--sample.batch 8 --run.tensorboard false --run.validate_every 1 --parallel.device cpu --data.source latents"
).split()
NINE = ("--count", "9", "--labels", "balanced")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """vae/, images/, latents/, and run/, which was trained on them and scored."""
    root = tmp_path_factory.mktemp("latents")
    save_vae(root / "vae")
    save_images(root / "images")
    assert encode_latents.main(command(root / "images", root / "vae", root / "latents", "--flip")) == 0
    with joined(overlays.read([], TINY).parallel):
        assert loop.train(plan(root, "run", "--data.vae", root / "vae", "--score.every", 40), StopRequest()) == 0
    return root


@pytest.fixture(autouse=True)
def no_process_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def plan(root, name, *more):
    words = [*TINY, "--data.path", root / "latents", "--run.folder", root / name, *more]
    return preflight.check(overlays.read([], [str(word) for word in words]), 1)


def rows(root, name, kind):
    lines = map(json.loads, (root / name / "scores.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def call(root, *words):
    record = root / "found.json"
    record.unlink(missing_ok=True)
    code = fid.main([*map(str, words), "--device", "cpu", "--batch", "8", "--json", str(record)])
    return code, json.loads(record.read_text()) if record.exists() else None


def test_a_run_on_latents_learns_and_is_scored_in_decoded_images(made):
    losses = [row["heldout_loss"] for row in rows(made, "run", "held-out")]
    assert losses[-1] < 0.75 * losses[0]
    (score,) = rows(made, "run", "score")
    assert score["reference"] == "decoded latents held out" and score["image_shape"] == [3, SIDE, SIDE]
    assert score["value"] > score["floor"] > 0 and score["not_finite"] == 0 and len(score["vae_sha256"]) == 64
    assert (made / "run" / "samples" / "step_0000040.png").is_file()


def test_samples_are_scaled_back_once_before_they_are_decoded(made):
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(made / "vae", local_files_only=True).eval()
    trained = restore.reopen(made / "run")
    kept = []

    class Still(torch.nn.Module):  # velocity 0: the sample is its noise
        def forward(self, x, t, labels):
            kept.append(x)
            return torch.zeros_like(x)

    sampler = sampling.Sampler(trained.config, trained.images, Still(), torch.device("cpu"), lambda i: i % 3)
    images = sampler.values(torch.arange(5))
    with torch.no_grad():
        expected = vae.decode(kept[0] / SCALE + SHIFT).sample
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=1e-5)
    assert sampler(torch.arange(5)).shape == (5, 3, SIDE, SIDE)


def test_fid_generates_and_scores_a_run_on_latents(made, capsys):
    trained = rows(made, "run", "score")[0]
    code, reference = call(made, "reference", made / "run", "--out", made / "ref.npz")
    assert code == 0 and reference["name"] == "decoded latents held out"
    code, record = call(made, "score", made / "run", "--reference", made / "ref.npz")
    assert code == 0 and record["value"] == pytest.approx(trained["value"], rel=1e-6)
    assert record["vae_sha256"] == trained["vae_sha256"]
    code, generated = call(made, "generate", made / "run", "--out", made / "out.npz", *NINE)
    assert code == 0 and generated["vae_sha256"] == trained["vae_sha256"]
    with np.load(made / "out.npz") as file:
        assert file["arr_0"].shape == (9, SIDE, SIDE, 3)
    capsys.readouterr()
    assert call(made, "score", made / "out.npz", "--reference", made / "ref.npz", "--vae", made / "vae") == (2, None)
    assert "--vae" in capsys.readouterr().err


def test_without_an_autoencoder_it_trains_and_is_validated_but_not_scored(made, capsys):
    with pytest.raises(ConfigError, match=r"data\.vae: latents become images only by it.*or set score\.every 0$"):
        plan(made, "blind", "--score.every", 5)
    assert not (made / "blind").exists()
    short = ("--train.steps", 2)
    with joined(overlays.read([], TINY).parallel):
        assert loop.train(plan(made, "blind", *short), StopRequest()) == 0
    assert "no sample grids: data.vae names no autoencoder" in capsys.readouterr().out
    assert rows(made, "blind", "held-out") and not (made / "blind" / "samples").exists()
    assert call(made, "generate", made / "blind", "--out", made / "blind.npz", *NINE) == (2, None)
    assert "--vae: " in capsys.readouterr().err
    code, _ = call(made, "generate", made / "blind", "--out", made / "blind.npz", *NINE, "--vae", made / "vae")
    assert code == 0
    plan(made, "blind", "--train.steps", 4, "--data.vae", made / "vae")  # it may come later
    dist.destroy_process_group()


def test_latents_whose_scale_is_wrong_are_told_of_and_another_scale_is_another_run(made, capsys, tmp_path):
    narrow = save_vae(tmp_path / "vae", scaling_factor=0.18215)
    assert encode_latents.main(command(made / "images", narrow, tmp_path / "latents", "--flip")) == 0
    (tmp_path / "run").symlink_to(made / "run")
    with pytest.raises(ConfigError, match=r"data \(encoding\)"):
        plan(tmp_path, "run", "--train.steps", 41)
    with joined(overlays.read([], TINY).parallel):
        assert loop.train(plan(tmp_path, "other", "--train.steps", 1), StopRequest()) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert len(warned) == 1 and "where about 1 is right" in warned[0]
