"""All-gather, reduce-scatter and all-to-all of tensors on CPUs, as exchanges of pairs, one after the other.

In step k of N - 1 a rank gets something of the rank k places on, and gives to the one k places back. It says that it
can receive before it sends: gloo says so on the connection that it sends on, behind what it sends, so that of its own
all-gather and all-to-all of two ranks one way follows the other; and its reduce-scatter is an all-reduce inside, which
sends twice as much. ``tests/bench/bench_pairwise.py`` has the milliseconds of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["all_gather", "all_to_all", "reduce_scatter"]


def all_gather(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``output``, N times as long as ``part``, with every rank's ``part``, by rank; both are flat.

    Args:
        output: of which ``part`` may be this rank's place.
        part: as long on every rank.
        group: of N ranks.
    """
    parts = output.view(group.size(), -1)
    rank = group.rank()
    if parts[rank].data_ptr() != part.data_ptr():
        parts[rank].copy_(part)
    for source, target in _partners(group):
        _exchange(parts[source], source, part, target, group)


def reduce_scatter(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``output`` with the sum over all ranks of their ``whole``'s part for this rank.

    Args:
        output: flat, an N-th of ``whole``.
        whole: flat; its parts lie by rank.
        group: of N ranks.
    """
    parts, received = whole.view(group.size(), -1), torch.empty_like(output)
    output.copy_(parts[group.rank()])
    for source, target in _partners(group):
        _exchange(received, source, parts[target], target, group)
        output.add_(received)


def all_to_all(
    output: torch.Tensor, rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> None:
    """Give each rank its rows.

    Args:
        output: ``(sum(received), ...)``; the rows of each rank, by rank.
        rows: ``(sum(sent), ...)``, for each rank, by rank; contiguous.
        received: rows that come from each rank.
        sent: rows that go to each rank.
        group: of the ranks.
    """
    rank = group.rank()
    arriving, leaving = torch.split(output, list(received)), torch.split(rows, list(sent))
    arriving[rank].copy_(leaving[rank])
    for source, target in _partners(group):
        _exchange(arriving[source], source, leaving[target], target, group)


def _partners(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Who gives to this rank and whom it gives to, step by step."""
    rank, size = group.rank(), group.size()
    return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]


def _exchange(received: torch.Tensor, source: int, sent: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
    """Receive from one rank of a group what another gets from this one; nothing travels of empty tensors."""
    pending = []
    if received.numel():
        pending.append(dist.irecv(received, group=group, group_src=source))
    if sent.numel():
        pending.append(dist.isend(sent, group=group, group_dst=target))
    for work in pending:
        work.wait()  # type: ignore[union-attr]
