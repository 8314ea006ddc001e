"""How a model is cut into the stages of a pipeline: traced by ``torch.fx``, cut between modules, balanced by time."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx

from sparkdl.errors import ConfigError

__all__ = [
    "GraphPart",
    "InputStyle",
    "Profile",
    "Stage",
    "check_rows_are_independent",
    "measure",
    "profile",
    "release",
    "split",
]

InputStyle = Literal["positional", "keyword", "dict"]

_NUMBERS = {"shape", "ndim", "dtype", "device", "size", "dim"}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg}
_REPEATS = 3
_SLACK = 0.1
"""By how much more than the fastest the slowest stage may take, where less is sent: times are no surer than that."""


@dataclass(frozen=True)
class GraphPart:
    """What one stage computes, in training or in evaluation.

    Attributes:
        module: takes the tensors ``inputs`` of a batch, then what the stage before sent, in this order; returns a tuple
            of what the next stage takes, or on the last stage what the model returns. Its modules and parameters are
            the user's own objects under the user's own names.
        inputs: names of the batch's tensors that this stage reads itself: all ranks of a pipeline read the same rows.
    """

    module: torch.fx.GraphModule
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """One of the parts that a model is cut into.

    Attributes:
        index: from 0.
        count: of how many.
        begins: the module that the stage begins with; empty for the first.
        training: what it computes while the model trains.
        evaluation: what it computes while the model evaluates: dropout of a function, say, is left out there.
        parameters: names, in the whole model, of the parameters it holds.
        buffers: names, in the whole model, of the buffers it holds.
    """

    index: int
    count: int
    begins: str
    training: GraphPart
    evaluation: GraphPart
    parameters: frozenset[str]
    buffers: frozenset[str]


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

    Returns:
        Names of the modules that the second to the last stage begin with.

    Raises:
        ConfigError: the model cannot be cut into so many stages.
    """
    if stages < 2:
        raise ConfigError(f"a pipeline of {stages} stages is none: cut the model into 2 or more")
    layers, why = _profile(model, inputs, input_style, example)
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
    return _profile(model, inputs, input_style, example)[0]


def _profile(
    model: torch.nn.Module,
    inputs: Sequence[str],
    input_style: InputStyle,
    example: Mapping[str, torch.Tensor] | None,
) -> tuple[Profile, str]:
    """The layers, and what keeps modules whole, as the end of a sentence."""
    check_rows_are_independent(model)
    with _without_constants(model):
        trace = _traced(model, inputs, input_style, training=True)
        starts = _cut_points(trace, model)
        costs, sizes = _measure_nodes(trace, model, example) if example is not None else _count_parameters(trace, model)
    edges = [0, *starts, len(trace.body)]
    layers = [trace.body[a:b] for a, b in itertools.pairwise(edges)]
    held = [{p for node in layer for p in _parameters(node, model)} for layer in layers]
    layers_of_model = Profile(
        begins=("", *starts.values()),
        seconds=tuple(sum(costs[node] for node in layer) for layer in layers),
        sent=(0.0, *(_crossing(trace, start, sizes) for start in starts)),
        parameters=tuple(sum(p.numel() * p.element_size() for p in parameters) for parameters in held),
    )
    return layers_of_model, _untraced(trace)


def split(
    model: torch.nn.Module, cuts: Sequence[str], *, inputs: Sequence[str], input_style: InputStyle = "positional"
) -> list[Stage]:
    """Cut ``model`` before each module of ``cuts``; needs no ranks, and leaves ``model`` as it is.

    What a later stage needs and an earlier one computes travels through all stages between.

    Args:
        model: traced by ``torch.fx``; a module whose forward cannot be traced stays whole.
        cuts: qualified names, in the order in which the model calls these modules; each begins the next stage.
        inputs: names of the tensors that the model is called with.
        input_style: how it is called with them, as in ``Task``.

    Raises:
        ConfigError: the model cannot be cut so: it cannot be traced, a name is unknown or out of order, a stage has no
            parameters, one parameter lies in two stages, or a layer depends on other rows of the batch.
    """
    if isinstance(cuts, str) or not cuts:
        raise ConfigError(f"cuts={cuts!r} names no modules: give names as in ('blocks.2',), one for each further stage")
    check_rows_are_independent(model)
    built: dict[bool, list[GraphPart]] = {}
    with _without_constants(model):
        for training in (True, False):
            trace = _traced(model, inputs, input_style, training=training)
            built[training] = _parts(trace, cuts, model)
    holders = [_held(pair, model) for pair in zip(built[True], built[False], strict=True)]
    parameters = {name for name, _ in model.named_parameters()}
    _check_tied([held & parameters for held in holders], cuts)
    begins = ["", *cuts]
    for held, first, last in zip(holders, begins, [*cuts, ""], strict=True):
        if not held & parameters:
            raise ConfigError(
                f"the stage from {first or 'the begin'} to {last or 'the end'} has no parameters: choose other cuts"
            )
    unused = {name for name, _ in _tensors(model)} - set().union(*holders)
    holders[0] |= unused  # what no stage computes with is kept once all the same
    return [
        Stage(
            index=index,
            count=len(begins),
            begins=begins[index],
            training=built[True][index],
            evaluation=built[False][index],
            parameters=frozenset(held & parameters),
            buffers=frozenset(held - parameters),
        )
        for index, held in enumerate(holders)
    ]


