"""First weights as a function of (seed, parameter name) alone: the same on any device, any mesh, in any order."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dit_train.model.dit import DiT

_STD = 0.02


@torch.no_grad()
def initialize(model: DiT, seed: int) -> None:
    """Fill parameters and position tables in place, one parameter at a time, without communication.

    Each rank draws a whole parameter in fp32 on the CPU and keeps its own part, so that 1, 2 or 64 ranks hold the
    same model. Linear layers are Xavier-uniform, the label table and the time MLP normal with deviation 0.02, biases
    zero; modulations (of low rank: their second matrix) and the final layer are zero, so that each block starts as the
    identity (adaLN-zero, arXiv 2212.09748).

    Raises `RuntimeError` for a parameter without memory or one that no rule covers.
    """
    model.refill_tables()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise RuntimeError(f"{name} is on the meta device: call model.to_empty(device=...) before initialize")
        _fill(parameter, name, seed)


def _fill(parameter: Tensor, name: str, seed: int) -> None:
    """Write the first values of one parameter, of which this rank may hold a part."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    dark = "modulation." in name and not name.endswith("modulation.down.weight")  # zero twice would never wake up
    if dark or name.startswith("final_layer.") or name.endswith(".bias"):
        local.zero_()
        return
    if name.endswith("_norm.weight"):
        local.fill_(1.0)
        return
    whole = _draw(name, parameter.shape, seed)
    if isinstance(parameter, DTensor):
        # src_data_rank=None: each rank cuts its own part out of its own draw
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    local.copy_(whole)


def _draw(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The whole parameter, fp32 on the CPU."""
    if len(shape) != 2:
        raise RuntimeError(f"no rule for the first weights of {name} with shape {tuple(shape)}")
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little"))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    if name.startswith(("label_embedding.", "time_embedding.")):
        return values.normal_(std=_STD, generator=generator)
    bound = math.sqrt(6.0 / (shape[0] + shape[1]))  # Glorot & Bengio 2010
    return values.uniform_(-bound, bound, generator=generator)
