"""Gradients are clipped by their global norm."""

import pytest
import torch
from torch import nn

from dit_train.run import faults


@pytest.mark.parametrize(("largest", "scale"), [(1.0, 1 / 5), (100.0, 1.0)])
def test_clipping_scales_to_the_norm_and_never_up(largest, scale):
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    norm = faults.gradient_norm(model)
    assert norm.item() == 5
    faults.clip(model, largest, norm)
    assert torch.allclose(model.weight.grad, torch.tensor([[3.0 * scale, 0]]), rtol=1e-5)
    assert torch.allclose(model.bias.grad, torch.tensor([4.0 * scale]), rtol=1e-5)
