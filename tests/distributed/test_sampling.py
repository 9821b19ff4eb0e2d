"""Generated images do not depend on how they are dealt: the same bits on any number of ranks, almost on any batch."""

from functools import cache

import numpy as np
import pytest
import torch

from tests.distributed.ranks import run

COUNT = 97


def sampled(batch: int) -> list[np.ndarray]:
    """Floats [97, 1, 8, 8] of a sharded DiT with weights in all its layers, and their uint8 images."""
    from torch.distributed.tensor import distribute_tensor

    from dit_train import overlays, rng
    from dit_train.data import sources
    from dit_train.parallel import shard
    from dit_train.parallel.mesh import joined
    from dit_train.run.sampling import Sampler
    from eval.generate import generate, quantize
    from eval.ranks import gather

    words = ["--model.width", "48", "--model.heads", "3", "--model.depth", "2", "--sample.steps", "4"]
    config = overlays.read([], [*words, "--sample.guidance", "1.5", "--parallel.device", "cpu"])
    images = sources.check(config.data)
    with joined(config.parallel) as world:
        model = shard.build(config.model, config.parallel, images, world, torch.float32, seed=0).eval()
        for name, parameter in model.named_parameters():  # the last layer begins as zero
            drawn = 0.1 * rng.normal(tuple(parameter.shape), 0, name, samples=[0])[0]
            parameter.data.copy_(distribute_tensor(drawn, parameter.device_mesh, parameter.placements))
        sampler = Sampler(config, images, model, world.device, lambda chosen: chosen % 10)
        rows, order = [torch.empty(0, 64)], [torch.empty(0, dtype=torch.int64)]
        kept: list[torch.Tensor] = []

        def watched(indices):
            kept.append(sampler.values(indices))
            return quantize(kept[-1])

        with torch.no_grad():
            for indices, _ in generate(watched, torch.arange(COUNT), batch):
                rows.append(kept[-1][: len(indices)].flatten(1))
                order.append(indices)
        values, _ = gather(torch.cat(rows), torch.cat(order))
    return [values.numpy(), quantize(values).numpy()]


@cache
def on(ranks: int, batch: int) -> list[np.ndarray]:
    return run(sampled, ranks, batch, timeout=240)[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_images_are_the_same_bits_on_any_number_of_ranks(ranks):
    """97 images in batches of 16: seven, the last short, which neither 2 nor 3 ranks share evenly."""
    alone, together = on(1, 16), on(ranks, 16)
    assert alone[0].std() > 0.1 and len(np.unique(alone[1])) > 50
    np.testing.assert_array_equal(alone[0], together[0])


def test_another_batch_rounds_differently_and_no_more():
    a, b = on(2, 7), on(2, 32)
    assert np.abs(a[0] - b[0]).max() <= 1e-5
    levels = np.abs(a[1].astype(int) - b[1].astype(int))
    assert levels.max() <= 1 and (levels > 0).mean() <= 1e-4
