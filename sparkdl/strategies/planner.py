"""The estimated step of each strategy, and the fastest that fits, from one measurement of the model."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from sparkdl.collective.base import Collective, on_leader
from sparkdl.collective.gradients.buckets import bucket_bytes
from sparkdl.compat.silent_ranks import silent_ranks
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.nn.mixture import mixtures, share_tokens
from sparkdl.strategies import tensor_plan
from sparkdl.strategies.local_steps import PRESETS as LOCAL_STEPS
from sparkdl.strategies.mesh import Mesh
from sparkdl.strategies.mesh_strategy import check_layers, check_training
from sparkdl.strategies.model_trace import InputStyle
from sparkdl.strategies.sharded import blocks_of, shard
from sparkdl.strategies.simulation import backward_with_buckets, mean_of_slowest, one_forward_one_backward
from sparkdl.strategies.stage_balance import Profile, profile

_REPEATS, _FLOATS, _PROBE_BYTES = 5, 4, 4 << 20
_CALLS = 9  # of each probe of a link
_MICRO_BATCHES_PER_STAGE = 4
_REFUSED = (RuntimeError, ValueError, TypeError, NotImplementedError, ConfigError)
"""What torch's parts raise of a model that they do not take."""
NOT_RANKED = {
    "local_sgd": "trains other weights: ranks step alone between two means",
    "diloco": "trains other weights: ranks step alone between two means",
    "parameter_server": "trains what all_reduce trains, and its first rank sends and gets what all others do",
    "parameter_server(staleness=None)": "trains other weights: each push is a step of its own",
}
"""Strategies that are estimated beside the others, and why they are not ranked: a user asks for them by name."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins two ranks.

    Attributes:
        bandwidth: bytes a second of payload, each way.
        latency: seconds of a message without any.
        slowed: the share of its speed that computing loses while the link is busy.
        stretched: how many times as long a message takes while ranks compute.
    """

    bandwidth: float
    latency: float
    slowed: float = 0.0
    stretched: float = 1.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise ConfigError(
                f"a link of {self.bandwidth:g} bytes/s and {self.latency:g} s is none: give a bandwidth above 0 and a "
                "latency of 0 or more"
            )

    def all_reduce(self, payload: float, ranks: int) -> float:
        """Seconds of a ring: every rank sends each of its ``ranks`` parts twice but for one."""
        if ranks == 1 or not payload:
            return 0.0
        return 2 * (ranks - 1) * (self.latency + payload / ranks / self.bandwidth)

    def all_gather(self, payload: float, ranks: int) -> float:
        """Seconds until every rank has the whole ``payload``, of which each had a part; of a reduce-scatter, too."""
        return self.all_reduce(payload, ranks) / 2

    def send(self, payload: float) -> float:
        """Seconds of one message."""
        return self.latency + payload / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class MixtureCosts:
    """The costs of one mixture of experts.

    Attributes:
        experts: how many.
        expert_bytes: of the parameters of all of them.
        token_bytes: of a row's tokens on their way to experts and back, in the forward and in the backward pass, with
            tokens dealt evenly; what exceeds ``capacity_factor`` stays.
        choice_bytes: of a row, which every rank tells all others that read the same batch.
    """

    experts: int
    expert_bytes: int
    token_bytes: float
    choice_bytes: float


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """What one process measured of a model, with its global batch of ``rows``.

    Attributes:
        rows: of the global batch.
        passes: seconds of forward and of backward, by rows of a batch, for some numbers of rows.
        gradients: bytes of each gradient, in the order in which a backward pass gives them.
        ready: the share of the backward pass behind which each of them is ready.
        parameter_bytes: of all parameters, those included that are not trained.
        lengths: of each parameter, its first dimension and its bytes; without them, ranks are taken to divide all.
        optimizer_seconds: of a step over all parameters.
        state_bytes: of the optimizer's state of all parameters.
        activation_bytes: kept for the backward pass, by row.
        flops: of forward and backward, by row.
        blocks: bytes of the parameters that ``fully_shard`` gathers at a time, in order.
        layers: what stages are made of, with ``profile_rows`` rows; None where the model cannot be cut.
        profile_rows: rows of that measurement.
        no_layers: why it cannot.
        jitter: relative standard deviation of the seconds of a pass.
        overheads: by strategy, seconds by which torch's own parts that spread the model lengthen a step, of a pipeline
            each micro-batch, which is shorter where gradients of a large table are added up rather than made anew; a
            sentence where they do not take the model.
        mixtures: of experts, that the model has.
        splits: by number of ranks of a tensor group, the work that is split, as a share of all, bytes that a rank sends
            a row, and messages; a sentence where the model cannot be split so.
    """

    rows: int
    passes: Mapping[int, tuple[float, float]]
    gradients: Sequence[int]
    ready: Sequence[float]
    parameter_bytes: int
    optimizer_seconds: float
    state_bytes: int
    activation_bytes: float
    flops: float
    blocks: Sequence[int]
    layers: Profile | None = None
    profile_rows: int = 1
    no_layers: str = ""
    jitter: float = 0.0
    overheads: Mapping[str, float | str] = field(default_factory=dict)
    mixtures: Sequence[MixtureCosts] = ()
    splits: Mapping[int, tuple[float, float, int] | str] = field(default_factory=dict)
    lengths: Sequence[tuple[int, int]] = ()

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients."""
        return sum(self.gradients)

    def padding(self, shards: int) -> float:
        """By what ``fully_shard`` multiplies the bytes of the parameters, of which each shard is as long as the first.

        It cuts along the first dimension: of two experts, four ranks hold and send as much as of four.
        """
        padded = sum(size * math.ceil(length / shards) * shards / length for length, size in self.lengths)
        return padded / sum(size for _, size in self.lengths) if self.lengths else 1.0

    def seconds(self, rows: float) -> tuple[float, float]:
        """Forward and backward of a batch of ``rows``: on the line through the two measurements next to it."""
        measured_rows = sorted(self.passes)
        if len(measured_rows) == 1:
            return self.passes[measured_rows[0]]
        above = next((i for i, count in enumerate(measured_rows) if count >= rows), len(measured_rows) - 1) or 1
        low, high = measured_rows[above - 1], measured_rows[above]
        share = (rows - low) / (high - low)
        (f0, b0), (f1, b1) = self.passes[low], self.passes[high]
        return max(f0 + share * (f1 - f0), 0.1 * f0), max(b0 + share * (b1 - b0), 0.1 * b0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One step under one strategy.

    Attributes:
        strategy: as ``strategy=`` takes it.
        seconds: of a step.
        computing: of these, in which a rank computes.
        sent_bytes: that a rank sends.
        memory_bytes: of the fullest rank: weights, gradients, optimizer state, what is gathered, activations.
        efficiency: seconds of one rank with the whole batch, over the seconds of all ranks together.
        rows: of the global batch.
    """

    strategy: str
    seconds: float
    computing: float
    sent_bytes: float
    memory_bytes: float
    efficiency: float
    rows: int

    @property
    def rows_per_second(self) -> float:
        """The rows of the global batch in a second."""
        return self.rows / self.seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All strategies for some ranks.

    Attributes:
        ranks: how many.
        fitting: those that fit the memory, the fastest first.
        too_large: those that do not, the smallest first.
        impossible: by strategy, why the model does not go with it.
        others: strategies that ``auto`` never chooses, see ``NOT_RANKED``.
    """

    ranks: int
    fitting: Sequence[Estimate]
    too_large: Sequence[Estimate]
    impossible: Mapping[str, str]
    others: Sequence[Estimate] = ()

    @property
    def reason(self) -> str:
        """Why the first is the first, or why there is none, in a sentence."""
        if not self.fitting and not self.too_large:
            return f"the model goes with no strategy of {self.ranks} ranks: {next(iter(self.impossible.values()), '')}"
        if not self.fitting:
            return (
                f"no strategy of {self.ranks} ranks fits the memory of a rank; {self.too_large[0].strategy} needs "
                "least: give more ranks or more memory"
            )
        fastest = self.fitting[0]
        slower = [estimate for estimate in self.fitting[1:] if estimate.strategy != fastest.strategy]
        beside = f", {slower[0].strategy}, the next, {slower[0].seconds:.3g}" if slower else ""
        large = f"; {self.too_large[0].strategy} does not fit the memory" if self.too_large else ""
        return (
            f"{fastest.strategy}: a step takes {fastest.seconds:.3g} s by estimate, {fastest.computing:.3g} of them "
            f"computing{beside}{large}"
        )


# --- the measurement ----------------------------------------------------------------------------------------------


def measure_model(
    model: torch.nn.Module,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    example: Mapping[str, torch.Tensor],
    *,
    ranks: Sequence[int],
    input_style: InputStyle = "positional",
) -> ModelCosts:
    """Measure ``model``, which is trained a few steps meanwhile: give a copy. It takes some seconds.

    Memory is needed for it, its gradients and its optimizer's state, and then for another copy and these besides. Where
    ``torch.distributed`` is open all ranks call it together.

    Args:
        model: whole.
        make_optimizer: of the model.
        example: a global batch, the inputs alone, tensors ``(rows, ...)`` by name in the order of the arguments.
        ranks: numbers of ranks that shall be estimated: the passes are timed with the rows that these would have.
        input_style: how the model is called.

    Raises:
        ConfigError: the model gives nothing that can be differentiated.
    """
    rows = len(next(iter(example.values())))
    optimizer = make_optimizer(model)
    row_counts = {rows, *(-(-rows // n) for n in ranks)}
    row_counts |= {max(1, -(-rows // (_MICRO_BATCHES_PER_STAGE * n))) for n in ranks if n > 1}
    steps = {count: _time_steps(model, _first(example, count), input_style, optimizer) for count in sorted(row_counts)}
    ready = steps[rows].ready
    state = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    optimizer.zero_grad(set_to_none=True)
    del optimizer
    few = _first(example, min(rows, 64))
    flops = FlopCounterMode(display=False)
    with flops:
        _loss(model, few, input_style).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    smallest = min(row_counts)
    layers, no_layers = None, ""
    try:
        layers = profile(model, inputs=list(example), input_style=input_style, example=_first(example, smallest))
    except ConfigError as refused:
        no_layers = str(refused)
    blocks = [_bytes_of(block) for block in blocks_of(model)]
    parameter_bytes = _bytes_of(model)
    splits = {n: _split_of(model, n, few, input_style, flops) for n in _group_sizes(ranks)}
    overheads: dict[str, float | str] = {}
    if splits:
        plain = steps[smallest]
        overheads = _overheads(model, make_optimizer, _first(example, smallest), input_style, plain, splits)
    deviations = [seconds / timed.median - 1 for timed in steps.values() for seconds in timed.passes]
    return ModelCosts(
        rows=rows,
        passes={count: (timed.forward, timed.backward) for count, timed in steps.items()},
        gradients=[parameter.numel() * parameter.element_size() for parameter, _ in ready],
        ready=[share for _, share in ready],
        parameter_bytes=parameter_bytes,
        optimizer_seconds=_median([timed.optimizer for timed in steps.values()]),
        state_bytes=state,
        activation_bytes=_saved_bytes(model, few, input_style) / len(next(iter(few.values()))),
        flops=flops.get_total_flops() / len(next(iter(few.values()))),
        blocks=[*([parameter_bytes - sum(blocks)] if parameter_bytes > sum(blocks) else []), *blocks],
        layers=layers,
        profile_rows=smallest,
        no_layers=no_layers,
        jitter=math.sqrt(sum(deviation**2 for deviation in deviations) / len(deviations)),
        overheads=overheads,
        mixtures=_mixtures_of(model, few, input_style),
        splits=splits,
        lengths=[(len(p), p.nbytes) for p in model.parameters() if p.dim() and p.numel()],
    )


def _group_sizes(ranks: Sequence[int]) -> list[int]:
    """The sizes that a group of one dimension may have, of all the numbers of ranks."""
    return sorted({size for n in ranks for size in range(2, n + 1) if n % size == 0})


def _first(example: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:rows] for name, tensor in example.items()}


def _loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], input_style: InputStyle) -> torch.Tensor:
    """A number that depends on all outputs of the model."""
    return torch.stack([output.square().mean() for output in _outputs(model, batch, input_style)]).sum()


def _outputs(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], input_style: InputStyle) -> list[torch.Tensor]:
    """What the model returns that depends on its parameters."""
    if input_style == "dict":
        returned = model(dict(batch))
    else:
        returned = model(**batch) if input_style == "keyword" else model(*batch.values())
    tensors: list[torch.Tensor] = []
    torch.fx.node.map_aggregate(returned, tensors.append)  # type: ignore[arg-type]
    outputs = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    if not outputs:
        raise ConfigError(
            f"{type(model).__name__} returns nothing that depends on a parameter which is trained: there is nothing to "
            "estimate"
        )
    return outputs


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Seconds of some steps: medians of forward, backward and optimizer; passes of each; when gradients are ready."""

    forward: float
    backward: float
    optimizer: float
    passes: Sequence[float]
    ready: Sequence[tuple[torch.nn.Parameter, float]]

    @property
    def median(self) -> float:
        """The median of a forward and its backward pass."""
        return _median(self.passes)


