"""The modules of a model that a tensor group splits: found in traces of its forward, or named by the user."""

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

COLUMN, ROW, HEADS, QKV = "column", "row", "heads", "qkv"
"""A linear layer by its output features, one by its input features, ``nn.MultiheadAttention`` by its heads, and a
linear layer whose output features are those of query, key and value, one behind the other, by those of each. An
embedding is split by columns (its features) or by rows (its vocabulary)."""

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
_BY_HEAD_MODULES = (nn.Dropout, nn.Identity, nn.Softmax)
_BY_HEAD_FUNCTIONS = {
    F.dropout, F.scaled_dot_product_attention, F.softmax, torch.cat, torch.chunk, torch.matmul, torch.softmax,
    torch.split, torch.transpose, torch.add, torch.mul, operator.add, operator.getitem, operator.matmul, operator.mul,
    operator.neg, operator.sub, operator.truediv,
}  # fmt: skip
_BY_HEAD_METHODS = {
    "add", "chunk", "contiguous", "div", "flatten", "masked_fill", "matmul", "mul", "permute", "reshape", "softmax",
    "split", "transpose", "unbind", "unflatten", "view",
}  # fmt: skip
_SOFTMAX = {F.softmax, torch.softmax, F.scaled_dot_product_attention, "softmax"}
_SHAPES = {"dim", "size"}


def find_plan(model: nn.Module, size: int, patterns: Mapping[str, str] | None = None) -> dict[str, str]:
    """Say which modules of ``model`` are split over ``size`` ranks, and how; it needs no ranks.

    Without ``patterns``, a trace by ``torch.fx`` shows what is split: pairs of linear layers between which only
    elementwise functions stand, and the projections of an attention of the user's own, which are viewed as heads, meet
    in a softmax or in ``scaled_dot_product_attention``, and are read by one linear layer. So are the linear layers of
    torch's transformer layers, and ``nn.MultiheadAttention``. The rest stays whole, embeddings, too.

    Args:
        model: the whole model; nothing of it is changed.
        size: number of ranks, 2 or more.
        patterns: by pattern of module names (as of ``fnmatch``), ``"column"``, ``"row"``, ``"heads"`` or ``"qkv"``:
            exactly these are split, such as ``{"*.c_attn": "qkv", "*.c_proj": "row", "wte": "row"}``.

    Returns:
        By module name ``"column"``, ``"row"``, ``"heads"`` or ``"qkv"``.

    Raises:
        ConfigError: nothing can be split, or something of ``patterns`` cannot.
    """
    tied = _tied_modules(model)
    if patterns is not None:
        return _given_plan(model, size, patterns, tied)
    plan: dict[str, str] = {}
    reasons: list[str] = []
    for layers, heads in _regions(model):
        reason = next(
            filter(None, (_refusal(model, name, split_kind, size, tied) for name, split_kind in layers.items())), None
        )
        odd = next((name for name, count in heads.items() if count % size), None)
        if reason is None and odd is not None:
            reason = f"{odd} gives {heads[odd]} heads, no multiple of {size}"
        if reason:
            reasons.append(reason)
        elif not plan.keys() & layers.keys():
            plan |= layers
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            reason = _refusal(model, name, HEADS, size, tied)
            if reason:
                reasons.append(reason)
            else:
                plan[name] = HEADS
    if not plan:
        why = "; ".join(dict.fromkeys(reasons)) or (
            "it has no attention whose projections a trace shows, and no two linear layers between which it shows "
            "nothing but elementwise functions"
        )
        raise ConfigError(
            f"tensor={size} finds nothing to split in {type(model).__name__} ({why}): choose another size, or name the "
            'modules, as in plan={"*.fc1": "column", "*.fc2": "row"}'
        )
    return plan


