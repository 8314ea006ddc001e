"""One rank's part of one global batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


class Batch(dict[str, torch.Tensor]):
    """Tensors by name, and where they stand.

    Attributes:
        step: position in the epoch, from 0, equal on all ranks.
        epoch: from 0.
        rows: rows of this rank; 0 for an empty part.
        global_rows: rows of all ranks together, at least 1.
        weight: ``rows * world_size / global_rows``. The mean over ranks of ``weight * mean over the local rows`` is the
            mean over the rows of the global batch, whatever the tail.
    """

    step: int
    epoch: int
    rows: int
    global_rows: int
    weight: float

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] = (),
        *,
        step: int = 0,
        epoch: int = 0,
        rows: int | None = None,
        global_rows: int | None = None,
        weight: float = 1.0,
    ) -> None:
        super().__init__(tensors)
        self.step, self.epoch, self.weight = step, epoch, weight
        self.rows = len(next(iter(self.values()), ())) if rows is None else rows
        self.global_rows = self.rows if global_rows is None else global_rows

    def __missing__(self, name: str) -> torch.Tensor:
        raise KeyError(f"a batch has no tensor {name!r}: it has {', '.join(map(repr, self)) or 'none'}")

    def _like(self, tensors: dict[str, torch.Tensor]) -> Batch:
        return Batch(
            tensors,
            step=self.step,
            epoch=self.epoch,
            rows=self.rows,
            global_rows=self.global_rows,
            weight=self.weight,
        )

    def to(self, *args: Any, **kwargs: Any) -> Batch:
        """Move every tensor, as ``torch.Tensor.to`` does; Lightning and Accelerate call this."""
        return self._like({name: tensor.to(*args, **kwargs) for name, tensor in self.items()})

    def pin_memory(self) -> Batch:
        """Copy every tensor into page-locked memory."""
        return self._like({name: tensor.pin_memory() for name, tensor in self.items()})