def _time_steps(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    input_style: InputStyle,
    optimizer: torch.optim.Optimizer,
) -> _Steps:
    """Time whole steps, since what one part leaves in the caches is what the next one finds there."""
    moments: dict[torch.nn.Parameter, float] = {}

    def note(parameter: torch.nn.Parameter) -> None:
        moments[parameter] = _now(parameter.device)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]  # type: ignore[no-untyped-call]
    forwards, backwards, optimizers, ready = [], [], [], []
    try:
        for number in range(_REPEATS + 1):
            moments.clear()
            begin = _now(_device(model))
            optimizer.zero_grad(set_to_none=True)
            loss = _loss(model, batch, input_style)
            middle = _now(loss.device)
            loss.backward()  # type: ignore[no-untyped-call]
            end = _now(loss.device)
            optimizer.step()
            if number:  # the first allocates
                forwards.append(middle - begin)
                backwards.append(end - middle)
                optimizers.append(_now(loss.device) - end)
                ready = [(parameter, (moment - middle) / (end - middle)) for parameter, moment in moments.items()]
    finally:
        for hook in hooks:
            hook.remove()
    return _Steps(
        forward=_median(forwards),
        backward=_median(backwards),
        optimizer=_median(optimizers),
        passes=[forward + backward for forward, backward in zip(forwards, backwards, strict=True)],
        ready=ready,
    )


