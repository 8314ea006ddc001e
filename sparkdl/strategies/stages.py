"""The stages of a pipeline: what each computes, holds, and sends to the next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from sparkdl.compat.recurrent_weights import swappable_weights
from sparkdl.errors import ConfigError
from sparkdl.strategies.model_trace import InputStyle, ModelTrace, trace_model, without_constants
from sparkdl.strategies.stage_balance import check_rows_are_independent, split_regions


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


def split(
    model: torch.nn.Module,
    cuts: Sequence[str],
    *,
    inputs: Sequence[str],
    input_style: InputStyle = "positional",
    plan: Mapping[str, str] | None = None,
) -> list[Stage]:
    """Cut ``model`` before each module of ``cuts``; needs no ranks, and leaves ``model`` as it is.

    What a later stage needs and an earlier one computes travels through all stages between.

    Args:
        model: traced by ``torch.fx``; a module whose forward cannot be traced stays whole.
        cuts: qualified names, in the order in which the model calls these modules; each begins the next stage.
        inputs: names of the tensors that the model is called with.
        input_style: how it is called with them, as in ``Task``.
        plan: of ``tensor_plan``, where a tensor group splits layers.

    Raises:
        ConfigError: the model cannot be cut so: it cannot be traced, a name is unknown or out of order, a stage has no
            parameters, one parameter lies in two stages, a layer depends on other rows of the batch, or a cut comes
            between layers that a tensor group splits together.
    """
    if isinstance(cuts, str) or not cuts:
        raise ConfigError(f"cuts={cuts!r} names no modules: give names as in ('blocks.2',), one for each further stage")
    check_rows_are_independent(model)
    built: dict[bool, list[GraphPart]] = {}
    with without_constants(model):
        for training in (True, False):
            trace = trace_model(model, inputs, input_style, training=training)
            _check_regions(trace, cuts, model, plan or {})
            built[training] = _parts(trace, cuts, model)
    names_by_stage = [_held(pair, model) for pair in zip(built[True], built[False], strict=True)]
    parameters = {name for name, _ in model.named_parameters()}
    _check_tied([tensor_names & parameters for tensor_names in names_by_stage], cuts)
    begins = ["", *cuts]
    for tensor_names, first, last in zip(names_by_stage, begins, [*cuts, ""], strict=True):
        if not tensor_names & parameters:
            raise ConfigError(
                f"the stage from {first or 'the begin'} to {last or 'the end'} has no parameters: choose other cuts"
            )
    unused = {name for name, _ in _tensors(model)} - set().union(*names_by_stage)
    names_by_stage[0] |= unused  # what no stage computes with is kept once all the same
    return [
        Stage(
            index=index,
            count=len(begins),
            begins=begins[index],
            training=built[True][index],
            evaluation=built[False][index],
            parameters=frozenset(tensor_names & parameters),
            buffers=frozenset(tensor_names - parameters),
        )
        for index, tensor_names in enumerate(names_by_stage)
    ]


def release(model: torch.nn.Module, stage: Stage) -> None:
    """Free the memory of all parameters and buffers of ``model`` that ``stage`` does not hold.

    They become meta tensors, each the same object under the same name as before, so that an optimizer may be made, or
    have been made, of the whole model.
    """
    with swappable_weights(model):
        for name, parameter in list(model.named_parameters()):
            if name not in stage.parameters:
                meta = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, meta)  # type: ignore[no-untyped-call]
    for name, buffer in list(model.named_buffers()):
        if name not in stage.buffers:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, torch.empty_like(buffer, device="meta"))


# --- the parts -------------------------------------------------------------------------------------------------------


def _positions(trace: ModelTrace, cuts: Sequence[str], model: torch.nn.Module) -> list[int]:
    """The position in the body where each module of ``cuts`` begins."""
    names = {name for name, _ in model.named_modules()}
    positions: list[int] = []
    for cut in cuts:
        if cut not in names or not cut:
            raise ConfigError(f"cuts names {cut!r}, which is no module of {type(model).__name__}: give names that are")
        begin = next((i for i, node in enumerate(trace.body) if _inside(trace.modules[node], cut)), None)
        if begin is None:
            module = next((leaf for leaf in trace.leaves if _inside(cut, leaf)), None)
            module = module or next((str(n.target) for n in trace.body if _inside(cut, str(n.target))), None)
            why = f" ({trace.leaves[module]})" if module in trace.leaves else ""
            raise ConfigError(
                f"cuts names {cut!r}, which lies inside of {module!r}, a module that stays whole{why}: cut before or "
                "behind it"
                if module
                else f"cuts names {cut!r}, which the model's forward does not call: name a module that it calls"
            )
        positions.append(begin)
    if positions[0] == 0:
        raise ConfigError(f"cuts names {cuts[0]!r}, which the model begins with: name the module of the second stage")
    for (first, position), (second, behind) in itertools.pairwise(zip(cuts, positions, strict=True)):
        if behind <= position:
            raise ConfigError(
                f"cuts names {first!r} before {second!r}, and the model calls {second!r} no later: name them in the "
                "order of its calls"
            )
    return positions


def _check_regions(trace: ModelTrace, cuts: Sequence[str], model: torch.nn.Module, plan: Mapping[str, str]) -> None:
    """Refuse cuts between layers that a tensor group splits together: a stage sends whole values."""
    regions = split_regions(trace, plan, model)
    for cut, position in zip(cuts, _positions(trace, cuts, model), strict=True):
        begin = next((begin for begin, end in regions if begin < position <= end), None)
        if begin is not None:
            raise ConfigError(
                f"cuts names {cut!r}, which a tensor group splits together with {str(trace.body[begin].target)!r} "
                "before it: cut before both, or behind both"
            )


def _inside(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _parts(trace: ModelTrace, cuts: Sequence[str], model: torch.nn.Module) -> list[GraphPart]:
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
    trace: ModelTrace,
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
    stage_nodes = [node for node in trace.body if number[node] == stage]
    needed: set[torch.fx.Node] = set()  # what this stage reads itself
    pending = [source for node in [*stage_nodes, *([output] if last else [])] for source in node.all_input_nodes]
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


# --- what a stage holds ----------------------------------------------------------------------------------------------


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _held(parts: tuple[GraphPart, GraphPart], model: torch.nn.Module) -> set[str]:
    """Names in ``model`` of what the two graphs of a stage compute with."""
    names = {id(tensor): name for name, tensor in _tensors(model)}
    return {names[id(tensor)] for part in parts for _, tensor in _tensors(part.module) if id(tensor) in names}


def _check_tied(names_by_stage: Sequence[set[str]], cuts: Sequence[str]) -> None:
    for first, names in enumerate(names_by_stage):
        for second in range(first + 1, len(names_by_stage)):
            shared = sorted(names & names_by_stage[second])
            if shared:
                raise ConfigError(
                    f"{', '.join(shared)} would lie in the stages {first} and {second}, and a rank holds its own stage "
                    f"alone: choose cuts other than {list(cuts)} that leave them in one, or untie them"
                )
