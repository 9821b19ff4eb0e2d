"""Settings that reach the optimizer as they are, whatever its class."""

import pytest
from torch import nn

from dit_train import overlays
from dit_train.run import optimizer


@pytest.mark.parametrize("name", ["muon", "block_muon", "muon_bp", "periodic_row_muon"])
@pytest.mark.parametrize("chosen", [False, True])
def test_compile_reaches_every_matrix_optimizer(name, chosen):
    arguments = ["--optimizer.name", name, *(["--optimizer.compile", "true"] if chosen else [])]
    built = optimizer.build(overlays.read([], arguments).optimizer, nn.Sequential(nn.Linear(4, 6)))
    assert built._compile is chosen


def test_adamw_has_nothing_to_compile():
    with pytest.raises(overlays.ConfigError, match=r"optimizer\.compile: no such setting"):
        overlays.read([], ["--optimizer.name", "adamw", "--optimizer.compile", "true"])