def _overheads(
    model: torch.nn.Module,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    batch: Mapping[str, torch.Tensor],
    input_style: InputStyle,
    plain: _Steps,
    splits: Mapping[int, tuple[float, float, int] | str],
) -> dict[str, float | str]:
    """Seconds by which the parts of torch that spread a model lengthen a step of ``batch``.

    Each deals a copy of the model to the smallest group there may be, of which this rank alone is there.
    """
    from sparkdl.strategies import expert, tensor

    size = min(splits)
    tensor_split = splits[size]
    overheads: dict[str, float | str] = {}
    device_type = _device(model).type
    with silent_ranks(size, device_type) as mesh, silent_ranks(1, device_type) as one_rank:

        def seconds(spread: Callable[[torch.nn.Module], None]) -> float | str:
            try:
                copied = copy.deepcopy(model)
                spread(copied)
                with tensor.computing(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the training itself warns if it comes to that
                    steps = _time_steps(copied, batch, input_style, make_optimizer(copied))
            except _REFUSED as refused:
                return _not_so(refused)
            return steps.median + steps.optimizer

        def deal(copied: torch.nn.Module, *, keep_parameters: bool) -> None:
            shard(copied, blocks_of(copied), mesh, keep_parameters=keep_parameters, offload=False)

        def split(copied: torch.nn.Module) -> None:
            tensor.split(copied, mesh, tensor_plan.find_plan(copied, size, None))

        def deal_experts(copied: torch.nn.Module) -> None:
            expert.split(copied, mesh)
            share_tokens(copied, None)  # silent ranks choose nothing

        by_strategy = {
            "zero2": (1.0, 1 / size, seconds(functools.partial(deal, keep_parameters=True))),
            "fsdp": (1.0, 1 / size, seconds(functools.partial(deal, keep_parameters=False))),
        }
        if not isinstance(tensor_split, str):
            part = 1 - tensor_split[0] + tensor_split[0] / size
            by_strategy["tensor"] = (part, part, seconds(split))
        layers = mixtures(model).values()
        if layers and not any(layer.experts % size for layer in layers):
            dealt = sum(p.nbytes for layer in layers for p in layer.expert_parameters().values()) / _bytes_of(model)
            by_strategy["expert"] = (1.0, 1 - dealt + dealt / size, seconds(deal_experts))
        for strategy, (passes, optimizer, total) in by_strategy.items():
            if not isinstance(total, str):
                total = max(total - passes * plain.median - optimizer * plain.optimizer, 0.0)
            overheads[strategy] = total
        try:
            count = _MICRO_BATCHES_PER_STAGE * size
            micro_batch = _micro_batch_seconds(copy.deepcopy(model), batch, input_style, count, one_rank.get_group())
            overheads["pipeline"] = micro_batch - plain.median
        except _REFUSED as refused:
            overheads["pipeline"] = _not_so(refused)
        return overheads


def _not_so(refused: Exception) -> str:
    return f"torch does not spread this model so: {' '.join(str(refused).split())}"


class _WholeStage(torch.nn.Module):
    """A model as torch's pipelines call a stage: tensors in, tensors out."""

    def __init__(self, model: torch.nn.Module, inputs: Sequence[str], input_style: InputStyle) -> None:
        super().__init__()
        self.model, self.inputs, self.input_style = model, inputs, input_style

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = dict(zip(self.inputs, tensors, strict=True))
        return tuple(output.contiguous() for output in _outputs(self.model, batch, self.input_style))


def _micro_batch_seconds(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], input_style: InputStyle, count: int, group: Any
) -> float:
    """Seconds of a micro-batch, one of ``count``, in a pipeline whose only stage, of ``group``, is the whole model."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def loss(outputs: Any, _: torch.Tensor) -> torch.Tensor:
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.stack([tensor.square().mean() for tensor in tensors]).sum()

    stage_model = _WholeStage(model, list(batch), input_style)
    micro_batch = tuple(batch.values())
    device = _device(model)
    outputs = stage_model(*micro_batch)
    stage = PipelineStage(stage_model, 0, 1, device, input_args=micro_batch, output_args=outputs, group=group)
    schedule = ScheduleGPipe(stage, count, loss_fn=loss)
    inputs = [torch.cat([tensor] * count) for tensor in micro_batch]
    seconds = []
    for number in range(_REPEATS + 1):
        model.zero_grad(set_to_none=True)
        begin = _now(device)
        schedule.step(*inputs, target=inputs[0])
        if number:
            seconds.append((_now(device) - begin) / count)
    return _median(seconds)


def _saved_bytes(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], input_style: InputStyle) -> int:
    """Bytes that a forward pass keeps for the backward pass, without parameters and inputs; each memory once."""
    excluded = {
        tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers(), *batch.values()]
    }
    bytes_by_storage: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = _loss(model, batch, input_style)
    del loss
    return sum(bytes_by_storage.values())


def _split_of(
    model: torch.nn.Module,
    ranks: int,
    batch: Mapping[str, torch.Tensor],
    input_style: InputStyle,
    whole: FlopCounterMode,
) -> tuple[float, float, int] | str:
    """The costs of a tensor group: the share of split work, bytes that a rank sends a row, messages of a step."""
    from sparkdl.strategies.tensor import bytes_per_step

    try:
        plan = tensor_plan.find_plan(model, ranks, None)
    except ConfigError as refused:
        return str(refused)
    vectors: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        def note(_: Any, __: Any, output: Any) -> None:
            output_tensor = output[0] if isinstance(output, tuple) else output
            vectors[name] = max(vectors.get(name, 0), output_tensor.numel() // output_tensor.shape[-1])

        return note

    hooks = [model.get_submodule(name).register_forward_hook(count(name)) for name in plan]
    try:
        _loss(model, batch, input_style)
    finally:
        for hook in hooks:
            hook.remove()
    rows = len(next(iter(batch.values())))
    by_module = whole.get_flop_counts()
    root = type(model).__name__
    split = sum(sum(by_module.get(f"{root}.{name}", {}).values()) for name in plan)
    total = max(sum(by_module.get("Global", {}).values()), 1)
    sent = sum(bytes_per_step(model, {name: style}, ranks, vectors.get(name, rows)) for name, style in plan.items())
    return min(split / total, 1.0), sent / rows, len(plan)


def _mixtures_of(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], input_style: InputStyle
) -> list[MixtureCosts]:
    measured: list[MixtureCosts] = []
    rows = len(next(iter(batch.values())))

    def note(layer: Any, arguments: Any, output: torch.Tensor) -> None:
        choices = layer.k * arguments[0].numel() // layer.features / rows
        taken_choices = choices * min(layer.capacity_factor or 1.0, 1.0)
        parameters = layer.expert_parameters().values()
        measured.append(
            MixtureCosts(
                experts=layer.experts,
                expert_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
                # There with the features, back with the outputs, and the gradients of both.
                token_bytes=2 * taken_choices * (layer.features + layer.out_features) * arguments[0].element_size(),
                choice_bytes=choices * torch.int64.itemsize,
            )
        )

    hooks = [layer.register_forward_hook(note) for layer in mixtures(model).values()]
    try:
        if hooks:
            _loss(model, batch, input_style)
    finally:
        for hook in hooks:
            hook.remove()
    return measured


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _device(model: torch.nn.Module) -> torch.device:
    return next(iter(model.parameters())).device


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure_link(collective: Collective) -> Link:
    """Measure the slowest way round a ring of all ranks; every rank calls this, and gets the same."""
    ranks, device = collective.world.size, collective.world.device
    if ranks == 1:
        return Link(bandwidth=math.inf, latency=0.0)

    def seconds(call: Callable[[], Any]) -> float:
        calls = []
        for number in range(_CALLS + 1):
            collective.barrier()
            begin = _now(torch.device(device))
            call()
            if number:  # the first widens the windows of TCP
                calls.append(_now(torch.device(device)) - begin)
        slowest: float = max(collective.all_gather_object(_median(calls)))  # the others wait for it
        return slowest

    def all_reduce(payload: int) -> float:
        numbers = torch.zeros(payload // _FLOATS, device=device)
        return seconds(lambda: collective.all_reduce(numbers, "sum"))

    small, large = all_reduce(_FLOATS), all_reduce(_PROBE_BYTES)
    messages = 2 * (ranks - 1)
    latency = small / messages
    bandwidth = _PROBE_BYTES / ranks / max(large / messages - latency, 1e-9)
    beside = collective.all_gather_object(_beside_computing(large, device))
    slowed, stretched = (max(values) for values in zip(*beside, strict=True))
    return Link(bandwidth=bandwidth, latency=latency, slowed=slowed, stretched=stretched)


def _beside_computing(large: float, device: str) -> tuple[float, float]:
    """What an all-reduce of the probe, which takes ``large`` seconds alone, and computing do to each other.

    Returns:
        ``slowed`` and ``stretched`` of ``Link``.
    """
    import torch.distributed as dist

    numbers, factor = torch.zeros(_PROBE_BYTES // _FLOATS, device=device), torch.ones(256, 256, device=device)

    def multiply(times: int) -> float:
        begin = _now(torch.device(device))
        for _ in range(times):
            torch.mm(factor, factor)
        return _now(torch.device(device)) - begin

    multiply(10)
    times = max(1, int(3 * large / (multiply(50) / 50)))  # so that the messages have arrived before the end
    delays, lasted = [], []
    for _ in range(_REPEATS):
        dist.barrier()
        alone = multiply(times)
        dist.barrier()
        begin = time.perf_counter()
        work = dist.all_reduce(numbers, async_op=True)
        arrived, computing = None, 0.0
        for _ in range(times):
            computing += multiply(1)
            if arrived is None and work.is_completed():
                arrived = time.perf_counter() - begin
        work.wait()
        delays.append(computing - alone)
        lasted.append(arrived or time.perf_counter() - begin)
    lasting = _median(lasted)
    return min(max(_median(delays) / lasting, 0.0), 0.9), max(lasting / large, 1.0)


def choose(
    collective: Collective,
    config: TrainConfig,
    model: torch.nn.Module,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    example: Mapping[str, torch.Tensor],
    *,
    memory_bytes: float,
    by_user: bool = False,
    input_style: InputStyle = "positional",
) -> tuple[str, str]:
    """Measure model and link, and take the first of the plan that the training goes with; all ranks call it at once.

    That they measure at the same time is the point: ranks of one host share its cores and its memory's bandwidth.

    Args:
        collective: over torch.distributed.
        config: of the training.
        model: a copy, see ``measure_model``.
        make_optimizer: of the model.
        example: a global batch.
        memory_bytes: that this rank may have; the smallest of all counts.
        by_user: a function of the user's own calls the model, which no pipeline can.
        input_style: how the model is called.

    Returns:
        the text of the strategy, and why; equal on all ranks.

    Raises:
        ConfigError: none fits.
    """
    ranks = collective.world.size
    places = collective.all_gather_object((collective.world.local_size, memory_bytes))
    costs = measure_model(model, make_optimizer, example, ranks=[ranks], input_style=input_style)
    link = measure_link(collective)

    def check(mesh: Mesh) -> None:
        if by_user and mesh.pipeline != 1:
            raise ConfigError(f"strategy='{mesh}' calls the parts of the model, and a function of yours calls it whole")
        check_training(mesh, config, collective.world.device)
        check_layers(mesh, model)

    def fastest() -> tuple[str, str]:
        plan = rank_strategies(
            costs,
            link,
            ranks,
            check=check,
            memory_bytes=min(memory for _, memory in places),
            local_ranks=min(local for local, _ in places),
        )
        if not plan.fitting:
            raise ConfigError(plan.reason)
        return plan.fitting[0].strategy, plan.reason

    return on_leader(collective, fastest)


# --- the estimates ------------------------------------------------------------------------------------------------


def rank_strategies(
    costs: ModelCosts,
    link: Link,
    ranks: int,
    *,
    check: Callable[[Mesh], None] | None = None,
    memory_bytes: float = math.inf,
    within_host: Link | None = None,
    local_ranks: int = 1,
) -> Plan:
    """Estimate every strategy for ``ranks``, and put the fastest that fits first.

    One process measures the model: seconds of its passes by rows, when each gradient is ready, what stays in memory,
    and how much longer a step takes when torch's own parts have dealt the model to ranks whose messages take no time.
    Links are latency, bandwidth (alpha and beta; Thakur, Rabenseifner and Gropp, 2005) and how messages and computing
    delay each other. The rest follows each strategy's schedule; ``docs/strategies.md`` says how far that is from what
    is measured.

    Args:
        costs: of the model.
        link: between hosts, the slowest on the way of a ring.
        ranks: how many.
        check: raises ``ConfigError`` for a mesh that the training would refuse, as ``check_layers`` does; it is not
            asked of those that copy the whole model. None checks nothing.
        memory_bytes: that a rank has for weights, gradients, optimizer state and activations.
        within_host: between ranks of one host; None is ``link``.
        local_ranks: ranks of a host; neighbours in the mesh share one as far as they can.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks are none: give 1 or more")
    inner = within_host or link
    estimates: list[Estimate] = []
    impossible: dict[str, str] = {}
    for strategy, mesh in _candidates(ranks, with_experts=bool(costs.mixtures)):
        one_host = inner if ranks <= local_ranks else link
        group = inner if max(mesh.tensor or 1, mesh.shard or 1, mesh.expert or 1) <= local_ranks else link
        try:
            if check is not None and not mesh.is_data_parallel:
                check(mesh)
            seconds, computing, sent, memory = _step(strategy, mesh, costs, all_ranks=one_host, group=group)
        except ConfigError as refused:
            impossible[strategy] = str(refused)
            continue
        # The choices of a mixture are those of all rows: each reader tells all others, with one message how many.
        choices = sum(mixture.choice_bytes for mixture in costs.mixtures) * costs.rows / mesh.readers
        messages = 2 * len(costs.mixtures) * (mesh.readers - 1)
        seconds += messages * one_host.latency + choices * (mesh.readers - 1) / one_host.bandwidth
        sent += choices * (mesh.readers - 1)
        estimates.append(_estimate(costs, ranks, strategy, seconds, computing, sent, memory))
    fitting = sorted((e for e in estimates if e.memory_bytes <= memory_bytes), key=lambda e: e.seconds)
    too_large = sorted((e for e in estimates if e.memory_bytes > memory_bytes), key=lambda e: e.memory_bytes)
    unranked = list(_not_ranked(costs, inner if ranks <= local_ranks else link, ranks)) if ranks > 1 else []
    return Plan(ranks=ranks, fitting=fitting, too_large=too_large, impossible=impossible, others=unranked)


