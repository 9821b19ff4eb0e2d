"""Golden vectors, identities and independent references of the algorithms beyond Muon's periodic forms."""

import math

import pytest
import torch
from torch import nn

from optimizers import (
    SGD,
    AdaGO,
    AdamW,
    AdamW8bit,
    AuON,
    Dion,
    Dion2,
    Lion,
    MarsAdamW,
    MarsMuon,
    Muon,
    Muon8bit,
    MuonBP,
    MuonEq,
    NorMuon,
    PeriodicRowMuon,
    PeriodicSignMuon,
    RowMuon,
    Scion,
)
from optimizers.engine.quantized_state import CODES, dynamic_map, pack, unpack
from tests.optimizers.golden import equal, four_steps, gradient, initial_weight, ns5, summary

ABSOLUTE = {"absolute_eps": 1e-7}
RMNP = {"nesterov": False, "adjust_lr_fn": "original", "row_norm": "plain", "row_eps": 1e-8}
POLAR = {"ns_coefficients": ((1.875, -1.25, 0.375),) * 40}
ADAGO = {"max_norm": 1.0, "weight_decay": 0.0, **ABSOLUTE}
GOLDEN = [
    (Muon, {"ns_coefficients": "polar_express", **ABSOLUTE}, [0.1512058645, 1.0439923229, -0.3151899380, 0.3531847482]),
    (Muon, POLAR, [0.1579822330, 1.0386641738, -0.3161561603, 0.3536490143]),
    (RowMuon, RMNP, [0.3979024154, 1.2360275652, -0.3702662234, 0.4205483020]),
    (NorMuon, {"nesterov": False, **ABSOLUTE}, [0.1663158686, 1.0535556894, -0.3118143528, 0.3613592675]),
    (AdaGO, ADAGO, [0.1778095200, 1.1380803995, -0.3425328753, 0.3819594407]),
    (MarsMuon, ABSOLUTE, [0.0943579414, 1.0332829100, -0.3254955719, 0.3457922161]),
    (MarsAdamW, {}, [0.8634846247, 1.5594614589, -0.4760515375, 0.6735863027]),
    (Dion2, {"fraction": 0.5}, [0.0486475225, 1.0679923538, -0.3427046874, 0.3298429514]),
    (Scion, {"weight_decay": 1.0, "radius": 1.0}, [0.1700179203, 0.8265032369, -0.2351749725, 0.2767996869]),
]  # fmt: skip
TALL = [
    (RowMuon, RMNP, [0.5100221349, 1.4831526293]),
    (NorMuon, {"nesterov": False, **ABSOLUTE}, [0.1471016230, 1.0561206496]),
]


@pytest.mark.parametrize(("cls", "options", "expected"), GOLDEN, ids=lambda v: getattr(v, "__name__", None))
def test_four_steps_match_golden_vectors(cls, options, expected):
    assert summary(four_steps(cls, **options)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("cls", "options", "expected"), TALL, ids=lambda v: getattr(v, "__name__", None))
def test_four_steps_of_the_tall_weight_match_golden_vectors(cls, options, expected):
    assert summary(four_steps(cls, transposed=True, **options))[:2] == pytest.approx(expected, abs=1e-7)


def test_four_steps_of_dion_match_golden_vectors():
    w = nn.Parameter(initial_weight())
    optimizer = Dion([w], lr=0.1, weight_decay=0.1, rank_fraction=0.5)
    first = [[((2 * i + 3 * j + i * j) % 5 - 2) / 3 for j in range(2)] for i in range(6)]
    optimizer.state[w]["right_basis"].copy_(torch.tensor(first, dtype=torch.float64))
    for t in range(1, 5):
        w.grad = gradient(t)
        optimizer.step()
    expected = [-0.0157618477, 1.0641837762, -0.3469199501, 0.3232895482]
    assert summary(w.detach()) == pytest.approx(expected, abs=1e-9)


# -- rules that have no golden vector, written out ------------------------------------------------------------------


def written_out(rule, decay=0.1):
    """Four steps of ``rule`` (gradient, state, t) -> step, t from 0."""
    w, state = initial_weight(), {}
    for t in range(4):
        w = w * (1 - 0.1 * decay) - 0.1 * rule(gradient(t + 1), state, t)
    return w


def ema(state, g, mu=0.95):
    state["m"] = mu * state.get("m", 0) + (1 - mu) * g
    return state["m"]


