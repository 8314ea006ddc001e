"""The quality of a shuffle, as numbers that can be compared between readers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.batches.order.permutations import permutation
from sparkdl.batches.order.plan import Order

_SAMPLED_BLOCKS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleQuality:
    """How far an order is from a uniform shuffle of all rows.

    It sees where rows lay in the files; ``content_excess`` sees what they hold.

    Attributes:
        distance: mean of ``|position in training order - position in the files|``, as a fraction of the rows; 0 without
            shuffling, 1/3 for a uniform shuffle.
        neighbours: share of rows whose next row in the files falls into the same global batch; near 1 unshuffled.
        uniform_neighbours: what a uniform shuffle gives for ``neighbours``.
    """

    distance: float
    neighbours: float
    uniform_neighbours: float

    @property
    def excess(self) -> float:
        """How many times more often than under a uniform shuffle neighbours stay together; 1 is perfect."""
        return self.neighbours / self.uniform_neighbours if self.uniform_neighbours else 1.0


def measure(stream: npt.ArrayLike, batch: int) -> ShuffleQuality:
    """Measure a whole epoch.

    Args:
        stream: position in the files of each row, in training order: a permutation of ``0..rows-1``.
        batch: rows of a global batch.
    """
    files = np.asarray(stream, dtype=np.int64)
    places = np.empty_like(files)
    places[files] = np.arange(files.size)
    distance = float(np.abs(places - np.arange(files.size)).mean() / max(1, files.size))
    together = places[1:] // batch == places[:-1] // batch
    neighbours = float(together.mean()) if together.size else 0.0
    return ShuffleQuality(distance=distance, neighbours=neighbours, uniform_neighbours=_uniform(files.size, batch))


def sample(order: Order, batch: int) -> ShuffleQuality:
    """Estimate the quality of an order from at most 32 of its blocks, in milliseconds whatever the size of the set."""
    begins = np.cumsum(order.block_rows) - order.block_rows
    filled = np.flatnonzero(order.block_rows)
    chosen = filled[permutation(filled.size, order.seed)[:_SAMPLED_BLOCKS]]
    moved, rows, together, pairs = 0.0, 0, 0, 0
    for block in chosen.tolist():
        count = int(order.block_rows[block])
        places = order.positions(block, np.arange(count))
        moved += float(np.abs(places - (begins[block] + np.arange(count))).sum())
        together += int((places[1:] // batch == places[:-1] // batch).sum())
        rows, pairs = rows + count, pairs + count - 1
    return ShuffleQuality(
        distance=moved / max(1, rows) / max(1, order.rows),
        neighbours=together / max(1, pairs),
        uniform_neighbours=_uniform(order.rows, batch),
    )


def content_excess(values: npt.ArrayLike, span: int) -> float:
    """How much more the means of successive spans of rows differ than under a uniform shuffle; 1 is perfect.

    Labels that come evenly are not enough: let labels times features be among the columns, too, since an optimizer
    follows the relation between them that it saw last.

    Args:
        values: what the rows hold, in training order, ``(rows, columns)``.
        span: rows whose mean is taken: those of a global batch, or of a sixteenth of the epoch.

    Returns:
        of the column with the largest, the variance of the means over what drawing without replacement gives.
    """
    columns = np.asarray(values, np.float64)
    spans = len(columns) // span
    means = columns[: spans * span].reshape(spans, span, -1).mean(axis=1)
    variance = columns.var(axis=0)
    chance = variance / span * (len(columns) - span) / max(1, len(columns) - 1)
    off = ((means - columns.mean(axis=0)) ** 2).mean(axis=0)
    return float((off[variance > 0] / chance[variance > 0]).max(initial=0.0))


def _uniform(rows: int, batch: int) -> float:
    return min(1.0, (min(batch, rows) - 1) / max(1, rows - 1))
