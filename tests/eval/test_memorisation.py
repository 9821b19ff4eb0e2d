import json

import pytest
import torch

from eval.memorisation import exact_copies, memorisation, pixel_hashes


def cloud(n, seed, d=5):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def by_loops(generated, training, held_out, quantile):
    """Share near and AuthPct, as dgm-eval defines it, without blocks."""
    options = {"compute_mode": "donot_use_mm_for_euclid_dist"}
    between = torch.cdist(training.double(), generated.double(), **options).min(0)
    own = torch.cdist(training.double(), training.double(), **options).fill_diagonal_(float("inf")).min(0).values
    fresh = torch.cdist(held_out.double(), training.double(), **options).min(1).values.sort().values
    threshold = fresh[round(quantile * len(fresh)) - 1]
    near = (between.values <= threshold).double().mean().item()
    return near, threshold.item(), 100 * (own[between.indices] < between.values).double().mean().item()


def test_agrees_with_the_definitions_written_out_whatever_the_blocks():
    generated, training, held_out = cloud(70, 0) * 0.8, cloud(90, 1), cloud(60, 2)
    whole = memorisation(generated, training, held_out, quantile=0.1)
    assert whole[:3] == pytest.approx(by_loops(generated, training, held_out, 0.1), rel=1e-9)
    assert 0 < whole.share_near < 1 and 20 < whole.auth_pct < 90
    for block in (1, 7, 64):
        other = memorisation(generated, training, held_out, quantile=0.1, block=block)
        assert other._asdict() == {name: pytest.approx(value, rel=1e-7) for name, value in whole._asdict().items()}


def test_fresh_images_are_as_near_as_held_out_ones_and_about_half_authentic():
    found = memorisation(cloud(600, 3), cloud(600, 4), cloud(600, 5), quantile=0.2)
    assert found.share_near == pytest.approx(0.2, abs=0.06)
    assert found.auth_pct == pytest.approx(50, abs=10)
    same = memorisation(cloud(100, 5), cloud(600, 4), cloud(100, 5), quantile=0.2)
    assert same.share_near == 0.2


def test_copies_are_found_worst_first_with_their_training_images():
    training = cloud(200, 6) * 10 + 40
    generated = torch.cat((cloud(30, 7) * 10 + 40, training[[17, 5]], training[[8]] + 0.01))
    found = memorisation(generated, training, cloud(100, 8) * 10 + 40, worst=3)
    assert dict(zip(found.generated, found.training, strict=True)) == {30: 17, 31: 5, 32: 8}
    assert found.generated[2] == 32 and found.ratios == sorted(found.ratios)
    assert found.distances[2] == pytest.approx(0.01 * 5**0.5, rel=1e-3)
    assert max(found.distances[:2]) < 1e-5 and found.ratios[:2] == [0, 0]
    everything = memorisation(training, training, cloud(100, 8) * 10 + 40)
    assert (everything.share_near, everything.auth_pct) == (1, 0)


def test_a_small_distance_among_close_images_is_no_wonder():
    """0.2 between neighbours 0.3 apart is less suspicious than 1 between neighbours 100 apart."""
    training = torch.tensor([[0.0], [0.3], [1000.0], [1100.0]])
    found = memorisation(torch.tensor([[-0.2], [1001.0]]), training, torch.tensor([[500.0]]), worst=1)
    assert (found.generated, found.training) == ([1], [2])
    assert found.ratios == pytest.approx([0.01])


def test_a_copy_of_a_training_image_that_occurs_twice_is_not_authentic():
    training = cloud(60, 9, d=33) * 100
    training = torch.cat((training, training[:30]))
    for block in (5, 7, 2048):  # distances of 0 come out as different rounding errors
        assert memorisation(training[:30], training, cloud(20, 10, d=33), block=block).auth_pct == 0
    json.dumps(
        memorisation(cloud(30, 11, d=33) * 100, training, cloud(20, 10, d=33), worst=99)._asdict(), allow_nan=False
    )


def test_bad_input_raises():
    x = cloud(6, 12)
    for quantile in (0, 1, 5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            memorisation(x, x, x, quantile=quantile)
    with pytest.raises(ValueError, match="has 1 image"):
        memorisation(x, x[:1], x)
    with pytest.raises(ValueError, match="n at least 1"):
        memorisation(x, x, x[:0])
    with pytest.raises(ValueError, match="NaN"):
        memorisation(x, x, x / 0)


def images(n, seed, shape=(1, 4, 4)):
    return torch.randint(0, 256, (n, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_exact_copies_are_pairs_of_equal_pixels():
    training = images(10, 0)
    training[7] = training[3]
    generated = torch.cat((images(2, 1), training[[7]], training[[0]] ^ 1, training[[9]]))
    hashes = pixel_hashes(generated[:3]) + pixel_hashes(generated[3:])  # as they come, batch by batch
    assert exact_copies(hashes, pixel_hashes(training)) == [(2, 3), (4, 9)]
    assert pixel_hashes(training.permute(0, 1, 3, 2)) == pixel_hashes(training.permute(0, 1, 3, 2).contiguous())


def test_the_shape_belongs_to_the_pixels():
    grey = torch.zeros(1, 1, 4, 4, dtype=torch.uint8)
    assert exact_copies(pixel_hashes(grey), pixel_hashes(grey.view(1, 1, 2, 8))) == []


def test_only_batches_of_uint8_have_hashes():
    with pytest.raises(TypeError, match="uint8"):
        pixel_hashes(images(2, 2).float())
    with pytest.raises(ValueError, match="N, C, H, W"):
        pixel_hashes(images(2, 2)[0])
