"""What a rank trains on depends on (seed, step, sample index) alone."""

import numpy as np
import pytest
import torch

from dit_train import overlays, rng
from dit_train.data import sources
from dit_train.run.batch import Prefetcher, draw, heldout, share

CONFIG = overlays.read([], ["--train.batch", "24", "--model.label_dropout", "0.3"])
DATA = sources.load(CONFIG.data)


def parts(batch):
    return {"x_t": batch.x_t, "t": batch.t, "labels": batch.labels, "target": batch.target}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_see_disjoint_noise_that_together_is_the_single_process_draw(ranks):
    whole = parts(draw(CONFIG, DATA, 5, share(24, 0, 1)))
    shares = [parts(draw(CONFIG, DATA, 5, share(24, rank, ranks))) for rank in range(ranks)]
    for key, value in whole.items():
        assert torch.equal(torch.cat([part[key] for part in shares]), value)
    assert not torch.equal(shares[0]["target"], shares[1]["target"])


def test_steps_and_seeds_differ():
    first = draw(CONFIG, DATA, 0, share(24, 0, 1))
    other = overlays.read([], ["--train.batch", "24", "--train.seed", "1"])
    for again in (draw(CONFIG, DATA, 1, share(24, 0, 1)), draw(other, DATA, 0, share(24, 0, 1))):
        assert not torch.equal(first.target, again.target) and not torch.equal(first.t, again.t)


def test_x_t_target_and_t_belong_together():
    batch = draw(CONFIG, DATA, 3, share(24, 0, 1))
    t = batch.t.view(-1, 1, 1, 1)
    x0 = batch.x_t - t * batch.target  # x_t − t·(noise − x0) = x0
    assert x0.min() > -1.001 and x0.max() < 1.001
    noise = batch.x_t + (1 - t) * batch.target
    assert abs(noise.mean()) < 0.1 and abs(noise.std() - 1) < 0.1


def test_an_epoch_shows_every_image_once():
    config = overlays.read([], ["--train.batch", "1438"])
    batch = draw(config, DATA, 0, share(1438, 0, 1))
    x0 = batch.x_t - batch.t.view(-1, 1, 1, 1) * batch.target
    shown = (x0 * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    whole = DATA.train.images(np.arange(1438))
    assert sorted(map(bytes, shown.flatten(1).numpy())) == sorted(map(bytes, whole.flatten(1).numpy()))
    assert not torch.equal(shown, whole)


def test_labels_are_dropped_at_the_configured_rate_to_the_null_class():
    labels = torch.cat([draw(CONFIG, DATA, step, share(24, 0, 1)).labels for step in range(60)])
    assert labels.max() == DATA.num_classes
    assert abs((labels == DATA.num_classes).float().mean() - 0.3) < 0.04


def test_the_prefetcher_gives_any_step_that_is_asked_for():
    batches = Prefetcher(CONFIG, DATA, share(24, 1, 2))
    try:
        for step in (4, 5, 6, 2):
            assert torch.equal(batches.take(step).x_t, draw(CONFIG, DATA, step, share(24, 1, 2)).x_t)
    finally:
        batches.close()


def test_streams_of_different_keys_are_unrelated():
    a = rng.normal((64,), 0, "noise", 1, samples=range(200)).flatten()
    for keys, samples in ((("noise", 2), range(200)), (("label", 1), range(200)), (("noise", 1), range(200, 400))):
        b = rng.normal((64,), 0, *keys, samples=samples).flatten()
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.03
    assert abs(a.mean()) < 0.03 and abs(a.std() - 1) < 0.03


def test_no_samples_is_an_empty_draw():
    assert rng.normal((2, 3), 0, "x", samples=[]).shape == (0, 2, 3)


def test_the_global_generators_are_not_touched():
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    draw(CONFIG, DATA, 0, share(24, 0, 1))
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


def noise_of(batch):
    return batch.x_t + (1 - batch.t.view(-1, 1, 1, 1)) * batch.target


def test_noise_and_dropped_labels_change_with_seed_and_step():
    other = overlays.read([], ["--train.batch", "24", "--train.seed", "1", "--model.label_dropout", "0.3"])
    first = draw(CONFIG, DATA, 0, share(24, 0, 1))
    for again in (draw(CONFIG, DATA, 1, share(24, 0, 1)), draw(other, DATA, 0, share(24, 0, 1))):
        correlation = torch.corrcoef(torch.stack([noise_of(first).flatten(), noise_of(again).flatten()]))[0, 1]
        assert abs(correlation) < 0.1
    masks = [[draw(c, DATA, step, share(24, 0, 1)).labels == 10 for step in range(9)] for c in (CONFIG, other)]
    assert not torch.equal(torch.cat(masks[0]), torch.cat(masks[1]))


def test_held_out_batches_hold_held_out_images_and_their_classes():
    indices, times = np.array([5, 300, 2]), np.array([0.2, 0.5, 0.9], dtype=np.float32)
    batch = heldout(0, DATA, indices, times)
    x0 = batch.x_t - batch.t.view(-1, 1, 1, 1) * batch.target
    assert torch.allclose(x0 * 127.5 + 127.5, DATA.heldout.images(indices).float(), atol=1e-3)
    assert torch.equal(batch.labels, DATA.heldout.labels(indices)) and batch.t.tolist() == pytest.approx(times.tolist())
    alone = heldout(0, DATA, indices[1:2], times[1:2])
    assert torch.equal(alone.x_t[0], batch.x_t[1])  # the noise belongs to the image
