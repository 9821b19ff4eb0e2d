"""The averaged weights move as they should and always give the trained ones back."""

import pytest
import torch
from torch import nn

from dit_train.run.ema import EMA


def test_the_average_moves_by_one_minus_decay_in_fp32():
    model = nn.Linear(2, 2)
    ema = EMA(model, 0.9999)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    ema.update(0)
    assert ema.weights["weight"].dtype == torch.float32
    assert torch.allclose(ema.weights["weight"] - start, torch.full((2, 2), 1e-4), rtol=1e-2)


def test_weights_and_mode_come_back_even_after_an_error():
    model = nn.Linear(2, 2).train()
    ema = EMA(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(7)
    averaged = ema.weights["weight"].clone()
    with pytest.raises(KeyError), ema.applied():
        assert torch.equal(model.weight, averaged) and not model.training and not torch.is_grad_enabled()
        raise KeyError
    assert model.training and torch.is_grad_enabled()
    assert torch.equal(model.weight, torch.full((2, 2), 7.0)) and torch.equal(ema.weights["weight"], averaged)


def test_the_average_does_not_follow_the_model_by_reference():
    model = nn.Linear(2, 2)
    ema = EMA(model, 0.5)
    before = ema.weights["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(ema.weights["weight"], before)


def test_the_ramp_keeps_initial_weights_out_of_a_short_run():
    ema = EMA(nn.Linear(1, 1), 0.9999, ramp=True)
    assert ema.decay(0) == 0.1 and ema.decay(490) == 491 / 500
    assert ema.decay(10**6) == 0.9999
    assert EMA(nn.Linear(1, 1), 0.9999).decay(0) == 0.9999
