"""Batches of tensors that are in memory already: for small data, examples and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sparkdl.batches.reading.batch import Batch
from sparkdl.errors import ConfigError, DataError
from sparkdl.world import SOLO, World


class TensorSource:
    """Shuffled, sharded batches over tensors that every rank holds whole.

    Global batch k of an epoch is the same set of rows at every world size; rank r takes the r-th of ``world.size``
    nearly equal parts. The last global batch is as short as the rows demand, and the parts of some ranks may be empty.

    Args:
        tensors: named tensors of one length, e.g. ``{"x": (rows, features), "y": (rows,)}``; not copied.
        global_batch_rows: rows of a global batch.
        world: which part of each global batch this rank takes.
        shuffle: a new permutation each epoch; without it, the rows in their order.
        seed: of the permutations.

    Raises:
        DataError: there are no rows, or the tensors differ in length.
        ConfigError: ``global_batch_rows`` is below 1, or ``seed`` does not lie in -2**43..2**44-1.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        global_batch_rows: int,
        world: World = SOLO,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if global_batch_rows < 1:
            raise ConfigError(f"global_batch_rows={global_batch_rows} is below 1: give at least 1 row")
        if not -(1 << 43) <= seed < 1 << 44:  # with the number of an epoch it makes a seed of torch's, of 64 bits
            raise ConfigError(f"seed={seed} does not lie in -2**43..2**44-1: give a seed in that range")
        lengths = {name: int(tensor.shape[0]) for name, tensor in tensors.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the tensors differ in length, {lengths}: give one row of each for every example")
        if not any(lengths.values()):
            raise DataError("there are 0 rows to make batches of: give at least 1")
        self._tensors = dict(tensors)
        self._on_cpu = all(tensor.is_cpu for tensor in self._tensors.values())
        self._rows = next(iter(lengths.values()))
        self.global_batch_rows = global_batch_rows
        self._world = world
        self._shuffle, self._seed = shuffle, seed
        self._epoch = self._position = 0
        self._order: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-self._rows // self.global_batch_rows)

    def __iter__(self) -> Iterator[Batch]:
        """Yield what is left of the epoch; an exhausted epoch starts over."""
        if self._position >= len(self):
            self._position = 0
        order, count = self._permutation(), len(self)
        parts = None if order is None else torch.split(order, self.global_batch_rows)
        take = self._taker()
        rank, size, batch_rows = self._world.rank, self._world.size, self.global_batch_rows
        while self._position < count:
            step = self._position
            self._position = step + 1
            total = min(batch_rows, self._rows - step * batch_rows)
            first, last = total * rank // size, total * (rank + 1) // size
            if parts is None:
                chosen: Any = slice(step * batch_rows + first, step * batch_rows + last)
            else:
                chosen = parts[step] if size == 1 else parts[step][first:last]
            # No name for the tensors here: they are freed as soon as the trainer is done with them.
            yield Batch(
                take(chosen),
                step=step,
                epoch=self._epoch,
                rows=last - first,
                global_rows=total,
                weight=(last - first) * size / total,
            )

    def _taker(self) -> Callable[[Any], dict[str, torch.Tensor]]:
        """What takes the chosen rows of every tensor: slices of them, or row numbers on the CPU."""
        items = list(self._tensors.items())
        if not self._shuffle:
            return lambda rows: {name: tensor[rows] for name, tensor in items}
        if self._on_cpu:
            gathers = [(name, tensor.index_select) for name, tensor in items]
            return lambda rows: {name: gather(0, rows) for name, gather in gathers}
        return lambda rows: {name: tensor.index_select(0, rows.to(tensor.device)) for name, tensor in items}

    def bounds(self, name: str) -> tuple[float, float] | None:
        """Return the least and the greatest value of the tensor ``name``; None where there is no such tensor."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.is_complex():
            return None
        least, greatest = torch.aminmax(tensor)
        return float(least), float(greatest)

    def set_epoch(self, epoch: int) -> None:
        """Start over at the first batch of ``epoch``."""
        self._epoch, self._position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what must agree for it to mean anything."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; any world size will do.

        Raises:
            ConfigError: the position belongs to other rows, another batch size or another order.
        """
        saved_identity = {name: state.get(name) for name in self._identity()}
        if saved_identity != self._identity():
            raise ConfigError(
                f"the position belongs to {saved_identity}, this source is {self._identity()}: make them equal"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "rows": self._rows,
            "global_batch_rows": self.global_batch_rows,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _permutation(self) -> torch.Tensor | None:
        if not self._shuffle:
            return None
        if self._order is None or self._order[0] != self._epoch:
            generator = torch.Generator().manual_seed((self._seed << 20) + self._epoch)
            self._order = (self._epoch, torch.randperm(self._rows, generator=generator))
        return self._order[1]