def _estimate(
    costs: ModelCosts, ranks: int, strategy: str, seconds: float, computing: float, sent: float, memory: float
) -> Estimate:
    alone = sum(costs.seconds(costs.rows)) + costs.optimizer_seconds
    return Estimate(
        strategy=strategy,
        seconds=seconds,
        computing=computing,
        sent_bytes=sent,
        memory_bytes=memory,
        efficiency=alone / (ranks * seconds),
        rows=costs.rows,
    )


def _not_ranked(costs: ModelCosts, link: Link, ranks: int) -> Iterator[Estimate]:
    """The strategies of ``NOT_RANKED``: a step of a rank with its part of the rows, and what travels a step."""
    if costs.rows < ranks:
        return
    passes = sum(costs.seconds(costs.rows / ranks))
    size, state = costs.parameter_bytes, costs.state_bytes
    memory = size + costs.gradient_bytes + state + costs.activation_bytes * costs.rows / ranks
    computing = passes + costs.optimizer_seconds
    for strategy in ("local_sgd", "diloco"):
        steps = LOCAL_STEPS[strategy]
        seconds = computing + link.all_reduce(size, ranks) / steps.every
        sent = 2 * size * (ranks - 1) / ranks / steps.every
        # What outer steps have: the last common model, and their momentum.
        common = size * (2 if steps.outer_momentum else 1 if steps.outer_lr != 1 else 0)
        yield _estimate(costs, ranks, strategy, seconds, computing, sent, memory + common)
    # The first rank's link gets all gradients of the others, and then gives them all parameters.
    through_server = 2 * link.send((ranks - 1) * size)
    sent = float((ranks - 1) * size)
    pushed = ranks * costs.gradient_bytes  # which wait for the server's step, and it takes their mean
    held = memory + size + pushed + costs.gradient_bytes
    yield _estimate(costs, ranks, "parameter_server", computing + through_server, computing, sent, held)
    worker = passes + 2 * link.send(size)
    busiest = max(ranks * costs.optimizer_seconds, through_server / 2, worker)  # of a round of all ranks
    held = memory + size + pushed
    yield _estimate(costs, ranks, "parameter_server(staleness=None)", busiest, computing, sent, held)