def release(model: torch.nn.Module, stage: Stage) -> None:
    """Free the memory of all parameters and buffers of ``model`` that ``stage`` does not hold.

    They become meta tensors, each the same object under the same name as before, so that an optimizer may be made, or
    have been made, of the whole model.
    """
    for name, parameter in list(model.named_parameters()):
        if name not in stage.parameters:
            meta = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, meta)  # type: ignore[no-untyped-call]
    for name, buffer in list(model.named_buffers()):
        if name not in stage.buffers:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, torch.empty_like(buffer, device="meta"))


# --- tracing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trace:
    """The graph of a model.

    Attributes:
        graph: of the model's forward.
        inputs: names of the tensors that its placeholders stand for.
        body: the nodes that one stage each computes, in their order: all but inputs, what is read off them, and
            attributes, which every stage reads itself.
        modules: the module that each node was traced in.
        leaves: modules that stay whole because they cannot be traced, and why.
    """

    graph: torch.fx.Graph
    inputs: tuple[str, ...]
    body: list[torch.fx.Node]
    modules: dict[torch.fx.Node, str]
    leaves: dict[str, str]


class _Tracer(torch.fx.Tracer):
    """Traces as far into a model as that cannot change what it computes.

    A module stays whole if its forward cannot be traced, or if tracing would freeze or lose what it does: random
    numbers of its own, attributes that it sets, a ``no_grad`` or ``autocast`` block.
    """

    def __init__(self, inputs: Sequence[str], input_style: InputStyle) -> None:
        super().__init__()
        self.leaves: dict[str, str] = {}
        self.modules: dict[torch.fx.Node, str] = {}
        self._inputs, self._input_style = inputs, input_style
        self._path = [""]
        self._modes = _modes()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Let the placeholders be the task's inputs, whatever ``forward`` is called with."""
        tensors = [self.create_proxy("placeholder", f"input_{i}", (), {}) for i in range(len(self._inputs))]
        named = dict(zip(self._inputs, tensors, strict=True))
        arguments: tuple[Any, ...] = (named,) if self._input_style == "dict" else tuple(tensors)
        keywords: dict[str, Any] = {}
        if self._input_style == "keyword":
            arguments, keywords = (), named
        model: Any = self.root
        try:
            inspect.signature(model.forward).bind(*arguments, **keywords)
        except TypeError as cause:
            raise ConfigError(
                f"{type(model).__name__}.forward{inspect.signature(model.forward)} cannot be called with the inputs "
                f"{list(self._inputs)} by input_style={self._input_style!r} ({cause}): give it what it takes"
            ) from cause

        def forward() -> Any:
            if _is_plain_encoder(model, keywords):
                return _encode(model, *arguments, **keywords)
            return model.forward(*arguments, **keywords)

        return (lambda: self._watched(model, forward)), []

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        if type(m) is torch.nn.TransformerEncoder:
            return module_qualified_name in self.leaves
        return module_qualified_name in self.leaves or super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return super().getattr(attr, attr_val, {})  # nodes of a forward that is given up are erased

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if _modes() != self._modes:
            raise torch.fx.proxy.TraceError("it switches gradients or autocast on or off, which a trace loses")
        node = super().create_node(*args, **kwargs)
        self.modules[node] = self._path[-1]
        return node

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        self._path.append(name)
        nodes, stack = len(self.graph.nodes), self.module_stack.copy()
        try:
            if self.is_leaf_module(m, name):
                return super().call_module(m, forward, args, kwargs)
            body = forward
            if type(m) is torch.nn.TransformerEncoder:
                if not _is_plain_encoder(m, kwargs) or len(args) > 2:
                    raise torch.fx.proxy.TraceError("it is called with a padding mask")
                body = lambda *a, **k: _encode(m, *a, **k)  # noqa: E731
            traced = lambda *a, **k: self._watched(m, lambda: body(*a, **k))  # noqa: E731
            return super().call_module(m, traced, args, kwargs)
        except ConfigError:
            raise
        except Exception as error:
            if name in self.leaves or super().is_leaf_module(m, name):
                raise
            for node in reversed(list(self.graph.nodes)[nodes:]):
                self.graph.erase_node(node)
            self.module_stack = stack
            self.leaves[name] = _first_line(error)
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._path.pop()

    def _watched(self, module: torch.nn.Module, forward: Callable[[], Any]) -> Any:
        """Call ``forward``; give up where it did what a trace cannot tell."""
        attributes = {part: dict(vars(part)) for part in module.modules()}
        generators = torch.get_rng_state(), random.getstate()
        try:
            result = forward()
        finally:
            changed = False
            for part, before in attributes.items():
                now = {name: value for name, value in vars(part).items() if not name.startswith("_tensor_constant")}
                if any(name not in before or before[name] is not value for name, value in now.items()):
                    changed = True
                    for name in now.keys() - before.keys():
                        del vars(part)[name]
                    vars(part).update(before)
            drawn = not torch.equal(generators[0], torch.get_rng_state()) or generators[1] != random.getstate()
            random.setstate(generators[1])
        if changed:
            raise torch.fx.proxy.TraceError("it sets attributes of its own")
        if drawn:
            raise torch.fx.proxy.TraceError("it draws random numbers that a trace would freeze")
        return result


