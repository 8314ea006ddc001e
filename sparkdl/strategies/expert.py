"""The experts of each ``MixtureOfExperts`` dealt over ranks, and tokens sent to them by all-to-all (GShard, 2021)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparkdl.collective.pairwise import all_to_all
from sparkdl.errors import ConfigError
from sparkdl.nn.mixture import MixtureOfExperts, mixtures, run_experts, share_tokens


def check(model: torch.nn.Module, size: int) -> None:
    """Refuse a model whose experts do not go over ``size`` ranks; nothing changes, and no other rank is asked.

    Raises:
        ConfigError: the model has no ``MixtureOfExperts``, or the experts of one do not divide by ``size``.
    """
    layers = mixtures(model)
    if not layers:
        raise ConfigError(
            f"the model {type(model).__name__} has no sparkdl.nn.MixtureOfExperts, and experts are what {size} ranks "
            "would share: use that layer, or choose another strategy"
        )
    for name, layer in layers.items():
        if layer.experts % size:
            where = f"layer {name!r}" if name else "the mixture"
            raise ConfigError(
                f"the {layer.experts} experts of {where} do not divide by {size} ranks: give the layer a multiple of "
                f"{size} experts, or choose a number of ranks that divides {layer.experts}"
            )


def split(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank its part of the experts, in place; tokens travel to them and back in every forward pass.

    Rank r of R gets the experts ``[r * experts / R, (r + 1) * experts / R)``. Each expert parameter becomes a DTensor
    of the same shape and name, ``Shard(0)`` over ``mesh``; gate and other layers stay as they are, and so do mixtures
    on the meta device, which other stages of a pipeline hold. The model must be equal on all ranks, and the ranks read
    different rows, whose tokens are routed together (``share_tokens`` widens that where the readers of a global batch
    are more than the ranks of ``mesh``).

    Gradients: where each rank's loss is such that the mean over all readers is the global batch's, an expert's gradient
    has arrived from all ranks of ``mesh`` and is divided by their number already. It is left to average it over the
    other ranks that read, those that hold the same experts, and all other gradients over all readers.

    All ranks of ``mesh`` run every forward and backward pass together, in evaluation, too; one without rows runs them
    over a row that stands in for none (``stand_in``).

    Args:
        model: with at least one ``MixtureOfExperts``.
        mesh: one-dimensional.

    Raises:
        ConfigError: see ``check``.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    check(model, mesh.size())
    for layer in mixtures(model).values():
        if layer.weight_in.device.type == "meta":
            continue
        for name, parameter in layer.expert_parameters().items():
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(layer, name, torch.nn.Parameter(part, requires_grad=parameter.requires_grad))
        layer.runner = torch.compiler.disable(_ExpertRanks(layer, mesh.get_group()).run)  # type: ignore[no-untyped-call]
    share_tokens(model, GroupTokens(mesh.get_group()))


class GroupTokens:
    """The ranks of a process group, as ``share_tokens`` takes them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``rows``, which may differ in their first dimension alone."""
        count = torch.tensor(len(rows), device=rows.device)
        counts = [torch.empty_like(count) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(counts, count, group=self._group)
        lengths = torch.stack(counts).tolist()
        padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in lengths]
        if max(lengths):
            dist.all_gather(parts, padded, group=self._group)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]


class _ExpertRanks:
    """Runs the experts of one layer where they lie."""

    def __init__(self, layer: MixtureOfExperts, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self._experts = layer.experts // self._size  # of one rank
        self._layer = layer

    def run(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the outputs of rows that are sorted by expert, ``counts`` of each."""
        leaving = torch.tensor(counts, device=rows.device).view(self._size, self._experts)
        arriving = leaving.clone()  # from each rank, for each expert here; of a silent rank, as many as go to it
        dist.all_to_all_single(arriving, leaving, group=self._group)
        sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        arrived = _AllToAll.apply(rows, sent, received, self._group)  # type: ignore[no-untyped-call]
        # Rows lie by rank and then by expert, and are run by expert.
        expert_of = torch.arange(self._experts, device=rows.device).repeat(self._size)
        by_expert = expert_of.repeat_interleave(arriving.flatten()).argsort(stable=True)
        parameters = [_divided(parameter, self._size) for parameter in self._layer.expert_parameters().values()]
        outputs = run_experts(arrived[by_expert], arriving.sum(0).tolist(), parameters, self._layer.activation)
        back = outputs[by_expert.argsort()]
        result: torch.Tensor = _AllToAll.apply(back, received, sent, self._group)  # type: ignore[no-untyped-call]
        return result


def _divided(parameter: Any, size: int) -> torch.Tensor:
    """This rank's part of a parameter, whose gradient is the sum over ``size`` ranks' losses, and shall be the mean."""
    divided: torch.Tensor = _DividedGradient.apply(parameter.to_local(), size)  # type: ignore[no-untyped-call]
    return divided


class _DividedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / ctx.divisor, None


class _AllToAll(torch.autograd.Function):
    """Rows to their ranks; in the backward pass, their gradients the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        if rows.is_cpu:
            all_to_all(arrived, rows.contiguous(), received, sent, group)
        else:
            dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = _AllToAll.apply(gradients[0], ctx.received, ctx.sent, ctx.group)  # type: ignore[no-untyped-call]
        return back, None, None, None