def simulate_copies(costs: ModelCosts, link: Link, ranks: int, *, straggler: float = 1.0) -> float:
    """Mean seconds of an ``all_reduce`` step of many ranks, each of which reads a whole measured batch.

    The slowest rank in each step is drawn, see ``mean_of_slowest``; its buckets leave when they are full, and a ring's
    2 (ranks - 1) messages take their latency.

    Args:
        costs: of the model.
        link: between neighbours of the ring.
        ranks: how many.
        straggler: how many times as long one of them computes.
    """
    forward, backward = costs.seconds(costs.rows)

    def step(slow: float) -> float:
        reduced, _ = _reduced_while_backward(costs, {ranks: 1.0}, backward * slow, link)
        return (forward + costs.optimizer_seconds) * slow + reduced

    return mean_of_slowest(step, ranks, costs.jitter, straggler=straggler)


def _candidates(ranks: int, *, with_experts: bool) -> Iterator[tuple[str, Mesh]]:
    """Every strategy that an estimate is made of, with the sizes it has on so many ranks."""
    yield "all_reduce", Mesh(data=ranks)
    if ranks == 1:
        return
    yield "zero1", Mesh(data=ranks)
    yield "zero2", Mesh(shard=ranks, keep_parameters=True)
    yield "fsdp", Mesh(shard=ranks)
    yield "tensor", Mesh(tensor=ranks)
    yield "pipeline", Mesh(pipeline=ranks)
    if with_experts:
        yield "expert", Mesh(expert=ranks)
    for size in _group_sizes([ranks]):
        if size < ranks:
            copies = ranks // size
            yield f"mesh(data={copies}, shard={size})", Mesh(data=copies, shard=size)
            yield f"mesh(data={copies}, tensor={size})", Mesh(data=copies, tensor=size)
            yield f"mesh(data={copies}, pipeline={size})", Mesh(data=copies, pipeline=size)
            if with_experts:
                yield f"mesh(data={copies}, expert={size})", Mesh(data=copies, expert=size)


