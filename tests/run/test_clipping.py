"""Gradients are clipped by their global norm."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dit_train.run import faults


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def linear(*gradients):
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = map(torch.tensor, gradients)
    return model


def norm_of(model):
    return faults.agree(torch.zeros(()), faults.gradient_squares(model), 0, False)[1]


@pytest.mark.parametrize(("largest", "scale"), [(1.0, 1 / 5), (5.0, 1.0), (100.0, 1.0), (None, 1.0)])
def test_clipping_scales_to_the_norm_and_never_up(largest, scale):
    model = linear([[3.0, 0.0]], [4.0])
    assert norm_of(model) == 5
    faults.clip(model, largest, 5.0)
    assert torch.allclose(model.weight.grad, torch.tensor([[3.0 * scale, 0]]), rtol=1e-5)
    assert torch.allclose(model.bias.grad, torch.tensor([4.0 * scale]), rtol=1e-5)


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    assert not torch.tensor(norm_of(linear([[torch.inf, 0.0]], [4.0]))).isfinite()
    assert not torch.tensor(norm_of(linear([[torch.nan, 0.0]], [4.0]))).isfinite()
