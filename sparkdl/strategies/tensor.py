"""The matrices of one layer cut over the ranks, by columns and then by rows: Shoeybi et al., Megatron-LM, 2019."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode

from sparkdl.errors import ConfigError
from sparkdl.strategies.tensor_plan import COLUMN, HEADS, QKV, ROW


def split(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Leave this rank's part of each module of ``plan`` in ``model``; every rank of ``mesh`` calls it.

    Parameters of these modules become ``DTensor``; those of a projection to query, key and value have the shapes
    ``(3, features, inputs)`` and ``(3, features)``. Each other parameter stays a plain tensor whose gradient is equal
    on all ranks of ``mesh``. What goes into a split region and what leaves it are plain tensors, equal on all ranks;
    within one the activations are ``DTensor``, so that code which is written for the whole shapes means the same.
    Forward and backward run within ``computing()``.

    Args:
        model: with the same weights on every rank.
        mesh: of one dimension.
        plan: what ``find_plan`` returned.

    Raises:
        ConfigError: in the forward pass, where a column's output leaves the model.
    """
    for name, split_kind in plan.items():
        module = model.get_submodule(name)
        if split_kind == HEADS:
            _split_attention(module, mesh)
        elif split_kind == QKV:
            module.__class__ = SplitQkv
            _split_packed(module, mesh, "weight", "bias")
        elif isinstance(module, nn.Embedding):
            _split_embedding(module, mesh, split_kind)
        else:
            _split_linear(module, mesh, split_kind)
    for module in model.modules():
        # This encoder would make nested tensors for layers on torch's fast path, which split ones never take.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    layers = (SplitColumn, SplitRow, SplitQkv, SplitAttention)  # whose gradients lie as their parameters do
    of_layers = {
        parameter
        for module in model.modules()
        if isinstance(module, layers)
        for parameter in module.parameters(recurse=False)
    }
    for parameter in model.parameters():
        if (parameter.is_floating_point() or parameter.is_complex()) and parameter not in of_layers:
            placements = parameter.placements if isinstance(parameter, DTensor) else None
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # for the hook alone: what is frozen now may be thawed
            parameter.register_hook(functools.partial(_laid_out, placements))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(is_trained)
    columns = [
        name
        for name, split_kind in plan.items()
        if split_kind in (COLUMN, QKV) and not isinstance(model.get_submodule(name), nn.Embedding)
    ]

    def refuse_parts(_: nn.Module, __: Any, output: Any) -> None:
        leaves: list[Any] = []
        torch.fx.node.map_aggregate(output, leaves.append)
        if any(isinstance(leaf, DTensor) for leaf in leaves):
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
    features = 0.0
    for name, split_kind in plan.items():
        module: Any = model.get_submodule(name)
        if split_kind == HEADS:
            features += 2 * module.embed_dim
        elif isinstance(module, nn.Embedding):
            # gathered, or added up
            features += module.embedding_dim / 2 if split_kind == COLUMN else module.embedding_dim
        else:
            features += module.out_features if split_kind == ROW else module.in_features
    return int(2 * (size - 1) * features * rows * itemsize / size)


def _split_linear(module: nn.Module, mesh: DeviceMesh, split_kind: str) -> None:
    module.__class__ = SplitColumn if split_kind == COLUMN else SplitRow
    _register_part(module, "weight", module.weight, mesh, Shard(0 if split_kind == COLUMN else 1))
    _register_part(module, "bias", module.bias, mesh, Shard(0) if split_kind == COLUMN else Replicate())


def _register_part(module: nn.Module, name: str, values: Any, mesh: DeviceMesh, placement: Placement) -> None:
    """Put this rank's part of ``values`` in the place of the parameter ``name``; None of ``values`` stays None."""
    if values is not None:
        part = distribute_tensor(values.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, getattr(module, name).requires_grad))


def _split_embedding(module: nn.Module, mesh: DeviceMesh, split_kind: str) -> None:
    style = (
        ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        if split_kind == COLUMN
        else RowwiseParallel(input_layouts=Replicate())
    )
    parallelize_module(module, mesh, style, src_data_rank=None)


def _split_packed(module: nn.Module, mesh: DeviceMesh, *names: str) -> None:
    """Give each rank its features of query, of key and of value."""
    for name in names:
        packed = getattr(module, name)
        if packed is not None:
            _register_part(module, name, packed.reshape(3, -1, *packed.shape[1:]), mesh, Shard(1))


def _split_attention(module: nn.Module, mesh: DeviceMesh) -> None:
    module.__class__ = SplitAttention
    _split_packed(module, mesh, "in_proj_weight", "in_proj_bias")
    assert isinstance(module.out_proj, nn.Linear)
    _split_linear(module.out_proj, mesh, ROW)
    # Hooks keep nn.TransformerEncoderLayer from its fast path, which would read the weights past this module.
    module.register_forward_hook(lambda *_: None)