def ahead(state, g):
    return 0.05 * g + 0.95 * ema(state, g)


def test_lion():
    def rule(g, state, t):
        u = 0.9 * state.get("m", 0) + 0.1 * g
        ema(state, g, 0.99)
        return u.sign()

    assert equal(four_steps(Lion), written_out(rule), 1e-14)


def test_sgd_is_that_of_torch_without_weight_decay():
    for nesterov in (False, True):
        w = nn.Parameter(initial_weight())
        theirs = torch.optim.SGD([w], lr=0.1, momentum=0.9, nesterov=nesterov)
        for t in range(1, 5):
            w.grad = gradient(t)
            theirs.step()
        assert equal(four_steps(SGD, weight_decay=0.0, nesterov=nesterov), w.detach(), 1e-14)


@pytest.mark.parametrize("how", ["r", "c", "rc"])
def test_muon_eq_equilibrates_before_it_orthogonalises(how):
    def rule(g, state, t):
        u = ahead(state, g)
        rows, columns = u.norm(dim=1, keepdim=True), u.norm(dim=0)
        x = u / (rows if "r" in how else 1) / (columns if "c" in how else 1)
        return 0.2 * math.sqrt(6) * ns5(x)

    assert equal(four_steps(MuonEq, equilibrate=how), written_out(rule), 1e-12)


@pytest.mark.parametrize(
    ("ball", "direction"),
    [
        ("row", lambda m: m / m.norm(dim=1, keepdim=True) / math.sqrt(6)),
        ("column", lambda m: math.sqrt(4) * m / m.norm(dim=0)),
        ("sign", lambda m: m.sign() / 6),
    ],
)
def test_scion_in_the_other_balls(ball, direction):
    expected = written_out(lambda g, state, t: 3.0 * direction(ema(state, g, 0.9)), decay=1.0)
    assert equal(four_steps(Scion, weight_decay=1.0, radius=3.0, ball=ball), expected, 1e-14)


@pytest.mark.parametrize(("form", "gamma"), [("paper", 1.0), ("repo", 1.5)])
def test_auon(form, gamma):
    def rule(g, state, t):
        u = ahead(state, g)
        x = u / (u.norm() + 1e-7)
        return (x if form == "paper" else u) / ((gamma * x).cosh().square().mean().sqrt() + 1e-8)

    assert equal(four_steps(AuON, form=form), written_out(rule), 1e-14)


def test_auon_s_hybrid_is_muon_of_one_iteration():
    assert equal(four_steps(AuON, form="hybrid"), four_steps(Muon, ns_steps=1))


@pytest.mark.parametrize(("adjust", "scale"), [("match_rms_adamw", 0.2 * math.sqrt(6)), ("original", 1.0)])
@pytest.mark.parametrize("beta1", [0.9, 0.99])
def test_periodic_sign_steps_take_a_dual_average_and_decay_by_their_own_rate(beta1, adjust, scale):
    w, m = initial_weight(), torch.zeros(4, 6, dtype=torch.float64)
    for t in range(4):
        g = gradient(t + 1)
        u = beta1 * m + (1 - beta1) * g
        m = 0.99 * m + 0.01 * g
        rate = 0.1 * scale * (1 if t % 2 == 0 else 0.25 / math.sqrt(6))
        w = w * (1 - 0.1 * (0.1 if t % 2 == 0 else rate)) - rate * (ns5(u) if t % 2 == 0 else u.sign())
    assert equal(four_steps(PeriodicSignMuon, period=2, input_momentum=beta1, adjust_lr_fn=adjust), w, 1e-12)


def test_row_muon_adds_epsilon_to_norms():
    def rule(g, state, t):
        u = ahead(state, g)
        return 0.2 * math.sqrt(6) * u / (u.norm(dim=1, keepdim=True) + 0.5)

    assert equal(four_steps(RowMuon, row_eps=0.5), written_out(rule), 1e-14)


def test_normuon_s_code_form_keeps_the_norm_of_the_direction():
    def rule(g, state, t):
        o = ns5(ahead(state, g))
        state["v"] = 0.95 * state.get("v", 0) + 0.05 * o.square().mean(1, keepdim=True)
        x = o / (state["v"].sqrt() + 1e-10)
        return x * o.norm() / x.norm()

    found = four_steps(NorMuon, neuron_norm="direction", neuron_eps=1e-10, adjust_lr_fn="original")
    assert equal(found, written_out(rule), 1e-12)