def _modes() -> tuple[bool, ...]:
    kinds = ("cpu", "cuda")
    return (torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in kinds))


def _is_plain_encoder(module: torch.nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Whether ``module`` is torch's encoder, called such that it runs its layers one after the other."""
    return type(module) is torch.nn.TransformerEncoder and keywords.get("src_key_padding_mask") is None


def _encode(encoder: torch.nn.TransformerEncoder, src: Any, mask: Any = None, *_: Any, **keywords: Any) -> Any:
    """The forward of ``encoder``, which cannot be traced, without its fast path."""
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, is_causal=bool(keywords.get("is_causal")))
    return src if encoder.norm is None else encoder.norm(src)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


@contextmanager
def _mode_of(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _without_constants(model: torch.nn.Module) -> Iterator[None]:
    """Take off ``model`` the tensors that tracing puts there, which its forward made of nothing but numbers."""
    before = set(vars(model))
    try:
        yield
    finally:
        for name in set(vars(model)) - before:
            delattr(model, name)


def _forked(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Leave torch's random numbers as they are."""
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    return torch.random.fork_rng(devices=list(devices))


def _traced(model: torch.nn.Module, inputs: Sequence[str], input_style: InputStyle, *, training: bool) -> _Trace:
    tracer = _Tracer(inputs, input_style)
    with _mode_of(model, training=training), _forked(model):
        try:
            graph = tracer.trace(model)
        except ConfigError:
            raise
        except Exception as cause:
            raise ConfigError(
                f"{type(model).__name__} cannot be cut into stages, since its forward cannot be traced "
                f"({_first_line(cause)}): move that into a submodule of its own, or give an nn.Sequential"
            ) from cause
    reads: dict[torch.fx.Node, str] = {}
    for node in graph.nodes:  # sources come before what is made of them
        reads[node] = _reads(node, {reads[source] for source in node.all_input_nodes})
    body = [node for node in graph.nodes if node.op not in ("get_attr", "output") and not reads[node]]
    return _Trace(graph, tuple(inputs), body, tracer.modules, tracer.leaves)


def _reads(node: torch.fx.Node, sources: set[str]) -> Literal["input", "number", ""]:
    """Whether ``node`` is an input of the model, or a number that its shape tells: each stage reads these itself.

    Args:
        node: of the graph.
        sources: what this function returned for the nodes that it is made of.
    """
    if node.op == "placeholder":
        return "input"
    if not sources or "" in sources:
        return ""
    if node.op == "call_method":
        return "number" if node.target in _NUMBERS else ""
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return "number" if node.args[1] in _NUMBERS else ""
    if sources == {"number"} and (node.target is operator.getitem or node.target in _ARITHMETIC):
        return "number"
    return ""


# --- where to cut -------------------------------------------------------------------------------------------------


def _inside(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _cut_points(trace: _Trace, model: torch.nn.Module) -> dict[int, str]:
    """By position in the body, the module that begins there: one a layer that has parameters, but for the first."""
    points: dict[int, str] = {}
    begun: set[str] = set()
    layers = 0
    for position, node in enumerate(trace.body):
        parts = trace.modules[node].split(".")
        path = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        begins = [name for name in path if name and name not in begun]
        begun.update(path)
        own = any(True for name in begins for _ in model.get_submodule(name).parameters(recurse=False))
        if not begins or not (own or _parameters(node, model)):
            continue
        layers += 1
        if layers > 1:
            points[position] = begins[0]
    return points


def _positions(trace: _Trace, cuts: Sequence[str], model: torch.nn.Module) -> list[int]:
    """Where in the body each module of ``cuts`` begins."""
    names = {name for name, _ in model.named_modules()}
    positions: list[int] = []
    for cut in cuts:
        if cut not in names or not cut:
            raise ConfigError(f"cuts names {cut!r}, which is no module of {type(model).__name__}: give names that are")
        begin = next((i for i, node in enumerate(trace.body) if _inside(trace.modules[node], cut)), None)
        if begin is None:
            whole = next((leaf for leaf in trace.leaves if _inside(cut, leaf)), None)
            whole = whole or next((str(n.target) for n in trace.body if _inside(cut, str(n.target))), None)
            why = f" ({trace.leaves[whole]})" if whole in trace.leaves else ""
            raise ConfigError(
                f"cuts names {cut!r}, which lies inside of {whole!r}, a module that stays whole{why}: cut before or "
                "behind it"
                if whole
                else f"cuts names {cut!r}, which the model's forward does not call: name a module that it calls"
            )
        positions.append(begin)
    if positions[0] == 0:
        raise ConfigError(f"cuts names {cuts[0]!r}, which the model begins with: name the module of the second stage")
    for (first, before), (second, behind) in itertools.pairwise(zip(cuts, positions, strict=True)):
        if behind <= before:
            raise ConfigError(
                f"cuts names {first!r} before {second!r}, and the model calls {second!r} no later: name them in the "
                "order of its calls"
            )
    return positions


def _untraced(trace: _Trace) -> str:
    """What keeps modules whole, as the end of a sentence."""
    if not trace.leaves:
        return ""
    name, why = next(iter(trace.leaves.items()))
    return f", or let the forward of {name!r}, which stays whole ({why}), be one that torch.fx can trace"


def _crossing(trace: _Trace, position: int, sizes: Mapping[torch.fx.Node, float]) -> float:
    """What a cut before the node at ``position`` sends: values that were computed before and are used behind it."""
    behind = set(trace.body[position:])
    return sum(
        sizes[node]
        for node in trace.body[:position]
        if any(user in behind or user.op == "output" for user in node.users)
    )


def _count_parameters(
    trace: _Trace, model: torch.nn.Module
) -> tuple[dict[torch.fx.Node, float], dict[torch.fx.Node, float]]:
    """What stands for the seconds and the bytes of each node where nothing is measured: its parameters, and 1."""
    counts = {node: float(sum(parameter.numel() for parameter in _parameters(node, model))) for node in trace.body}
    return counts, dict.fromkeys(trace.body, 1.0)


def _parameters(node: torch.fx.Node, model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that ``node`` computes with."""
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    own = dict(model.named_parameters())
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    return [own[name] for name in names if name in own]


def _measure_nodes(
    trace: _Trace, model: torch.nn.Module, example: Mapping[str, torch.Tensor]
) -> tuple[dict[torch.fx.Node, float], dict[torch.fx.Node, float]]:
    """Seconds of each node, forward and backward, the least of a few runs; and bytes of what it gives."""
    fastest: dict[torch.fx.Node, float] = {}
    sizes: dict[torch.fx.Node, float] = {}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with _mode_of(model, training=True), _forked(model), torch.enable_grad():
        for _ in range(_REPEATS):
            stopwatch = _Stopwatch(model, graph=trace.graph)
            stopwatch.run(*[example[name] for name in trace.inputs])
            sizes = stopwatch.bytes
            for node, seconds in stopwatch.seconds.items():
                fastest[node] = min(seconds, fastest.get(node, seconds))
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
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


# --- the parts ----------------------------------------------------------------------------------------------------


def _parts(trace: _Trace, cuts: Sequence[str], model: torch.nn.Module) -> list[GraphPart]:
    """The graph of each stage."""
    positions = _positions(trace, cuts, model)
    number = {
        node: sum(position <= i for position in positions) for i, node in enumerate(trace.body)
    }  # the stage of each node
    output = next(node for node in trace.graph.nodes if node.op == "output")
    last_use = {
        node: max([len(cuts) if user is output else number[user] for user in _final_users(node, number)], default=-1)
        for node in trace.body
    }
    placeholders = [node for node in trace.graph.nodes if node.op == "placeholder"]
    parts: list[GraphPart] = []
    for stage in range(len(positions) + 1):
        received = [node for node in trace.body if number[node] < stage <= last_use[node]]
        sent = [node for node in trace.body if number[node] <= stage < last_use[node]]
        parts.append(_part(trace, stage, number, placeholders, received, sent, output, model, last=stage == len(cuts)))
    return parts


def _final_users(node: torch.fx.Node, number: Mapping[torch.fx.Node, int]) -> Iterator[torch.fx.Node]:
    """Who uses ``node``; body nodes have no other users than these."""
    return (user for user in node.users if user in number or user.op == "output")


def _part(
    trace: _Trace,
    stage: int,
    number: Mapping[torch.fx.Node, int],
    placeholders: Sequence[torch.fx.Node],
    received: Sequence[torch.fx.Node],
    sent: Sequence[torch.fx.Node],
    output: torch.fx.Node,
    model: torch.nn.Module,
    *,
    last: bool,
) -> GraphPart:
    own = [node for node in trace.body if number[node] == stage]
    needed: set[torch.fx.Node] = set()  # what this stage reads itself
    pending = [source for node in [*own, *([output] if last else [])] for source in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node not in number and node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs = [node for node in placeholders if node in needed]
    for node in inputs:
        copies[node] = graph.placeholder(str(node.target))
    for i, node in enumerate(received):
        value = graph.placeholder(f"received_{i}")
        # A received value is a leaf of autograd, and a leaf cannot be changed in place.
        changed = any(_works_in_place(user, model) for user in node.users if number.get(user) == stage)
        copies[node] = graph.call_method("clone", (value,)) if changed else value
    for node in trace.graph.nodes:
        if node in copies or node.op == "output":
            continue
        if node in needed or number.get(node) == stage:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    if last:
        graph.output(torch.fx.node.map_arg(output.args[0], lambda n: copies[n]))
    else:
        graph.output(tuple(copies[node] for node in sent))
    module = torch.fx.GraphModule(model, graph, f"{type(model).__name__}Stage{stage}")
    names = dict(zip(placeholders, trace.inputs, strict=True))
    return GraphPart(module, tuple(names[node] for node in inputs))


def _works_in_place(node: torch.fx.Node, model: torch.nn.Module) -> bool:
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") or node.target == "__setitem__"
    name = getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or name.endswith("_") or name in ("setitem", "iadd", "isub", "imul")


# --- what a stage holds -------------------------------------------------------------------------------------------


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _held(parts: tuple[GraphPart, GraphPart], model: torch.nn.Module) -> set[str]:
    """Names in ``model`` of what the two graphs of a stage compute with."""
    names = {id(tensor): name for name, tensor in _tensors(model)}
    return {names[id(tensor)] for part in parts for _, tensor in _tensors(part.module) if id(tensor) in names}


def _check_tied(holders: Sequence[set[str]], cuts: Sequence[str]) -> None:
    for first, names in enumerate(holders):
        for second in range(first + 1, len(holders)):
            shared = sorted(names & holders[second])
            if shared:
                raise ConfigError(
                    f"{', '.join(shared)} would lie in the stages {first} and {second}, and a rank holds its own stage "
                    f"alone: choose cuts other than {list(cuts)} that leave them in one, or untie them"
                )


def check_rows_are_independent(model: torch.nn.Module) -> None:
    """Refuse layers whose result for a row depends on the other rows of the batch, which comes in parts.

    Raises:
        ConfigError: names the layer, and what to take instead.
    """
    with _mode_of(model, training=True):
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
