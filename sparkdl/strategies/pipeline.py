"""The way of micro-batches through a pipeline: GPipe and 1F1B, by ``torch.distributed.pipelining``."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from sparkdl.compat.pipeline_messages import receives_first
from sparkdl.errors import ConfigError, SparkdlError
from sparkdl.nn.mixture import BatchBalance, MixtureOfExperts, counting, mixtures
from sparkdl.strategies.base import StepObjective
from sparkdl.strategies.stages import GraphPart, Stage

SCHEDULES = ("1f1b", "gpipe", "naive")
"""1F1B holds the activations of at most as many micro-batches as stages follow (Narayanan et al., SOSP 2019), GPipe
those of all (Huang et al., NeurIPS 2019); naive sends the batch as one."""

_KEPT_SCHEDULES = 8


class Pipeline:
    """Computes batches with the ranks of one pipeline, each of which has one stage; every rank calls every method.

    Each micro-batch has the same number of rows, and at least one: the last row is repeated, and counts neither in the
    loss nor in the outputs. A batch without rows goes through the same schedule.

    Random numbers: the ranks of a pipeline have one stream in common, of which each training batch takes one number;
    the stage's own numbers, for dropout, begin anew at that number plus the index of the stage.

    Mixtures of experts: the balance loss of a batch is known once all its micro-batches went forward, and each stage
    adds the gradient of its own layers' in the backward passes.

    Args:
        stage: what this rank computes.
        group: the ranks of the pipeline, in the order of their stages.
        device: where this rank computes.
        micro_batches: how many a batch is cut into; with ``"naive"`` 1.
        schedule: one of ``SCHEDULES``.
        data_size: of how many parts a global batch consists, so that ranks of all pipelines cut alike.
        exchanges_in_backward: backward passes leave gradients of other pipelines, too, whose rows count.
        readers: the ranks of this stage in all pipelines, where they wait for each other in passes; None where not.

    Raises:
        ConfigError: the schedule is unknown, or the group has not as many ranks as the model has stages.
    """

    def __init__(
        self,
        stage: Stage,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        data_size: int = 1,
        exchanges_in_backward: bool = False,
        readers: dist.ProcessGroup | None = None,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ConfigError(f"schedule={schedule!r} is unknown: choose one of {list(SCHEDULES)}")
        if micro_batches < 1:
            raise ConfigError(f"micro_batches={micro_batches} is below 1: give at least 1")
        if dist.get_world_size(group) != stage.count:
            raise ConfigError(
                f"the pipeline has {dist.get_world_size(group)} ranks for {stage.count} stages: cut the model into as "
                "many stages as ranks"
            )
        self.stage, self.group, self.device = stage, group, device
        self.micro_batches = 1 if schedule == "naive" else micro_batches
        self.schedule, self.data_size = schedule, data_size
        self._exchanges_in_backward, self._readers = exchanges_in_backward, readers
        self.is_first, self.is_last = stage.index == 0, stage.index == stage.count - 1
        self._mixtures = mixtures(stage.training.module)
        for layer in self._mixtures.values():
            layer.balance = BatchBalance(layer)
        self._plans: OrderedDict[Any, _Plan] = OrderedDict()
        self._rows: dict[str, torch.Tensor] = {}  # the first row this rank had, of each tensor that its stage reads

    def step(self, batch: Any, objective: StepObjective) -> tuple[torch.Tensor, Any]:
        """Forward and backward of all micro-batches; gradients of this stage's parameters are added to ``.grad``.

        Returns:
            On the last stage the loss of the batch, detached, as ``objective(model, batch)`` gives it, and the model's
            outputs of all rows, None where there is no row. On the others 0 and None. The balance loss of a stage's
            mixtures is added on that stage.

        Raises:
            ConfigError: what the model returns or sends does not go through a pipeline.
        """
        plan, tensors = self._plan(batch, objective, training=True)
        if batch.rows and self.is_last:
            plan.task.divisors = objective.divisors(plan.example, batch)
        else:
            objective.skip(batch)
        plan.task.batch, plan.task.objective = batch, objective
        balances = [layer.balance for layer in self._mixtures.values() if layer.balance is not None]
        for balance in balances:
            balance.begin(objective.scaled(torch.tensor(batch.weight, dtype=torch.float64, device=self.device)))
        with self._own_random_numbers(), self._gradients_of(batch):
            outputs = plan.run(tensors, batch.rows)
        loss = torch.zeros((), device=self.device)
        for part in plan.task.losses:
            loss = loss + part
        plan.task.losses.clear()
        for balance in balances:
            loss = loss + balance.loss() * batch.weight
        return loss, plan.joined(outputs, batch.rows) if self.is_last and batch.rows else None

    def evaluate(self, batch: Any, objective: StepObjective) -> tuple[Any, torch.Tensor] | None:
        """Forward of all micro-batches.

        Returns:
            On the last stage what ``objective.evaluate`` gives; None on the others, and where there is no row.
        """
        plan, tensors = self._plan(batch, objective, training=False)
        with torch.no_grad():
            outputs = plan.run(tensors, batch.rows)
        if not self.is_last or not batch.rows:
            return None
        joined = plan.joined(outputs, batch.rows)
        return joined, objective.sums(joined, batch)

    # --- rows -----------------------------------------------------------------------------------------------------

    def _micro_rows(self, batch: Any) -> int:
        """Rows of a micro-batch: as many on ranks that read other parts of the same global batch."""
        rows: int = max(batch.rows, -(-batch.global_rows // self.data_size))
        return max(1, -(-rows // self.micro_batches))

    def _padded(self, batch: Any, name: str, rows: int) -> torch.Tensor:
        """The batch's tensor ``name`` with as many rows, the last one repeated."""
        tensor: torch.Tensor = batch[name]
        if name not in self._rows and batch.rows:
            self._rows[name] = tensor[:1].clone()
        if batch.rows == rows:
            return tensor
        last = tensor[-1:] if batch.rows else self._rows.get(name, tensor.new_zeros((1, *tensor.shape[1:])))
        return torch.cat([tensor, last.expand(rows - batch.rows, *last.shape[1:])])

    @contextmanager
    def _gradients_of(self, batch: Any) -> Iterator[None]:
        """Throw the gradients away of rows that stand in for none."""
        if batch.rows or self._exchanges_in_backward:
            yield
            return
        parameters = list(self.stage.training.module.parameters())
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Give the block numbers of this stage's own; the stream of all stages goes on by one number."""
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed + self.stage.index)
            yield

    # --- plans ----------------------------------------------------------------------------------------------------

    def _plan(self, batch: Any, objective: StepObjective, *, training: bool) -> tuple[_Plan, dict[str, torch.Tensor]]:
        """The schedule for batches like this one, and the tensors of this one; all ranks make a new one together."""
        part = self.stage.training if training else self.stage.evaluation
        micro_rows = self._micro_rows(batch)
        tensors = {name: self._padded(batch, name, micro_rows * self.micro_batches) for name in part.inputs}
        # All tensors of the batch, so that ranks that read none of them know a new shape when there is one.
        shapes = tuple((name, tensor.shape[1:], tensor.dtype) for name, tensor in sorted(batch.items()))
        key = training, torch.is_inference_mode_enabled(), micro_rows, shapes
        is_new = torch.tensor(float(key not in self._plans), device=self.device)
        if self._readers is not None:  # whose batches may have other shapes: the first pass of a new one is of all
            dist.all_reduce(is_new, dist.ReduceOp.MAX, self._readers)
        if not is_new:
            self._plans.move_to_end(key)
            plan = self._plans[key]
            plan.runner.objective = objective
            return plan, tensors
        plan = self._plans[key] = self._new_plan(part, tensors, micro_rows, objective, training=training)
        if len(self._plans) > _KEPT_SCHEDULES:
            self._plans.popitem(last=False)
        return plan, tensors

    def _new_plan(
        self,
        part: GraphPart,
        tensors: Mapping[str, torch.Tensor],
        micro_rows: int,
        objective: StepObjective,
        *,
        training: bool,
    ) -> _Plan:
        """Send the first micro-batch through all stages, to find out what travels between them."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        stage = self.stage
        received, structure, error = ((), (), None) if self.is_first else self._receive()
        runner = _Runner(part, structure, objective, self._mixtures.values(), is_last=self.is_last)
        sent: tuple[torch.Tensor, ...] = ()
        if error is None:
            try:
                sent = self._first_pass(runner, received, tensors, micro_rows, training=training)
            except SparkdlError as refused:
                error = refused
        if not self.is_last:
            described = [(tensor.detach().cpu(), tensor.requires_grad) for tensor in sent]
            message = described, runner.structure, error
            dist.send_object_list([message], group=self.group, group_dst=stage.index + 1, device=self.device)
        errors: list[Any] = [None] * stage.count
        dist.all_gather_object(errors, error, self.group)
        for of_a_rank in filter(None, errors):
            raise of_a_rank
        task = _Task(micro_rows)
        stage_of_torch = PipelineStage(
            runner, stage.index, stage.count, self.device, input_args=received, output_args=sent, group=self.group
        )
        # With fewer micro-batches than stages the two schedules are one, and torch's 1F1B takes no such number.
        kind = Schedule1F1B if self.schedule == "1f1b" and self.micro_batches >= stage.count and training else None
        schedule = (kind or ScheduleGPipe)(
            stage_of_torch, self.micro_batches, loss_fn=task.loss if training else None, scale_grads=False
        )
        example = _filled(runner.structure, [tensor.detach() for tensor in sent]) if self.is_last else None
        task.structure = runner.structure
        return _Plan(stage_of_torch, schedule, self.micro_batches, runner, task, example)

    def _receive(self) -> tuple[tuple[torch.Tensor, ...], Any, SparkdlError | None]:
        objects: list[Any] = [None]
        dist.recv_object_list(objects, group=self.group, group_src=self.stage.index - 1, device=self.device)
        described, structure, error = objects[0]
        tensors = (tensor.to(self.device).requires_grad_(requires_grad) for tensor, requires_grad in described)
        return tuple(tensors), structure, error

    def _first_pass(
        self,
        runner: _Runner,
        received: tuple[torch.Tensor, ...],
        tensors: Mapping[str, torch.Tensor],
        micro_rows: int,
        *,
        training: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Compute what this stage sends of the first micro-batch, and refuse what a pipeline would do otherwise."""
        buffers = {name: (buffer, buffer.clone()) for name, buffer in runner.module.named_buffers()}
        devices = [self.device] if self.device.type == "cuda" else []
        runner.counted_rows = iter([0])
        with ExitStack() as contexts:
            contexts.enter_context(torch.random.fork_rng(devices=devices))
            contexts.enter_context(torch.set_grad_enabled(training))
            for name, layer in self._mixtures.items():
                contexts.enter_context(_refusing_other_rows(name, layer, micro_rows))
            sent: tuple[torch.Tensor, ...] = runner(
                *received, **_keywords({name: tensor[:micro_rows] for name, tensor in tensors.items()})
            )
        for name, (buffer, value) in buffers.items():
            if not torch.equal(buffer, value):
                raise ConfigError(
                    f"the buffer {name!r} changes in a forward pass, and a pipeline does several for one batch: leave "
                    "that layer out, or choose a strategy without a pipeline"
                )
        for tensor in sent if self.is_last else ():
            if tensor.ndim == 0 or tensor.shape[0] != micro_rows:
                raise ConfigError(
                    f"the model returns shape {tuple(tensor.shape)} for {micro_rows} rows: return one entry a row, "
                    "since a pipeline computes a batch in parts"
                )
        return sent