def test_step_sizes_of_adago_fall_and_are_bounded_below():
    w = nn.Parameter(initial_weight())
    optimizer = AdaGO([w], lr=0.1, max_norm=1.0, least_step=0.03)
    moved = []
    for t in range(1, 31):
        before, w.grad = w.detach().clone(), gradient(t)
        optimizer.step()
        moved.append((before - w.detach()).norm().item() / ns5(optimizer.state[w]["momentum_buffer"]).norm().item())
    assert moved[0] == pytest.approx(0.1 / math.sqrt(1 + 1e-6))
    assert moved[3] == pytest.approx(0.1 / math.sqrt(4 + 1e-6)) and moved[-1] == pytest.approx(0.03)


# -- identities -----------------------------------------------------------------------------------------------------


def test_row_muon_is_periodic_row_muon_that_never_refreshes():
    assert equal(four_steps(RowMuon), four_steps(PeriodicRowMuon, period=math.inf))


def test_row_normalisation_is_scion_s_row_ball_of_another_radius():
    rows = four_steps(RowMuon, nesterov=False, weight_decay=1.0, momentum=0.9)
    assert equal(four_steps(Scion, ball="row", weight_decay=1.0, radius=0.2 * 6), rows, 1e-15)


def test_period_one_of_sign_steps_is_muon_on_a_dual_average():
    options = {"momentum": 0.95, "input_momentum": 0.95}
    found = four_steps(PeriodicSignMuon, period=1, **options)
    assert equal(found, four_steps(Muon, nesterov=False), 1e-15)


def test_a_dual_average_of_one_gradient_ahead_is_nesterov():
    """κ = μ: the look-ahead of β₁ = μ² over β₂ = μ."""
    found = four_steps(PeriodicSignMuon, period=1, momentum=0.95, input_momentum=0.95**2)
    assert equal(found, four_steps(Muon), 1e-14)


def test_all_rows_without_momentum_are_muon_without_momentum():
    assert equal(
        four_steps(Dion2, fraction=1.0, momentum=0.0, adjust_lr_fn="original"),
        four_steps(Muon, momentum=0.0, nesterov=False, adjust_lr_fn="original"),
        1e-14,
    )


def test_rows_that_were_not_selected_keep_their_momentum_until_they_are():
    w = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = Dion2([w], lr=0.1, weight_decay=0.0, fraction=0.25, momentum=0.0)
    moved, weights = [], torch.tensor([4.0, 3.0, 2.5, 2.2], dtype=torch.float64)
    for _ in range(4):
        before, w.grad = (
            w.detach().clone(),
            gradient(1) * torch.tensor([[4.0], [3.0], [2.5], [2.2]], dtype=torch.float64),
        )
        optimizer.step()
        moved += (w.detach() - before).norm(dim=1).nonzero().flatten().tolist()
    sizes = gradient(1).abs().sum(1) * weights
    owed, expected = torch.zeros(4, dtype=torch.float64), []
    for _ in range(4):
        owed += sizes
        expected.append(int(owed.argmax()))
        owed[expected[-1]] = 0
    assert moved == expected and len(set(expected)) > 2


def test_no_correction_is_no_mars():
    assert equal(four_steps(MarsMuon, mars_gamma=0.0), four_steps(Muon, nesterov=False))
    assert equal(four_steps(MarsAdamW, mars_gamma=0.0, betas=(0.9, 0.95)), four_steps(AdamW))


@pytest.mark.parametrize("cls", [MarsMuon, MarsAdamW])
def test_exact_variance_reduction_compares_one_batch_at_two_weights(cls):
    def loss(w, t):
        return (w * gradient(t)).sum() + (w - initial_weight()).square().sum() * t

    w = nn.Parameter(initial_weight())
    optimizer = cls([w], lr=0.1, mars_exact=True, mars_clip=None)
    other = nn.Parameter(initial_weight())  # the same steps of the corrected gradients
    base = cls([other], lr=0.1, mars_gamma=0.0)
    last = initial_weight()
    for t in range(1, 5):
        with optimizer.at_previous_weights():
            loss(w, t).backward()
        loss(w, t).backward()
        g, before = (gradient(t) + 2 * t * (x - initial_weight()) for x in (w.detach(), last))
        other.grad, last = g + 0.025 * 0.95 / 0.05 * (g - before), w.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        base.step()
    assert equal(w.detach(), other.detach(), 1e-14)
    w.grad = gradient(1)
    with pytest.raises(ValueError, match=r"take them inside optimizer\.at_previous_weights"):
        optimizer.step()
    with optimizer.at_previous_weights():
        loss(w, 5).backward()
    with pytest.raises(OSError, match="no data"), optimizer.at_previous_weights():
        raise OSError("no data")  # those taken before are of no use then
    with pytest.raises(ValueError, match=r"take them inside optimizer\.at_previous_weights"):
        optimizer.step()


