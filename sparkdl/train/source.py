"""What the loop asks of its batches.

Two Protocols, which ``batches.reading.loader`` and ``train.in_memory`` satisfy, and which a loader of a user's own may
satisfy as well.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from typing import Any, Protocol, runtime_checkable

import torch

__all__ = ["BatchLike", "BatchSource", "end_epoch"]


class BatchLike(Protocol):
    """One rank's part of one global batch: named tensors that share their first dimension.

    Attributes:
        epoch: epoch the batch belongs to.
        step: position of the batch in its epoch, from 0, equal on all ranks.
        rows: rows of this rank; 0 for an empty part.
        global_rows: rows of all ranks together, at least 1.
        weight: ``rows * world_size / global_rows``. The mean over ranks of ``weight * local mean`` is the mean over the
            global batch.
    """

    epoch: int
    step: int
    rows: int
    global_rows: int
    weight: float

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor ``name``."""
        ...

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor ``name``."""
        ...

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Names and tensors."""
        ...


@runtime_checkable
class BatchSource(Protocol):
    """Batches of an epoch, as many on every rank, in an order that its seed and the epoch fix.

    A source may also have ``bounds(name)``, the least and greatest value of a tensor over the whole set, or None: where
    it shows that no class label is ignored, a loss over classes spares its ranks an exchange a step. And it may have
    ``end_epoch()``, which raises if what it gave of the epoch that was just left, whole or not, was damaged.
    """

    def __len__(self) -> int:
        """Batches of a whole epoch, equal on all ranks."""
        ...

    def __iter__(self) -> Iterator[BatchLike]:
        """Yield what is left of the epoch."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Start over at the first batch of ``epoch``."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which counts the batches that were handed out; JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position that ``state_dict`` returned, perhaps at another world size."""
        ...


def end_epoch(source: BatchSource) -> None:
    """Let a source that can tell raise what it found wrong with the epoch that was just left."""
    check = getattr(source, "end_epoch", None)
    if check is not None:
        check()