def _step(
    strategy: str, mesh: Mesh, costs: ModelCosts, *, all_ranks: Link, group: Link
) -> tuple[float, float, float, float]:
    """Seconds of a step, those of computing, sent bytes and memory of a rank.

    Raises:
        ConfigError: the model does not go with the mesh.
    """
    rows = costs.rows / mesh.readers
    if rows < 1:
        raise ConfigError(f"{costs.rows} rows a step cannot be dealt to {mesh.readers} ranks: raise the batch")
    copies, shards = int(mesh.data or 1), int(mesh.shard or 1)
    if mesh.pipeline != 1:
        return _pipeline_step(costs, int(mesh.pipeline or 1), copies, all_ranks)
    if mesh.expert != 1:
        return _expert_step(costs, int(mesh.expert or 1), copies, all_ranks, group)
    forward, backward = costs.seconds(rows)
    part = 1.0  # of the model that a rank holds
    split_seconds = sent = 0.0
    activations = costs.activation_bytes * rows
    if mesh.tensor != 1:
        split = costs.splits.get(int(mesh.tensor or 1), "it was not measured for a group of that many ranks")
        if isinstance(split, str):
            raise ConfigError(split)
        share, bytes_per_row, messages = split
        part = 1 - share + share / int(mesh.tensor or 1)
        sent = bytes_per_row * rows
        latency = group.latency * 2 * (int(mesh.tensor or 1) - 1)
        split_seconds = messages * latency + sent / group.bandwidth + _overhead(costs, "tensor")
        forward, backward, activations = forward * part, backward * part, activations * part
    largest = _largest_part(costs.gradients, copies) if strategy == "zero1" else 1 / shards
    optimizer = costs.optimizer_seconds * part * largest
    computing = forward + backward + optimizer
    weights, gradients, state = (
        size * part for size in (costs.parameter_bytes, costs.gradient_bytes, costs.state_bytes)
    )
    if shards > 1:
        return _sharded_step(costs, mesh, forward, backward, optimizer, group if copies == 1 else all_ranks)
    reduced, sent_now = _reduced_while_backward(costs, {copies: part}, backward, all_ranks)
    seconds = forward + split_seconds + reduced + optimizer
    sent += sent_now
    if strategy == "zero1":
        seconds += (copies - 1) * all_ranks.send(gradients * largest)  # each rank gives its part to each other
        sent += (copies - 1) * gradients * largest
        state *= largest
    buckets = gradients if copies > 1 else 0.0
    return seconds, computing, sent, weights + max(gradients, buckets) + state + activations


