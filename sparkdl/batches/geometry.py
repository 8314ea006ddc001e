"""Sizes and counts of a shard set that reading is planned from.

Enters: a manifest and the reader's settings. Leaves: the shape of the shuffle (lanes, window) and of the buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.batches.plan import Order, Steps, choose_lanes
from sparkdl.config import LoaderConfig
from sparkdl.shards.manifest import Manifest, TensorSpec

__all__ = ["Geometry", "row_bytes"]


def row_bytes(manifest: Manifest, tensors: Sequence[TensorSpec]) -> float:
    """Bytes of an average row of ``tensors``, decoded; for rows that differ in length, from the statistics."""
    total = 0.0
    for spec in tensors:
        elements = float(math.prod(spec.shape))
        if spec.dtype == "binary" or spec.ragged:
            stats = [manifest.statistics[name] for name in spec.columns if name in manifest.statistics]
            total += 8
            if not stats:
                elements *= manifest.bytes / max(1, manifest.rows)
            elif spec.dtype == "binary":
                elements = float(stats[0].mean or 0)
            else:
                kept = stats[0].count + stats[0].nan_count + stats[0].inf_count + stats[0].null_count
                elements *= kept / max(1, manifest.rows)
        total += elements * (1 if spec.dtype in ("bool", "binary") else np.dtype(spec.dtype).itemsize)
    return max(1.0, total)


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """What the order of rows depends on besides seed and epoch, and how large the buffers are.

    Attributes:
        block_rows: rows of every block in file order, ``(blocks,)``.
        lanes: streams that every step draws from.
        window: rows of a lane that are shuffled among each other.
        row_bytes: of an average row, all tensors of the set.
        read_bytes: of an average row, the tensors that are read.
        config: the reader's settings.
    """

    block_rows: npt.NDArray[np.int64]
    lanes: int
    window: int
    row_bytes: float
    read_bytes: float
    config: LoaderConfig

    @classmethod
    def of(cls, manifest: Manifest, tensors: Sequence[TensorSpec], config: LoaderConfig) -> Geometry:
        """Work out the geometry; the order it gives does not depend on which tensors are read."""
        counts = [block.rows for shard in manifest.shards for block in shard.blocks]
        block_rows = np.array(counts, dtype=np.int64)
        each = row_bytes(manifest, manifest.tensors)
        pool_rows = max(1, int(config.pool_bytes / each))
        pool_blocks = int(pool_rows / max(1.0, manifest.rows / max(1, len(counts))))
        lanes = config.lanes or choose_lanes(len(counts), pool_blocks)
        return cls(
            block_rows=block_rows,
            lanes=lanes,
            window=max(1, pool_rows // lanes),
            row_bytes=each,
            read_bytes=row_bytes(manifest, tensors),
            config=config,
        )

    def order(self, seed: int, epoch: int, shuffle: bool) -> Order:
        """The order of one epoch; without shuffling, one lane in file order."""
        lanes = self.lanes if shuffle else 1
        window = self.window if shuffle else self.window * self.lanes
        return Order(block_rows=self.block_rows, seed=seed, epoch=epoch, lanes=lanes, window=window, shuffle=shuffle)

    @property
    def chunk_rows(self) -> int:
        """Rows that one task gathers, unless a step has more."""
        return max(1, int(self.config.chunk_bytes / self.read_bytes))

    def buffer_bytes(self, steps: Steps) -> int:
        """Bound of the buffers that one rank keeps: what is gathered ahead, twice, since sizes are powers of two."""
        share = -(-steps.global_batch // steps.world_size)
        chunk = max(self.chunk_rows, share) * self.read_bytes
        ahead = max(2, self.config.prefetch_bytes // self.config.chunk_bytes) + 6
        return int(2 * ahead * chunk) + (1 << 20)

    def private_bytes(self, steps: Steps) -> int:
        """Bound of what one rank allocates for reading: buffers, row numbers of two pools, places of blocks."""
        pool_rows = min(int(self.block_rows.sum()), 2 * self.window * self.lanes)
        return self.buffer_bytes(steps) + 8 * pool_rows + 400 * self.block_rows.size

    def mapped_bytes(self) -> int:
        """Bound of the pages of the set that one rank has mapped at a time: pools in use, next, and just used."""
        return int(min(self.block_rows.sum() * self.row_bytes, 3 * self.config.pool_bytes))
