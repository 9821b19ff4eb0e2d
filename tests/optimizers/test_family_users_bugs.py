"""What users' inputs would break in the family beyond Muon's periodic forms, each kept out by a test in one process."""

import copy
import math

import pytest
import torch
from torch import nn

import optimizers as o
from optimizers.engine.narrow import count_of
from tests.optimizers.golden import equal, four_steps

MATRIX = [
    (o.RowMuon, {}),
    (o.NorMuon, {}),
    (o.MuonEq, {"equilibrate": "rc"}),
    (o.AdaGO, {}),
    (o.AuON, {}),
    (o.AuON, {"form": "hybrid"}),
    (o.Scion, {}),
    (o.Scion, {"ball": "row"}),
    (o.Scion, {"ball": "column"}),
    (o.Scion, {"ball": "sign"}),
    (o.PeriodicSignMuon, {"neuron_beta2": 0.9}),
    (o.Dion, {"rank_fraction": 0.5}),
    (o.Dion2, {}),
    (o.Dion2, {"selection": "local", "momentum_dtype": "int8", "mars_gamma": 0.1}),
    (o.MarsMuon, {}),
    (o.Muon8bit, {}),
    (o.MuonBP, {"neuron_beta2": 0.9, "period": 2, "mars_gamma": 0.1}),
]
ELEMENTWISE = [(cls, {}) for cls in (o.AdamW, o.AdamW8bit, o.MarsAdamW, o.Lion, o.SGD)]
ALL = [*MATRIX, *ELEMENTWISE]


def each(cases):
    return pytest.mark.parametrize(("cls", "options"), cases, ids=lambda v: getattr(v, "__name__", None))


def values(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(optimizer, steps=3, start=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(start, start + steps):
        for i, p in enumerate(params):
            p.grad = values(10 * step + i, *p.shape).to(p.dtype) if p.requires_grad else None
        optimizer.step()
    return [p.detach().clone() for p in params]


# -- odd tensors ----------------------------------------------------------------------------------------------------


@each(ALL)
def test_matrices_without_rows_or_columns_and_of_one_take_steps(cls, options):
    shapes = [(0, 5), (5, 0), (0, 4, 3), (3, 0, 4), (1, 7), (7, 1), (1, 1), (6, 3, 2, 2)]
    shapes += [(), (0,), (7,)] if (cls, options) in ELEMENTWISE else []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        optimizer = cls([nn.Parameter(values(9, *shape).to(dtype)) for shape in shapes], **options)
        assert all(w.isfinite().all() for w in train(optimizer))
        optimizer.plan.summary()
        other = cls([nn.Parameter(values(9, *shape).to(dtype)) for shape in shapes], **options)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@each(ALL)
def test_strides_do_not_matter(cls, options):
    """torch's AdamW kernel, for one, walks over memory as if all its tensors were contiguous."""
    plain = nn.Parameter(values(0, 10, 12))
    base = values(0, 10, 12).repeat_interleave(2, 0).t().contiguous()
    strided, beside = nn.Parameter(base.t()[::2]), base.t()[1::2].clone()
    both = [cls([p], lr=0.1, **options) for p in (plain, strided)]
    for step in range(3):
        plain.grad = values(step, 10, 12).t().contiguous().t()
        strided.grad = values(step, 10, 12)
        for optimizer in both:
            optimizer.step()
    assert equal(plain, strided, 1e-6) and equal(base.t()[1::2], beside)


@pytest.mark.parametrize("split", [(5, 1, 6), (2,), ("interleaved", 3)])
def test_dion2_selects_rows_of_each_logical_matrix(split):
    whole = nn.Parameter(values(0, 12, 6))
    if len(split) == 3:
        cut = lambda x: x.split(list(split))  # noqa: E731
    else:
        cut = (lambda x: x.chunk(2)) if split == (2,) else (lambda x: [x[i::3] for i in range(3)])
    parts = [nn.Parameter(x.detach().clone()) for x in cut(whole)]
    together, apart = o.Dion2([{"params": [whole], "matrix_splits": [split]}]), o.Dion2(parts)
    for step in range(4):
        whole.grad = values(step, 12, 6)
        for p, g in zip(parts, cut(whole.grad), strict=True):
            p.grad = g.clone()
        together.step()
        apart.step()
    assert all(equal(a, b, 1e-6) for a, b in zip(cut(whole), parts, strict=True))


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda p: o.AuON(p, form=["paper"]), r"form is \['paper'\] but has to be one of paper, repo, hybrid"),
        (lambda p: o.Scion(p, ball={}), r"ball is \{\} but has to be one of spectral, row, column, sign"),
        (lambda p: o.Muon([{"params": p, "algorithm": ["muon"]}]), r"group 0: unknown algorithm \['muon'\]"),
        (lambda p: o.MarsMuon(p, mars_gamma=0.0, mars_exact=True), r"group 0: mars_exact does nothing without mars_g"),
        (lambda p: o.AdaGO(p, neuron_beta2=0.9), r"group 0: adago has step sizes of its own, which neuron_beta2 would"),
        (lambda p: o.MuonBP(p, block_grid=(1, 2), neuron_beta2=0.9), r"neuron_beta2 normalises whole rows, but blocks"),
        (lambda p: o.BlockMuon(p, block_grid=(1, 2), neuron_beta2=0.9), r"use block_grid=\(r, 1\) and shards of rows"),
        (lambda p: o.Dion2(p, neuron_beta2=0.9), r"dion2 has no option 'neuron_beta2'; known: "),
        (lambda p: o.RowMuon(p, equilibrate="r"), r"row_muon has no option 'equilibrate'; known: "),
        (lambda p: o.Scion(p, ball="row", neuron_beta2=0.9), r"scion_row has no option 'neuron_beta2'; known: "),
        (lambda p: o.MarsAdamW(p, momentum_dtype="int8"), r"mars_adamw has no option 'momentum_dtype'; known: "),
        (lambda p: o.NorMuon(p, stagger=True), r"normuon has no option 'stagger'; did you mean "),
        (lambda p: o.AdaGO(p, initial_norm=math.inf), r"group 0: initial_norm is inf but has to be a finite float > 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_line(build, words):
    with pytest.raises(ValueError, match=words):
        build([nn.Parameter(values(0, 4, 6))])


def test_neurons_of_sign_steps_are_even_already():
    """They were normalised once more, which made the steps smaller and their decay larger."""
    for options in ({"period": math.inf}, {"period": 3, "phase": 2}):
        with_neurons = four_steps(o.PeriodicSignMuon, neuron_beta2=0.9, **options)
        if options["period"] == math.inf:
            assert equal(with_neurons, four_steps(o.PeriodicSignMuon, **options))
        else:
            assert not equal(with_neurons, four_steps(o.PeriodicSignMuon, **options), 1e-3)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"mars_gamma": 0.1}, {"last_gradient"}),
        ({"neuron_beta2": 0.9}, {"neuron_second_moment"}),
        ({"mars_gamma": 0.1, "neuron_beta2": 0.9}, {"last_gradient", "neuron_second_moment"}),
    ],
)
def test_a_feature_may_be_switched_on_between_steps(options, keys):
    p = nn.Parameter(values(0, 12, 8))
    optimizer = o.PeriodicRowMuon([p], period=2)
    train(optimizer)
    optimizer.param_groups[0].update(options)
    train(optimizer, start=3)
    assert optimizer.state[p].keys() == {"momentum_buffer", *keys} and p.isfinite().all()


