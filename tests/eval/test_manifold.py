import pytest
import torch

from eval.manifold import prdc


def cloud(n, d, seed, shift=0.0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + shift


def line(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def by_loops(real, generated, k, density_k):
    def distances(x, y):
        return torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist")

    def radius(x, neighbour):
        return distances(x, x).sort(1).values[:, neighbour]  # the first is the vector itself

    between = distances(real, generated)
    dense = between <= radius(real, density_k)[:, None]
    return (
        (between <= radius(real, k)[:, None]).any(0).double().mean().item(),
        (between <= radius(generated, k)[None]).any(1).double().mean().item(),
        dense.double().sum().item() / (density_k * len(generated)),
        dense.any(1).double().mean().item(),
    )


def test_agrees_with_the_definitions_written_out():
    real, generated = cloud(120, 6, 0), cloud(120, 6, 1, 0.8)
    found = prdc(real, generated, k=3, density_k=4)
    assert found == pytest.approx(by_loops(real, generated, 3, 4), abs=1e-12)
    assert 0.1 < found.recall < found.precision < 1 or 0.1 < found.precision < found.recall < 1


def test_a_model_collapsed_to_one_real_point_is_precise_and_recalls_nothing():
    real = cloud(100, 8, 2)
    found = prdc(real, real[7].expand(100, -1))
    assert found.precision == 1
    assert found.recall <= 0.01  # the point itself
    turned = prdc(real[7].expand(100, -1), real)
    assert turned.precision <= 0.01 and turned.recall == 1


def test_closed_forms_on_a_grid():
    """Neighbours of integers are at 1, 1, 2, 2, …; at the ends at 1, 2, 3, …"""
    real = line(*range(10))
    assert prdc(real, real, k=1, density_k=1)[:2] == (1, 1)
    inner = prdc(real, line(3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5), k=1, density_k=1)
    assert inner == (1, 0, 2, 0.2)  # in the balls of 3 and 4; its own radius is 0
    on_the_border = prdc(real, line(*range(10, 20)), k=1, density_k=1)
    assert on_the_border == (0.1, 0.1, 0.1, 0.1)  # 10 lies in the ball of 9, and 9 in that of 10
    assert prdc(real, line(*range(20, 30)), k=3, density_k=5) == (0, 0, 0, 0)
    # at k = 2 the balls of 1 … 8 hold 3 integers each, those of 0 and 9 (radius 2) as well
    assert prdc(real, real, k=2, density_k=2).density == 30 / (2 * 10)


def test_a_duplicate_is_a_neighbour_and_the_vector_itself_is_not():
    real = line(0, 0, 5, 9)
    found = prdc(real, line(0.5, 0.5, 0.5, 0.5), k=1, density_k=1)
    assert found.precision == 0  # the radius of both zeros is 0, that of 5 is 4
    assert (
        prdc(real, line(0, 1, 1, 1), k=1, density_k=1).precision == 1
    )  # a copy of 0; 1 lies on the border of 5's ball


def test_blocks_do_not_change_results_even_where_copies_tie():
    real = cloud(97, 16, 3) * 30 + 50
    generated = torch.cat((real[::2], cloud(48, 16, 4) * 30 + 50))
    whole = prdc(real, generated)
    for block in (1, 7, 32, 96):
        assert prdc(real, generated, block=block) == whole
    copies = prdc(real, real, k=3, density_k=3)
    assert copies == (1, 1, pytest.approx(4 / 3, rel=1e-12), 1)  # each ball holds its 3 neighbours and its centre


def test_no_block_is_larger_than_asked_for(monkeypatch):
    import eval.distances

    sizes, compute = set(), eval.distances.squared_distances
    monkeypatch.setattr(eval.distances, "squared_distances", lambda x, y: sizes.add(x.shape + y.shape) or compute(x, y))
    monkeypatch.setattr("eval.manifold.squared_distances", eval.distances.squared_distances)
    prdc(cloud(40, 4, 5), cloud(100, 4, 6), allow_unequal=True, block=16)
    assert len(sizes) > 1 and max(max(size[0], size[2]) for size in sizes) == 16


def test_unequal_counts_need_a_word():
    real, generated = cloud(30, 4, 7), cloud(60, 4, 8)
    with pytest.raises(ValueError, match="30 real but 60 generated"):
        prdc(real, generated)
    found = prdc(real, generated, allow_unequal=True)
    assert found == pytest.approx(by_loops(real, generated, 3, 5), abs=1e-12)


def test_bad_input_raises():
    x = cloud(10, 4, 9)
    for wrong in ({"k": 0}, {"k": 10}, {"density_k": 10}):
        with pytest.raises(ValueError, match="less than the 10 vectors"):
            prdc(x, x, **wrong)
    with pytest.raises(ValueError, match="one d"):
        prdc(x, cloud(10, 5, 9))
    with pytest.raises(ValueError, match="NaN"):
        prdc(x, x * float("nan"))
    with pytest.raises(ValueError, match="at least 1 row"):
        prdc(x, x, block=0)
