"""The agreement of ranks before they exchange tensors: shapes, dtypes, and the state of an optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from sparkdl.collective.base import Ranks, as_bytes
from sparkdl.errors import CheckpointError, ConfigError

Named = Sequence[tuple[str, torch.Tensor]]
Description = list[tuple[str, tuple[int, ...], str]]


def agree_on_tensors(ranks: Ranks, named: Named) -> None:
    """Check that every rank holds tensors of the same names, shapes and dtypes in the same order.

    One small message where they do; the descriptions travel only where the hashes differ.

    Raises:
        CheckpointError: they differ; every rank raises the same sentence, which names the first tensor that does.
        ConfigError: a tensor is sparse, or lazy and without a shape so far.
    """
    unusable = next((name for name, tensor in named if not _is_plain(tensor)), None)
    own_layout = [] if unusable else [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    digest = hashlib.sha256(f"{unusable} {own_layout}".encode()).digest()
    digests = ranks.gather_rows(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    if all(torch.equal(peer_digest, digests[0]) for peer_digest in digests):
        if unusable:
            raise ConfigError(_unusable(unusable))
        return
    everyone: list[tuple[str | None, Description]] = ranks.all_gather_object((unusable, own_layout))
    for rank, (bad, _) in enumerate(everyone):
        if bad:
            raise ConfigError(f"rank {rank}: {_unusable(bad)}")
    raise CheckpointError(_difference([description for _, description in everyone]))


def _is_plain(tensor: torch.Tensor) -> bool:
    lazy = isinstance(tensor, UninitializedTensorMixin)
    return not lazy and tensor.layout == torch.strided


def _unusable(name: str) -> str:
    return f"{name} is lazy or sparse and has no fixed memory: run one batch through the model first"


def _difference(everyone: list[Description]) -> str:
    first = everyone[0]
    for rank, peer in enumerate(everyone):
        for leader_tensor, peer_tensor in zip(first, peer, strict=False):
            if leader_tensor != peer_tensor:
                return (
                    f"{leader_tensor[0]} is {leader_tensor[1]} of {leader_tensor[2]} on rank 0, but rank {rank} has "
                    f"{peer_tensor[0]} {peer_tensor[1]} of {peer_tensor[2]} there: build the same model on every rank"
                )
        if len(first) != len(peer):
            longer, holder = (first, 0) if len(first) > len(peer) else (peer, rank)
            extra = longer[min(len(first), len(peer))]
            return (
                f"rank 0 has {len(first)} tensors and rank {rank} has {len(peer)}: {extra[0]} {extra[1]} exists on "
                f"rank {holder} alone; build the same model on every rank"
            )
    raise AssertionError("descriptions with different hashes are equal")


def named_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    """Every parameter to keep equal, once, with its name: the model's, then those that only the optimizer knows."""
    names = {param: name for name, param in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            names.setdefault(param, f"optimizer group {number}, parameter {index}")
    return names


def share_optimizer(ranks: Ranks, optimizer: torch.optim.Optimizer) -> None:
    """Give every rank the state and the hyperparameters of rank 0's ``optimizer``.

    Its structure travels as an object, its tensors as bytes. Nothing is loaded where rank 0 has nothing to give.

    Raises:
        CheckpointError: the ranks' parameter groups differ.
    """
    counts = ranks.all_gather_object([len(g["params"]) for g in optimizer.param_groups])
    for rank, sizes in enumerate(counts):
        if sizes != counts[0]:
            raise CheckpointError(
                f"the optimizer of rank 0 has groups of {counts[0]} parameters and that of rank {rank} of {sizes}: "
                "build the same optimizer on every rank"
            )
    leader = ranks.world.rank == 0
    leader_tensors: list[torch.Tensor] = []
    outline = _outline(optimizer.state_dict(), leader_tensors) if leader else None
    outline = ranks.broadcast_object(outline)
    device = ranks.world.device
    tensors = leader_tensors if leader else []
    if not leader:
        filled = _fill(outline, tensors, device)
    staged = [tensor.to(device) for tensor in tensors] if leader else tensors
    ranks.broadcast_unchecked(staged)
    if not leader:
        optimizer.load_state_dict(filled)


class _Shape(tuple[Any, ...]):
    """Stands for a tensor in an outline: ``(shape, dtype, on_cpu)``."""


def _outline(value: Any, into: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        into.append(value.detach())
        return _Shape((tuple(value.shape), value.dtype, value.device.type == "cpu"))
    if isinstance(value, dict):
        return {key: _outline(item, into) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_outline(item, into) for item in value)
    return value


def _fill(value: Any, into: list[torch.Tensor], device: str) -> Any:
    if isinstance(value, _Shape):
        shape, dtype, _ = value
        into.append(torch.empty(shape, dtype=dtype, device=device))
        return into[-1]
    if isinstance(value, dict):
        return {key: _fill(item, into, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fill(item, into, device) for item in value)
    return value


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of ``tensors``, one after the other, as one new flat tensor on their device."""
    return torch.cat([as_bytes(tensor) for tensor in tensors])


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite ``tensors`` with the bytes that ``pack`` of equal tensors returned."""
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        # A slice may start at any byte, and a view as a wider dtype must not: copy into an aligned tensor.
        part = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        as_bytes(part).copy_(flat[offset : offset + size])
        tensor.detach().copy_(part)
        offset += size
