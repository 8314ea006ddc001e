"""The matrices of one layer cut over the ranks, by columns and then by rows: Shoeybi et al., Megatron-LM, 2019."""

from __future__ import annotations

import copy
import fnmatch
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sparkdl.errors import ConfigError

__all__ = ["COLUMN", "HEADS", "ROW", "SplitAttention", "bytes_per_step", "computing", "find_plan", "split"]

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


def split(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Leave this rank's part of each module of ``plan`` in ``model``; every rank of ``mesh`` calls it.

    Parameters of these modules become ``DTensor``; those of an attention's input projection have the shapes
    ``(3, embed, embed)`` and ``(3, embed)``. Each other parameter stays a plain tensor whose gradient is equal on all
    ranks of ``mesh``. What goes into a split region and what leaves it are plain tensors, equal on all ranks; within
    one the activations are ``DTensor``, so that code which is written for the whole shapes means the same. Forward and
    backward run within ``computing()``.

    Args:
        model: with the same weights on every rank.
        mesh: of one dimension.
        plan: what ``find_plan`` returned.

    Raises:
        ConfigError: in the forward pass, where a column's output leaves the model.
    """
    for name, how in plan.items():
        module = model.get_submodule(name)
        if how == HEADS:
            _split_attention(module, mesh)
        else:
            _split_linear(module, mesh, how)
    for module in model.modules():
        # This encoder would make nested tensors for layers on torch's fast path, which split ones never take.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_hook(_whole_gradient)  # type: ignore[no-untyped-call]
    columns = [name for name, how in plan.items() if how == COLUMN]

    def refuse_parts(_: nn.Module, __: Any, output: Any) -> None:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(output)):
            raise ConfigError(
                f"a part of the features leaves the model, since no row joins what a column of {columns} gives: split "
                'the layer that reads it by "row", or leave that column out of the plan'
            )

    model.register_forward_hook(refuse_parts)


@contextmanager
def computing() -> Iterator[None]:
    """Run forward and backward of a split model within: plain tensors that meet split ones count as equal on all ranks.

    Dropout draws the whole mask from the default generator, of which each rank takes its part, so that ranks which are
    seeded alike drop what one rank would. Other random functions within a split region draw alike on all ranks.
    """
    with ExitStack() as contexts:
        if torch.is_inference_mode_enabled():
            # There torch gives DTensor composite functions whole, such as matmul, for which it gathers all heads.
            contexts.enter_context(torch.inference_mode(False))
            contexts.enter_context(torch.no_grad())
        contexts.enter_context(implicit_replication())
        contexts.enter_context(_SplitFunctions())
        yield


def bytes_per_step(model: nn.Module, plan: Mapping[str, str], size: int, rows: int, itemsize: int = 4) -> int:
    """Return the bytes that one rank sends for one forward and backward pass, by rings of all-reduces.

    Each row joins its outputs in the forward pass; each column, and each attention once, adds up the gradient of its
    input in the backward pass, as far as that input needs one: this counts as if all did, and self-attention that
    returns no weights.

    Args:
        model: whole or split.
        plan: what ``find_plan`` returned.
        size: number of ranks.
        rows: vectors that go through each module: rows of the batch, times positions of a sequence.
        itemsize: bytes of one number of the activations.
    """
    features = 0
    for name, how in plan.items():
        module: Any = model.get_submodule(name)
        if how == HEADS:
            features += 2 * module.embed_dim
        else:
            features += module.in_features if how == COLUMN else module.out_features
    return 2 * (size - 1) * features * rows * itemsize // size


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


def _split_linear(module: nn.Module, mesh: DeviceMesh, how: str) -> None:
    style = (
        ColwiseParallel(use_local_output=False)
        if how == COLUMN
        else RowwiseParallel(input_layouts=Replicate())  # of a plain input; a split one comes as DTensor
    )
    parallelize_module(module, mesh, style, src_data_rank=None)


def _split_attention(module: nn.Module, mesh: DeviceMesh) -> None:
    module.__class__ = SplitAttention
    embed = module.embed_dim
    for name in ("in_proj_weight", "in_proj_bias"):
        whole = getattr(module, name)
        if whole is not None:
            packed = whole.detach().reshape(3, embed, *whole.shape[1:])  # each rank has its heads of q, of k and of v
            part = distribute_tensor(packed, mesh, [Shard(1)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, whole.requires_grad))
    assert isinstance(module.out_proj, nn.Linear)
    _split_linear(module.out_proj, mesh, ROW)
    # Hooks keep nn.TransformerEncoderLayer from its fast path, which would read the weights past this module.
    module.register_forward_hook(lambda *_: None)


def _whole_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a whole parameter that a split region uses is in parts."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class _SplitFunctions(TorchFunctionMode):
    """What torch itself does not do with tensors that are split."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout) and isinstance(args[0], DTensor):
            return _dropout(*args, **{name: value for name, value in kwargs.items() if name != "inplace"})
        if func is F.scaled_dot_product_attention and any(isinstance(tensor, DTensor) for tensor in args[:3]):
            return _scaled_dot_product_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(tensor: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Drop what one rank would: its mask is drawn whole, and this rank takes its part."""
    if not training or not p:
        return tensor
    kept = F.dropout(torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device), p)
    return tensor * DTensor.from_local(kept, tensor.device_mesh, [Replicate()], run_check=False).redistribute(
        placements=tensor.placements
    )


def _scaled_dot_product_attention(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend with the heads of this rank, which are dimension 1 of ``(batch, heads, positions, features)``."""
    split_by_heads = [tuple(getattr(tensor, "placements", ())) == (Shard(1),) for tensor in (query, key, value)]
    if not all(split_by_heads) or query.dim() != 4 or isinstance(attn_mask, DTensor):
        raise ConfigError(
            "scaled_dot_product_attention in a split region takes (batch, heads, positions, features) of query, key "
            "and value, split by heads: split all three projections by column and give whole heads to each rank"
        )
    mesh = query.device_mesh
    if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1:
        attn_mask = attn_mask.chunk(mesh.size(), -3)[mesh.get_local_rank()]
    attended = _attend(
        *(tensor.to_local() for tensor in (query, key, value)),
        mask=attn_mask,
        dropout=dropout_p,
        is_causal=is_causal,
        scale=scale,
        mesh=mesh,
        enable_gqa=enable_gqa,
    )[0]
    # The whole tensor's strides are worked out from the part's, which say too little where a rank has one head.
    return DTensor.from_local(attended.contiguous(), mesh, [Shard(1)], run_check=False)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    dropout: float,
    mesh: DeviceMesh,
    is_causal: bool = False,
    scale: float | None = None,
    need_weights: bool = False,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what this rank's heads attend to, ``(batch, heads, positions, features)``, and by which weights."""
    if not dropout and not need_weights:
        return (
            F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            ),
            None,
        )
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], device=scores.device).tril() == 0, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # Positions that may attend to none get 0 from torch's fused kernels, and NaN where weights are asked for.
    weights = scores.softmax(-1) if need_weights else torch._safe_softmax(scores, -1)
    if dropout:
        # The fused kernels draw alike on all ranks; one rank's mask has all heads.
        batch, heads, *positions = weights.shape
        ones = torch.ones(batch, heads * mesh.size(), *positions, dtype=weights.dtype, device=weights.device)
        weights = weights * F.dropout(ones, dropout).chunk(mesh.size(), 1)[mesh.get_local_rank()]
    return weights @ value, weights


class SplitAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` of which this rank has some heads; its arguments and outputs are the same."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with this rank's heads, then join those of all ranks."""
        packed: Any = self.in_proj_weight
        mesh = packed.device_mesh
        if is_causal and attn_mask is None:
            raise ConfigError("is_causal=True is a hint about attn_mask, which is None: give the mask, too")
        batched = query.dim() == 3
        copies: dict[int, torch.Tensor] = {}  # one sum of gradients for each tensor that comes in
        for tensor in (query, key, value):
            if id(tensor) not in copies:
                copies[id(tensor)] = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(
                    grad_placements=[Partial()]
                )
        weights = packed.to_local()
        packed_bias: Any = self.in_proj_bias
        biases = [None] * 3 if packed_bias is None else packed_bias.to_local()
        projected = []
        for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True):
            states = F.linear(copies[id(tensor)], weight, bias)
            if not batched:
                states = states.unsqueeze(0)
            elif not self.batch_first:
                states = states.transpose(0, 1)
            projected.append(states.view(*states.shape[:2], -1, self.head_dim).transpose(1, 2))
        mask = self._mask(attn_mask, key_padding_mask, projected[0], batched, mesh)
        attended, attention = _attend(
            *projected, mask=mask, dropout=self.dropout if self.training else 0.0, mesh=mesh, need_weights=need_weights
        )
        # Positions lead, as in torch's own, so that a dropout behind this layer draws in the same order.
        joined = attended.permute(2, 0, 1, 3).flatten(2).contiguous()  # (positions, batch, features of these heads)
        output = self.out_proj(DTensor.from_local(joined, mesh, [Shard(-1)], run_check=False))
        if not batched:
            output = output.squeeze(1)
        elif self.batch_first:
            output = output.transpose(0, 1)
        if not need_weights or attention is None:
            return output, None
        attention = DTensor.from_local(attention, mesh, [Shard(1)], run_check=False).full_tensor()
        if average_attn_weights:
            attention = attention.mean(1)
        return output, attention if batched else attention.squeeze(0)

    def _mask(
        self,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        query: torch.Tensor,
        batched: bool,
        mesh: DeviceMesh,
    ) -> torch.Tensor | None:
        """One mask that is added to the scores, which broadcasts to ``(batch, heads, positions, positions)``."""
        masks = []
        if attn_mask is not None:
            if attn_mask.dim() == 3:  # (batch * heads, positions, positions)
                attn_mask = attn_mask.reshape(-1, self.num_heads, *attn_mask.shape[1:])
                attn_mask = attn_mask.chunk(mesh.size(), 1)[mesh.get_local_rank()]
            masks.append(attn_mask)
        if key_padding_mask is not None:
            masks.append((key_padding_mask if batched else key_padding_mask.unsqueeze(0))[:, None, None, :])
        added = [
            torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(mask, -math.inf)
            if mask.dtype == torch.bool
            else mask.to(query.dtype)
            for mask in masks
        ]
        return sum(added[1:], added[0]) if added else None
