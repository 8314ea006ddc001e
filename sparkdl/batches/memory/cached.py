"""Remote, compressed and Parquet blocks: fetched, checked and decoded into the host's cache, mapped from there."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from sparkdl.batches.memory.address_space import AddressSpace
from sparkdl.batches.memory.blocks import Blocks
from sparkdl.batches.memory.cache import BlockCache, default_folder
from sparkdl.batches.memory.mapped import MappedBlocks
from sparkdl.columns.spec import TensorSpec
from sparkdl.config import LoaderConfig
from sparkdl.errors import IntegrityError
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import RangeReader, Storage, xxh3_hex

_TRAILER = 8  # bytes of the hash behind a block in the cache


class CachedBlocks(Blocks):
    """Remote, compressed or Parquet shards: each block is fetched and decoded once per host, then mapped."""

    def __init__(self, manifest: Manifest, tensors: Sequence[TensorSpec], config: LoaderConfig, root: Storage) -> None:
        super().__init__(manifest, tensors, config, AddressSpace(max(1 << 36, 32 * config.pool_bytes)))
        self._root = root
        folder = Path(config.cache_dir) if config.cache_dir else default_folder()
        self._cache = BlockCache(folder / "blocks", config.cache_bytes)
        self._places: dict[int, tuple[int, int]] = {}
        self._coming: dict[int, Future[None]] = {}
        self._numbers = [n for shard in manifest.shards for n in range(len(shard.blocks))]
        self._fetchers: ThreadPoolExecutor | None = None
        self._footers: dict[str, _Footer] = {}

    def _arrive(self, block: int) -> None:
        if self._fetchers is None:
            self._fetchers = ThreadPoolExecutor(self._config.fetch_threads, thread_name_prefix="sparkdl-fetch")
        self._coming[block] = self._fetchers.submit(self._fetch, block)

    def _leave(self, block: int) -> bool:
        coming = self._coming.get(block)
        if coming is not None and not coming.cancel() and not coming.done():
            return False
        self._coming.pop(block, None)
        extent = self._places.pop(block, None)
        if extent is not None:
            self.space.unmap(*extent)
        return True

    def _present(self, block: int) -> bool:
        return block in self._places

    def _load(self, block: int) -> None:
        with self._lock:
            coming = self._coming.get(block)
        if coming is None:
            self._fetch(block)
            return
        try:
            coming.result()
        except BaseException:
            with self._lock:
                self._coming.pop(block, None)  # the next try fetches again
            raise
        if not self._checked[block]:
            self._verify(block)

    def _fetch(self, block: int) -> None:
        """Task: bring a block into the cache unless it is there, map it, and check it."""
        key = self._key(block)
        for attempt in (1, 2):
            descriptor, size = self._cache.open(key, lambda: self._message(block))
            try:
                with self._lock:
                    start = self.space.allot(size + _TRAILER)
                    self.space.map(descriptor, size + _TRAILER, start)
            finally:
                os.close(descriptor)
            if self._is_whole(start, size):
                break
            self._cache.discard(key)  # the machine died while it was written, or its disk errs
            with self._lock:
                self.space.unmap(start, size + _TRAILER)
            if attempt == 2:
                raise self._altered(block)
        self._locate_tensors(block, start, size)
        with self._lock:
            self._places[block] = (start, size + _TRAILER)
            self._checked[block] = True

    def _key(self, block: int) -> str:
        info = self._where[block][1]
        kind = "" if self.manifest.format == "ipc" and self.manifest.compression is None else "decoded-"
        return f"{kind}{self.manifest.schema_hash}-{info.hash}-{info.bytes}-{info.rows}"

    def _is_whole(self, start: int, size: int) -> bool:
        """Whether the bytes of a file of the cache, mapped at ``start``, are those that were written."""
        data = self.space.bytes[start : start + size + _TRAILER]
        return bool(xxhash.xxh3_64_digest(data[:size].data) == data[size:].tobytes())

    def _altered(self, block: int) -> IntegrityError:
        shard, info = self._where[block]
        return IntegrityError(
            f"the cache {self._cache.folder} returns other bytes than were written of {self._name(shard, info)}: check "
            "its disk"
        )

    def _suspects(self) -> list[int]:
        return list(self._places)  # few: those in use and those just used

    def _verify(self, block: int) -> None:
        with self._lock:
            start, size = self._places[block]
        if not self._is_whole(start, size - _TRAILER):
            self._cache.discard(self._key(block))  # the next run fetches it again
            raise self._altered(block)

    def _message(self, block: int) -> bytes:
        """The block as one uncompressed Arrow message."""
        shard, info = self._where[block]
        file = self._root.child(shard.path)
        size = file.size()
        if size < info.offset + info.bytes:  # before so many bytes are asked for
            raise IntegrityError(
                f"{file.uri} has {size} bytes, its manifest says {shard.bytes}: it was cut short, restore it or write "
                "the set again"
            )
        data = file.read_bytes(info.offset, info.bytes)
        actual_hash = xxh3_hex(data)
        if actual_hash != info.hash:
            raise self._mismatch(shard, info, actual_hash)
        if self.manifest.format == "ipc" and self.manifest.compression is None:
            return data
        try:
            return bytes(self._decoded(block, file, data).serialize())
        except (pa.ArrowException, OSError, ValueError, OverflowError) as cause:
            raise IntegrityError(
                f"{self._name(shard, info)} cannot be decoded ({cause}): write the set again"
            ) from cause

    def _decoded(self, block: int, file: Storage, data: bytes) -> pa.RecordBatch:
        """A compressed message, or a row group, as a record batch."""
        shard, info = self._where[block]
        if self.manifest.format == "ipc":
            batch = pa.ipc.read_record_batch(pa.py_buffer(data), self._schema)
        else:

            def within_group(start: int, length: int) -> bytes:
                begin = start - info.offset
                if begin < 0 or begin + length > len(data):
                    raise OSError(
                        f"{length} bytes at {start} lie outside of the row group, {len(data)} bytes at {info.offset}"
                    )
                return data[begin : begin + length]

            part = RangeReader(shard.bytes, within_group)  # a file of which only this row group is there
            table = self._footer(file).read_row_group(self._numbers[block], part)
            [batch] = table.cast(self._schema).combine_chunks().to_batches()
        batch.validate(full=True)  # it is written anew from its offsets, wherever these lead
        return batch

    def _footer(self, file: Storage) -> _Footer:
        """The footer of a Parquet shard, fetched once."""
        with self._lock:
            footer = self._footers.setdefault(file.uri, _Footer(file))
        footer.fetch()
        return footer

    def rest(self) -> None:
        """End the fetching threads, unless another reader uses them."""
        with self._lock:
            if self._fetchers is None or any(block not in self._stand_ins for block in self._users):
                return
            fetchers, self._fetchers = self._fetchers, None
        fetchers.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for block in [block for block, coming in self._coming.items() if coming.cancelled()]:
                del self._coming[block]
                if block in self._idle:
                    del self._idle[block]
                    self._idle_bytes -= self._where[block][1].bytes


class _Footer:
    """What a Parquet file says of itself, fetched on first use, so that each row group costs its own bytes only."""

    def __init__(self, file: Storage) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._metadata: Any = None

    def fetch(self) -> None:
        from pyarrow import parquet

        with self._lock:
            if self._metadata is None:
                with self._file.open_input() as stream:
                    self._metadata = parquet.ParquetFile(stream, pre_buffer=False).metadata

    def read_row_group(self, number: int, part: RangeReader) -> pa.Table:
        """Decode a row group out of the bytes of the file that were fetched."""
        from pyarrow import parquet

        source = pa.PythonFile(part, mode="r")
        return parquet.ParquetFile(source, metadata=self._metadata, pre_buffer=False).read_row_group(number)


def open_blocks(manifest: Manifest, root: Storage, tensors: Sequence[TensorSpec], config: LoaderConfig) -> Blocks:
    """Choose how the blocks of a set come into memory: by mapping its files if possible, else through the cache."""
    if root.local_path() is not None and manifest.format == "ipc" and manifest.compression is None:
        return MappedBlocks(manifest, tensors, config, root)
    return CachedBlocks(manifest, tensors, config, root)