# --- one plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor that was taken out of a structure."""

    number: int


class _Runner(torch.nn.Module):
    """One stage as torch calls it: tensors in, a tuple of tensors out.

    Numbers that travel, such as a length, are constants of a plan, since they follow from shapes.

    Attributes:
        counted_rows: of the calls to come, how many of their rows, from the first on, are the batch's.
    """

    def __init__(
        self,
        part: GraphPart,
        received: Any,
        objective: StepObjective,
        layers: Iterable[MixtureOfExperts],
        *,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.module, self.inputs, self.is_last = part.module, part.inputs, is_last
        self.received, self.objective = received, objective
        self.structure: Any = None
        self.counted_rows: Iterator[int] = iter(())
        self._layers = tuple(layers)

    def forward(self, *received: torch.Tensor, **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch_tensors = [tensors[f"tensor_{i}"] for i in range(len(self.inputs))]
        with self.objective.autocast(), counting(self._layers, next(self.counted_rows)):
            result = self.module(*batch_tensors, *_filled(self.received, received))
        outputs: list[torch.Tensor] = []
        structure = _taken_apart(result, outputs)
        if self.structure is None:
            self.structure = structure
        elif structure != self.structure:
            raise ConfigError(
                f"a stage gives {structure} after {self.structure}: what is no tensor must be equal in all batches"
            )
        return tuple(outputs) if self.is_last else tuple(output.contiguous() for output in outputs)


@contextmanager
def _refusing_other_rows(name: str, layer: MixtureOfExperts, rows: int) -> Iterator[None]:
    """Refuse, in a forward pass inside, a mixture whose tokens nobody knows the rows of, or that is called twice."""
    calls = 0

    def check(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigError(
                f"layer {name!r} is called twice for one row, and a pipeline adds up the balance loss of one call: "
                "give the model two layers, or choose a strategy without a pipeline"
            )
        if inputs[0].ndim < 2 or inputs[0].shape[0] != rows:
            raise ConfigError(
                f"layer {name!r} gets shape {tuple(inputs[0].shape)} for a micro-batch of {rows} rows, of which it "
                "must know whose tokens are whose: call it with the rows first, as (rows, ..., features)"
            )

    handle = layer.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


@dataclass
class _Task:
    """What the last stage computes the loss of: the batch that is under way."""

    micro_rows: int
    batch: Any = None
    objective: Any = None
    divisors: Any = None
    structure: Any = None
    losses: list[torch.Tensor] = field(default_factory=list)

    def loss(self, outputs: Any, number: torch.Tensor) -> torch.Tensor:
        """Return what to call ``backward`` on, for the micro-batch of this number."""
        begin = int(number) * self.micro_rows
        count = min(self.batch.rows - begin, self.micro_rows)
        tensors: Sequence[torch.Tensor] = outputs if isinstance(outputs, tuple) else (outputs,)
        if count <= 0:  # all rows stand in for none: a loss with a graph, and no gradient
            return torch.stack([(t * 0).sum() for t in tensors if t.requires_grad]).sum()
        real = _filled(self.structure, [tensor[:count] for tensor in tensors])
        loss: torch.Tensor = self.objective.part(real, self.batch, slice(begin, begin + count), self.divisors)
        self.losses.append(loss.detach())
        return cast(torch.Tensor, self.objective.scaled(loss))


@dataclass
class _Plan:
    """A schedule for batches of one shape.

    Attributes:
        stage: as torch knows it.
        schedule: of torch.
        micro_batches: that a batch is cut into.
        runner: what the stage calls.
        task: what it computes the loss of.
        example: on the last stage, outputs of a micro-batch.
    """

    stage: Any
    schedule: Any
    micro_batches: int
    runner: _Runner
    task: _Task
    example: Any

    def run(self, tensors: Mapping[str, torch.Tensor], rows: int) -> list[Any]:
        """Do the schedule with a batch of ``rows`` rows; return the outputs of each micro-batch, on the last stage."""
        micro_rows = self.task.micro_rows
        begins = range(0, micro_rows * self.micro_batches, micro_rows)
        self.runner.counted_rows = iter([min(max(rows - begin, 0), micro_rows) for begin in begins])
        target = torch.arange(self.micro_batches) if self.stage.is_last else None
        try:
            with receives_first(self.stage.device):
                self.schedule.step(target=target, **_keywords(tensors))
        except RuntimeError as error:
            if isinstance(error.__cause__, SparkdlError):
                raise error.__cause__ from None
            raise
        outputs = list(self.stage.output_chunks)
        self.stage.clear_runtime_states()
        return outputs

    def joined(self, outputs: Sequence[Any], rows: int) -> Any:
        """The outputs of a batch, of that many rows."""
        chunks = [chunk if isinstance(chunk, tuple) else (chunk,) for chunk in outputs]
        columns = [torch.cat([tensor.detach() for tensor in column])[:rows] for column in zip(*chunks, strict=True)]
        return _filled(self.runner.structure, columns)


def _keywords(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"tensor_{i}": tensor for i, tensor in enumerate(tensors.values())}


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Append the tensors in ``value`` to ``tensors``; return ``value`` with slots in their places."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if isinstance(value, Mapping):
        return {name: _taken_apart(entry, tensors) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        entries = [_taken_apart(entry, tensors) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | torch.Size):
        return value
    raise ConfigError(
        f"a {type(value).__name__} lies between two stages or is what the model returns: make it tensors, or tuples, "
        "lists or dicts of them"
    )


def _filled(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Put ``tensors`` in the places of the slots."""
    if isinstance(structure, _Slot):
        return tensors[structure.number]
    if isinstance(structure, dict):
        return {name: _filled(entry, tensors) for name, entry in structure.items()}
    if isinstance(structure, list):
        return [_filled(entry, tensors) for entry in structure]
    if type(structure) is tuple:
        return tuple(_filled(entry, tensors) for entry in structure)
    return structure


# --- how long a rank waits ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bubble:
    """One step on one rank.

    Attributes:
        seconds: of the step.
        computing: seconds of them in forward and backward passes; the rest waits for other stages.
        held: the most micro-batches whose activations this rank held at a time.
    """

    seconds: float
    computing: float
    held: int

    @property
    def share(self) -> float:
        """The part of the step in which the rank waits: (K-1)/(M+K-1) for K equal stages and M micro-batches."""
        return 1.0 - self.computing / self.seconds


def measure_bubble(pipeline: Pipeline, batch: Any, objective: StepObjective) -> Bubble:
    """Do one ``step`` of ``batch``, whose schedule must be made already, with a stopwatch in each pass."""
    plan, _ = pipeline._plan(batch, objective, training=True)
    stage, computing, held, most = plan.stage, 0.0, 0, 0

    def timed(compute: Any, change: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal computing, held, most
            begin = _now(pipeline.device)
            held += max(change, 0)
            most = max(most, held)
            result = compute(*args, **kwargs)
            held += min(change, 0)
            computing += _now(pipeline.device) - begin
            return result

        return run

    stage.forward_one_chunk = timed(stage.forward_one_chunk, 1)
    stage.backward_one_chunk = timed(stage.backward_one_chunk, -1)
    try:
        dist.barrier(pipeline.group)
        begin = _now(pipeline.device)
        pipeline.step(batch, objective)
        dist.barrier(pipeline.group)  # the step of a pipeline ends with that of its slowest stage
        return Bubble(_now(pipeline.device) - begin, computing, most)
    finally:
        del stage.forward_one_chunk, stage.backward_one_chunk


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
