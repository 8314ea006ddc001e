"""The cuts of a pipeline: between layers, so that stages take as long and little is sent."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from sparkdl.errors import ConfigError
from sparkdl.nn.mixture import take_dropped
from sparkdl.nn.modes import mode_of
from sparkdl.strategies.model_trace import InputStyle, ModelTrace, forked, trace_model, without_constants
from sparkdl.strategies.tensor_plan import COLUMN, QKV

_REPEATS = 3
_SLACK = 0.1
"""The share by which the slowest stage may take longer than the fastest, where less is sent: times are no surer."""


@dataclass(frozen=True)
class Profile:
    """What each layer of a model costs that a pipeline may be cut before or behind.

    Attributes:
        begins: by layer, the module that it begins with; empty for the first.
        seconds: by layer, forward and backward of the example; where there is none, its parameters.
        sent: by layer, bytes that a cut before it sends of the example; where there is none, how many values.
        parameters: by layer, their bytes.
    """

    begins: tuple[str, ...]
    seconds: tuple[float, ...]
    sent: tuple[float, ...]
    parameters: tuple[int, ...]

    def cuts(self, stages: int) -> list[int]:
        """The layers that the second to the last of so many stages begin with.

        Of all ways whose slowest stage is nearly the fastest it is the one that sends least.
        """
        return _partition(self.seconds, self.sent, stages)


def measure(
    model: torch.nn.Module,
    stages: int,
    *,
    inputs: Sequence[str],
    input_style: InputStyle = "positional",
    example: Mapping[str, torch.Tensor] | None = None,
    plan: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Choose where to cut ``model``, see ``Profile.cuts``.

    The times of two machines differ, so one rank measures and tells the others. The model is as it was afterwards.

    Args:
        model: on the device that it trains on.
        stages: how many.
        inputs: names of the tensors that the model is called with.
        input_style: how it is called with them, as in ``Task``.
        example: a micro-batch, tensors of shape ``(rows, ...)`` by name; forward and backward of each module are timed
            with it. None counts parameters instead.
        plan: of ``tensor_plan``, where a tensor group splits layers: no cut comes between those of one region.

    Returns:
        Names of the modules that the second to the last stage begin with.

    Raises:
        ConfigError: the model cannot be cut into so many stages.
    """
    if stages < 2:
        raise ConfigError(f"a pipeline of {stages} stages is none: cut the model into 2 or more")
    layers, why = _profile(model, inputs, input_style, example, plan or {})
    if len(layers.begins) < stages:
        raise ConfigError(
            f"the model has {len(layers.begins)} layers to cut between, and the pipeline {stages} stages: choose at "
            f"most {len(layers.begins)} stages{why}"
        )
    return tuple(layers.begins[first] for first in layers.cuts(stages))


def profile(
    model: torch.nn.Module,
    *,
    inputs: Sequence[str],
    input_style: InputStyle = "positional",
    example: Mapping[str, torch.Tensor] | None = None,
) -> Profile:
    """Measure the layers of ``model``; the arguments are those of ``measure``.

    Raises:
        ConfigError: the model cannot be cut.
    """
    return _profile(model, inputs, input_style, example, {})[0]


def _profile(
    model: torch.nn.Module,
    inputs: Sequence[str],
    input_style: InputStyle,
    example: Mapping[str, torch.Tensor] | None,
    plan: Mapping[str, str],
) -> tuple[Profile, str]:
    """The layers, and what keeps modules whole, as the end of a sentence."""
    check_rows_are_independent(model)
    with without_constants(model):
        trace = trace_model(model, inputs, input_style, training=True)
        regions = split_regions(trace, plan, model)
        starts = {
            position: name
            for position, name in _cut_points(trace, model).items()
            if not any(begin < position <= end for begin, end in regions)
        }
        costs, sizes = _measure_nodes(trace, model, example) if example is not None else _count_parameters(trace, model)
    edges = [0, *starts, len(trace.body)]
    layers = [trace.body[a:b] for a, b in itertools.pairwise(edges)]
    layer_parameters = [{p for node in layer for p in _parameters(node, model)} for layer in layers]
    layers_of_model = Profile(
        begins=("", *starts.values()),
        seconds=tuple(sum(costs[node] for node in layer) for layer in layers),
        sent=(0.0, *(_crossing(trace, start, sizes) for start in starts)),
        parameters=tuple(sum(p.numel() * p.element_size() for p in parameters) for parameters in layer_parameters),
    )
    return layers_of_model, _untraced(trace)


