"""Shard files: blocks of rows as Arrow IPC or Parquet, aligned and hashed."""

from __future__ import annotations

import functools
import io
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from sparkdl.columns.convert import Rows
from sparkdl.columns.spec import TensorSpec
from sparkdl.config import ShardConfig
from sparkdl.errors import SparkdlError, StorageError
from sparkdl.shards.blocks import BlockCutter, to_batch
from sparkdl.shards.manifest import BlockInfo, ShardInfo
from sparkdl.storage import Storage, storage_errors

_ALIGNMENT = 64
_PAD = "sparkdl.pad"


class ShardWriter:
    """Writes tensors as shards, in the order in which they come, under names that no other attempt uses.

    Args:
        root: of the set.
        number: part of the files' names: of the partition, or of the bucket.
        tag: of the transaction; together with a number drawn here it is part of every file's name.
        config: sizes and format.
    """

    def __init__(self, root: Storage, number: int, tag: str, config: ShardConfig) -> None:
        self._root, self._number, self._config = root, number, config
        self._tag = f"{tag}-{uuid.uuid4().hex[:8]}"
        self._cutter = BlockCutter(config)
        self._file: ShardFile | None = None
        self._shards: list[ShardInfo] = []
        self._paths: list[str] = []

    def add(self, rows: Rows, count: int, tensors: Sequence[TensorSpec]) -> None:
        """Take in ``count`` rows.

        Raises:
            StorageError: a shard cannot be written.
        """
        for block in self._cutter.add(rows, count):
            self._write(block, tensors)

    def finish(self, tensors: Sequence[TensorSpec]) -> list[ShardInfo]:
        """Write the rows that are left and close the last file; what the files hold."""
        for block in self._cutter.rest():
            self._write(block, tensors)
        self._close()
        return self._shards

    def abort(self) -> None:
        """Remove every file of this attempt."""
        if self._file is not None:
            self._file.abort()
            self._file = None
        for path in self._paths:
            with suppress(StorageError):  # a vacuum will find it
                self._root.child(path).delete()
        self._shards, self._paths = [], []

    def _write(self, rows: Rows, tensors: Sequence[TensorSpec]) -> None:
        batch = to_batch(rows, tensors)
        if self._file is None:
            kind = "arrow" if self._config.format == "ipc" else "parquet"
            path = f"shards/{self._number:05d}-{len(self._shards):04d}-{self._tag}.{kind}"
            self._paths.append(path)
            self._file = ShardFile(self._root, path, batch.schema, self._config)
        self._file.write(batch)
        if self._file.bytes >= self._config.shard_bytes:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._shards.append(self._file.close())
            self._file = None


class ShardFile:
    """One shard file being written; every ``write`` is one block of it.

    Args:
        root: of the set.
        path: of the file below it.
        schema: of the blocks.
        config: format and compression.
    """

    def __init__(self, root: Storage, path: str, schema: pa.Schema, config: ShardConfig) -> None:
        self._path, self._uri = path, root.child(path).uri
        self._blocks: list[BlockInfo] = []
        self._stream = root.child(path).open_output()
        self._sink = _HashingSink(self._stream)
        self._head_bytes = len(b"PAR1")
        with storage_errors(self._uri, "write"):
            self._parquet = config.format == "parquet"
            if self._parquet:
                from pyarrow import parquet  # which loads every filesystem that Arrow knows

                codec = config.compression or "none"
                self._writer = parquet.ParquetWriter(self._sink, schema, compression=codec, use_dictionary=False)
            else:
                self._pads = _pads(schema, config.compression)
                self._head_bytes = len(b"ARROW1\0\0") + schema.serialize().size
                options = pa.ipc.IpcWriteOptions(compression=config.compression)
                target = pa.PythonFile(self._sink, mode="w")
                self._writer = pa.ipc.new_file(target, schema, options=options)

    @property
    def bytes(self) -> int:
        """Bytes written so far."""
        return self._sink.position

    def write(self, batch: pa.RecordBatch) -> BlockInfo:
        """Append one block."""
        origin = max(self._sink.position, self._head_bytes)  # Arrow writes the head along with the first block
        self._sink.hash_from(origin)
        with storage_errors(self._uri, "write"):
            if self._parquet:
                self._writer.write_batch(batch, row_group_size=batch.num_rows)
            else:
                pad = self._pads[-origin % _ALIGNMENT]
                self._writer.write_batch(batch, custom_metadata={_PAD: pad})
        block = BlockInfo(batch.num_rows, self._sink.position - origin, origin, self._sink.digest())
        self._blocks.append(block)
        return block

    def close(self) -> ShardInfo:
        """Write the footer, make the file durable, and say what it holds."""
        with storage_errors(self._uri, "write"):
            self._writer.close()
            self._stream.close()
        rows = sum(block.rows for block in self._blocks)
        return ShardInfo(self._path, rows, self._sink.position, tuple(self._blocks))

    def abort(self) -> None:
        """Give the file up and remove what there is of it."""
        self._sink.discard = True  # the writers write a footer when they are dropped
        abandoned = SparkdlError("the shard is given up")
        with suppress(Exception):
            self._stream.__exit__(type(abandoned), abandoned, None)


class _HashingSink(io.RawIOBase):
    """Passes bytes on, counting and hashing them while they are in the cache."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = xxhash.xxh3_64()
        self._from = 0
        self.position = 0
        self.discard = False

    def hash_from(self, position: int) -> None:
        """Begin a new hash with the write that starts at ``position``."""
        self._hash.reset()
        self._from = position

    def digest(self) -> str:
        """The hash of everything since."""
        return self._hash.hexdigest()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if not self.discard:
            self._stream.write(data)
            if self.position >= self._from:
                self._hash.update(data)
        self.position += size
        return size


@functools.lru_cache(maxsize=64)
def _pads(schema: pa.Schema, compression: str | None) -> dict[int, str]:
    """Custom metadata by the length, modulo 64, that it gives to the message of a record batch without its body.

    Arrow aligns messages to 8 bytes; a block's metadata is padded so that its body starts at a multiple of 64, and with
    it every fixed-size buffer of a full block: a reader maps the file and uses the buffers where they are.
    """
    probe = pa.RecordBatch.from_arrays([pa.nulls(1, kind) for kind in schema.types], schema=schema)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    pads: dict[int, str] = {}
    for length in range(0, 2 * _ALIGNMENT, 4):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema, options=options) as writer:
            writer.write_batch(probe, custom_metadata={_PAD: "." * length})
        _, message = pa.ipc.MessageReader.open_stream(sink.getvalue())
        pads.setdefault((8 + message.metadata.size) % _ALIGNMENT, "." * length)
    return pads
