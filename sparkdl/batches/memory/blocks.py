"""The places of every block's rows in memory, found out and checked on first touch."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.batches.memory.address_space import AddressSpace
from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.types import arrow_schema
from sparkdl.config import LoaderConfig
from sparkdl.errors import IntegrityError
from sparkdl.observe import emit, logger
from sparkdl.shards.manifest import BlockInfo, Manifest, ShardInfo

Ints = npt.NDArray[np.int64]

_PADDING = 64  # a writer may pad a buffer up to here


class Blocks(ABC):
    """The blocks of one shard set in memory.

    For every tensor it has the place of its first element in each block, counted in elements from the start of one
    ``AddressSpace``; with it, any row of the set is one index. Uncompressed Arrow files of this machine are mapped
    where they lie (``mapped.MappedBlocks``); all else goes through the host's cache (``cached.CachedBlocks``). Bytes
    that were checked once are checked again when they may have changed: when an epoch begins and when it ends.

    Args:
        manifest: of the set.
        tensors: those that will be read.
        config: how.
        space: holds the bytes.

    Attributes:
        rows: rows of every block, ``(blocks,)``.
        base: by tensor, where each block's data starts in the address space, in elements, ``(blocks,)``.
        offsets: by ragged tensor, where each block's row offsets start, in offsets, ``(blocks,)``.
        offset_dtype: by ragged tensor, the dtype of its offsets.
        damaged: blocks that differ from their hash, and the block that stands in for each.
    """

    def __init__(
        self, manifest: Manifest, tensors: Sequence[TensorSpec], config: LoaderConfig, space: AddressSpace
    ) -> None:
        self.manifest = manifest
        self.space = space
        self._tensors = tuple(tensors)
        self._schema = arrow_schema(manifest.tensors)
        self._config = config
        self._where = [(shard, block) for shard in manifest.shards for block in shard.blocks]
        count = len(self._where)
        self.rows: Ints = np.fromiter((block.rows for _, block in self._where), np.int64, count)
        self.base = {spec.name: np.zeros(count, np.int64) for spec in tensors}
        self.offsets = {spec.name: np.zeros(count, np.int64) for spec in tensors if is_ragged(spec)}
        self.offset_dtype: dict[str, np.dtype[Any]] = {}
        self.damaged: dict[int, int] = {}
        self._checked = np.zeros(count, np.bool_)
        self._lock = threading.RLock()
        self._users: dict[int, int] = {}
        self._stand_ins: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_bytes = 0

    def request(self, blocks: Iterable[int]) -> None:
        """Announce that blocks will be read: they are fetched meanwhile, and stay until they are released."""
        with self._lock:
            for block in blocks:
                users = self._users.get(block, 0)
                self._users[block] = users + 1
                if users == 0 and block in self._idle:
                    del self._idle[block]
                    self._idle_bytes -= self._where[block][1].bytes
                elif users == 0:
                    self._arrive(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Take back one ``request`` of each block.

        Blocks that nobody uses stay in memory as long as they are no more than twice ``pool_bytes``; then the oldest
        leave, so that what a rank occupies does not grow with the set.
        """
        with self._lock:
            for block in blocks:
                self._users[block] -= 1
                if not self._users[block]:
                    del self._users[block]
                    self._idle[block] = None
                    self._idle_bytes += self._where[block][1].bytes
            while self._idle_bytes > 2 * self._config.pool_bytes:
                oldest = next(iter(self._idle))
                if not self._leave(oldest):
                    break
                del self._idle[oldest]
                self._idle_bytes -= self._where[oldest][1].bytes

    def ready(self, block: int) -> int:
        """Make a requested block readable; returns its number, or that of the block that stands in for it.

        Raises:
            IntegrityError: it differs from its hash, and ``on_damage="error"``, or no other block is whole.
        """
        if self._checked[block] and self._present(block):
            return block
        if block in self.damaged:
            return self.ready(self.damaged[block])
        try:
            self._load(block)
        except IntegrityError as damage:
            if self._config.on_damage == "error":
                raise
            return self._substitute(block, damage)
        self._checked[block] = True
        return block

    def begin_epoch(self) -> None:
        """Have blocks checked again before they are read: by policy all, else those that may have changed."""
        with self._lock:
            for block in range(len(self._where)) if self._config.verify == "epoch" else self._suspects():
                self._checked[block] = False

    def end_epoch(self) -> None:
        """Check the blocks again that may have changed while they were read.

        Raises:
            IntegrityError: one differs from its hash, and ``on_damage="error"``.
        """
        with self._lock:
            suspects = [block for block in self._suspects() if self._checked[block]]
        for block in suspects:
            try:
                self._verify(block)
            except IntegrityError as damage:
                self._checked[block] = False
                if self._config.on_damage == "error":
                    raise
                logger.warning("%s; batches of this epoch may hold it", damage)
                emit("block_changed", block=block, reason=str(damage))

    def _substitute(self, block: int, damage: IntegrityError) -> int:
        """The next whole block in file order: the same one on every rank, whatever the order they read in."""
        count = len(self._where)
        for step in range(1, count):
            stand_in = (block + step) % count
            if stand_in in self.damaged:
                continue
            try:
                self.request([stand_in])  # kept until the end: it may be read whenever the damaged block is
                if not (self._checked[stand_in] and self._present(stand_in)):
                    self._load(stand_in)
                    self._checked[stand_in] = True
            except IntegrityError:
                self.release([stand_in])
                continue
            with self._lock:
                self._stand_ins.add(stand_in)
                if block not in self.damaged:
                    self.damaged[block] = stand_in
                    logger.warning("%s; its rows are replaced by those of block %d", damage, stand_in)
                    emit("block_substituted", block=block, by=stand_in, reason=str(damage))
            return stand_in
        raise damage

    def _locate_tensors(self, block: int, start: int, size: int) -> None:
        """Note where the tensors of a block lie whose message is at ``[start, start + size)`` of the address space."""
        shard, info = self._where[block]
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(self.space.bytes[start : start + size]), self._schema)
        except (pa.ArrowException, OSError, ValueError, OverflowError) as cause:
            raise IntegrityError(f"{self._name(shard, info)} is no Arrow record batch: write the set again") from cause
        if batch.num_rows != info.rows:
            raise IntegrityError(
                f"{self._name(shard, info)} holds {batch.num_rows} rows, the manifest says {info.rows}: write the set "
                "again"
            )
        for spec in self._tensors:
            array = batch.column(spec.name)
            buffers = array.buffers()  # their addresses, not to_numpy, whose first call imports pandas
            self._check_size(spec, buffers[-1], batch.num_rows)
            self.base[spec.name][block] = self._element(buffers[-1], item_size(spec), start, size)
            if is_ragged(spec):
                long = pa.types.is_large_list(array.type) or pa.types.is_large_binary(array.type)
                dtype = self.offset_dtype[spec.name] = np.dtype(np.int64 if long else np.int32)
                self._check_offsets(spec, buffers[1], buffers[-1], batch.num_rows, dtype)
                self.offsets[spec.name][block] = self._element(buffers[1], dtype.itemsize, start, size)

    def _check_offsets(
        self, spec: TensorSpec, offsets: pa.Buffer | None, values: pa.Buffer | None, rows: int, dtype: np.dtype[Any]
    ) -> None:
        """Row offsets of a ragged tensor must climb, and end inside its values: what they point at is read."""
        row_ends = np.empty(0, dtype)
        if offsets is not None:
            row_ends = np.frombuffer(offsets, dtype, min(rows + 1, offsets.size // dtype.itemsize))
        elements = (values.size if values is not None else 0) // item_size(spec)
        width = math.prod(spec.shape)
        offsets_ascend = row_ends.size == rows + 1 and row_ends[0] >= 0 and bool((row_ends[1:] >= row_ends[:-1]).all())
        if not offsets_ascend or int(row_ends[-1]) * width > elements:
            raise IntegrityError(
                f"the row offsets of tensor {spec.name!r} in a block of {self.manifest.uri} lead out of its "
                f"{elements} elements: write the set again"
            )

    def _check_size(self, spec: TensorSpec, buffer: pa.Buffer | None, rows: int) -> None:
        """Arrow takes a schema at its word: a file that holds other columns would be read as wrong numbers."""
        if is_ragged(spec):
            return
        due = rows * math.prod(spec.shape) * item_size(spec)
        stored_bytes = buffer.size if buffer is not None else 0
        if not due <= stored_bytes < due + _PADDING:
            raise IntegrityError(
                f"tensor {spec.name!r} takes {stored_bytes} bytes in a block of {self.manifest.uri}, {due} are due for "
                f"{rows} rows of {spec.dtype} {spec.shape}: the files are not those of the manifest, write the "
                "set again"
            )

    def _element(self, buffer: pa.Buffer | None, item: int, start: int, size: int) -> int:
        """The start of a buffer of the block at ``[start, start + size)``, in elements of ``item`` bytes.

        Counted from the start of the address space; 0 for an empty one.
        """
        if buffer is None or not buffer.size:
            return 0
        offset = int(buffer.address) - self.space.address
        element, remainder = divmod(offset, item)
        if remainder or offset < start or offset + buffer.size > start + size:
            raise IntegrityError(
                f"a buffer of {buffer.size} bytes of a block of {self.manifest.uri} lies outside of its block, or off "
                "the grid of its dtype: write the set again"
            )
        return element

    def _name(self, shard: ShardInfo, info: BlockInfo) -> str:
        return f"the block at byte {info.offset} of {self.manifest.uri}/{shard.path}"

    def _mismatch(self, shard: ShardInfo, info: BlockInfo, actual_hash: str) -> IntegrityError:
        return IntegrityError(
            f"{self._name(shard, info)} has hash {actual_hash}, the manifest says {info.hash}: restore the file, write "
            "the set again, or read with on_damage='substitute'"
        )

    def rest(self) -> None:  # noqa: B027 (not every way of reading has threads)
        """End the threads of the background, unless another reader uses them; the next request starts new ones."""

    @abstractmethod
    def _arrive(self, block: int) -> None:
        """A block that is not in memory will be used; under the lock."""

    @abstractmethod
    def _leave(self, block: int) -> bool:
        """Give the memory of a block back, unless that is impossible just now; under the lock."""

    @abstractmethod
    def _present(self, block: int) -> bool:
        """Whether a checked block is readable as it is."""

    @abstractmethod
    def _load(self, block: int) -> None:
        """Make the block readable, check it, note where its tensors lie."""

    @abstractmethod
    def _suspects(self) -> list[int]:
        """Blocks in memory whose bytes may have changed since they were checked; under the lock."""

    @abstractmethod
    def _verify(self, block: int) -> None:
        """Compare a block that is in memory with its hash, again.

        Raises:
            IntegrityError: it differs.
        """


def is_ragged(spec: TensorSpec) -> bool:
    """Whether rows of the tensor differ in length."""
    return spec.ragged or spec.dtype == "binary"


def item_size(spec: TensorSpec) -> int:
    """Bytes of one element as it is stored."""
    return 1 if spec.dtype in ("bool", "binary") else np.dtype(spec.dtype).itemsize