def check_rows_are_independent(model: torch.nn.Module) -> None:
    """Refuse layers whose result for a row depends on the other rows of the batch, which comes in parts.

    Raises:
        ConfigError: names the layer, and what to take instead.
    """
    with mode_of(model, training=True):
        for name, module in model.named_modules():
            batch_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            if module.training and (batch_norm or getattr(module, "track_running_stats", False)):
                why = "statistics of a micro-batch are not the batch's"
            elif getattr(module, "mixes_rows", False):
                why = "what it computes of a row depends on the other rows"
            else:
                continue
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}, and a pipeline computes micro-batches ({why}): "
                "take a layer that looks at each row alone, as LayerNorm and GroupNorm do"
            )


def split_regions(trace: ModelTrace, plan: Mapping[str, str], model: torch.nn.Module) -> list[tuple[int, int]]:
    """The values that a tensor group has in parts, from the columns of ``plan`` to their rows: no cut may come between.

    Returns:
        For each such value the positions in the body of what gives it, and of the last that reads it.
    """
    positions = {node: position for position, node in enumerate(trace.body)}
    regions: dict[torch.fx.Node, tuple[int, int]] = {}
    for node in trace.body:
        split_kind = plan.get(str(node.target)) if node.op == "call_module" else None
        if split_kind in (COLUMN, QKV):
            is_split = not isinstance(model.get_submodule(str(node.target)), torch.nn.Embedding)
        else:
            is_split = split_kind is None and any(source in regions for source in node.all_input_nodes)
        if is_split:
            readers = [positions.get(user, len(trace.body)) for user in node.users]
            regions[node] = positions[node], max(readers, default=positions[node])
    return list(regions.values())


# --- layers ----------------------------------------------------------------------------------------------------------


def _cut_points(trace: ModelTrace, model: torch.nn.Module) -> dict[int, str]:
    """The module that begins at each position in the body: one a layer that has parameters, but for the first."""
    points: dict[int, str] = {}
    begun: set[str] = set()
    layers = 0
    for position, node in enumerate(trace.body):
        parts = trace.modules[node].split(".")
        path = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        begins = [name for name in path if name and name not in begun]
        begun.update(path)
        has_own_parameters = any(True for name in begins for _ in model.get_submodule(name).parameters(recurse=False))
        if not begins or not (has_own_parameters or _parameters(node, model)):
            continue
        layers += 1
        if layers > 1:
            points[position] = begins[0]
    return points


def _untraced(trace: ModelTrace) -> str:
    """What keeps modules whole, as the end of a sentence."""
    if not trace.leaves:
        return ""
    name, why = next(iter(trace.leaves.items()))
    return f", or let the forward of {name!r}, which stays whole ({why}), be one that torch.fx can trace"


def _crossing(trace: ModelTrace, position: int, sizes: Mapping[torch.fx.Node, float]) -> float:
    """What a cut before the node at ``position`` sends: values that were computed before and are used behind it."""
    behind = set(trace.body[position:])
    return sum(
        sizes[node]
        for node in trace.body[:position]
        if any(user in behind or user.op == "output" for user in node.users)
    )


def _count_parameters(
    trace: ModelTrace, model: torch.nn.Module
) -> tuple[dict[torch.fx.Node, float], dict[torch.fx.Node, float]]:
    """What stands for the seconds and the bytes of each node where nothing is measured: its parameters, and 1."""
    counts = {node: float(sum(parameter.numel() for parameter in _parameters(node, model))) for node in trace.body}
    return counts, dict.fromkeys(trace.body, 1.0)


