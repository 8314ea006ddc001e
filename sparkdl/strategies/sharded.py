"""Parameters, gradients and optimizer state cut over ranks: ZeRO stages 2 and 3, by torch's ``fully_shard``."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from sparkdl.collective.pairwise import all_gather, reduce_scatter
from sparkdl.compat.view_outputs import copy_views
from sparkdl.nn.mixture import mixtures


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The parts of ``model`` that are gathered, or computed again, one at a time.

    These are the entries with parameters of its outermost lists and sequences of modules. A parameter that lies in two
    entries, or in one and elsewhere, stays with the model as a whole.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    blocks: list[torch.nn.Module] = []

    def look_into(module: torch.nn.Module) -> None:
        for child in module.children():
            if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
                look_into(child)
                continue
            inside = Counter(id(parameter) for _, parameter in child.named_parameters(remove_duplicate=False))
            if inside and all(owners[parameter] == count for parameter, count in inside.items()):
                blocks.append(child)

    look_into(model)
    return blocks


def recomputable(blocks: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules among ``blocks`` that may compute a batch twice: running statistics would count it twice."""
    return [
        block
        for block in blocks
        if not any(isinstance(module, _NormBase) and module.track_running_stats for module in block.modules())
    ]


def shard(
    model: torch.nn.Module | None,
    blocks: Iterable[torch.nn.Module],
    mesh: Any,
    *,
    keep_parameters: bool,
    offload: bool,
    expert_mesh: Any = None,
) -> Messages | None:
    """Cut the parameters of ``model`` over ``mesh``, in place: they are DTensors then.

    Args:
        model: whole, or cut by other dimensions before; equal on all ranks of ``mesh``; None where the blocks are all.
        blocks: of ``blocks_of``: each is gathered while it computes, what lies outside of them all the time.
        mesh: of one dimension, or of ``(data, shard)``: copies, each cut.
        keep_parameters: leave them gathered from the forward to the backward pass.
        offload: let the cut parameters, gradients and optimizer state wait in the host's memory.
        expert_mesh: what experts are cut over that ``expert.split`` has dealt already; None deals with none.

    Returns:
        On CPUs what counts the messages; None elsewhere.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    options: dict[str, Any] = {
        "reshard_after_forward": not keep_parameters,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    modules = [*blocks, *([model] if model is not None else [])]
    for module in modules:
        copy_views(module)
    dealt: dict[Any, None] = {}  # in one order on all ranks
    if expert_mesh is not None:
        dealt = dict.fromkeys(layer for module in modules for layer in mixtures(module).values())
    for layer in dealt:
        fully_shard(layer.gate, mesh=mesh, **options)
        fully_shard(layer, mesh=expert_mesh, **options)  # the gate has its own mesh, and what is left are the experts
    for module in modules:
        if module not in dealt:
            fully_shard(module, mesh=mesh, **options)
    if mesh.device_type != "cpu":
        return None
    messages = Messages()
    sharded: dict[Any, None] = dict.fromkeys([*modules, *dealt, *(layer.gate for layer in dealt)])
    for number, module in enumerate(sharded):
        module.set_custom_all_gather(_AllGather(messages, 2 * number))
        module.set_custom_reduce_scatter(_ReduceScatter(messages, 2 * number + 1))
    return messages


def ungather(model: torch.nn.Module) -> None:
    """Let the parameters of ``model`` be the parts that this rank has, wherever a forward pass left them gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Messages:
    """A checksum of what a rank gathered and scattered: messages meet by their order, whatever layers they are of."""

    def __init__(self) -> None:
        self._checksum = 0

    def count(self, *numbers: int) -> None:
        """Take in a message, or what else must be equal on all ranks."""
        self._checksum = zlib.crc32(repr(numbers).encode(), self._checksum)

    def differ(self, groups: Iterable[dist.ProcessGroup]) -> bool:
        """Whether those since the last call differ between ranks; all ranks of the product of ``groups`` call it."""
        bounds, self._checksum = torch.tensor([self._checksum] * 2), 0
        for group in groups:
            of_ranks = bounds.new_empty(2 * group.size())
            all_gather(of_ranks, bounds, group)
            bounds = torch.stack([of_ranks[::2].min(), of_ranks[1::2].max()])
        return bool(bounds[0] != bounds[1])


class _Buffers:
    """What ``fully_shard`` asks a collective for besides the call, which has ended when it returns, async or not."""

    def __init__(self, messages: Messages, number: int) -> None:
        self._messages, self._number = messages, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Buffers):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._messages.count(self._number, input_tensor.numel())
        all_gather(output_tensor, input_tensor, group)


class _ReduceScatter(_Buffers):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._messages.count(self._number, input_tensor.numel())
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)
            return
        reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
