"""What a step would take under each strategy, and which is the fastest that fits: estimates from one measurement.

One process measures the model: seconds of its passes by rows, when each gradient is ready, what stays in memory. Links
are two numbers, latency and bandwidth (alpha and beta; Thakur, Rabenseifner and Gropp, 2005). The rest is arithmetic
over the schedule that each strategy follows; ``docs/strategies.md`` says how far that is from what is measured.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from sparkdl.collective.base import Collective, on_leader
from sparkdl.collective.gradients.buckets import bucket_bytes
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies import tensor_plan
from sparkdl.strategies.mesh import Mesh
from sparkdl.strategies.mesh_strategy import check_layers, check_training
from sparkdl.strategies.model_trace import InputStyle
from sparkdl.strategies.sharded import blocks_of
from sparkdl.strategies.stage_balance import Profile, profile

__all__ = ["Estimate", "Link", "ModelCosts", "Plan", "choose", "measure_link", "measure_model", "rank_strategies"]

_REPEATS, _FLOATS, _PROBE_BYTES = 5, 4, 4 << 20
_MICRO_BATCHES_PER_STAGE = 4
_CALL_SECONDS = {"cpu": 1.1e-3, "cuda": 1e-4}
"""What torch itself does around a message within a pass; of CPUs as the MLP of ``bench_planner.py`` has it, of GPUs a
guess."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins two ranks.

    Attributes:
        bandwidth: bytes a second of payload, each way.
        latency: seconds of a message without any.
    """

    bandwidth: float
    latency: float

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
        """Seconds until every rank has the whole ``payload``, of which each had a part."""
        return self.all_reduce(payload, ranks) / 2

    def send(self, payload: float) -> float:
        """Seconds of one message."""
        return self.latency + payload / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """What one process measured of a model, with its global batch of ``rows``.

    Attributes:
        rows: of the global batch.
        passes: seconds of forward and of backward, by rows of a batch, for some numbers of rows.
        gradients: bytes of each gradient, in the order in which a backward pass gives them.
        ready: the share of the backward pass behind which each of them is ready.
        parameter_bytes: of all parameters, those included that are not trained.
        optimizer_seconds: of a step over all parameters.
        state_bytes: of the optimizer's state of all parameters.
        activation_bytes: kept for the backward pass, by row.
        flops: of forward and backward, by row.
        blocks: bytes of the parameters that ``fully_shard`` gathers at a time, in order.
        layers: what stages are made of, with ``profile_rows`` rows; None where the model cannot be cut.
        profile_rows: rows of that measurement.
        no_layers: why it cannot.
        call_seconds: of torch's own work around each message within a pass.
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
    call_seconds: float = 0.0
    splits: Mapping[int, tuple[float, float, int] | str] = field(default_factory=dict)

    @property
    def gradient_bytes(self) -> int:
        """Of all of them."""
        return sum(self.gradients)

    def seconds(self, rows: float) -> tuple[float, float]:
        """Forward and backward of a batch of ``rows``: on the line through the two measurements next to it."""
        known = sorted(self.passes)
        if len(known) == 1:
            return self.passes[known[0]]
        above = next((i for i, measured in enumerate(known) if measured >= rows), len(known) - 1) or 1
        low, high = known[above - 1], known[above]
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
        """Of the global batch."""
        return self.rows / self.seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All strategies for some ranks.

    Attributes:
        ranks: how many.
        fitting: those that fit the memory, the fastest first.
        too_large: those that do not, the smallest first.
        impossible: by strategy, why the model does not go with it.
    """

    ranks: int
    fitting: Sequence[Estimate]
    too_large: Sequence[Estimate]
    impossible: Mapping[str, str]

    @property
    def reason(self) -> str:
        """Why the first is the first, in a sentence.

        Raises:
            ConfigError: none fits.
        """
        if not self.fitting:
            least = f"; {self.too_large[0].strategy} needs least" if self.too_large else ""
            raise ConfigError(
                f"no strategy of {self.ranks} ranks fits the memory of a rank{least}: give more ranks or more memory"
            )
        first = self.fitting[0]
        others = [estimate for estimate in self.fitting[1:] if estimate.strategy != first.strategy]
        beside = f", {others[0].strategy}, the next, {others[0].seconds:.3g}" if others else ""
        large = f"; {self.too_large[0].strategy} does not fit the memory" if self.too_large else ""
        return (
            f"{first.strategy}: a step takes {first.seconds:.3g} s by estimate, {first.computing:.3g} of them computing"
            f"{beside}{large}"
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
    wanted = {rows, *(-(-rows // n) for n in ranks)}
    wanted |= {max(1, -(-rows // (_MICRO_BATCHES_PER_STAGE * n))) for n in ranks if n > 1}
    passes: dict[int, tuple[float, float]] = {}
    ready: list[tuple[torch.nn.Parameter, float]] = []
    for count in sorted(wanted, reverse=True):
        passes[count], ready = _time_passes(model, _first(example, count), input_style, optimizer)
    gradients = [parameter.numel() * parameter.element_size() for parameter, _ in ready]
    optimizer_seconds = _time_optimizer(model, optimizer, _first(example, min(wanted)), input_style)
    state = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    one = _first(example, min(rows, 64))
    flops = FlopCounterMode(display=False)
    with flops:
        _loss(model, one, input_style).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    smallest = min(wanted)
    layers, no_layers = None, ""
    try:
        layers = profile(model, inputs=list(example), input_style=input_style, example=_first(example, smallest))
    except ConfigError as refused:
        no_layers = str(refused)
    blocks = [_bytes_of(block) for block in blocks_of(model)]
    whole = _bytes_of(model)
    return ModelCosts(
        rows=rows,
        passes=passes,
        gradients=gradients,
        ready=[share for _, share in ready],
        parameter_bytes=whole,
        optimizer_seconds=optimizer_seconds,
        state_bytes=state,
        activation_bytes=_saved_bytes(model, one, input_style) / len(next(iter(one.values()))),
        flops=flops.get_total_flops() / len(next(iter(one.values()))),
        blocks=[*([whole - sum(blocks)] if whole > sum(blocks) else []), *blocks],
        layers=layers,
        profile_rows=smallest,
        no_layers=no_layers,
        call_seconds=_CALL_SECONDS.get(_device(model).type, 0.0),
        splits={n: _split_of(model, n, one, input_style, flops) for n in _group_sizes(ranks)},
    )


def _group_sizes(ranks: Sequence[int]) -> list[int]:
    """The sizes that a group of one dimension may have, of all the numbers of ranks."""
    return sorted({size for n in ranks for size in range(2, n + 1) if n % size == 0})


def _first(example: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:rows] for name, tensor in example.items()}


def _loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], input_style: InputStyle) -> torch.Tensor:
    """A number that depends on all outputs of the model."""
    if input_style == "dict":
        outputs = model(dict(batch))
    else:
        outputs = model(**batch) if input_style == "keyword" else model(*batch.values())
    tensors: list[torch.Tensor] = []
    torch.fx.node.map_aggregate(outputs, tensors.append)  # type: ignore[arg-type]
    losses = [t.square().mean() for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
    if not losses:
        raise ConfigError(
            f"{type(model).__name__} returns nothing that depends on a parameter which is trained: there is nothing to "
            "estimate"
        )
    return torch.stack(losses).sum()


def _time_passes(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    input_style: InputStyle,
    optimizer: torch.optim.Optimizer,
) -> tuple[tuple[float, float], list[tuple[torch.nn.Parameter, float]]]:
    """Median seconds of forward and backward; by gradient, the share of the backward pass before it is ready."""
    moments: dict[torch.nn.Parameter, float] = {}

    def note(parameter: torch.nn.Parameter) -> None:
        moments[parameter] = _now(parameter.device)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]  # type: ignore[no-untyped-call]
    forwards, backwards, ready = [], [], []
    try:
        for number in range(_REPEATS + 1):
            optimizer.zero_grad(set_to_none=True)
            moments.clear()
            begin = _now(_device(model))
            loss = _loss(model, batch, input_style)
            middle = _now(loss.device)
            loss.backward()  # type: ignore[no-untyped-call]
            end = _now(loss.device)
            if number:  # the first allocates
                forwards.append(middle - begin)
                backwards.append(end - middle)
                ready = [(parameter, (moment - middle) / (end - middle)) for parameter, moment in moments.items()]
    finally:
        for hook in hooks:
            hook.remove()
    return (_median(forwards), _median(backwards)), ready


def _time_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, torch.Tensor],
    input_style: InputStyle,
) -> float:
    taken = []
    for number in range(_REPEATS + 1):
        optimizer.zero_grad(set_to_none=True)
        _loss(model, batch, input_style).backward()  # type: ignore[no-untyped-call]
        begin = _now(_device(model))
        optimizer.step()
        if number:
            taken.append(_now(_device(model)) - begin)
    return _median(taken)


def _saved_bytes(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], input_style: InputStyle) -> int:
    """Bytes that a forward pass keeps for the backward pass, without parameters and inputs; each memory once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers(), *batch.values()]}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = _loss(model, batch, input_style)
    del loss
    return sum(kept.values())


