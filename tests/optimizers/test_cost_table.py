"""Every cell of the table of the family in ``optimizers/README.md`` is what the census counts."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import optimizers
from optimizers.engine.algorithm import ALGORITHMS
from optimizers.orthogonal.coefficients import NS5, resolve
from optimizers.orthogonal.newton_schulz import flops

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import optimizer_costs  # noqa: E402

README = (ROOT / "optimizers" / "README.md").read_text()
RANKS = 4


def rows():
    table = README[README.index("| class | group name |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


ROWS = list(rows())


def contender(label):
    """The name of the benchmark's contender that a line of the table is about."""
    return next(name for name in optimizer_costs.CONTENDERS if re.split(", (?:K|P|a) ", name)[0] == label)


def cost(cell, m, n, periods, ranks=RANKS):
    """A cell's formula for one matrix."""
    names = {
        "C": 4 * m * n * (ranks - 1) / ranks**2,
        "R": 16 * (ranks - 1) / ranks,
        "N": ranks,
        "m": m,
        "n": n,
        "r": min(m, n) // 4,  # of Dion
        **periods,
    }
    names["F"] = lambda p, q: flops(resolve(NS5, 5), int(p), int(q))
    formula = re.sub(r"⌈(.*?)/(.*?)⌉", r"(-(-(\1)//(\2)))", cell.replace("·", "*").replace("−", "-"))
    return eval(formula, {"__builtins__": {}}, names)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_state_bytes_and_products_are_those_of_a_step(row):
    label, groups, _, state, sent, products, _ = row
    found = optimizer_costs.costs_of(optimizer_costs.CONTENDERS[contender(label)], RANKS)
    sent, _, period = sent.partition(",")
    periods = {key: int(value) for key, value in re.findall(r"([KP]) = (\d+)", period)}
    shapes = optimizer_costs.SHAPES
    elements = sum(m * n for m, n in shapes)
    expected = sum(cost(state, m, n, periods) * m * n for m, n in shapes) / elements
    assert found.state == pytest.approx(expected, rel=1e-9)
    expected = sum(cost(sent, m, n, periods) for m, n in shapes) / 1e6
    assert sum(found.megabytes) / len(found.megabytes) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    expected = sum(cost(products, m, n, periods) for m, n in shapes) / 1e9
    assert sum(found.gflop) / len(found.gflop) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len(found.gflop) == next(iter(periods.values()), 1)
    assert set(re.findall(r"`(\w+)`", groups)) <= set(ALGORITHMS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_state_bytes_are_those_of_rows_of_any_length(row):
    """A formula of scales was right for divisors of 2048 alone."""
    for m, n in ((700, 16), (16, 700), (8, 2048), (8, 2049), (4, 5000)):
        (state,) = optimizer_costs.CONTENDERS[contender(row[0])]([nn.Parameter(torch.zeros(m, n))]).state.values()
        held = sum(x.nbytes for x in state.values())
        assert held == pytest.approx(m * n * cost(row[3], m, n, {}, ranks=1), rel=1e-9), (m, n)


def test_the_table_has_every_class_and_every_algorithm():
    classes = {re.match(r"`(\w+)`", row[0])[1] for row in ROWS}
    assert classes == {name for name in optimizers.__all__ if name[0].isupper()}
    assert {name for row in ROWS for name in re.findall(r"`(\w+)`", row[1])} == set(ALGORITHMS)


WORDS = {
    "block steps": "blocks",
    "column steps": "unit columns",
    "Frobenius steps": "the whole at norm 1",
    "low-rank steps": "low-rank steps",
    "row steps": "unit rows",
    "sign steps": "signs",
}
"""What the table says of steps that are no refreshes."""


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_happens_between_refreshes_is_what_the_algorithm_does(row):
    said = row[2]
    for name in re.findall(r"`(\w+)`", row[1]):
        algorithm = ALGORITHMS[name]
        assert (said == "–") == (algorithm.elementwise is not None)
        assert ("every step" in said) == (algorithm.period == 1)
        assert ("refreshes" in said) == (algorithm.period == 1 and not algorithm.selects)
        never = algorithm.period == math.inf or algorithm.together is not None
        assert ("always" in said or "low-rank" in said) == never
        assert ("a quarter of the rows" in said) == algorithm.selects
        found = [steps for steps, words in WORDS.items() if words in said]
        assert found == ([algorithm.other_steps] if algorithm.other_steps else [])


@pytest.mark.long
def test_the_counted_table_is_what_the_command_prints():
    shown = re.search(r"<!-- costs -->\n(.*?)\n<!-- end of costs -->", README, re.DOTALL)[1]
    assert shown.splitlines() == optimizer_costs.table([2, 4])
