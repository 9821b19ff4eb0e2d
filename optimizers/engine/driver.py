"""The one ``torch.optim.Optimizer``: gradient → momentum → direction → scale → weight, over lists of local shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..orthogonal.pieces import Pieces
from ..sharding.agreement import agree, process_groups
from ..sharding.exchange import pipeline, warm_up
from ..sharding.layout import local
from ..sharding.plan import BucketBytes
from ..sharding.report import Plan
from ..sharding.team import Team, team_of
from .across import row_steps_across
from .algorithm import ALGORITHMS, Algorithm
from .compiled import Kernels
from .costs import plan_of
from .directions import Step, orthogonalise, spectral, wire_dtype
from .foreign import from_torch
from .gradients import local_gradients
from .jobs import Job, describe, divide, label
from .members import listed, tensors_of
from .momentum import advance_in, look_ahead, update_momentum
from .options import check_options, find_algorithm, plain
from .rows import row_step
from .scaling import spectral_scale
from .spans import Spans, spent_on
from .stored_state import check_stored, complete, unwrap_tensors, wrap_tensors
from .task import Task
from .update import apply


class Driver(torch.optim.Optimizer):
    """Updates plain tensors, replicas and DTensors of any layout; several algorithms may share one driver.

    A gradient that is None counts as zero, on every step and for every algorithm, so that a rank without a gradient
    neither hangs the others nor updates its state differently; ``p.grad`` is never written. Parameters with
    ``requires_grad=False`` are left alone and have no state until they are thawed; freezing and thawing have to happen
    on all ranks between the same steps, as nothing is exchanged to find out.

    Args:
        params: tensors, (name, tensor) pairs or groups. A group may name its ``algorithm``; ``lr`` and
            ``weight_decay`` default to those given here, other options to those of the group's algorithm.
        algorithm: of groups that name none.
        options: of ``algorithm``, complete.
        bucket_bytes: how much travels or is updated at a time: the shards of all ranks together, in the dtype in which
            they travel, or in their own where nothing does.
        max_in_flight: buckets in flight on a refresh.
        process_group: of ranks that each hold the same plain tensors and gradients, and deal their matrices to owners.
        compile: whether passes over large matrices run as kernels that are compiled at their first use.

    Raises:
        ValueError: for bad options, parameters that are no matrices, placements that are not supported, a
            process_group without this rank, and if ranks disagree about the parameter groups. An error of one rank is
            raised on all that share its meshes or its process_group.
    """

    _spans: Spans | None = None

    def __init__(
        self,
        params: Iterable[Any],
        algorithm: Algorithm,
        options: dict[str, Any],
        bucket_bytes: BucketBytes,
        max_in_flight: int,
        process_group: dist.ProcessGroup | None = None,
        compile: bool = False,
    ) -> None:
        self._options = {"algorithm": algorithm.name, **options}
        self._bucket_bytes, self._max_in_flight, self._compile = bucket_bytes, max_in_flight, compile
        self._kernels = Kernels()
        self._holders: Team | None = None
        self._travelled: list[Job] = []
        self._reduced_bytes = 0
        self._jobs: list[Job] | None = None
        self._building = True
        params = listed(params)
        error = None
        try:
            if process_group is not None:  # first: whatever else is wrong is told to its ranks
                self._holders = team_of(process_group)
            for name, value in (("bucket_bytes", bucket_bytes), ("max_in_flight", max_in_flight)):
                auto = name == "bucket_bytes" and value == "auto"
                if not auto and (not isinstance(value, int) or value < 1):
                    raise ValueError(f"{name} is {value!r} but has to be an int >= 1")
            if not isinstance(compile, bool):
                raise ValueError(f"compile is {compile!r} but has to be True or False")
            # Schedulers that cycle the momentum look for it among the defaults.
            super().__init__(params, {key: plain(value) for key, value in options.items()})
        except Exception as problem:
            error = problem
        self._build(error, tensors_of(params))
        self._building = False

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sent in the last step, from the plan."""
        return self._reduced_bytes + sum(job.bucket.bytes_sent[job.layouts[0].rank] for job in self._travelled)

    @property
    def wire_bytes_max(self) -> int:
        """Bytes that the busiest rank sent in the last step, from the plan, which knows the traffic of all.

        With shards over several process groups it is the sum of each group's busiest rank. Norms of rows that ranks
        share are counted as this rank sends them.
        """
        sent: dict[Any, list[tuple[int, ...]]] = defaultdict(list)
        for job in self._travelled:
            sent[job.team].append(job.bucket.bytes_sent)
        return self._reduced_bytes + sum(max(map(sum, zip(*buckets, strict=True))) for buckets in sent.values())

    @property
    def plan(self) -> Plan:
        """What every rank computes and sends in each kind of step; ``plan.summary()`` prints it. Not collective."""
        if self._jobs is None or self._built_for != self._present():
            raise RuntimeError("the plan follows the parameters at the next step or load_state_dict; ask after it")
        return plan_of(self._jobs, self.param_groups)

    def time_spans(self, enabled: bool = True) -> None:
        """From the next step on, measure what its time goes to, or no longer."""
        self._spans = Spans(self._clock) if enabled else None

    @property
    def span_ms(self) -> dict[str, float]:
        """Milliseconds of the last step: momentum, exchange, orthogonalisation, update, other; see ``spans.py``.

        {} without ``time_spans()`` before that step. On a GPU it waits for the step's end.
        """
        return self._spans.milliseconds() if self._spans is not None else {}

    def _clock(self) -> torch.device:
        """The device whose time is measured; where there are several, the first GPU's, as it is waited for."""
        devices = [job.device for job in self._jobs]
        return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))

    # -- groups and state -------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and create its state. Collective if parameters are sharded or there is a process_group."""
        if self._building:  # the constructor compares all groups at once
            self._add_group(param_group)
            return
        before, error = len(self.param_groups), None
        (param_group,) = listed([param_group])
        tensors = [*tensors_of(self.param_groups), *tensors_of(param_group)]
        try:
            self._add_group(param_group)
        except Exception as problem:
            error = problem
        try:
            self._build(error, tensors)
        except Exception:
            for group in self.param_groups[before:]:
                for p in group["params"]:
                    self.state.pop(p, None)
            del self.param_groups[before:]
            raise

    def _add_group(self, param_group: dict[str, Any]) -> None:
        number, algorithm = len(self.param_groups), None
        where = f"group {number}"
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            algorithm = find_algorithm(param_group.setdefault("algorithm", self._options["algorithm"]), where)
            own = algorithm.name == self._options["algorithm"]
            for key, default in algorithm.options.items():
                inherited = own or key in ("lr", "weight_decay")
                param_group[key] = plain(param_group.get(key, self._options[key] if inherited else default))
            param_group.setdefault("step", 0)
            if "matrix_splits" in param_group:
                param_group["matrix_splits"] = plain(param_group["matrix_splits"])
            check_options(param_group, algorithm, where)
        super().add_param_group(param_group)
        for key in self.defaults.keys() - algorithm.options.keys():  # torch fills them into every group
            del self.param_groups[-1][key]
        self._complete_state(number)

    def _complete_state(self, number: int) -> None:
        """State exists from the start, on every rank, so that checkpoints can be read before the first step."""
        group = self.param_groups[number]
        for i, p in enumerate(group["params"]):
            name = label(f"group {number}", group, i)
            if not p.is_floating_point():
                raise ValueError(f"{name}: dtype {p.dtype} is not supported; parameters have to be real floats")
            if p.requires_grad:
                complete(self.state[p], p, ALGORITHMS[group["algorithm"]], group["step"] > 0, name)

    def _build(self, error: Exception | None = None, tensors: Iterable[Tensor] | None = None) -> None:
        """Divide the parameters into jobs; ranks compare the division, and an ``error`` becomes one of all."""
        jobs: list[Job] = []
        lines: list[str] = []
        if error is None:
            try:
                jobs = divide(self.param_groups, self._bucket_bytes, self._holders)
                lines = describe(self.param_groups, self._bucket_bytes, self._max_in_flight, self._compile)
            except Exception as problem:
                error = problem
        tensors = tensors_of(self.param_groups) if tensors is None else tensors
        agree(error, lines, process_groups(tensors, self._holders))
        for group, device in dict.fromkeys(self._meetings(jobs)):
            warm_up(group, device)
        self._jobs, self._built_for = jobs, self._present()

    def _meetings(self, jobs: Iterable[Job]) -> Iterator[tuple[Any, torch.device]]:
        """Process groups that any step will communicate in, and on which device."""
        for job in jobs:
            if job.bucket:
                yield job.team.open(), job.device
            if job.layouts and ALGORITHMS[self.param_groups[job.group]["algorithm"]].whole_rows:
                for group in job.layouts[0].column_groups:
                    yield group, job.device

    def _present(self) -> list[tuple[Any, ...]]:
        """Which tensors there are, where and of what dtype, and which are trained."""
        return [(id(p), p.requires_grad, p.dtype, p.device) for group in self.param_groups for p in group["params"]]

    def _rebuild(self) -> None:
        """Follow parameters that were frozen, thawed, moved, cast, or replaced as accelerate does when it shards."""
        error = None
        try:
            self._follow_parameters()
        except Exception as problem:
            error = problem
        self._build(error)

    def _follow_parameters(self) -> None:
        """Make the state fit the parameters.

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
        for number in range(len(self.param_groups)):
            self._complete_state(number)

    # -- step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter. Communicates for matrices that ranks share, in groups whose refresh it is.

        Raises:
            ValueError: for sparse gradients, or gradients placed differently from their parameter; nothing has been
                updated or sent then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._jobs is None or self._built_for != self._present():
            self._rebuild()
        with ExitStack() as stack:
            for kind in {job.device.type for job in self._jobs}:
                if torch.is_autocast_enabled(kind):  # it would choose the dtype of the iterations
                    stack.enter_context(torch.autocast(kind, enabled=False))
            self._run()
        for group in self.param_groups:
            group["step"] += 1
        return loss

    def _task(self, job: Job) -> Task:
        group = self.param_groups[job.group]
        algorithm = ALGORITHMS[group["algorithm"]]
        weights = job.select(local(p) for p in job.params)
        gradients = job.select(local_gradients(job))
        return Task(job, group, algorithm, algorithm.refreshes(group, job.offset), weights, gradients)

    @spent_on("other")
    def _run(self) -> None:
        tasks = [self._task(job) for job in self._jobs]
        travelling = [task for task in tasks if task.travels]
        self._travelled = [task.job for task in travelling]

        def meanwhile() -> None:
            for task in tasks:
                if not task.travels and not task.shares_rows:
                    self._stay(task)
            self._share([task for task in tasks if task.shares_rows])

        pipeline(travelling, self._depart, self._turn, self._land, self._max_in_flight, meanwhile)

    @spent_on("update")
    def _share(self, tasks: Sequence[Task]) -> None:
        """Take the row steps of jobs whose rows ranks share."""
        forms = (self._advancing, self._looking_ahead)
        self._reduced_bytes = row_steps_across(tasks, self._buffers, *forms, self._all_reduce)

    @spent_on("exchange")
    def _all_reduce(self, packed: Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(packed, group=group)

    @spent_on("update")
    def _stay(self, task: Task) -> None:
        """Update a job without communication."""
        if task.algorithm.elementwise is not None:
            state = {key: self._states(task, key) for key in task.algorithm.state}
            task.algorithm.elementwise(task.weights, state, task.dense_gradients(), task.group)
            return
        if task.algorithm.whole_rows and not task.refresh:
            states = (task.weights, self._buffers(task), task.dense_gradients())
            take_compiled = self._kernels.row_step if self._compile else None
            row_step(*states, task.job.layouts, task.group, self._advancing(task), take_compiled)
            return
        apply(self._direct(task), task.group)

    @spent_on("orthogonalisation")
    def _direct(self, task: Task) -> Step:
        direction = spectral if task.refresh else task.algorithm.between
        return direction(task.weights, self._inputs(task), task.job.layouts, task.group)

    @spent_on("exchange")
    def _depart(self, task: Task) -> tuple[Task, Any]:
        job = task.job
        form = partial(self._form, task)
        return task, task.route.depart(job.bucket, form, job.layouts[0].rank, job.team.open(), job.device)

    @spent_on("exchange")
    def _turn(self, travelling: tuple[Task, Any]) -> tuple[Task, Any]:
        task, trip = travelling
        return task, task.route.turn(trip, partial(self._orthogonalise, task))

    @spent_on("orthogonalisation")
    def _orthogonalise(self, task: Task, matrices: list[Pieces], stack_bytes: int) -> None:
        orthogonalise(matrices, task.group, task.weights[0], stack_bytes)

    @spent_on("update")
    def _land(self, travelling: tuple[Task, Any]) -> None:
        task, trip = travelling
        factors = [spectral_scale(task.group["adjust_lr_fn"], *layout.shape) for layout in task.job.layouts]
        apply(Step(task.weights, self._arrive(task, trip), factors), task.group)

    @spent_on("exchange")
    def _arrive(self, task: Task, trip: Any) -> list[Tensor]:
        return task.route.land(trip)

    @spent_on("momentum")
    def _inputs(self, task: Task) -> list[Tensor]:
        """U of a task: on a refresh new tensors of the dtype in which it would travel, else as ``_advancing`` gives."""
        buffers = self._buffers(task)
        if not task.refresh:
            return self._advancing(task)(buffers, task.dense_gradients())
        wire = wire_dtype(task.group, task.weights[0].dtype)
        inputs = [torch.empty(m.shape, dtype=wire, device=m.device) for m in buffers]
        self._form(task, inputs)
        return inputs

    @spent_on("momentum")
    def _form(self, task: Task, outs: Sequence[Tensor | None]) -> None:
        """Update the momentum of a task and form U where it is wanted."""
        # Replicas advance one matrix alike, to the last bit, though only its owner's sends U.
        dealt = len(set(getattr(task.job.bucket, "replicas", ()))) > 1
        take_compiled = partial(self._kernels.advance, group=task.group) if self._compile and not dealt else None
        advance_in(outs, self._buffers(task), task.dense_gradients(), self._advancing(task), take_compiled)

    def _advancing(self, task: Task) -> Callable[..., list[Tensor]]:
        return partial(update_momentum, **_momentum_options(task.group))

    def _looking_ahead(self, task: Task) -> Callable[..., list[Tensor]]:
        return partial(look_ahead, **_momentum_options(task.group))

    def _buffers(self, task: Task) -> list[Tensor]:
        return self._states(task, "momentum_buffer")

    def _states(self, task: Task, key: str) -> list[Tensor]:
        return task.job.select(local(self.state[p][key]) for p in task.job.params)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As torch's; parameters that were thawed since the last step are among it."""
        self._follow_parameters()
        return super().state_dict()

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and group options; tensors keep the dtype they were stored in. Collective as the constructor is.

        State dicts of ``torch.optim.AdamW`` and ``torch.optim.Muon`` can be loaded into the class of the same name.

        Raises:
            ValueError: if the groups do not match, in number, size or algorithm, and for state that a trainable
                parameter lacks or that is placed differently. Nothing has been loaded then, on any rank.
        """
        handle = self.register_load_state_dict_pre_hook(Driver._prepare_load)  # after the hooks of the user
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._rebuild()

    def _prepare_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check and translate what will be loaded; ranks compare it."""
        error, lines = None, []
        try:
            state_dict = from_torch(state_dict)
            saved = self._merged(state_dict["param_groups"])
            check_stored(self.param_groups, saved, state_dict["state"])
            members = [{**new, "params": group["params"]} for new, group in zip(saved, self.param_groups, strict=True)]
            lines = describe(members, self._bucket_bytes, self._max_in_flight, self._compile)
            state_dict = {"state": wrap_tensors(state_dict["state"]), "param_groups": saved}
        except Exception as problem:
            error = problem
        agree(error, lines, process_groups(tensors_of(self.param_groups), self._holders))
        return state_dict

    def _merged(self, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups of a checkpoint; options that an older one lacks stay as they are."""
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint has a different number of parameter groups, {len(saved)}, than the optimizer, "
                f"{len(self.param_groups)}; build the optimizer with the groups that were saved"
            )
        groups = []
        for number, (group, stored) in enumerate(zip(self.param_groups, saved, strict=True)):
            where = f"group {number}"
            for what, theirs, ours in (
                ("algorithm", stored["algorithm"], group["algorithm"]),
                ("number of parameters", len(stored["params"]), len(group["params"])),
                (
                    "matrix_splits",
                    plain(stored.get("matrix_splits", group.get("matrix_splits"))),
                    group.get("matrix_splits"),
                ),
            ):
                if theirs != ours:
                    raise ValueError(
                        f"{where}: the checkpoint's {what} is {theirs!r}, the optimizer's is {ours!r}; build the "
                        "optimizer with the groups that were saved"
                    )
            merged, algorithm = {**group, **stored}, ALGORITHMS[group["algorithm"]]
            options = {key: plain(merged[key]) for key in algorithm.options}
            check_options(options, algorithm, f"loaded {where}")  # schedulers leave keys of their own beside them
            groups.append({**merged, **options})
        return groups

    def __getstate__(self) -> dict[str, Any]:
        own = ("_options", "_bucket_bytes", "_max_in_flight", "_holders", "_compile")
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or what ``load_state_dict`` prepared; the plan is built anew."""
        super().__setstate__({**state, "state": unwrap_tensors(state["state"])})
        self._building = False
        self._travelled: list[Job] = []
        self._reduced_bytes = 0
        self._kernels = Kernels()
        self._jobs = None


def _momentum_options(group: dict[str, Any]) -> dict[str, Any]:
    return {"mu": group["momentum"], "nesterov": group["nesterov"], "form": group["momentum_form"]}