def _split_of(
    model: torch.nn.Module,
    ranks: int,
    batch: Mapping[str, torch.Tensor],
    input_style: InputStyle,
    whole: FlopCounterMode,
) -> tuple[float, float, int] | str:
    """Of a tensor group: the share of the work that is split, bytes that a rank sends a row, messages of a step."""
    from sparkdl.strategies.tensor import bytes_per_step

    try:
        plan = tensor_plan.find_plan(model, ranks, None)
    except ConfigError as refused:
        return str(refused)
    vectors: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        def note(_: Any, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            vectors[name] = max(vectors.get(name, 0), first.numel() // first.shape[-1])

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
    sent = sum(bytes_per_step(model, {name: how}, ranks, vectors.get(name, rows)) for name, how in plan.items())
    return min(split / total, 1.0), sent / rows, len(plan)


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
    """Measure the slowest way round a ring of all ranks; every rank calls this, and gets what rank 0 found."""
    ranks, device = collective.world.size, collective.world.device
    if ranks == 1:
        return Link(bandwidth=math.inf, latency=0.0)

    def seconds(payload: int) -> float:
        numbers = torch.zeros(payload // _FLOATS, device=device)
        taken = []
        for _ in range(_REPEATS):
            collective.barrier()
            begin = _now(torch.device(device))
            collective.all_reduce(numbers, "sum")
            taken.append(_now(torch.device(device)) - begin)
        return _median(taken)

    small, large = seconds(_FLOATS), seconds(_PROBE_BYTES)
    each = 2 * (ranks - 1)
    latency = small / each
    bandwidth = _PROBE_BYTES / ranks / max(large / each - latency, 1e-9)
    return collective.broadcast_object(Link(bandwidth=bandwidth, latency=latency), 0)  # type: ignore[no-any-return]


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

    def first() -> tuple[str, str]:
        whole = rank_strategies(
            costs,
            link,
            ranks,
            memory_bytes=min(memory for _, memory in places),
            local_ranks=min(local for local, _ in places),
            true_reduce_scatter=collective.world.device != "cpu",
        )
        meshes = dict(_candidates(ranks))

        def goes(strategy: str) -> bool:
            mesh = meshes[strategy]
            if by_user and mesh.pipeline != 1:
                return False
            if mesh.is_data_parallel:
                return True
            try:
                check_training(mesh, config, collective.world.device)
                check_layers(mesh, model)
            except ConfigError:
                return False
            return True

        plan = replace(whole, fitting=[estimate for estimate in whole.fitting if goes(estimate.strategy)])
        return plan.fitting[0].strategy if plan.fitting else "", plan.reason

    return on_leader(collective, first)


# --- the estimates ------------------------------------------------------------------------------------------------


def rank_strategies(
    costs: ModelCosts,
    link: Link,
    ranks: int,
    *,
    memory_bytes: float = math.inf,
    within_host: Link | None = None,
    local_ranks: int = 1,
    true_reduce_scatter: bool = False,
) -> Plan:
    """Estimate every strategy for ``ranks``, and put the fastest that fits first.

    Args:
        costs: of the model.
        link: between hosts, the slowest on the way of a ring.
        ranks: how many.
        memory_bytes: that a rank has for weights, gradients, optimizer state and activations.
        within_host: between ranks of one host; None is ``link``.
        local_ranks: ranks of a host; neighbours in the mesh share one as far as they can.
        true_reduce_scatter: the backend has one, as NCCL has; gloo's is an all-reduce, which sends twice as much.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks are none: give 1 or more")
    inner = within_host or link
    estimates: list[Estimate] = []
    impossible: dict[str, str] = {}
    for strategy, mesh in _candidates(ranks):
        one_host = inner if ranks <= local_ranks else link
        group = inner if max(mesh.tensor or 1, mesh.shard or 1) <= local_ranks else link
        try:
            seconds, computing, sent, memory = _step(
                strategy, mesh, costs, all_ranks=one_host, group=group, true_reduce_scatter=true_reduce_scatter
            )
        except ConfigError as refused:
            impossible[strategy] = str(refused)
            continue
        alone = sum(costs.seconds(costs.rows)) + costs.optimizer_seconds
        estimates.append(
            Estimate(
                strategy=strategy,
                seconds=seconds,
                computing=computing,
                sent_bytes=sent,
                memory_bytes=memory,
                efficiency=alone / (ranks * seconds),
                rows=costs.rows,
            )
        )
    fitting = sorted((e for e in estimates if e.memory_bytes <= memory_bytes), key=lambda e: e.seconds)
    too_large = sorted((e for e in estimates if e.memory_bytes > memory_bytes), key=lambda e: e.memory_bytes)
    return Plan(ranks=ranks, fitting=fitting, too_large=too_large, impossible=impossible)


def _candidates(ranks: int) -> Iterator[tuple[str, Mesh]]:
    """Every strategy that an estimate is made of, with the sizes it has on so many ranks."""
    yield "all_reduce", Mesh(data=ranks)
    if ranks == 1:
        return
    yield "zero1", Mesh(data=ranks)
    yield "zero2", Mesh(shard=ranks, keep_parameters=True)
    yield "fsdp", Mesh(shard=ranks)
    yield "tensor", Mesh(tensor=ranks)
    yield "pipeline", Mesh(pipeline=ranks)
    for size in _group_sizes([ranks]):
        if size < ranks:
            copies = ranks // size
            yield f"mesh(data={copies}, shard={size})", Mesh(data=copies, shard=size)
            yield f"mesh(data={copies}, tensor={size})", Mesh(data=copies, tensor=size)
            yield f"mesh(data={copies}, pipeline={size})", Mesh(data=copies, pipeline=size)


def _step(
    strategy: str, mesh: Mesh, costs: ModelCosts, *, all_ranks: Link, group: Link, true_reduce_scatter: bool
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
    forward, backward = costs.seconds(rows)
    part = 1.0  # of the model that a rank holds
    split_seconds = sent = 0.0
    activations = costs.activation_bytes * rows
    if mesh.tensor != 1:
        ways = costs.splits.get(int(mesh.tensor or 1), "it was not measured for a group of that many ranks")
        if isinstance(ways, str):
            raise ConfigError(ways)
        share, bytes_per_row, messages = ways
        part = 1 - share + share / int(mesh.tensor or 1)
        sent = bytes_per_row * rows
        latency = group.latency * 2 * (int(mesh.tensor or 1) - 1)
        split_seconds = messages * (latency + costs.call_seconds) + sent / group.bandwidth
        forward, backward, activations = forward * part, backward * part, activations * part
    largest = _largest_part(costs.gradients, copies) if strategy == "zero1" else 1 / shards
    optimizer = costs.optimizer_seconds * part * largest
    computing = forward + backward + optimizer
    weights, gradients, state = (
        size * part for size in (costs.parameter_bytes, costs.gradient_bytes, costs.state_bytes)
    )
    if shards > 1:
        return _sharded_step(
            costs, mesh, forward, backward, optimizer, group if copies == 1 else all_ranks, true_reduce_scatter
        )
    reduced, sent_now = _reduced_while_backward(costs, part, backward, copies, all_ranks)
    seconds = forward + split_seconds + reduced + optimizer
    sent += sent_now
    if strategy == "zero1":
        # Each rank gives its part to all others, by a tree, and the next rank follows.
        seconds += math.ceil(math.log2(copies)) * all_ranks.send(gradients)
        sent += (copies - 1) * gradients * largest
        state *= largest
    buckets = gradients if copies > 1 else 0.0
    return seconds, computing, sent, weights + max(gradients, buckets) + state + activations


def _largest_part(sizes: Sequence[int], parts: int) -> float:
    """The share of the largest part where whole tensors are dealt, the largest first, each to who has least so far."""
    held = [0] * parts
    for size in sorted(sizes, reverse=True):
        held[held.index(min(held))] += size
    return max(held) / max(sum(sizes), 1)


def _reduced_while_backward(
    costs: ModelCosts, part: float, backward: float, copies: int, link: Link
) -> tuple[float, float]:
    """Seconds of a backward pass that sends each bucket of gradients when it is full, one after the other; bytes."""
    if copies == 1:
        return backward, 0.0
    limit = bucket_bytes(int(costs.gradient_bytes * part), copies)
    free = filling = sent = moment = 0.0
    for size, ready in zip(costs.gradients, costs.ready, strict=True):
        if filling and filling + size * part > limit:
            free = max(free, moment) + link.all_reduce(filling, copies)
            sent, filling = sent + filling, 0.0
        filling += size * part
        moment = ready * backward
    free = max(free, moment) + link.all_reduce(filling, copies)
    return max(free, backward), 2 * (sent + filling) * (copies - 1) / copies


def _sharded_step(
    costs: ModelCosts,
    mesh: Mesh,
    forward: float,
    backward: float,
    optimizer: float,
    link: Link,
    true_reduce_scatter: bool,
) -> tuple[float, float, float, float]:
    """``fully_shard``: blocks are gathered before they compute, their gradients reduced behind; copies average."""
    shards, copies = int(mesh.shard or 1), int(mesh.data or 1)
    passes = 1 if mesh.keep_parameters else 2
    gather = sum(link.all_gather(block, shards) for block in costs.blocks) * passes
    scatter = sum(link.all_reduce(block, shards) for block in costs.blocks) * (0.5 if true_reduce_scatter else 1.0)
    average = link.all_reduce(costs.gradient_bytes / shards, copies)
    calls = (passes + 1) * len(costs.blocks) * costs.call_seconds
    share = (shards - 1) / shards
    sent = costs.parameter_bytes * share * (passes + (1 if true_reduce_scatter else 2))
    sent += 2 * costs.gradient_bytes / shards * (copies - 1) / copies
    computing = forward + backward + optimizer
    held = (costs.parameter_bytes + costs.gradient_bytes + costs.state_bytes) / shards
    if mesh.keep_parameters:
        held += costs.parameter_bytes
    else:
        held += 2 * max(costs.blocks)  # the block that computes, and the next one
    activations = costs.activation_bytes * costs.rows / mesh.readers
    return computing + gather + scatter + average + calls, computing, sent, held + activations


def _pipeline_step(costs: ModelCosts, count: int, copies: int, link: Link) -> tuple[float, float, float, float]:
    """M micro-batches through K stages: the slowest sets the pace, and fills and empties (M + K - 1 turns)."""
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
    turn = max(shares) * (forward + backward)
    largest = max(parameters) / costs.parameter_bytes
    optimizer = costs.optimizer_seconds * largest
    average = link.all_reduce(costs.gradient_bytes * largest, copies)
    exchange = link.send(max(crossing)) + costs.call_seconds  # activations one way, gradients the other, at a time
    seconds = (micro_batches + count - 1) * (turn + exchange) + average + optimizer
    neighbours = [a + b for a, b in itertools.pairwise([0.0, *crossing, 0.0])]
    sent = micro_batches * max(neighbours) + 2 * costs.gradient_bytes * largest * (copies - 1) / copies
    held = (costs.parameter_bytes + costs.gradient_bytes + costs.state_bytes) * largest
    activations = costs.activation_bytes * rows * min(count, micro_batches) * max(shares)
    return seconds, micro_batches * turn + optimizer, sent, held + activations
