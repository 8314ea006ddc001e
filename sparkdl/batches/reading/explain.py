"""The size of an epoch, its steps and its memory, told before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.batches.order.plan import Order, Steps, segments
from sparkdl.batches.order.quality import ShuffleQuality, sample
from sparkdl.batches.reading.geometry import Geometry
from sparkdl.shards.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """An epoch in numbers.

    Attributes:
        uri: of the set.
        rows: of the set.
        blocks: of the set.
        steps: of an epoch, on every rank.
        world_size: number of ranks.
        global_batch: rows of a step over all ranks.
        rows_per_rank: rows that one rank trains on in an epoch, fewest and most.
        last_step_rows: rows of the last step over all ranks.
        bytes_read_per_rank: bytes of shards that one rank touches in an epoch, fewest and most.
        read_amplification: bytes touched by all ranks together over the bytes of the set.
        private_bytes: bound of what one rank allocates for reading.
        mapped_bytes: bound of the pages of the set that one rank maps at a time; ranks of a host share them.
        spread: whether the rows of the set lie in random order, so that neighbours in the files have nothing in common.
        quality: of the shuffle.
        warnings: what a person should know.
    """

    uri: str
    rows: int
    blocks: int
    steps: int
    world_size: int
    global_batch: int
    rows_per_rank: tuple[int, int]
    last_step_rows: int
    bytes_read_per_rank: tuple[int, int]
    read_amplification: float
    private_bytes: int
    mapped_bytes: int
    spread: bool
    quality: ShuffleQuality
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        low, high = self.rows_per_rank
        read_low, read_high = self.bytes_read_per_rank
        quality = self.quality
        lines = [
            ("shard set", f"{self.uri}: {self.rows:,} rows in {self.blocks:,} blocks"),
            ("steps", f"{self.steps:,} of {self.global_batch:,} rows; the last of {self.last_step_rows:,}"),
            ("rows per rank", f"{low:,}{f' to {high:,}' if high != low else ''} on each of {self.world_size}"),
            (
                "read per rank",
                f"{_mib(read_low, read_high)}; all ranks together {self.read_amplification:.2f} x the set",
            ),
            (
                "memory per rank",
                f"at most {_mib(self.private_bytes)} allocated, {_mib(self.mapped_bytes)} mapped and shared",
            ),
            ("rows", "at random in the files" if self.spread else "in the files as they came"),
            ("shuffle", f"rows move {quality.distance:.3f} of the set on average (uniform shuffle: 0.333)"),
            (
                "neighbours",
                f"{quality.neighbours:.2%} of file neighbours share a global batch "
                f"(uniform shuffle: {quality.uniform_neighbours:.2%})",
            ),
            *(("warning", text) for text in self.warnings),
        ]
        return "\n".join(f"{name:<16}{text}" for name, text in lines)


def _mib(low: int, high: int | None = None) -> str:
    ends = [f"{size / 2**20:,.1f}" for size in ((low,) if high in (None, low) else (low, high))]
    return " to ".join(str(end) for end in ends) + " MiB"


def explain(manifest: Manifest, geometry: Geometry, order: Order, steps: Steps, threads: int) -> Explanation:
    """Work out an ``Explanation`` for ranks that gather with ``threads`` threads; touches no shard."""
    sizes = np.array([block.bytes for shard in manifest.shards for block in shard.blocks], dtype=np.int64)
    bytes_read = [_bytes_read(sizes, order, steps, rank) for rank in range(steps.world_size)]
    trained = [_rows_trained(steps, rank) for rank in range(steps.world_size)]
    quality = sample(order, steps.global_batch)
    amplification = sum(bytes_read) / max(1, int(sizes.sum()))
    return Explanation(
        uri=manifest.uri,
        rows=order.rows,
        blocks=order.block_rows.size,
        steps=steps.count,
        world_size=steps.world_size,
        global_batch=steps.global_batch,
        rows_per_rank=(min(trained), max(trained)),
        last_step_rows=steps.global_rows(steps.count - 1),
        bytes_read_per_rank=(min(bytes_read), max(bytes_read)),
        read_amplification=amplification,
        private_bytes=geometry.pipeline(steps, threads).private_bytes,
        mapped_bytes=geometry.mapped_bytes(),
        spread=manifest.spread,
        quality=quality,
        warnings=_warnings(manifest, geometry, order, steps, quality, amplification),
    )


def _rows_trained(steps: Steps, rank: int) -> int:
    low, high = steps.share(0, rank)
    last_low, last_high = steps.share(steps.count - 1, rank)
    return (high - low) * (steps.count - 1) + last_high - last_low


def _bytes_read(sizes: npt.NDArray[np.int64], order: Order, steps: Steps, rank: int) -> int:
    """Bytes of the blocks that lie in the lanes of a rank."""
    cycle = min(steps.count, order.lanes)  # after so many steps the dealing of rows to lanes repeats
    lanes = np.unique(segments(steps, order.lanes, rank, 0, cycle).lane)
    touched = np.zeros(sizes.size, np.bool_)
    for lane in lanes.tolist():
        touched[order.lane_blocks(lane)] = True
    return int(sizes[touched].sum())


def _warnings(
    manifest: Manifest, geometry: Geometry, order: Order, steps: Steps, quality: ShuffleQuality, amplification: float
) -> tuple[str, ...]:
    warnings = []
    left_out = order.rows - steps.count * steps.global_batch
    if left_out > 0:
        which = "other ones each epoch" if order.shuffle else "the same ones in every epoch, since nothing is shuffled"
        warnings.append(f"tail='drop' leaves out {left_out:,} rows of an epoch, {which}")
    if left_out < 0 and steps.tail == "pad":
        warnings.append(f"tail='pad' repeats {-left_out:,} rows in the last step")
    if steps.global_rows(steps.count - 1) < steps.world_size:
        warnings.append(
            f"the last step has {steps.global_rows(steps.count - 1)} rows for {steps.world_size} ranks: some get none"
        )
    if order.shuffle and order.lanes < steps.world_size:
        warnings.append(
            f"{order.lanes} lanes for {steps.world_size} ranks: some ranks read the same blocks; write smaller "
            "blocks or raise pool_bytes"
        )
    elif amplification > 1.5:
        warnings.append(f"the ranks together read {amplification:.1f} x the set, which matters if it is remote")
    if order.shuffle and quality.excess > 10 and not manifest.spread:
        warnings.append(
            f"file neighbours share a batch {quality.excess:.0f} x as often as under a uniform shuffle: write the set "
            f"with spread_rows=True, or raise pool_bytes above {geometry.config.pool_bytes:,}"
        )
    return tuple(warnings)