def _largest_part(sizes: Sequence[int], parts: int) -> float:
    """The share of the largest part where whole tensors are dealt, the largest first, each to who has least so far."""
    bytes_by_part = [0] * parts
    for size in sorted(sizes, reverse=True):
        bytes_by_part[bytes_by_part.index(min(bytes_by_part))] += size
    return max(bytes_by_part) / max(sum(sizes), 1)


def _reduced_while_backward(
    costs: ModelCosts, parts: Mapping[int, float], backward: float, link: Link
) -> tuple[float, float]:
    """Seconds of a backward pass that sends each bucket of gradients when it is full, one after the other; bytes.

    Args:
        costs: of the model.
        parts: by number of copies, the share of all gradients that is averaged over so many.
        backward: seconds of computing.
        link: between the copies.
    """
    parts = {copies: part for copies, part in parts.items() if copies > 1}
    if not parts:
        return backward, 0.0
    limit = bucket_bytes(int(costs.gradient_bytes * sum(parts.values())), max(parts))
    buckets: list[tuple[float, float]] = []  # bytes, and the second of the pass at which it is full
    for size, ready in zip(costs.gradients, costs.ready, strict=True):
        if not buckets or (buckets[-1][0] + size) * sum(parts.values()) > limit:
            buckets.append((0.0, 0.0))
        buckets[-1] = buckets[-1][0] + size, ready * backward
    seconds = backward_with_buckets(
        [full for _, full in buckets],
        [sum(link.all_reduce(size * part, copies) for copies, part in parts.items()) for size, _ in buckets],
        backward,
        slowed=link.slowed,
        stretched=link.stretched,
    )
    return seconds, sum(2 * costs.gradient_bytes * part * (n - 1) / n for n, part in parts.items())


def _overhead(costs: ModelCosts, strategy: str) -> float:
    """Seconds of torch's own parts.

    Raises:
        ConfigError: they do not take the model.
    """
    seconds = costs.overheads.get(strategy, 0.0)
    if isinstance(seconds, str):
        raise ConfigError(seconds)
    return seconds


