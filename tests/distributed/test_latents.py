"""Latents are the same bytes whichever ranks made them, and a bad image on one rank is told of by all."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np

from tests.distributed.ranks import run
from tests.vae import command, save_images, save_vae


def on_ranks(root: Path, name: str) -> dict:
    import torch
    import torch.distributed as dist

    from dit_train import overlays
    from dit_train.data import sources
    from dit_train.run import references
    from dit_train.run.batch import draw, share
    from dit_train.run.sampling import Sampler
    from eval.generate import generate
    from eval.ranks import gather, world
    from scripts import encode_latents

    rank, ranks = world()
    out, told = root / name, io.StringIO()
    with contextlib.redirect_stderr(told):
        bad = encode_latents.main(command(root / "broken", root / "vae", root / f"{name} broken"))
    if ranks == 1:  # here, a command that refuses leaves its group to the end of the process
        dist.destroy_process_group()
    left = sorted(path.name for path in (root / f"{name} broken").iterdir())
    code = encode_latents.main(command(root / "images", root / "vae", out, "--flip"))
    words = [
        "--data.source",
        "latents",
        "--data.path",
        str(out),
        "--data.vae",
        str(root / "vae"),
        "--train.batch",
        "12",
    ]
    config = overlays.read([], [*words, "--sample.steps", "2"])
    data = sources.load(config.data)
    batch = draw(config, data, 5, share(12, rank, ranks))
    drawn, _ = gather(batch.x_t.flatten(1), torch.tensor(share(12, rank, ranks)))
    sampler = Sampler(config, data, lambda x, t, labels: 0.1 * x, torch.device("cpu"), lambda i: i % 3)
    rows, order = [torch.empty(0, 768)], [torch.empty(0, dtype=torch.int64)]
    for indices, images in generate(sampler, torch.arange(10), 4):
        rows.append(images.flatten(1).float())
        order.append(indices)
    images, _ = gather(torch.cat(rows), torch.cat(order))
    real = references.read_together(
        data.train, np.arange(40, 0, -1)
    )  # three batches: on two ranks one has a round of filler
    alone = data.train.images([40, 3])
    return {
        "bad": bad,
        "told": told.getvalue(),
        "left": left,
        "code": code,
        "drawn": drawn.numpy(),
        "images": images.numpy(),
        "real": real.numpy(),
        "same": bool((real[[0, 37]].int() - alone.int()).abs().max() <= 1),
    }


def test_latents_noise_and_samples_are_the_same_bytes_on_1_2_and_3_ranks(tmp_path):
    save_vae(tmp_path / "vae")
    save_images(tmp_path / "images")
    broken = sorted(save_images(tmp_path / "broken").rglob("*.png"))[10]  # in the second part of seven
    broken.write_bytes(b"no image")
    answers = {1: [on_ranks(tmp_path, "on 1")]}
    answers |= {ranks: run(on_ranks, ranks, tmp_path, f"on {ranks}", timeout=300) for ranks in (2, 3)}
    one = {path.name: path.read_bytes() for path in (tmp_path / "on 1").iterdir()}
    assert {"part-00006.npy", "mirrored-00006.npy", "labels.npy", "manifest.json"} <= one.keys()
    for ranks, found in answers.items():
        made = {path.name: path.read_bytes() for path in (tmp_path / f"on {ranks}").iterdir()}
        assert made == one, ranks
        for answer in found:
            assert answer["code"] == 0 and answer["bad"] == 2
            assert f"{broken} cannot be read" in answer["told"] and answer["told"].count("\n") == 1
            assert [f"part-{number:05d}.npy" in answer["left"] for number in range(4)] == [
                True,
                False,
                ranks == 3,
                False,
            ]
            assert (answer["drawn"] == answers[1][0]["drawn"]).all()
            assert (answer["real"] == answers[1][0]["real"]).all() and answer["same"]
            assert (answer["images"] == answers[1][0]["images"]).all() and answer["images"].std() > 1
        manifest = json.loads((tmp_path / f"on {ranks} broken" / "manifest.json").read_text())
        assert "parts" not in manifest
