"""All-gather, reduce-scatter and all-to-all of tensors on CPUs, as messages from each rank to each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_LONG = 1 << 16
"""Bytes of a part from which more than two ranks gather sooner by gloo's own ring."""


def all_gather(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``output``, N times as long as ``part``, with every rank's ``part``, by rank; both are flat.

    Args:
        output: of which ``part`` may be this rank's place.
        part: as long on every rank.
        group: of N ranks.
    """
    if group.size() > 2 and part.nbytes >= _LONG:
        dist.all_gather_single(output, part, group=group)
        return
    parts = output.view(group.size(), -1)
    own = parts[group.rank()]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    _exchange(parts.unbind(), [part] * group.size(), group)


def give_to_all(parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Fill the parts of all other ranks with what they have there; any lengths, and any device.

    Args:
        parts: flat, by rank, as long on every rank; this rank's own is given.
        group: of the ranks.
    """
    if parts[group.rank()].device.type == "cpu":
        _exchange(parts, [parts[group.rank()]] * group.size(), group)
        return
    sources = [rank for rank, part in enumerate(parts) if part.numel()]
    for work in [dist.broadcast(parts[rank], group=group, group_src=rank, async_op=True) for rank in sources]:
        work.wait()


def reduce_scatter(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``output`` with the sum over all ranks of their ``whole``'s part for this rank, in the order of the ranks.

    Args:
        output: flat, an N-th of ``whole``.
        whole: flat; its parts lie by rank.
        group: of N ranks.
    """
    parts = whole.view(group.size(), -1)
    received = torch.empty_like(parts)
    received[group.rank()] = parts[group.rank()]
    _exchange(received.unbind(), parts.unbind(), group)
    torch.sum(received, 0, out=output)


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
    arriving, leaving = torch.split(output, list(received)), torch.split(rows, list(sent))
    arriving[group.rank()].copy_(leaving[group.rank()])
    _exchange(arriving, leaving, group)


def _exchange(received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Receive from each other rank of a group, and give it what is for it; nothing travels of empty tensors.

    A rank says that it can receive before it sends: gloo says so on the connection that it sends on, behind what it
    sends, so that of its own all-gather and all-to-all of two ranks one way follows the other; and its reduce-scatter
    is an all-reduce inside, which sends twice as much. Steps that wait for each other take as long for megabytes, and
    three times as long for a few bytes of eight ranks. ``tests/bench/bench_pairwise.py`` has the milliseconds of both.

    Args:
        received: tensors for what comes, by rank.
        sent: what goes, by rank.
        group: of the ranks; each begins with its neighbours, so that not all send to one at first.
    """
    rank, size = group.rank(), group.size()
    pending = []
    for step in range(1, size):
        source = (rank + step) % size
        if received[source].numel():
            pending.append(dist.irecv(received[source], group=group, group_src=source))
    for step in range(1, size):
        target = (rank - step) % size
        if sent[target].numel():
            pending.append(dist.isend(sent[target], group=group, group_dst=target))
    for work in pending:
        work.wait()  # type: ignore[union-attr]