def _sharded_step(
    costs: ModelCosts,
    mesh: Mesh,
    forward: float,
    backward: float,
    optimizer: float,
    link: Link,
) -> tuple[float, float, float, float]:
    """``fully_shard``: blocks are gathered before they compute, their gradients reduced behind; copies average."""
    shards, copies = int(mesh.shard or 1), int(mesh.data or 1)
    passes, padding = 1 if mesh.keep_parameters else 2, costs.padding(shards)
    blocks = [block * padding for block in costs.blocks]
    gather = sum(link.all_gather(block, shards) for block in blocks) * passes
    scatter = sum(link.all_gather(block, shards) for block in blocks)
    average = link.all_reduce(costs.gradient_bytes * padding / shards, copies)
    overhead = _overhead(costs, "zero2" if mesh.keep_parameters else "fsdp")
    share = (shards - 1) / shards
    sent = costs.parameter_bytes * padding * share * (passes + 1)
    sent += 2 * costs.gradient_bytes * padding / shards * (copies - 1) / copies
    computing = forward + backward + optimizer
    memory = (costs.parameter_bytes + costs.gradient_bytes + costs.state_bytes) * padding / shards
    if mesh.keep_parameters:
        memory += costs.parameter_bytes * padding
    else:
        memory += 2 * max(blocks)  # the block that computes, and the next one
    activations = costs.activation_bytes * costs.rows / mesh.readers
    return computing + overhead + gather + scatter + average, computing, sent, memory + activations


def _expert_step(
    costs: ModelCosts, size: int, copies: int, all_ranks: Link, group: Link
) -> tuple[float, float, float, float]:
    """Tokens go to the ranks of their experts, evenly, and come back; gradients are averaged over who has the same."""
    for mixture in costs.mixtures:
        if mixture.experts % size:
            raise ConfigError(f"the {mixture.experts} experts of a mixture do not divide by {size} ranks")
    ranks = size * copies
    rows = costs.rows / ranks
    expert_share = sum(mixture.expert_bytes for mixture in costs.mixtures) / costs.parameter_bytes / size
    dense_share = 1 - expert_share * size
    forward, backward = costs.seconds(rows)
    optimizer = costs.optimizer_seconds * (dense_share + expert_share)
    tokens = sum(mixture.token_bytes for mixture in costs.mixtures) * rows * (size - 1) / size
    # Two all-to-alls each way, and one of how many tokens come.
    exchange = tokens / group.bandwidth + 5 * len(costs.mixtures) * (size - 1) * group.latency
    parts = {ranks: dense_share, copies: expert_share}
    reduced, averaged = _reduced_while_backward(costs, parts, backward, all_ranks)
    computing = forward + backward + optimizer
    memory = (costs.parameter_bytes + costs.gradient_bytes + costs.state_bytes) * (dense_share + expert_share)
    seconds = forward + reduced + optimizer + exchange + _overhead(costs, "expert")
    return seconds, computing, tokens + averaged, memory + costs.activation_bytes * rows


def _pipeline_step(costs: ModelCosts, count: int, copies: int, link: Link) -> tuple[float, float, float, float]:
    """Micro-batches go through the stages by 1F1B."""
    if costs.layers is None:
        raise ConfigError(costs.no_layers)
    layers = costs.layers
    if len(layers.begins) < count:
        raise ConfigError(f"the model has {len(layers.begins)} layers to cut between, and the pipeline {count} stages")
    micro_batches = _MICRO_BATCHES_PER_STAGE * count
    rows = costs.rows / copies / micro_batches
    if rows < 1:
        raise ConfigError(f"{costs.rows / copies:g} rows make no {micro_batches} micro-batches: raise the batch")
    edges = [0, *layers.cuts(count), len(layers.begins)]
    shares = [sum(layers.seconds[a:b]) / sum(layers.seconds) for a, b in itertools.pairwise(edges)]
    parameters = [sum(layers.parameters[a:b]) for a, b in itertools.pairwise(edges)]
    crossing = [layers.sent[edge] / costs.profile_rows * rows for edge in edges[1:-1]]
    forward, backward = costs.seconds(rows)
    largest = max(parameters) / costs.parameter_bytes
    optimizer = costs.optimizer_seconds * largest
    average = link.all_reduce(costs.gradient_bytes * largest, copies)
    overhead = _overhead(costs, "pipeline")
    if overhead < 0:
        share = max(1 + overhead / (forward + backward), 0.1)
        forward, backward, overhead = share * forward, share * backward, 0.0
    # A byte counts twice, since a rank is delayed by what it sends and by what it gets.
    delay = link.slowed * link.stretched / link.bandwidth  # by each byte that travels while there is computing
    messages = [((a + b) * delay + overhead) / 2 for a, b in itertools.pairwise([0.0, *crossing, 0.0])]
    stages_forward = [share * forward + extra for share, extra in zip(shares, messages, strict=True)]
    stages_backward = [share * backward + extra for share, extra in zip(shares, messages, strict=True)]
    transfers = [payload * link.stretched / link.bandwidth for payload in crossing]
    passes = one_forward_one_backward(stages_forward, stages_backward, transfers, link.latency, micro_batches)
    seconds = passes + average + optimizer
    neighbours = [a + b for a, b in itertools.pairwise([0.0, *crossing, 0.0])]
    sent = micro_batches * max(neighbours) + 2 * costs.gradient_bytes * largest * (copies - 1) / copies
    memory = (costs.parameter_bytes + costs.gradient_bytes + costs.state_bytes) * largest
    activations = costs.activation_bytes * rows * min(count, micro_batches) * max(shares)
    computing = micro_batches * max(shares) * (forward + backward) + optimizer
    return seconds, computing, sent, memory + activations