def _parameters(node: torch.fx.Node, model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that ``node`` computes with."""
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    parameters = dict(model.named_parameters())
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    return [parameters[name] for name in names if name in parameters]


def _measure_nodes(
    trace: ModelTrace, model: torch.nn.Module, example: Mapping[str, torch.Tensor]
) -> tuple[dict[torch.fx.Node, float], dict[torch.fx.Node, float]]:
    """Seconds of each node, forward and backward, the least of a few runs; and bytes of what it gives."""
    fastest: dict[torch.fx.Node, float] = {}
    sizes: dict[torch.fx.Node, float] = {}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with mode_of(model, training=True), forked(model), torch.enable_grad():
        for _ in range(_REPEATS):
            stopwatch = _Stopwatch(model, graph=trace.graph)
            stopwatch.run(*[example[name] for name in trace.inputs])
            sizes = stopwatch.bytes
            for node, seconds in stopwatch.seconds.items():
                fastest[node] = min(seconds, fastest.get(node, seconds))
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    take_dropped(model)  # the example's tokens count nowhere
    return fastest, sizes


class _Stopwatch(torch.fx.Interpreter):
    """Times forward and backward of each node by itself, and weighs what it gives; gradients are thrown away."""

    def __init__(self, module: torch.nn.Module, graph: torch.fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.seconds: dict[torch.fx.Node, float] = {}
        self.bytes: dict[torch.fx.Node, float] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        leaves: list[torch.Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            value = value.detach()
            if not value.is_floating_point():
                return value
            leaves.append(value.requires_grad_())
            return value.clone()  # what is changed in place must not be a leaf

        args, kwargs = torch.fx.node.map_aggregate(self.fetch_args_kwargs_from_env(n), leaf)
        if n.op == "call_module":
            leaves += [p for p in self.fetch_attr(str(n.target)).parameters() if p.requires_grad]
        begin = _now(leaves)
        result = getattr(self, n.op)(n.target, args, kwargs)
        tensors: list[torch.Tensor] = []

        def collect(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                tensors.append(value)

        torch.fx.node.map_aggregate(result, collect)
        outputs = [tensor for tensor in tensors if tensor.requires_grad]
        if outputs and leaves and n.op in ("call_module", "call_function", "call_method"):
            torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True)
        self.seconds[n] = _now(leaves) - begin
        self.bytes[n] = float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return torch.fx.node.map_aggregate(result, lambda v: v.detach() if isinstance(v, torch.Tensor) else v)


def _now(tensors: Sequence[torch.Tensor]) -> float:
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return time.perf_counter()


def _partition(costs: Sequence[float], crossing: Sequence[float], parts: int) -> list[int]:
    """Where to cut ``costs`` into runs, none empty: the first item of each run but the first.

    The greatest sum of a run is within a tenth of the least there can be, and what crosses the cuts is then the least.

    The linear partition problem by dynamic programming (Skiena, The Algorithm Design Manual, section 10.7), once for
    the greatest sum, and once for what crosses among the runs that are short enough.

    Args:
        costs: of each item.
        crossing: what a cut before each item sends, 0 for the first.
        parts: how many runs.
    """
    sums = list(itertools.accumulate(costs, initial=0.0))
    (_, fastest), _ = _least(sums, [0.0] * len(costs), parts, math.inf)
    return _least(sums, crossing, parts, fastest * (1 + _SLACK))[1]


def _least(
    sums: Sequence[float], crossing: Sequence[float], parts: int, limit: float
) -> tuple[tuple[float, float], list[int]]:
    """What crosses the best cuts, and the greatest sum of a run, which is the less important; and these cuts.

    Args:
        sums: of the costs before each item, and of all.
        crossing: what a cut before each item sends.
        parts: how many runs.
        limit: the greatest sum that a run may have.
    """
    items, never = len(sums) - 1, (math.inf, math.inf)
    best = [[never] * (items + 1) for _ in range(parts + 1)]
    last_cut = [[0] * (items + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0, 0.0
    for part in range(1, parts + 1):
        for end in range(part, items + 1):
            for begin in range(part - 1, end):
                cost = sums[end] - sums[begin]
                sent, slowest = best[part - 1][begin]
                candidate = sent + crossing[begin], max(slowest, cost)
                if cost <= limit and candidate < best[part][end]:
                    best[part][end], last_cut[part][end] = candidate, begin
    cuts, end = [], items
    for part in range(parts, 1, -1):
        end = last_cut[part][end]
        cuts.append(end)
    return best[parts][-1], cuts[::-1]