@pytest.mark.parametrize("cls", [MarsMuon, MarsAdamW])
def test_last_weights_are_neither_updated_nor_taken_for_the_present_ones(cls):
    w = nn.Parameter(initial_weight())
    optimizer = cls([w], mars_exact=True)
    with optimizer.at_previous_weights():
        w.grad = gradient(1)
    w.grad = gradient(1)
    optimizer.step()
    now = w.detach().clone()
    with optimizer.at_previous_weights():
        for enter in (optimizer.step, optimizer.at_previous_weights().__enter__):
            with pytest.raises(ValueError, match=r"leave at_previous_weights\(\) first"):
                enter()
        assert equal(w.detach(), initial_weight())
    assert equal(w.detach(), now)


def test_features_combine_as_their_own_classes_have_them():
    assert equal(four_steps(Muon, neuron_beta2=0.95), four_steps(NorMuon))
    assert equal(four_steps(Muon, equilibrate="r"), four_steps(MuonEq))
    assert equal(four_steps(Muon, nesterov=False, mars_gamma=0.025), four_steps(MarsMuon))
    assert equal(four_steps(PeriodicRowMuon, period=1, neuron_beta2=0.95), four_steps(NorMuon))
    assert equal(four_steps(MuonBP, momentum_form="ema", neuron_beta2=0.95, period=3), four_steps(NorMuon), 1e-14)
    assert not equal(
        four_steps(PeriodicRowMuon, neuron_beta2=0.95, mars_gamma=0.025), four_steps(PeriodicRowMuon), 1e-3
    )


