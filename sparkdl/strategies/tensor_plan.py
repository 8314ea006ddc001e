"""Which modules of a model are split over a tensor group: found in traces of its forward, or named by the user."""

from __future__ import annotations

import copy
import fnmatch
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparkdl.errors import ConfigError

__all__ = ["COLUMN", "HEADS", "ROW", "find_plan"]

COLUMN, ROW, HEADS = "column", "row", "heads"
"""A linear layer by its output features, one by its input features, and ``nn.MultiheadAttention`` by its heads."""

_ELEMENTWISE_MODULES = (
    nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh,
    nn.Tanhshrink,
)  # fmt: skip
_ELEMENTWISE_FUNCTIONS = {
    F.celu, F.dropout, F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid, F.mish,
    F.relu, F.relu6, F.selu, F.sigmoid, F.silu, F.softplus, F.softsign, F.tanh, torch.relu, torch.sigmoid, torch.tanh,
    torch.mul, torch.add, torch.square, operator.add, operator.mul, operator.neg, operator.pow, operator.sub,
    operator.truediv,
}  # fmt: skip
_ELEMENTWISE_METHODS = {"add", "mul", "pow", "relu", "sigmoid", "square", "tanh"}
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def find_plan(model: nn.Module, size: int, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Say which modules of ``model`` are split over ``size`` ranks, and how; it needs no ranks.

    Without ``given``, pairs of linear layers are split between which only elementwise functions stand, as a trace by
    ``torch.fx`` proves, those of torch's transformer layers, and ``nn.MultiheadAttention``. The rest stays whole.

    Args:
        model: the whole model; nothing of it is changed.
        size: number of ranks, 2 or more.
        given: by pattern of module names (as of ``fnmatch``), ``"column"``, ``"row"`` or ``"heads"``: exactly these are
            split, such as the projections of an attention of the user's own, ``{"*.q": "column", "*.o": "row"}``.

    Returns:
        By module name ``"column"``, ``"row"`` or ``"heads"``.

    Raises:
        ConfigError: nothing can be split, or something of ``given`` cannot.
    """
    tied = _tied_modules(model)
    if given is not None:
        return _given_plan(model, size, given, tied)
    plan: dict[str, str] = {}
    reasons: list[str] = []
    for names, columns, row in _pairs(model):
        reason = next(filter(None, (_refusal(model, name, COLUMN, size, tied) for name in columns)), None)
        reason = reason or _refusal(model, row, ROW, size, tied)
        if reason:
            reasons.append(reason)
        elif not any(name in plan for name in names):
            plan |= dict.fromkeys(columns, COLUMN) | {row: ROW}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            reason = _refusal(model, name, HEADS, size, tied)
            if reason:
                reasons.append(reason)
            else:
                plan[name] = HEADS
    if not plan:
        why = "; ".join(dict.fromkeys(reasons)) or (
            "it has no nn.MultiheadAttention, and no two linear layers between which a trace shows nothing but "
            "elementwise functions"
        )
        raise ConfigError(
            f"tensor={size} finds nothing to split in {type(model).__name__} ({why}): choose another size, or name the "
            'modules, as in plan={"*.fc1": "column", "*.fc2": "row"}'
        )
    return plan


def _tied_modules(model: nn.Module) -> dict[str, str]:
    """By name of a module that shares a parameter, the other name of that parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = [each for each in names.values() if len(each) > 1]
    return {
        name.rpartition(".")[0]: next(other for other in group if other != name) for group in shared for name in group
    }


def _refusal(model: nn.Module, name: str, how: str, size: int, tied: Mapping[str, str]) -> str | None:
    """Why the module ``name`` cannot be split so; None where it can."""
    module: Any = model.get_submodule(name)
    kind = type(module).__name__
    if how == HEADS:
        if type(module) is not nn.MultiheadAttention:
            return f"{name} is {kind}, and only nn.MultiheadAttention is split by heads"
        if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
            return f"{name} has add_bias_kv, add_zero_attn, kdim or vdim, which are not split"
        if module.num_heads % size:
            return f"{name} has {module.num_heads} heads, no multiple of {size}"
        inner = {name, f"{name}.out_proj"}
    else:
        if type(module) is not nn.Linear or set(module._parameters) != {"weight", "bias"}:
            return f"{name} is {kind}, and only a plain nn.Linear is split by {how}s"
        features = module.out_features if how == COLUMN else module.in_features
        if features % size:
            direction = "output" if how == COLUMN else "input"
            return f"{name} has {features} {direction} features, no multiple of {size}"
        inner = {name}
    for part in inner & tied.keys():
        return f"{part} shares a parameter with {tied[part]}"
    if module._forward_hooks or module._forward_pre_hooks or torch.nn.utils.parametrize.is_parametrized(module):
        return f"{name} has hooks or parametrizations"
    return None


def _given_plan(model: nn.Module, size: int, given: Mapping[str, str], tied: Mapping[str, str]) -> dict[str, str]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    plan: dict[str, str] = {}
    for pattern, how in given.items():
        if how not in (COLUMN, ROW, HEADS):
            raise ConfigError(f"plan={{{pattern!r}: {how!r}}} is unknown: choose 'column', 'row' or 'heads'")
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ConfigError(
                f"plan={{{pattern!r}: {how!r}}} matches no module of {type(model).__name__}: choose a pattern of their "
                f"names, such as {', '.join(map(repr, names[:5]))}"
            )
        for name in matches:
            if plan.setdefault(name, how) != how:
                raise ConfigError(f"plan splits {name} by {plan[name]} and by {how}: choose one")
            reason = _refusal(model, name, how, size, tied)
            if reason:
                raise ConfigError(
                    f"plan={{{pattern!r}: {how!r}}} cannot be split over tensor={size} ranks ({reason}): choose "
                    "another size, or leave it out"
                )
    ways = set(plan.values())
    if (COLUMN in ways) != (ROW in ways):
        alone, other = (COLUMN, ROW) if COLUMN in ways else (ROW, COLUMN)
        raise ConfigError(
            f"plan={dict(given)} splits by {alone} and nothing by {other}: name the layers on the other side, too"
        )
    for graph, prefix in _graphs(model):
        modules = dict(model.get_submodule(prefix).named_modules())
        for node in graph.nodes:
            if node.op == "call_module" and plan.get(_joined(prefix, node.target)) == COLUMN:
                _check_consumers(node, prefix, modules, plan)
    return plan


def _check_consumers(column: fx.Node, prefix: str, modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> None:
    """Refuse a column of which a trace shows, through elementwise functions, another end than a row."""
    ahead, name = list(column.users), _joined(prefix, column.target)
    while ahead:
        node = ahead.pop()
        if _is_elementwise(node, modules):
            ahead += node.users
        elif node.op == "output" and not prefix:
            raise ConfigError(
                f"plan splits {name} by column, and its output is the model's own: leave it out, or split the layer "
                "before it"
            )
        elif node.op == "call_module" and isinstance(modules[str(node.target)], nn.Linear):
            reader = _joined(prefix, node.target)
            if plan.get(reader) != ROW:
                raise ConfigError(f"plan splits {name} by column, and {reader}, which reads it, not by row: do so, too")


def _pairs(model: nn.Module) -> Iterator[tuple[list[str], list[str], str]]:
    """Names of all layers, of those by column and of the one by row, where that is proved."""
    for name, module in model.named_modules():
        if type(module) in _LAYERS and _is_elementwise_activation(module.activation):
            first, second = _joined(name, "linear1"), _joined(name, "linear2")
            yield [first, second], [first], second
    for graph, prefix in _graphs(model):
        modules = dict(model.get_submodule(prefix).named_modules())
        calls = Counter(id(modules[str(node.target)]) for node in graph.nodes if node.op == "call_module")
        for node in graph.nodes:
            if _is_linear(node, modules):
                columns = _columns_of(node, modules)
                layers = [*columns, node]
                if columns and all(calls[id(modules[str(layer.target)])] == 1 for layer in layers):
                    names = [_joined(prefix, layer.target) for layer in layers]
                    yield names, names[:-1], names[-1]


def _columns_of(row: fx.Node, modules: Mapping[str, nn.Module]) -> list[fx.Node]:
    """The linear layers whose outputs reach ``row`` through elementwise functions, and nothing else; or none."""
    columns: list[fx.Node] = []
    region: set[fx.Node] = set()
    behind = list(row.args[:1])
    while behind:
        node = behind.pop()
        if not isinstance(node, fx.Node):
            return []
        if node in region:
            continue
        region.add(node)
        if _is_linear(node, modules):
            columns.append(node)
        elif _is_elementwise(node, modules) and node.all_input_nodes:
            behind += node.all_input_nodes
        else:
            return []
    if any(user is not row and user not in region for node in region for user in node.users):
        return []
    if any(modules[str(column.target)].out_features != modules[str(row.target)].in_features for column in columns):
        return []  # broadcast against each other
    return columns


def _is_linear(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    return node.op == "call_module" and type(modules[str(node.target)]) is nn.Linear


def _is_elementwise(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return type(modules[str(node.target)]) in _ELEMENTWISE_MODULES
    if node.op == "call_method":
        return node.target in _ELEMENTWISE_METHODS
    return node.op == "call_function" and node.target in _ELEMENTWISE_FUNCTIONS


def _is_elementwise_activation(activation: Any) -> bool:
    return type(activation) in _ELEMENTWISE_MODULES or activation in _ELEMENTWISE_FUNCTIONS


class _Tracer(fx.Tracer):
    """Goes into containers and, where it shall, into modules of the user's own."""

    def __init__(self, goes_into_own: bool) -> None:
        super().__init__()
        self._goes_into_own = goes_into_own

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, nn.Sequential):
            return False
        return super().is_leaf_module(m, module_qualified_name) or not self._goes_into_own


def _graphs(model: nn.Module, prefix: str = "") -> Iterator[tuple[fx.Graph, str]]:
    """Traces that cover the model, with the name of the module that each is of; what cannot be traced is left out."""
    # The trace runs the user's code, which may write to its module: it gets a copy, without the weights' memory.
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for goes_into_own in (True, False):
        try:
            graph = _Tracer(goes_into_own).trace(copy.deepcopy(model, dict(memo)))
        except Exception:  # whatever the user's code raises of a stand-in for its input: it proves nothing
            continue
        yield graph, prefix
        if goes_into_own:
            return
        break
    for name, child in model.named_children():
        if not type(child).__module__.startswith("torch.nn") or isinstance(
            child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        ):
            yield from _graphs(child, _joined(prefix, name))


def _joined(prefix: str, name: Any) -> str:
    return f"{prefix}.{name}" if prefix else str(name)