def _tied_modules(model: nn.Module) -> dict[str, str]:
    """The other name of a shared parameter, by name of a module that shares it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = [group_names for group_names in names.values() if len(group_names) > 1]
    return {
        name.rpartition(".")[0]: next(other_name for other_name in group if other_name != name)
        for group in shared
        for name in group
    }


def _refusal(model: nn.Module, name: str, split_kind: str, size: int, tied: Mapping[str, str]) -> str | None:
    """Why the module ``name`` cannot be split so; None where it can."""
    module: Any = model.get_submodule(name)
    kind = type(module).__name__
    if split_kind == HEADS:
        if type(module) is not nn.MultiheadAttention:
            return f"{name} is {kind}, and only nn.MultiheadAttention is split by heads"
        if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
            return f"{name} has add_bias_kv, add_zero_attn, kdim or vdim, which are not split"
        if module.num_heads % size:
            return f"{name} has {module.num_heads} heads, no multiple of {size}"
        split_modules = {name, f"{name}.out_proj"}
    elif type(module) is nn.Embedding and split_kind in (COLUMN, ROW):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return f"{name} has max_norm, scale_grad_by_freq or sparse, which are not split"
        if split_kind == COLUMN and module.embedding_dim % size:
            return f"{name} has {module.embedding_dim} features, no multiple of {size}"
        if split_kind == ROW and module.padding_idx is not None:
            return f"{name} has padding_idx, which a split vocabulary does not know: split it by column"
        split_modules = {name}
    else:
        if type(module) is not nn.Linear or set(module._parameters) != {"weight", "bias"}:
            return f"{name} is {kind}, and only a plain nn.Linear is split by {split_kind}s"
        features = module.in_features if split_kind == ROW else module.out_features
        if split_kind == QKV and features % 3:
            return f"{name} has {features} output features, and those of query, key and value would be a multiple of 3"
        if features % (3 * size if split_kind == QKV else size):
            direction = "input" if split_kind == ROW else "output"
            return (
                f"{name} has {features} {direction} features, no multiple of {3 * size if split_kind == QKV else size}"
            )
        split_modules = {name}
    for part in split_modules & tied.keys():
        return f"{part} shares a parameter with {tied[part]}"
    if module._forward_hooks or module._forward_pre_hooks or torch.nn.utils.parametrize.is_parametrized(module):
        return f"{name} has hooks or parametrizations"
    return None


def _given_plan(model: nn.Module, size: int, patterns: Mapping[str, str], tied: Mapping[str, str]) -> dict[str, str]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    plan: dict[str, str] = {}
    for pattern, split_kind in patterns.items():
        if split_kind not in (COLUMN, ROW, HEADS, QKV):
            raise ConfigError(
                f"plan={{{pattern!r}: {split_kind!r}}} is unknown: choose 'column', 'row', 'heads' or 'qkv'"
            )
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ConfigError(
                f"plan={{{pattern!r}: {split_kind!r}}} matches no module of {type(model).__name__}: choose a pattern "
                f"of their names, such as {', '.join(map(repr, names[:5]))}"
            )
        for name in matches:
            if plan.setdefault(name, split_kind) != split_kind:
                raise ConfigError(f"plan splits {name} by {plan[name]} and by {split_kind}: choose one")
            reason = _refusal(model, name, split_kind, size, tied)
            if reason:
                raise ConfigError(
                    f"plan={{{pattern!r}: {split_kind!r}}} cannot be split over tensor={size} ranks ({reason}): choose "
                    "another size, or leave it out"
                )
    linear = {name: split_kind for name, split_kind in plan.items() if isinstance(model.get_submodule(name), nn.Linear)}
    begins, ends = bool({COLUMN, QKV} & set(linear.values())), ROW in linear.values()
    if begins != ends:
        present_kind, missing_kind = (COLUMN, ROW) if begins else (ROW, COLUMN)
        raise ConfigError(
            f"plan={dict(patterns)} splits by {present_kind} and nothing by {missing_kind}: name the layers "
            "on the other side, too"
        )
    for graph, prefix in _graphs(model):
        modules = dict(model.get_submodule(prefix).named_modules())
        for node in graph.nodes:
            if node.op == "call_module" and linear.get(_joined(prefix, node.target)) == COLUMN:
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


def _regions(model: nn.Module) -> Iterator[tuple[dict[str, str], dict[str, int]]]:
    """How the layers of a region are split, where a trace proves that they can be, and the heads that some give."""
    for name, module in model.named_modules():
        if type(module) in _LAYERS and _is_elementwise_activation(module.activation):
            first, second = _joined(name, "linear1"), _joined(name, "linear2")
            yield {first: COLUMN, second: ROW}, {}
    for graph, prefix in _graphs(model):
        modules = dict(model.get_submodule(prefix).named_modules())
        calls = Counter(id(modules[str(node.target)]) for node in graph.nodes if node.op == "call_module")
        for node in graph.nodes:
            if not _is_linear(node, modules):
                continue
            heads: dict[str, int] = {}
            split_kinds = dict.fromkeys(_columns_of(node, modules), COLUMN)
            if not split_kinds:
                attention = _attention_of(node, modules)
                split_kinds = {column: split_kind for column, (split_kind, _) in attention.items()}
                heads = {_joined(prefix, column.target): count for column, (_, count) in attention.items()}
            layers = split_kinds | {node: ROW}
            if split_kinds and all(calls[id(modules[str(layer.target)])] == 1 for layer in layers):
                yield {_joined(prefix, layer.target): split_kind for layer, split_kind in layers.items()}, heads


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


def _attention_of(row: fx.Node, modules: Mapping[str, nn.Module]) -> dict[fx.Node, tuple[str, int]]:
    """The projections of the attention that ``row`` joins, how each is split, and into how many heads; or none.

    Within, each operation works on heads by themselves: DTensor gives its meaning, and nothing is exchanged.
    """
    projections: dict[fx.Node, None] = {}
    region: set[fx.Node] = set()
    behind = list(row.all_input_nodes)
    while behind:
        node = behind.pop()
        if node in region or node in projections:
            continue
        if _is_linear(node, modules):
            projections[node] = None
        elif _keeps_heads(node, modules, row):
            region.add(node)
            behind += node.all_input_nodes
    # Masks, scales and lengths are whole on every rank: what no projection reaches is none of the region.
    reached = set(projections)
    for node in row.graph.nodes:  # in the order of their calls
        if node in region and reached.intersection(node.all_input_nodes):
            reached.add(node)
    region &= reached
    leaves = any(
        user is not row and user not in region and not _reads_shape(user) for node in reached for user in node.users
    )
    # A query, key or value that no projection gives as heads is whole on every rank, and the others are not.
    mixes = any(node not in reached for product in region & reached for node in _multiplied(product))
    if leaves or mixes or not any(_is_softmax(node, modules) for node in region):
        return {}
    split: dict[fx.Node, tuple[str, int]] = {}
    for projection in projections:
        layer: Any = modules[str(projection.target)]
        split_kind, heads = _heads_of(projection, layer.out_features)
        if not heads or layer.out_features // (3 if split_kind == QKV else 1) % heads:
            return {}
        split[projection] = split_kind, heads
    return split


def _heads_of(projection: fx.Node, features: int) -> tuple[str, int]:
    """How a projection is viewed as heads: by column, or as query, key and value; 0 heads where no trace says it."""
    split_kind, views = COLUMN, [user for user in projection.users if not _reads_shape(user)]
    if len(views) == 1 and views[0].op != "call_module" and _name_of(views[0]) in ("split", "chunk"):
        pieces = [user for user in views[0].users if not _reads_shape(user)]
        by = views[0].args[1] if len(views[0].args) > 1 else None
        unequal = isinstance(by, tuple | list) or (isinstance(by, int) and by not in (3, features // 3))
        if len(pieces) != 3 or unequal or any(piece.target is not operator.getitem for piece in pieces):
            return COLUMN, 0
        split_kind, views = QKV, [user for piece in pieces for user in piece.users if not _reads_shape(user)]
    counts: set[int] = set()
    for view in views:
        shape = list(view.args[1:])
        if _name_of(view) == "unflatten" and len(shape) == 2 and isinstance(shape[1], tuple | list):
            shape = [None, None, *shape[1]]
        elif _name_of(view) not in ("view", "reshape"):
            return COLUMN, 0
        elif len(shape) == 1 and isinstance(shape[0], tuple | list):
            shape = list(shape[0])
        if len(shape) == 5 and shape[2] == 3 and split_kind == COLUMN and len(views) == 1:
            split_kind, shape = QKV, [*shape[:2], *shape[3:]]
        counts.add(shape[2] if len(shape) == 4 and isinstance(shape[2], int) and shape[2] > 0 else 0)
    return split_kind, counts.pop() if len(counts) == 1 else 0


def _multiplied(node: fx.Node) -> list[Any]:
    """What an attention multiplies head by head."""
    if node.target is F.scaled_dot_product_attention:
        return [*node.args, *(node.kwargs[name] for name in ("query", "key", "value") if name in node.kwargs)][:3]
    return list(node.args[:2]) if node.target in (torch.matmul, operator.matmul, "matmul") else []


def _name_of(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def _keeps_heads(node: fx.Node, modules: Mapping[str, nn.Module], row: fx.Node) -> bool:
    """Whether ``node`` works on each head by itself, once features are viewed as heads."""
    if node.op == "call_module":
        module: Any = modules[str(node.target)]
        if type(module) in (nn.LayerNorm, nn.RMSNorm):  # of a head, not of all features
            joined: Any = modules[str(row.target)]
            return bool(module.normalized_shape != (joined.in_features,))
        return type(module) in _BY_HEAD_MODULES
    if node.op == "call_method":
        return node.target in _BY_HEAD_METHODS
    return node.op == "call_function" and node.target in _BY_HEAD_FUNCTIONS


def _is_softmax(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    return node.target in _SOFTMAX or (node.op == "call_module" and type(modules[str(node.target)]) is nn.Softmax)


def _reads_shape(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target in _SHAPES) or (
        node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")
    )


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

    proxy_buffer_attributes = True  # masks that are cut to a length of the input

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