def test_normalised_neurons_have_equal_rows_after_many_like_gradients():
    w = nn.Parameter(torch.randn(16, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    optimizer = NorMuon([w], lr=0.1, weight_decay=0.0)
    g = (
        torch.randn(16, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        * torch.logspace(0, -6, 16)[:, None]
    )
    for _ in range(100):
        before, w.grad = w.detach().clone(), g.clone()
        optimizer.step()
    norms = (w.detach() - before).norm(dim=1)
    assert norms.max() / norms.min() < 1.02
    assert (w.detach() - before).square().mean().sqrt().item() == pytest.approx(0.02, rel=1e-6)


# -- 8 bits ---------------------------------------------------------------------------------------------------------


BITSANDBYTES = {
    True: [
        *(-0.9929687, -0.7539062, -0.5148437, -0.2757813, -0.08734375, -0.03953125, -0.00634375, -0.00015625),
        *(0.00026875, 0.00690625, 0.04234375, 0.09015625, 0.2898437, 0.5289062, 0.7679688, 1.0),
    ],
    False: [
        *(0.0, 0.000240625, 0.001984375, 0.006765625, 0.01773438, 0.04164062, 0.06554688, 0.08945312),
        *(0.1667969, 0.2863281, 0.4058594, 0.5253906, 0.6449219, 0.7644532, 0.8839843, 1.0),
    ],
}
"""Every 17th of the values that its ``create_dynamic_map`` returns, signed or not."""


@pytest.mark.parametrize(("signed", "squares", "least"), [(True, 48.5958377, 5.5e-7), (False, 48.5974521, 3.25e-7)])
def test_dynamic_maps_are_those_of_bitsandbytes(signed, squares, least):
    values = torch.tensor(dynamic_map(signed))
    assert len(values) == 256 and (values.diff() > 0).all()
    assert values[::17].tolist() == pytest.approx(BITSANDBYTES[signed], abs=1e-7)
    assert values.square().sum().item() == pytest.approx(squares, rel=1e-6)
    assert values[values > 0][0].item() == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_value_is_found_for_every_float_but_not_0_for_second_moments(signed):
    values = torch.tensor(dynamic_map(signed))
    half_way = (values[1:] + values[:-1]) / 2
    around = [torch.nextafter(half_way, torch.full_like(half_way, to)) for to in (-2.0, 2.0)]
    every = torch.arange(-(2**31), 2**31, 4093).to(torch.int32).view(torch.float32)  # also subnormal ones
    x = torch.cat([half_way, *around, torch.tensor([0.0, -0.0, 1.0, -1.0]), every[every.abs() <= 1]])
    found = CODES["dynamic8" if signed else "dynamic8_unsigned"].encode(x)
    nearest = torch.bucketize(x, half_way)
    assert torch.equal(found.long(), nearest if signed else torch.where(x > 0, nearest.clamp_min(1), nearest))


@pytest.mark.parametrize("n", [512, 700, 2048, 2049, 5000])
@pytest.mark.parametrize("name", CODES)
def test_what_is_decoded_is_as_near_as_the_code_allows(name, n):
    code = CODES[name]
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-20, 20, 5)[:, None]
    x = x.abs() if "unsigned" in name else x
    x[2] = 0
    q, absmax = torch.zeros(5, n, dtype=code.dtype), torch.zeros(5, -(-n // 2048))
    pack(x, q, absmax, code)
    found = unpack(q, absmax, code, torch.float32)
    assert equal(found[2], x[2])
    relative = (found - x).abs() / x.abs().amax(1, keepdim=True).clamp_min(1e-38)
    assert relative.max() <= (0.5 / 127 if name == "int8" else 0.5 * 0.9 / 64) * 1.0001
    assert (q.nbytes + absmax.nbytes) / x.numel() <= 1.01
    if name != "dynamic8":  # its values below zero end at -0.993: a block whose largest entry is negative shrinks
        again = torch.zeros_like(q)
        pack(found, again, absmax, code)
        assert torch.equal(again, q)


def test_a_nan_shows_in_its_own_block_alone():
    code = CODES["int8"]
    x = torch.ones(2, 4096)
    x[0, 0] = torch.nan
    q, absmax = torch.zeros(2, 4096, dtype=code.dtype), torch.zeros(2, 2)
    pack(x, q, absmax, code)
    found = unpack(q, absmax, code, torch.float32)
    assert found[0, :2048].isnan().all() and equal(found[0, 2048:], x[0, 2048:]) and equal(found[1], x[1])


def twins(eight_bit, full, steps=20, **options):
    """Weights after some steps with and without 8-bit state, relative to how far they went."""
    found = []
    for cls, more in ((eight_bit, options), (full, {})):
        w = nn.Parameter(torch.zeros(64, 128))
        optimizer = cls([w], lr=0.01, weight_decay=0.0, **more)
        for t in range(steps):
            w.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(t))
            optimizer.step()
        found.append(w.detach())
    return ((found[0] - found[1]).norm() / found[1].norm()).item(), optimizer


@pytest.mark.parametrize(("options", "limit"), [({}, 0.02), ({"momentum_dtype": "dynamic8"}, 0.03)])
def test_muon_of_8_bits_takes_nearly_the_same_steps(options, limit):
    assert 0 < twins(Muon8bit, Muon, **options)[0] < limit


def test_adamw_of_8_bits_takes_nearly_the_same_steps():
    assert 0 < twins(AdamW8bit, AdamW)[0] < 0.05


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4, 1e-6])
def test_small_gradients_beside_large_ones_make_no_jumps(scale):
    """Their second moments were kept as 0, and steps of 33000 times the learning rate were taken."""
    w = nn.Parameter(torch.zeros(16, 512))
    optimizer = AdamW8bit([w], lr=1.0, weight_decay=0.0)
    for t in range(60):
        before, w.grad = w.detach().clone(), torch.randn(16, 512, generator=torch.Generator().manual_seed(t))
        w.grad[:, 256:] *= scale
        optimizer.step()
        assert (w.detach() - before).abs().max() < 3, t


def test_small_tensors_and_vectors_keep_fp32():
    params = [nn.Parameter(torch.randn(*shape)) for shape in ((64, 64), (63, 65), (5000,), (4, 32, 64), (16, 8, 6, 6))]
    optimizer = AdamW8bit(params)
    dtypes = [optimizer.state[p]["exp_avg"].dtype for p in params]
    assert dtypes == [torch.uint8, torch.float32, torch.float32, torch.uint8, torch.uint8]
    shapes = [
        tuple(optimizer.state[p]["exp_avg_sq_absmax"].shape) for p in params if "exp_avg_absmax" in optimizer.state[p]
    ]
    assert shapes == [(64, 1), (4, 32, 1), (16, 1)]
