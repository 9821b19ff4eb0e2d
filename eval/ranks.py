"""Which rank this is, how rows that lie on many ranks come together in one order, and what one rank does for all."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """(rank, number of ranks) in ``group``, or in the default group; (0, 1) where none was started."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must lie to travel: the CPU if the group serves it, else this rank's GPU."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather(rows: Tensor, indices: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """All ranks' rows in the order of their global indices, so that the result is the same for any number of ranks.

    Args:
        rows: [N, d] of this rank; N differs between ranks and may be 0.
        indices: int64 [N], the global index of each row.
        group: every one of its ranks calls this.

    Returns:
        (rows [total, d], indices [total]) on every rank, on the device of ``rows``.

    Raises:
        ValueError: an index occurs twice, rows and indices differ in number, or rows are not [N, d].
    """
    if rows.ndim != 2:  # flattened, their mean would be one number
        raise ValueError(f"rows must be [N, d], not {list(rows.shape)}")
    if len(rows) != len(indices):
        raise ValueError(f"{len(rows)} rows but {len(indices)} indices")
    indices = indices.to(rows.device)
    if world(group)[1] > 1:
        counts = [int(count) for count in _all_gather(torch.tensor([len(rows)]), group)]
        rows, indices = (_all_gather_uneven(x, counts, group) for x in (rows, indices))
    indices, order = indices.sort()
    if (indices[1:] == indices[:-1]).any():
        raise ValueError("a sample index occurs twice: every image must be counted once")
    return rows[order], indices


def from_main(compute: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """What ``compute()`` returns on rank 0, on every rank; it is called once every rank has come here.

    For what only one rank may do, such as listing a folder and deciding by it. The result is small and picklable.

    Raises:
        Exception: what ``compute`` raised, on rank 0; elsewhere a ValueError or OSError if it was one, else a
            RuntimeError, with the same text. So all raise or none does.
    """
    rank, ranks = world(group)
    if ranks == 1:
        return compute()
    device = communication_device(group)
    arrived = torch.ones(1, device=device)
    dist.all_reduce(arrived, group=group)
    arrived.item()  # on a GPU only this waits for the others
    told: list[Any] = [None, None]
    cause = None
    if rank == 0:
        try:
            told[0] = compute()
        except Exception as error:  # whatever it is, the others wait to hear of it
            cause = error
            kind = next((kind for kind in (ValueError, OSError) if isinstance(error, kind)), RuntimeError)
            told[1] = (kind, f"{error}" or type(error).__name__)
    dist.broadcast_object_list(told, group=group, device=device, group_src=0)
    if cause is not None:
        raise cause
    if told[1] is not None:
        kind, text = told[1]
        raise kind(text if kind is ValueError else f"on rank 0: {text}")
    return told[0]


def raise_together(error: ValueError | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank, which all call this, where one of them brings an error: else the others would wait for it.

    Raises:
        ValueError: the own error, or one with the text of the first rank that has one.
    """
    if world(group)[1] > 1:
        device = communication_device(group)
        some = torch.tensor([error is not None], dtype=torch.int32, device=device)
        dist.all_reduce(some, dist.ReduceOp.MAX, group=group)
        if some.item():
            told: list[Any] = [None] * world(group)[1]
            dist.all_gather_object(told, None if error is None else str(error), group=group)
            error = error or ValueError(next(text for text in told if text is not None))
    if error is not None:
        raise error


def _all_gather(x: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The tensor of each rank, all of one shape, on the device of ``x``."""
    sent = x.to(communication_device(group)).contiguous()
    received = [torch.empty_like(sent) for _ in range(world(group)[1])]
    dist.all_gather(received, sent, group=group)
    return [part.to(x.device) for part in received]


def _all_gather_uneven(x: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Rows of all ranks one after the other; rank r has ``counts[r]`` of them. Short ones are padded on the way."""
    padded = torch.cat((x, x.new_zeros(max(counts) - len(x), *x.shape[1:])))
    return torch.cat([part[:count] for part, count in zip(_all_gather(padded, group), counts, strict=True)])
