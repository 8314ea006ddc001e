"""Shard files by pyarrow alone: blocks cut, permuted, aligned and hashed.

Enters: record batches of source columns. Leaves: Arrow IPC (or Parquet) files of tensors, and a report of what is in
them; and, through ``write_table_shards``, a whole committed shard set without Spark.

Arrow aligns messages to 8 bytes; here a block's metadata is padded so that its body starts at a multiple of 64, and
with it every fixed-size buffer of a full block: a reader maps the file and uses the buffers where they are.
"""

from __future__ import annotations

import functools
import io
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import xxhash

from sparkdl.columns.convert import Converter, Rows
from sparkdl.columns.layout import Layout, Preparation, plan_tensors, with_dictionaries
from sparkdl.columns.spec import TensorSpec
from sparkdl.config import ShardConfig
from sparkdl.errors import SchemaError, SparkdlError, StorageError
from sparkdl.shards.blocks import BlockCutter, permuted, to_batch
from sparkdl.shards.key import content_key
from sparkdl.shards.manifest import BlockInfo, Manifest, ShardInfo, Source
from sparkdl.shards.transaction import PartReport, Transaction
from sparkdl.storage import Storage, storage_errors

__all__ = ["PartWriter", "ShardFile", "write_table_shards"]

_ALIGNMENT = 64
_PAD = "sparkdl.pad"


def write_table_shards(
    rows: pa.Table | pa.RecordBatchReader,
    uri: str | Storage,
    *,
    columns: Sequence[str] | None = None,
    labels: Sequence[str] = (),
    layout: Layout | None = None,
    source: Source | None = None,
    config: ShardConfig | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write a shard set without Spark, from this process.

    Args:
        rows: a table, or a reader of record batches for rows that do not fit into memory.
        uri: of the set's directory.
        columns: those to write, all by default; labels are written in any case.
        labels: the columns that become labels.
        layout: how columns become tensors.
        source: the pinned table that the rows are; makes a second write of the same thing a cache hit.
        config: sizes, format and seed.
        overwrite: replace a set that stands at ``uri``.

    Returns:
        the manifest that was committed, or found.

    Raises:
        SchemaError: a column cannot become a tensor.
        DataError: there are no rows, or values that cannot be written.
        ConflictError: another set stands at ``uri``.
        StorageError: the target cannot be written.
    """
    layout, config = (layout or Layout()).of_prepared(columns), config or ShardConfig()
    schema = layout.schema_of_prepared(rows.schema, labels)
    tensors = plan_tensors(schema, columns=columns, labels=labels, layout=layout)
    key = content_key(source, rows.schema, tensors, layout, config)
    transaction = Transaction(uri, layout=layout, source=source, config=config, key=key, overwrite=overwrite)
    found = transaction.existing()
    if found is not None:
        return found
    missing = [spec.name for spec in tensors if spec.logical == "string" and spec.name not in layout.dictionaries]
    if missing and not isinstance(rows, pa.Table):
        raise SchemaError(f"column {missing[0]!r} is a string in a stream: give its values in Layout.dictionaries")
    found_values = {name: sorted(v for v in rows[name].unique().to_pylist() if v is not None) for name in missing}
    tensors = with_dictionaries(tensors, found_values, layout, config.max_dictionary_values)
    with transaction:
        writer = PartWriter(transaction.root, tensors, config, tag=transaction.tag, prepare=layout.prepare)
        try:
            for batch in rows.to_batches() if isinstance(rows, pa.Table) else rows:
                writer.write(batch)
            report = writer.finish()
        except BaseException:
            writer.abort()
            raise
        return transaction.commit([report], tensors, missing)


class PartWriter:
    """Writes the rows of one partition as shards, under names that no other attempt uses.

    Args:
        root: of the set.
        tensors: as planned.
        config: sizes, format and seed.
        partition: its number; with the seed it decides the permutation of rows.
        tag: of the transaction; together with a number drawn here it is part of every file's name.
        packed_already: packed tensors that arrive as one array column of their name, not as their columns.
        prepare: makes the columns that become tensors of the raw ones; columns that it does not make are labels.
    """

    def __init__(
        self,
        root: Storage,
        tensors: Sequence[TensorSpec],
        config: ShardConfig,
        *,
        partition: int = 0,
        tag: str,
        packed_already: Collection[str] = (),
        prepare: Preparation | None = None,
    ) -> None:
        self._prepare = prepare
        self._root, self._config, self._partition = root, config, partition
        self._tag = f"{tag}-{uuid.uuid4().hex[:8]}"
        self._converter = Converter(tensors, packed_already)
        self._cutter = BlockCutter(config)
        self._file: ShardFile | None = None
        self._shards: list[ShardInfo] = []
        self._paths: list[str] = []
        self._blocks = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Take in a batch of source columns.

        Raises:
            DataError, SchemaError: its values cannot be what was planned.
            StorageError: a shard cannot be written.
        """
        if not batch.num_rows:
            return
        if self._prepare is None:
            self._convert(batch)
            return
        for start in range(0, batch.num_rows, self._prepare.rows_at_once):
            raw = batch.slice(start, self._prepare.rows_at_once)
            self._convert(self._with_labels(raw, self._prepare.apply(raw)))

    def _with_labels(self, raw: pa.RecordBatch, made: pa.RecordBatch) -> pa.RecordBatch:
        labels = [spec.name for spec in self._converter.tensors if spec.role == "label"]
        arrays = [*made.columns, *(raw.column(label) for label in labels)]
        return pa.RecordBatch.from_arrays(arrays, [*made.schema.names, *labels])

    def _convert(self, batch: pa.RecordBatch) -> None:
        rows = self._converter.convert(batch)
        if not self._converter.refused:
            for block in self._cutter.add(rows, batch.num_rows):
                self._write_block(block)

    def finish(self) -> PartReport:
        """Write what is left and close the last file."""
        if self._converter.refused:
            self.abort()
        else:
            for block in self._cutter.rest():
                self._write_block(block)
            self._close_file()
        return PartReport(
            partition=self._partition,
            shards=self._shards,
            tensors=self._converter.tensors,
            statistics=self._converter.statistics,
            unseen=self._converter.unseen,
        )

    def abort(self) -> None:
        """Remove every file of this attempt."""
        if self._file is not None:
            self._file.abort()
            self._file = None
        for path in self._paths:
            with suppress(StorageError):  # a vacuum will find it
                self._root.child(path).delete()
        self._shards, self._paths = [], []

    def _write_block(self, rows: Rows) -> None:
        first = next(iter(rows.values()))
        generator = np.random.Generator(np.random.PCG64([self._config.seed, self._partition, self._blocks]))
        batch = to_batch(permuted(rows, generator.permutation(len(first))), self._converter.tensors)
        self._blocks += 1
        if self._file is None:
            kind = "arrow" if self._config.format == "ipc" else "parquet"
            path = f"shards/{self._partition:05d}-{len(self._shards):04d}-{self._tag}.{kind}"
            self._paths.append(path)
            self._file = ShardFile(self._root, path, batch.schema, self._config)
        self._file.write(batch)
        if self._file.bytes >= self._config.shard_bytes:
            self._close_file()

    def _close_file(self) -> None:
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
    """Custom metadata by the length, modulo 64, that it gives to the message of a record batch without its body."""
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
