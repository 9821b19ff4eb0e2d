"""The one ``torch.optim.Optimizer``: gradient → momentum → direction → scale → weight, over lists of local shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..sharding.exchange import Trip, depart, land, pipeline, turn
from ..sharding.layout import as_matrices, layout_of, local
from .algorithm import ALGORITHMS, Algorithm
from .directions import Step, orthogonalise_whole, spectral
from .jobs import Job, divide, label
from .momentum import update_momentum
from .options import check_grid, check_options, find_algorithm
from .scaling import spectral_scale
from .stored_state import unwrap_tensors, wrap_tensors


class Driver(torch.optim.Optimizer):
    """Updates plain tensors, replicas and DTensors sharded by FSDP2; several algorithms may share one driver.

    A gradient that is None counts as zero, on every step and for every algorithm, so that a rank without a gradient
    neither hangs the others nor updates its state differently; ``p.grad`` is never written. Parameters with
    ``requires_grad=False`` are left alone.

    Args:
        params: tensors, (name, tensor) pairs or groups. A group may name its ``algorithm``; ``lr`` and
            ``weight_decay`` default to those given here, other options to those of the group's algorithm.
        algorithm: of groups that name none.
        options: of ``algorithm``, complete.
        bucket_bytes: how much of one rank's shards travels or is updated at a time.
        max_in_flight: buckets in flight on a refresh.

    Raises:
        ValueError: for bad options, parameters that are no matrices, placements that are not supported, and, on all
            ranks, if ranks disagree about the parameter groups.
    """

    def __init__(
        self,
        params: Iterable[Any],
        algorithm: Algorithm,
        options: dict[str, Any],
        bucket_bytes: int,
        max_in_flight: int,
    ) -> None:
        for name, value in (("bucket_bytes", bucket_bytes), ("max_in_flight", max_in_flight)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r} but has to be an int >= 1")
        self._options = {"algorithm": algorithm.name, **options}
        self._bucket_bytes, self._max_in_flight = bucket_bytes, max_in_flight
        self._wire_bytes = 0
        self._jobs: list[Job] | None = None
        self._building = True
        super().__init__(params, {"lr": options["lr"], "weight_decay": options["weight_decay"]})
        self._building = False
        self._build()

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sent in the last step, from the plan."""
        return self._wire_bytes

    # -- groups and state -------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and create its state. Collective if parameters are sharded."""
        where = f"group {len(self.param_groups)}"
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            algorithm = find_algorithm(param_group.setdefault("algorithm", self._options["algorithm"]), where)
            own = algorithm.name == self._options["algorithm"]
            for key, default in algorithm.options.items():
                param_group.setdefault(key, self._options[key] if own or key in self.defaults else default)
            param_group.setdefault("step", 0)
            check_options(param_group, algorithm, where)
        super().add_param_group(param_group)
        try:
            self._init_state(self.param_groups[-1], where)
            if not self._building:
                self._build()
        except ValueError:
            for p in self.param_groups.pop()["params"]:
                self.state.pop(p, None)
            raise

    def _init_state(self, group: dict[str, Any], where: str) -> None:
        """State exists from the start, on every rank, so that checkpoints can be read before the first step."""
        algorithm = ALGORITHMS[group["algorithm"]]
        for i, p in enumerate(group["params"]):
            name = label(where, group, i)
            if not p.is_floating_point():
                raise ValueError(f"{name}: dtype {p.dtype} is not supported; parameters have to be real floats")
            if algorithm.elementwise is None:
                check_grid(group.get("block_grid"), layout_of(p, name), name)
            dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
            for key in algorithm.state:
                buffer = torch.zeros_like(p.detach(), dtype=dtype, memory_format=torch.contiguous_format)
                self.state[p].setdefault(key, buffer)

    def _build(self) -> None:
        """Divide the parameters into jobs; ranks compare the division."""
        self._jobs = divide(self.param_groups, self._bucket_bytes, self._max_in_flight)
        self._built_for = self._present()

    def _present(self) -> list[tuple[int, bool]]:
        """Which tensors there are, and which are trained."""
        return [(id(p), p.requires_grad) for group in self.param_groups for p in group["params"]]

    def _rebuild(self) -> None:
        """Follow parameters that were frozen, or replaced as accelerate does when it shards a model.

        Raises:
            ValueError: if a parameter was replaced after the first step, since its state would be lost.
        """
        stale = set(self.state) - {p for group in self.param_groups for p in group["params"]}
        if stale and any(group["step"] for group in self.param_groups):
            raise ValueError(
                f"{len(stale)} parameters were replaced in the groups after the first step, which would lose their "
                "state; shard the model first, or load the state into an optimizer of the new parameters"
            )
        for p in stale:
            del self.state[p]
        for number, group in enumerate(self.param_groups):
            self._init_state(group, f"group {number}")
        self._build()

    # -- step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter. Communicates only for cut matrices of groups whose refresh it is.

        Raises:
            ValueError: for sparse gradients, or gradients placed differently from their parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._jobs is None or self._built_for != self._present():
            self._rebuild()
        travelling, staying = [], []
        for job in self._jobs:
            group = self.param_groups[job.group]
            refresh = ALGORITHMS[group["algorithm"]].refreshes(group)
            (travelling if refresh and job.bucket is not None else staying).append((job, refresh))
        self._wire_bytes = sum(job.bucket.bytes_sent(job.layouts[0].rank) for job, _ in travelling)

        def meanwhile() -> None:
            for job, refresh in staying:
                self._stay(job, refresh)

        pipeline((job for job, _ in travelling), self._depart, self._turn, self._land, self._max_in_flight, meanwhile)
        for group in self.param_groups:
            group["step"] += 1
        return loss

    def _stay(self, job: Job, refresh: bool) -> None:
        """Update a job without communication."""
        group = self.param_groups[job.group]
        algorithm = ALGORITHMS[group["algorithm"]]
        if algorithm.elementwise is not None:
            state = {key: self._states(job, key) for key in algorithm.state}
            algorithm.elementwise(self._weights(job), state, self._grads(job), group)
            return
        inputs = [as_matrices(u) for u in self._inputs(job)]
        weights = [as_matrices(w) for w in self._weights(job)]
        direction = spectral if refresh else algorithm.between
        self._update(job, direction(weights, inputs, [layout.shape for layout in job.layouts], group))

    def _depart(self, job: Job) -> tuple[Job, Trip]:
        layout = job.layouts[0]
        return job, depart(job.bucket, [as_matrices(u) for u in self._inputs(job)], layout.rank, layout.group)

    def _turn(self, travelling: tuple[Job, Trip]) -> tuple[Job, Trip]:
        job, trip = travelling
        group, like = self.param_groups[job.group], job.params[0]
        return job, turn(trip, lambda matrices: orthogonalise_whole(matrices, group, like))

    def _land(self, travelling: tuple[Job, Trip]) -> None:
        job, trip = travelling
        adjust = self.param_groups[job.group]["adjust_lr_fn"]
        factors = [spectral_scale(adjust, *layout.shape) for layout in job.layouts]
        self._update(job, Step([as_matrices(w) for w in self._weights(job)], land(trip), factors))

    def _inputs(self, job: Job) -> list[Tensor]:
        group = self.param_groups[job.group]
        buffers = self._states(job, "momentum_buffer")
        return update_momentum(buffers, self._grads(job), group["momentum"], group["nesterov"], group["momentum_form"])

    def _update(self, job: Job, step: Step) -> None:
        """W ← (1 − η·λ)·W over the whole job, then W_i ← W_i − η·factor_i·direction_i."""
        group = self.param_groups[job.group]
        lr, decay = group["lr"], group["weight_decay"]
        if decay != 0:
            torch._foreach_mul_(self._weights(job), 1 - lr * decay)
        by_factor: dict[float, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for weight, direction, factor in zip(step.weights, step.directions, step.factors, strict=True):
            if weight.dtype != torch.float64:
                direction = direction.float()  # 16-bit weights would be rounded twice, and not alike everywhere
            if isinstance(lr, Tensor):
                weight.sub_(direction * (lr * factor))
            else:
                by_factor[factor][0].append(weight)
                by_factor[factor][1].append(direction)
        for factor, (weights, directions) in by_factor.items():
            torch._foreach_add_(weights, directions, alpha=-lr * factor)

    # -- local tensors ----------------------------------------------------------------------------------------------

    def _weights(self, job: Job) -> list[Tensor]:
        return [local(p.detach()) for p in job.params]

    def _states(self, job: Job, key: str) -> list[Tensor]:
        return [local(self.state[p][key]) for p in job.params]

    def _grads(self, job: Job) -> list[Tensor]:
        return [_local_grad(p) for p in job.params]

    # -- loading ----------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and group options; tensors keep the dtype they were stored in. Collective if sharded.

        Raises:
            ValueError: if the groups do not match, in number, size or algorithm.
        """
        saved = state_dict["param_groups"]
        for number, (group, stored) in enumerate(zip(self.param_groups, saved, strict=False)):
            if stored.get("algorithm", group["algorithm"]) != group["algorithm"]:
                raise ValueError(
                    f"group {number}: the checkpoint's algorithm is {stored['algorithm']!r}, the optimizer's is "
                    f"{group['algorithm']!r}; build the optimizer with the groups that were saved"
                )
        if len(saved) == len(self.param_groups):  # options that an older checkpoint lacks stay as they are
            saved = [{**group, **stored} for group, stored in zip(self.param_groups, saved, strict=True)]
            for number, group in enumerate(saved):  # schedulers leave keys of their own in the groups
                algorithm = ALGORITHMS[group["algorithm"]]
                check_options({key: group[key] for key in algorithm.options}, algorithm, f"loaded group {number}")
        handle = self.register_load_state_dict_pre_hook(wrap_tensors)  # after the hooks of the user
        try:
            super().load_state_dict({**state_dict, "param_groups": saved})
        finally:
            handle.remove()
        for number, group in enumerate(self.param_groups):
            self._init_state(group, f"group {number}")
        self._build()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_options", "_bucket_bytes", "_max_in_flight", "_wire_bytes")
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or what ``load_state_dict`` prepared; the plan is built anew."""
        super().__setstate__({**state, "state": unwrap_tensors(state["state"])})
        self._building = False
        self._jobs = None


def _local_grad(p: Tensor) -> Tensor:
    grad = p.grad
    if grad is None:
        return torch.zeros_like(local(p.detach()))
    if grad.layout != torch.strided:
        raise ValueError(f"a sparse gradient of shape {tuple(p.shape)} is not supported; use a dense one")
    if isinstance(p, DTensor) and (not isinstance(grad, DTensor) or grad.placements != p.placements):
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(p.shape)} and placements {tuple(p.placements)} is placed "
            f"differently: {tuple(getattr(grad, 'placements', ()))}; redistribute it to the parameter's placements"
        )
    return local(grad)
