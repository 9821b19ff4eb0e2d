"""The one ``torch.optim.Optimizer``: gradient → momentum → direction → scale → weight, over lists of local shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..orthogonal.pieces import Pieces
from ..sharding.agreement import agree, process_groups
from ..sharding.exchange import pipeline, warm_up
from ..sharding.layout import dividing_groups, local
from ..sharding.plan import BucketBytes
from ..sharding.report import Plan
from ..sharding.team import Team, team_of
from . import variance
from .across import row_steps_across
from .adaptive import apply_adaptive, squares_of
from .algorithm import ALGORITHMS, MAX_IN_FLIGHT, Algorithm
from .compiled import Kernels
from .costs import plan_of
from .directions import Step, block, orthogonalise, spectral, wire_dtype
from .foreign import from_torch
from .forms import absmax_key, wide
from .gradients import local_gradients
from .jobs import Job, check_splits, describe, divide, label
from .members import listed, tensors_of
from .momentum import advance_in, ahead_of, form_of, look_ahead, update_momentum
from .neurons import Neurons, neuron_steps, neurons_of
from .norms import column_steps, matrix_steps
from .options import check_momenta, check_options, completed_steps, find_algorithm, nearest, plain, structure
from .quantized_state import CODES, pack, unpack
from .rows import row_step
from .scaling import refresh_scale
from .selection import apply_to_rows, row_norms, select, take_rows, take_rows_here
from .spans import Spans, spent_on
from .stored_state import check_stored, complete, unwrap_tensors, wrap_tensors
from .sums import Sums
from .task import Member, Task
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
        options: of ``algorithm``, where they differ from its own; those that follow may be among them.
        bucket_bytes: how much travels or is updated at a time: the shards of all ranks together, in the dtype in which
            they travel, or in their own where nothing does.
        max_in_flight: buckets in flight on a refresh.
        process_group: of ranks that each hold the same plain tensors and gradients, and deal their matrices to owners.
        compile: whether passes over large matrices run as kernels that are compiled at their first use.
        problem: what is wrong already, to be raised on all ranks.

    Raises:
        ValueError: for bad options, parameters that are no matrices, placements that are not supported, a
            process_group without this rank, and if ranks disagree about the parameter groups. An error of one rank is
            raised on all that share its meshes or its process_group.
    """

    _spans: Spans | None = None
    _has_previous = _at_previous = False

    def __init__(
        self,
        params: Iterable[Any],
        algorithm: Algorithm,
        options: Mapping[str, Any],
        bucket_bytes: BucketBytes = "auto",
        max_in_flight: int = MAX_IN_FLIGHT,
        process_group: dist.ProcessGroup | None = None,
        compile: bool = False,
        problem: ValueError | None = None,
    ) -> None:
        options = {**algorithm.options, **options}
        bucket_bytes = options.pop("bucket_bytes", bucket_bytes)
        max_in_flight = options.pop("max_in_flight", max_in_flight)
        process_group, compile = options.pop("process_group", process_group), options.pop("compile", compile)
        self._options = {"algorithm": algorithm.name, **options}
        self._bucket_bytes, self._max_in_flight, self._compile = bucket_bytes, max_in_flight, compile
        self._kernels = Kernels()
        self._holders: Team | None = None
        self._travelled: list[Task] = []
        self._reduced_bytes = 0
        self._jobs: list[Job] | None = None
        self._building = True
        params = listed(params)
        error = None
        try:
            if process_group is not None:  # first: whatever else is wrong is told to its ranks
                self._holders = team_of(process_group)
            if problem is not None:
                raise problem
            for name, value in (("bucket_bytes", bucket_bytes), ("max_in_flight", max_in_flight)):
                auto = name == "bucket_bytes" and value == "auto"
                if not auto and (not isinstance(value, int) or value < 1):
                    raise ValueError(f"{name} is {value!r} but has to be an int >= 1")
            if not isinstance(compile, bool):
                raise ValueError(f"compile is {compile!r} but has to be True or False")
            if unknown := options.keys() - algorithm.options.keys():
                key = min(unknown)
                raise ValueError(f"{algorithm.name} has no option {key!r}{nearest(key, algorithm.options)}")
            # Schedulers that cycle the momentum look for it among the defaults.
            super().__init__(params, {key: plain(value) for key, value in options.items()})
        except Exception as problem:
            error = problem
        self._build(error, tensors_of(params))
        self._building = False

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sent in the last step, from the plan."""
        return self._reduced_bytes + sum(task.bucket.bytes_sent[task.job.layouts[0].rank] for task in self._travelled)

    @property
    def wire_bytes_max(self) -> int:
        """Bytes that the busiest rank sent in the last step, from the plan, which knows the traffic of all.

        With shards over several process groups it is the sum of each group's busiest rank. Norms of rows that ranks
        share are counted as this rank sends them.
        """
        sent: dict[Any, list[tuple[int, ...]]] = defaultdict(list)
        for task in self._travelled:
            sent[task.job.team].append(task.bucket.bytes_sent)
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
            check_momenta(param_group, where)
        super().add_param_group(param_group)
        for key in self.defaults.keys() - algorithm.options.keys():  # torch fills them into every group
            del self.param_groups[-1][key]
        self._complete_state(number)

    def _complete_state(self, number: int) -> None:
        """State exists from the start, on every rank, so that checkpoints can be read before the first step."""
        group = self.param_groups[number]
        if ALGORITHMS[group["algorithm"]].elementwise is None:
            check_splits(group, f"group {number}")
        for i, p in enumerate(group["params"]):
            name = label(f"group {number}", group, i)
            if not p.is_floating_point():
                raise ValueError(f"{name}: dtype {p.dtype} is not supported; parameters have to be real floats")
            if p.requires_grad:
                complete(self.state[p], group, i, name, (number, i))

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
            group = self.param_groups[job.group]
            algorithm = ALGORITHMS[group["algorithm"]]
            if job.bucket:
                yield job.team.open(), job.device
            met = [dividing_groups(p) for p in job.params if group.get("mars_gamma")]
            for layout in job.layouts:
                met += [layout.column_groups] if algorithm.unit == "rows" or algorithm.together else []
                met += [layout.row_groups] if algorithm.together else []
                whole = algorithm.unit in ("columns", "matrix") or algorithm.step_sizes or algorithm.selects
                met += [layout.groups] if whole or group.get("neuron_beta2") is not None else []
            yield from ((one, job.device) for groups in met for one in groups)

    def _present(self) -> list[tuple[Any, ...]]:
        """Which tensors there are, where and of what dtype, which are trained, and options that shape their state."""
        tensors = [(id(p), p.requires_grad, p.dtype, p.device) for group in self.param_groups for p in group["params"]]
        return [*tensors, *map(structure, self.param_groups)]

    def _keep_up(self) -> None:
        """Build the plan anew if parameters or the structure of groups changed; collective then."""
        if self._jobs is None or self._built_for != self._present():
            self._rebuild()

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
        for number, group in enumerate(self.param_groups):
            algorithm = ALGORITHMS[group["algorithm"]]
            check_options({key: group[key] for key in algorithm.options}, algorithm, f"group {number}")
            self._complete_state(number)

    # -- step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter. Communicates for matrices that ranks share, in groups whose refresh it is.

        Raises:
            ValueError: for sparse gradients, or gradients placed differently from their parameter; nothing has been
                updated or sent then.
        """
        self._check_weights_are_present()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._keep_up()
        with ExitStack() as stack:
            for kind in {job.device.type for job in self._jobs}:
                if kind == "meta":
                    raise ValueError(
                        "parameters lie on the meta device; build the optimizer after model.to_empty(device=...), "
                        "which replaces them"
                    )
                if torch.is_autocast_enabled(kind):  # it would choose the dtype of the iterations
                    stack.enter_context(torch.autocast(kind, enabled=False))
            self._run()
        for group in self.param_groups:
            group["step"] += 1
        return loss

    @contextmanager
    @torch.no_grad()
    def at_previous_weights(self) -> Iterator[None]:
        """Inside, the parameters of groups with ``mars_exact`` are those of before the last step.

        Take the loss of the batch of the coming step and its gradients inside as well::

            with optimizer.at_previous_weights():
                loss(model, batch).backward()
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        Gradients are None at the start; those that there were before are there again afterwards. What scales the
        present ones, as clipping does, has to scale ``previous_gradients`` too. On the first step the weights are the
        present ones. After a forward without a backward, as an evaluation is, FSDP2 still has the root's weights of
        then gathered and would use those inside: call ``model.reshard()`` before.

        Raises:
            ValueError: if it is entered already; so does a step inside.
        """
        self._check_weights_are_present()
        self._keep_up()
        groups = self._exact_groups()
        started = [group for group in groups if group["step"]]
        present = [(p, p.grad, _kept(p.grad)) for group in self.param_groups for p in group["params"]]
        self.zero_grad(set_to_none=True)
        self._has_previous, self._at_previous = False, True
        for group in started:
            variance.swap_weights(group, self.state)
        try:
            with torch.enable_grad():
                yield
            for p in (p for group in groups for p in group["params"] if p.requires_grad):
                before = local(self.state[p]["last_gradient"])
                before.zero_() if p.grad is None else before.copy_(local(p.grad))
            self._has_previous = True
        finally:
            for group in started:
                variance.swap_weights(group, self.state)
            for p, gradient, kept in present:
                p.grad = gradient if kept is None else gradient.copy_(kept)
            self._at_previous = False

    def _check_weights_are_present(self) -> None:
        if self._at_previous:
            raise ValueError("the weights are those of before the last step; leave at_previous_weights() first")

    @property
    def takes_previous(self) -> bool:
        """Whether a step needs gradients that are taken inside ``at_previous_weights``."""
        return bool(self._exact_groups())

    def previous_gradients(self) -> list[Tensor]:
        """This rank's parts of the gradients that the last ``at_previous_weights`` has taken, for scaling."""
        trained = [p for group in self._exact_groups() for p in group["params"] if p.requires_grad]
        return [local(self.state[p]["last_gradient"]) for p in trained]

    def _exact_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group.get("mars_gamma") and group["mars_exact"]]

    def _keep_previous(self) -> None:
        """Check that exact variance reduction has its gradients, and keep the weights for the next."""
        groups = self._exact_groups()
        if groups and not self._has_previous:
            raise ValueError(
                "mars_exact needs this batch's gradients at the weights of before the last step; take them inside "
                "optimizer.at_previous_weights(), or set mars_exact=False"
            )
        for group in groups:
            variance.keep_weights(group, self.state)
        self._has_previous = False

    def _task(self, job: Job) -> Task:
        group = self.param_groups[job.group]
        algorithm = ALGORITHMS[group["algorithm"]]
        weights = job.select(local(p) for p in job.params)
        gradients = job.select(local_gradients(job))
        return Task(job, group, algorithm, algorithm.refreshes(group, job.offset), weights, gradients)

    @spent_on("other")
    def _run(self) -> None:
        tasks = [self._task(job) for job in self._jobs]
        self._keep_previous()
        travelling = [task for task in tasks if task.travels]
        self._travelled = travelling
        self._reduced_bytes = self._measure(tasks)
        self._select([task for task in tasks if task.algorithm.selects])
        at_home: list[Neurons] = []

        def meanwhile() -> None:
            for task in tasks:
                if not (task.travels or task.adds_up or task.algorithm.together):
                    self._stay(task)
            self._add_up([task for task in tasks if task.adds_up])
            self._step_together([task for task in tasks if task.algorithm.together])

        land = partial(self._land, at_home)
        pipeline(travelling, self._depart, self._turn, land, self._max_in_flight, meanwhile)
        self._normalise(at_home)

    @spent_on("momentum")
    def _measure(self, tasks: Sequence[Task]) -> int:
        """Norms of gradients that algorithms ask for, in one all-reduce; the bytes that this rank sends for it."""
        sums = Sums(self._all_reduce)
        clipped: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            if not group.get("mars_gamma") or group["mars_clip"] is None:
                continue
            for p in group["params"]:
                if p.requires_grad:
                    shards = local(p.detach() if p.grad is None else p.grad), local(self.state[p]["last_gradient"])
                    gradient = torch.zeros_like(shards[0]) if p.grad is None else shards[0]
                    clipped[p] = variance.measured(gradient, shards[1], group, dividing_groups(p), sums)
        for task in tasks:
            task.clipped = [clipped.get(p) for p in task.job.params]
            if task.algorithm.step_sizes is not None:
                task.squares = [sums.add(total, groups) for total, groups in squares_of(task)]
        return sums.reduce()

    @spent_on("momentum")
    def _select(self, tasks: Sequence[Task]) -> None:
        """Update the momentum of tasks that orthogonalise some rows only, and choose those."""
        sums, norms = Sums(self._all_reduce), []
        for task in tasks:
            with self._open(task) as state:
                for m, g in zip(state["momentum_buffer"], self._gradients(task), strict=True):
                    m.add_(g)
                norms.append(row_norms(task, state["momentum_buffer"], sums))
        self._reduced_bytes += sums.reduce()
        for task, selected in zip(tasks, select(tasks, norms), strict=True):
            task.selected = selected

    @spent_on("update")
    def _add_up(self, tasks: Sequence[Task]) -> None:
        """Take the steps of tasks for which ranks may have to add up squares.

        Momentum of 8 bits is decoded for all of them at once.
        """
        forms = (self._advancing, self._looking_ahead)
        with ExitStack() as stack:
            members: dict[str, list[Member]] = {"rows": [], "columns": [], "matrix": []}
            for task in tasks:
                state = stack.enter_context(self._open(task))
                members[task.algorithm.unit].append(Member(task, state, self._gradients(task)))
            self._reduced_bytes += row_steps_across(members["rows"], *forms, self._all_reduce)
            self._reduced_bytes += column_steps(members["columns"], *forms, self._all_reduce)
            self._reduced_bytes += matrix_steps(members["matrix"], *forms, self._all_reduce)

    @spent_on("update")
    def _step_together(self, tasks: Sequence[Task]) -> None:
        by_rule: dict[Callable[..., int], list[Task]] = defaultdict(list)
        for task in tasks:
            by_rule[task.algorithm.together.take].append(task)
        for take, some in by_rule.items():
            with ExitStack() as stack:
                opened = [Member(task, stack.enter_context(self._open(task)), self._gradients(task)) for task in some]
                self._reduced_bytes += take(opened, self._all_reduce)

    @spent_on("update")
    def _normalise(self, at_home: Sequence[Neurons]) -> None:
        """Take the steps of directions whose neurons are normalised."""
        if at_home:
            self._reduced_bytes += neuron_steps(at_home, self._all_reduce)

    @spent_on("exchange")
    def _all_reduce(self, packed: Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(packed, group=group)

    @spent_on("update")
    def _stay(self, task: Task) -> None:
        """Update a job without communication."""
        with self._open(task) as state:
            if task.algorithm.elementwise is not None:
                task.algorithm.elementwise(task.weights, state, self._gradients(task), task.group)
            elif task.algorithm.unit == "rows" and not task.refresh:
                states = (task.weights, state["momentum_buffer"], self._gradients(task))
                take_compiled = self._kernels.row_step if self._compile else None
                row_step(*states, task.job.layouts, task.group, self._advancing(task), take_compiled)
            elif task.selected is not None:
                apply_to_rows(task, self._direct_rows(task, state["momentum_buffer"]))
            else:
                self._normalise(self._finish(task, self._direct(task, state["momentum_buffer"])))

    @spent_on("orthogonalisation")
    def _direct(self, task: Task, buffers: list[Tensor]) -> Step:
        direction = spectral if task.refresh else task.algorithm.between
        return direction(task.weights, self._inputs(task, buffers), task.job.layouts, task.group)

    @spent_on("orthogonalisation")
    def _direct_rows(self, task: Task, buffers: list[Tensor]) -> list[Tensor]:
        return take_rows_here(task, buffers)

    @spent_on("exchange")
    def _depart(self, task: Task) -> tuple[Task, Any]:
        job = task.job
        form = partial(self._form_travelling, task)
        return task, task.route.depart(task.bucket, form, job.layouts[0].rank, job.team.open(), job.device)

    @spent_on("exchange")
    def _turn(self, travelling: tuple[Task, Any]) -> tuple[Task, Any]:
        task, trip = travelling
        return task, task.route.turn(trip, partial(self._orthogonalise, task))

    @spent_on("orthogonalisation")
    def _orthogonalise(self, task: Task, matrices: list[Pieces], stack_bytes: int) -> None:
        orthogonalise(matrices, task.group, task.weights[0], stack_bytes)

    @spent_on("update")
    def _land(self, at_home: list[Neurons], travelling: tuple[Task, Any]) -> None:
        task, trip = travelling
        if task.selected is not None:
            apply_to_rows(task, self._arrive(task, trip))
            return
        factors = [refresh_scale(task.group, *layout.shape) for layout in task.job.layouts]
        at_home += self._finish(task, Step(task.weights, self._arrive(task, trip), factors))

    @spent_on("exchange")
    def _arrive(self, task: Task, trip: Any) -> list[Tensor]:
        return task.route.land(trip)

    def _finish(self, task: Task, step: Step) -> list[Neurons]:
        """Apply directions to weights, or return those whose neurons have to be normalised first."""
        orthogonal = task.refresh or task.algorithm.between is block
        if orthogonal and task.group.get("neuron_beta2") is not None:
            return neurons_of(task, step, self._states(task, "neuron_second_moment"))
        if task.algorithm.step_sizes is not None:
            rows = {key: self._states(task, key) for key, form in task.algorithm.state.items() if form.per_row}
            apply_adaptive(task, step, rows)
        else:
            apply(step, task.group)
        return []

    @spent_on("momentum")
    def _inputs(self, task: Task, buffers: list[Tensor]) -> list[Tensor]:
        """U of a task: on a refresh new tensors of the dtype in which it would travel, else as ``_advancing`` gives."""
        if not task.refresh:
            return self._advancing(task)(buffers, self._gradients(task))
        wire = wire_dtype(task.group, task.weights[0].dtype)
        inputs = [torch.empty(m.shape, dtype=wire, device=m.device) for m in buffers]
        self._form(task, buffers, inputs)
        return inputs

    @spent_on("momentum")
    def _form_travelling(self, task: Task, outs: Sequence[Tensor | None]) -> None:
        with self._open(task) as state:
            if task.selected is not None:
                take_rows(task, state["momentum_buffer"], outs)
            else:
                self._form(task, state["momentum_buffer"], outs)

    def _form(self, task: Task, buffers: list[Tensor], outs: Sequence[Tensor | None]) -> None:
        """Update the momentum of a task and form U where it is wanted."""
        # Replicas advance one matrix alike, to the last bit, though only its owner's sends U.
        dealt = len(set(getattr(task.job.bucket, "replicas", ()))) > 1
        take_compiled = partial(self._kernels.advance, group=task.group) if self._compile and not dealt else None
        advance_in(outs, buffers, self._gradients(task), self._advancing(task), take_compiled)

    def _advancing(self, task: Task) -> Callable[..., list[Tensor]]:
        group = task.group
        options = {"mu": group["momentum"], "ahead": ahead_of(group), "form": form_of(group)}
        return partial(update_momentum, **options)

    def _looking_ahead(self, task: Task) -> Callable[..., list[Tensor]]:
        return partial(look_ahead, ahead=ahead_of(task.group), form=form_of(task.group))

    def _gradients(self, task: Task) -> list[Tensor]:
        """What momentum is formed of, once a step: gradients, those that are None as zeros, with less variance."""
        gradients = task.dense_gradients()
        if not task.group.get("mars_gamma"):
            return gradients
        return variance.corrections(gradients, self._states(task, "last_gradient"), task.clipped, task.group)

    @contextmanager
    def _open(self, task: Task) -> Iterator[dict[str, list[Tensor]]]:
        """The state by key; that of 8 bits decoded, and encoded anew afterwards."""
        state = {key: self._states(task, key) for key in task.algorithm.state}
        coded = {key: (state[key], self._states(task, absmax_key(key))) for key in task.job.codes}
        for key, (values, scales) in coded.items():
            code, dtype = CODES[task.job.codes[key]], wide(task.weights[0].dtype)
            state[key] = [unpack(q, s, code, dtype) for q, s in zip(values, scales, strict=True)]
        yield state
        for key, (values, scales) in coded.items():
            for x, q, s in zip(state[key], values, scales, strict=True):
                pack(x, q, s, CODES[task.job.codes[key]])

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
            merged["step"] = completed_steps(merged["step"], f"loaded {where}")
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
        self._travelled: list[Task] = []
        self._reduced_bytes = 0
        self._kernels = Kernels()
        self._jobs = None


def _kept(gradient: Tensor | None) -> Tensor | None:
    """A copy of a plain gradient, which may lie in a bucket of DDP that the next backward writes into."""
    return None if gradient is None or isinstance(gradient, DTensor) else gradient.detach().clone()
