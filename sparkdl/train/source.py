"""The batches that the trainer asks for, and their way to where the model computes."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from sparkdl.batches.reading.batch import Batch


class BatchLike(Protocol):
    """One rank's part of one global batch: named tensors that share their first dimension.

    Attributes:
        epoch: epoch the batch belongs to.
        step: position of the batch in its epoch, from 0, equal on all ranks.
        rows: rows of this rank; 0 for an empty part.
        global_rows: rows of all ranks together, at least 1.
        weight: ``rows * size / global_rows``, with ``size`` the number of parts of a global batch. The mean over ranks
            of ``weight * local mean`` is the mean over the global batch.
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

    The loaders of ``batches.reading.loader`` and ``train.in_memory`` satisfy it, and one of a user's own may as well.

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


class Placement:
    """Brings batches to where the model computes; a batch that is there already passes untouched."""

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device, self._channels_last = device, channels_last
        self._idle = device.type == "cpu" and not channels_last

    def __call__(self, batch: BatchLike) -> BatchLike:
        """Return ``batch`` on the device, images in channels-last order if that was asked for; dtypes stay."""
        if self._idle:
            return batch
        tensors = {name: self._place(tensor) for name, tensor in batch.items()}
        return Batch(
            tensors,
            epoch=batch.epoch,
            step=batch.step,
            rows=batch.rows,
            global_rows=batch.global_rows,
            weight=batch.weight,
        )

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._channels_last and tensor.ndim == 4:
            return tensor.to(self._device, non_blocking=True, memory_format=torch.channels_last)
        return tensor.to(self._device, non_blocking=True)