def test_an_option_that_became_wrong_between_steps_is_named():
    optimizer = o.Muon([nn.Parameter(values(0, 64, 64))])
    train(optimizer)
    for options, words in (
        ({"momentum_dtype": "int8"}, "which is not of the group's momentum_dtype; set the one that was saved"),
        ({"momentum_dtype": "int4"}, "group 0: momentum_dtype is 'int4' but has to be"),
        ({"momentum_dtype": None, "exchange": "gathr"}, "group 0: exchange is 'gathr' but has to be one of"),
    ):
        optimizer.param_groups[0].update(options)
        with pytest.raises(ValueError, match=words):
            train(optimizer)


@pytest.mark.parametrize("cls", [o.MarsMuon, o.MarsAdamW])
def test_a_thawed_parameter_has_its_own_weights_as_those_of_before_the_last_step(cls):
    first, second = (nn.Parameter(values(i, 6, 8)) for i in range(2))
    second.requires_grad_(False)
    optimizer = cls([first, second], mars_exact=True)
    seen = []
    for _ in range(3):
        with optimizer.at_previous_weights():
            seen.append(second.detach().clone())
            (first.square().sum() + second.square().sum()).backward()
        (first.square().sum() + second.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        second.requires_grad_(True)
    assert all(equal(w, values(1, 6, 8)) for w in seen) and not equal(second, seen[0], 1e-6)


@pytest.mark.parametrize("how", ["frozen", "switched off"])
@pytest.mark.parametrize("cls", [o.MarsMuon, o.MarsAdamW])
def test_weights_of_before_the_last_step_are_no_older_after_a_pause(cls, how):
    first, second = (nn.Parameter(values(i, 6, 8)) for i in range(2))
    optimizer = cls([first, second], mars_exact=True, lr=0.1)

    def step():
        before = second.detach().clone()
        with optimizer.at_previous_weights():
            seen = second.detach().clone()
            (first.square().sum() + second.square().sum()).backward()
        (first.square().sum() + second.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return seen, before

    for paused in (False, False, True, True, False):
        if how == "frozen":
            second.requires_grad_(not paused)
        else:
            optimizer.param_groups[0]["mars_exact"] = not paused
        seen, before = step()
    assert equal(seen, before)


def test_schedulers_may_move_the_momentum_below_that_of_the_input():
    """A checkpoint of such a step did not load."""
    w = nn.Parameter(values(0, 6, 8))
    optimizer = o.PeriodicSignMuon([w])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    for step in range(2):
        train(optimizer, 1, step)
        scheduler.step()
    assert optimizer.param_groups[0]["momentum"] < optimizer.param_groups[0]["input_momentum"]
    other = nn.Parameter(w.detach().clone())
    resumed = o.PeriodicSignMuon([other])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert equal(train(optimizer, 1, 5)[0], train(resumed, 1, 5)[0])


def test_steps_of_parameters_on_meta_name_the_order_of_building():
    optimizer = o.Muon([nn.Parameter(torch.empty(6, 8, device="meta"))])
    with pytest.raises(ValueError, match=r"on the meta device; build the optimizer after model\.to_empty"):
        optimizer.step()


def test_a_fraction_that_divides_the_rows_selects_no_row_more_for_the_rounding_of_floats():
    assert [count_of({"fraction": f}, 30) for f in (0.1, 0.3, 0.7, 0.25, 1e-6)] == [3, 9, 21, 8, 1]
