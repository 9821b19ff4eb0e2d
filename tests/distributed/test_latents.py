"""Latents are the same bytes whichever ranks made them, and a bad image on one rank is told of by all."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

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
    real = references.read_together(data.train, np.arange(40, 0, -1))  # three batches, one short
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """vae/, images/, broken/ with one file that is no image, and what one rank makes of them; its answer."""
    root = tmp_path_factory.mktemp("latents")
    save_vae(root / "vae")
    save_images(root / "images")
    sorted(save_images(root / "broken").rglob("*.png"))[10].write_bytes(b"no image")  # in the second part of seven
    return root, on_ranks(root, "on 1")


def test_one_rank_keeps_the_parts_before_an_image_that_it_cannot_read(alone):
    root, answer = alone
    assert (answer["bad"], answer["code"]) == (2, 0)
    assert answer["told"].count("\n") == 1 and "cannot be read as an image" in answer["told"]
    assert [name for name in answer["left"] if name.startswith("part")] == ["part-00000.npy"]
    assert "parts" not in json.loads((root / "on 1 broken" / "manifest.json").read_text())


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_latents_noise_and_samples_are_the_same_bytes_on_any_number_of_ranks(alone, ranks):
    root, first = alone
    answers = run(on_ranks, ranks, root, f"on {ranks}", timeout=300)
    one, many = ({path.name: path.read_bytes() for path in (root / f"on {n}").iterdir()} for n in (1, ranks))
    assert {"part-00006.npy", "mirrored-00006.npy", "labels.npy", "manifest.json"} <= one.keys() and many == one
    whole = {2: [0], 3: [0, 2]}[ranks]  # of the round in which one rank met the image
    for answer in answers:
        assert answer["code"] == 0 and answer["bad"] == 2 and answer["told"] == first["told"] and answer["same"]
        kept = [name for name in answer["left"] if name.startswith("part")]
        assert kept == [f"part-{number:05d}.npy" for number in whole]
        for key in ("drawn", "real", "images"):
            assert np.array_equal(answer[key], first[key]) and first[key].std() > 0.1, key
