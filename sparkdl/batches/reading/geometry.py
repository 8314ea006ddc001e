"""Sizes and counts of a shard set that reading is planned from."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.batches.memory.blocks import is_ragged
from sparkdl.batches.order.plan import Order, Steps, choose_lanes
from sparkdl.columns.spec import TensorSpec
from sparkdl.config import LoaderConfig
from sparkdl.shards.manifest import Manifest

_LEAST_CHUNK = 1 << 12
_LARGEST_ROW = float(1 << 40)
_NUMBERED_AS = 32  # bytes a row of the pool counts as at least: its number is held twice, in 16 bytes
_GROUP_ROWS = 1 << 17  # more rows shuffled at once gain nothing
_SHUFFLING = 40  # bytes a row of a window takes while it is shuffled
_INDEX_BATCH_ROWS = 1 << 17  # more rows numbered at once gain nothing
_NUMBERING = 56  # bytes a row of an index batch takes while it is numbered, and its patterns
_INDEX = 24  # bytes an index of a row takes: of the index batch in use, of the next, of what is still gathered


def row_bytes(manifest: Manifest, tensors: Sequence[TensorSpec]) -> float:
    """Bytes of an average row of ``tensors``, decoded; for rows that differ in length, from the statistics."""
    total = 0.0
    for spec in tensors:
        elements = float(math.prod(spec.shape))
        if is_ragged(spec):
            stats = [manifest.statistics[name] for name in spec.columns if name in manifest.statistics]
            total += 8
            elements = 1.0  # statistics count every number of a row
            if not stats:
                elements *= manifest.bytes / max(1, manifest.rows)
            elif spec.dtype == "binary":
                elements = float(stats[0].mean or 0)
            else:
                element_count = stats[0].count + stats[0].nan_count + stats[0].inf_count + stats[0].null_count
                elements *= element_count / max(1, manifest.rows)
        total += elements * (1 if spec.dtype in ("bool", "binary") else np.dtype(spec.dtype).itemsize)
    return min(max(1.0, total), _LARGEST_ROW)  # statistics are what a file says, and buffers are sized by them


def cores(local_size: int) -> int:
    """Cores of this host for each of its ranks, at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // local_size)


def gather_threads(config: LoaderConfig, local_size: int) -> int:
    """Threads that a rank gathers with, where its host has ``local_size`` ranks."""
    return config.threads or min(4, cores(local_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """How a rank spends memory and threads while it reads.

    Attributes:
        chunk_rows: rows gathered by one task, unless one step has more.
        index_batch_rows: rows numbered by one task, unless one step has more.
        group: lanes whose windows one task shuffles.
        depth: chunks submitted and not yet taken.
        threads: that gather.
        buffer_bytes: bound of the buffers: what is submitted, the chunk being consumed, and two that somebody may keep.
        number_bytes: bound of the row numbers.
        private_bytes: bound of all that the rank allocates for reading: buffers, row numbers, places of blocks.
    """

    chunk_rows: int
    index_batch_rows: int
    group: int
    depth: int
    threads: int
    buffer_bytes: int
    number_bytes: int
    private_bytes: int


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
        indices: numbers that say where a row lies: one for every tensor that is read, two for a ragged one.
    """

    block_rows: npt.NDArray[np.int64]
    lanes: int
    window: int
    row_bytes: float
    read_bytes: float
    config: LoaderConfig
    indices: int = 1

    @classmethod
    def of(cls, manifest: Manifest, tensors: Sequence[TensorSpec], config: LoaderConfig) -> Geometry:
        """Work out the geometry; the order it gives does not depend on which tensors are read."""
        counts = [block.rows for shard in manifest.shards for block in shard.blocks]
        block_rows = np.array(counts, dtype=np.int64)
        bytes_per_row = row_bytes(manifest, manifest.tensors)
        pool_rows = max(1, int(config.pool_bytes / max(bytes_per_row, _NUMBERED_AS)))
        pool_blocks = int(pool_rows / max(1.0, manifest.rows / max(1, len(counts))))
        lanes = config.lanes or choose_lanes(len(counts), pool_blocks)
        return cls(
            block_rows=block_rows,
            lanes=lanes,
            window=max(1, pool_rows // lanes),
            row_bytes=bytes_per_row,
            read_bytes=row_bytes(manifest, tensors),
            config=config,
            indices=sum(2 if is_ragged(spec) else 1 for spec in tensors),
        )

    def order(self, seed: int, epoch: int, shuffle: bool) -> Order:
        """The order of one epoch; without shuffling, one lane in file order."""
        lanes = self.lanes if shuffle else 1
        window = self.window if shuffle else self.window * self.lanes
        return Order(block_rows=self.block_rows, seed=seed, epoch=epoch, lanes=lanes, window=window, shuffle=shuffle)

    def pipeline(self, steps: Steps, threads: int) -> Pipeline:
        """Size the buffers of a rank that gathers with ``threads`` threads.

        All it allocates stays below ``pool_bytes``, unless one step is larger than a chunk or more ``prefetch_bytes``
        were asked for than there is room.
        """
        config, size, rows = self.config, self.read_bytes, int(self.block_rows.sum())
        group = max(1, min(-(-self.lanes // threads), _GROUP_ROWS // self.window))
        number = _NUMBERING + _INDEX * self.indices
        index_batch_rows = max(1, min(_INDEX_BATCH_ROWS, config.pool_bytes // 8 // number))
        numbers = 16 * min(rows, self.window * self.lanes) + _SHUFFLING * threads * min(rows, group * self.window)
        numbers += number * min(rows, index_batch_rows)
        fitting = max(_LEAST_CHUNK, config.pool_bytes - numbers) / ((threads + 4) * size)
        chunk_rows = max(1, int(min(config.chunk_bytes / size, fitting)))
        gathered = max(chunk_rows, -(-steps.global_batch // steps.world_size))
        depth = max(threads + 1, int((config.prefetch_bytes or 0) / (gathered * size)))
        buffer_bytes = int((depth + 3) * gathered * size)
        return Pipeline(
            chunk_rows=chunk_rows,
            index_batch_rows=index_batch_rows,
            group=group,
            depth=depth,
            threads=threads,
            buffer_bytes=buffer_bytes,
            number_bytes=numbers,
            private_bytes=buffer_bytes + numbers + 400 * self.block_rows.size + (1 << 20),
        )

    def mapped_bytes(self) -> int:
        """Bound of the pages of the set that one rank has mapped at a time: in use, next, and two just used."""
        return int(min(self.block_rows.sum() * self.row_bytes, 4 * self.config.pool_bytes))