def _laid_out(placements: tuple[Any, ...] | None, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as its parameter lies; None for a whole parameter, whose gradient a split region gives in parts.

    That of a split vocabulary comes whole, and would count on every rank in the norm.
    """
    if not isinstance(gradient, DTensor):
        return gradient
    if placements is None:
        return gradient.full_tensor()
    return gradient if gradient.placements == placements else gradient.redistribute(placements=placements)


class _SplitFunctions(TorchFunctionMode):
    """What torch itself does not do with tensors that are split."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and getattr(args[0], "packed_qkv", False):
            return _unpack(func, args, kwargs)
        if func in (F.dropout, torch.dropout) and isinstance(args[0], DTensor):
            return _dropout(*args, **{name: value for name, value in kwargs.items() if name != "inplace"})
        if func is F.scaled_dot_product_attention and any(isinstance(tensor, DTensor) for tensor in args[:3]):
            return _scaled_dot_product_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _unpack(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do with the output of ``SplitQkv``, which has this rank's query, key and value, what is meant for all features.

    Raises:
        ConfigError: it is neither split into three, nor viewed as ``(batch, positions, 3, heads, features)``.
    """
    packed, name = args[0], getattr(func, "__name__", "")
    if name in ("__get__", "size", "dim"):
        return func(*args, **kwargs)
    mesh, width, local = packed.device_mesh, packed.shape[-1], packed.to_local()
    if name in ("split", "chunk"):
        size_name = "chunks" if name == "chunk" else "split_size"
        by, axis = (*args[1:], *(kwargs[key] for key in (size_name, "dim") if key in kwargs), 0)[:2]
        if axis in (-1, packed.ndim - 1) and by in (3 if name == "chunk" else width // 3, [width // 3] * 3):
            return tuple(
                DTensor.from_local(part, mesh, [Shard(packed.ndim - 1)], run_check=False) for part in local.chunk(3, -1)
            )
    if name in ("view", "reshape"):
        shape = args[1] if len(args) == 2 else args[1:]
        if len(shape) == 5 and shape[2] == 3 and int(shape[3]) % mesh.size() == 0:
            features = width // 3 // int(shape[3])
            part = local.view(*local.shape[:2], 3, int(shape[3]) // mesh.size(), features)
            return DTensor.from_local(part, mesh, [Shard(3)], run_check=False)
    raise ConfigError(
        f"{name} reads what a layer that is split by 'qkv' gives, of shape {tuple(packed.shape)}: split it into three "
        "along the last dimension, or view it as (batch, positions, 3, heads, features)"
    )


class SplitColumn(nn.Linear):
    """A linear layer of whose output this rank has some features.

    It multiplies plain tensors, as the layers below do: an operation on a DTensor takes some 50 us more, and torch's
    ``ColwiseParallel`` does about ten of them in both passes.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's features, as a part of ``(..., features)``; ``input`` is whole, or a part by DTensor."""
        weight: Any = self.weight
        bias: Any = self.bias
        mesh = weight.device_mesh
        features = F.linear(_whole(input, mesh), part_of(weight), None if bias is None else part_of(bias))
        return DTensor.from_local(features, mesh, [Shard(features.ndim - 1)], run_check=False)


class SplitRow(nn.Linear):
    """A linear layer to which this rank gives its part of the input features; the outputs of all ranks are summed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the whole output, a plain tensor; ``input`` is whole, or a part by DTensor."""
        weight: Any = self.weight
        bias: Any = self.bias
        mesh = weight.device_mesh
        if not isinstance(input, DTensor):
            input = DTensor.from_local(input, mesh, [Replicate()], run_check=False)
        part = input.redistribute(placements=[Shard(input.ndim - 1)]).to_local()
        summands = DTensor.from_local(F.linear(part, part_of(weight)), mesh, [Partial()], run_check=False)
        output: torch.Tensor = summands.redistribute(placements=[Replicate()]).to_local()
        return output if bias is None else output + part_of(bias)


class SplitQkv(nn.Linear):
    """A linear layer to query, key and value, of each of which this rank has some heads."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's features of query, key and value, as a part of ``(..., 3 * features)``."""
        weight: Any = self.weight
        bias: Any = self.bias
        mesh = weight.device_mesh
        parts = part_of(weight).flatten(0, 1), None if bias is None else part_of(bias).flatten()
        states = F.linear(_whole(input, mesh), *parts)
        packed: Any = DTensor.from_local(states, mesh, [Shard(states.ndim - 1)], run_check=False)
        packed.packed_qkv = True
        return packed  # type: ignore[no-any-return]


def part_of(parameter: DTensor) -> torch.Tensor:
    """What this rank has of a parameter: the plain tensor that takes its gradient, where ``keep_part`` named one.

    A gradient that goes on to a DTensor costs three operations on it, some 0.1 ms a parameter and pass.
    """
    part: torch.Tensor | None = getattr(parameter, "part", None)
    if part is None:
        return parameter.to_local()
    return part.requires_grad_(parameter.requires_grad)  # which a callback may change


def keep_part(parameter: torch.nn.Parameter, part: torch.nn.Parameter) -> None:
    """Let ``part``, which is this rank's memory of ``parameter``, take the gradients of split layers."""
    parameter.part = part  # type: ignore[attr-defined]


def _whole(input: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The whole of a split region's input, a plain tensor whose gradient is summed over the ranks of ``mesh``."""
    if isinstance(input, DTensor):
        input = input.redistribute(placements=[Replicate()])
    else:
        input = DTensor.from_local(input, mesh, [Replicate()], run_check=False)
    summed: torch.Tensor = input.to_local(grad_placements=[Partial()])
    return summed


def _dropout(tensor: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Drop what one rank would: its mask is drawn whole, and this rank takes its part."""
    if not training or not p:
        return tensor
    mask = F.dropout(torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device), p)
    return tensor * DTensor.from_local(mask, tensor.device_mesh, [Replicate()], run_check=False).redistribute(
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
    hidden = scores.isneginf().all(-1, keepdim=True) & (not need_weights)
    weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
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
                copies[id(tensor)] = _whole(tensor, mesh)
        weights = part_of(packed)
        packed_bias: Any = self.in_proj_bias
        biases = [None] * 3 if packed_bias is None else part_of(packed_bias)
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
        additive_masks = [
            torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(mask, -math.inf)
            if mask.dtype == torch.bool
            else mask.to(query.dtype)
            for mask in masks
        ]
        return sum(additive_masks[1:], additive_masks[0]) if additive_masks else None
