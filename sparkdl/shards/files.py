"""The rows of one partition as files, and a whole shard set without Spark."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

from sparkdl.columns.convert import Converter
from sparkdl.columns.layout import Layout, Preparation, plan_tensors, with_dictionaries
from sparkdl.columns.spec import TensorSpec
from sparkdl.config import ShardConfig
from sparkdl.errors import DataError, SchemaError
from sparkdl.shards.key import content_key
from sparkdl.shards.manifest import Manifest, Source
from sparkdl.shards.shard_file import ShardWriter
from sparkdl.shards.spread import RunWriter, spread
from sparkdl.shards.transaction import PartReport, Transaction
from sparkdl.storage import Storage


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
    existing = transaction.existing()
    if existing is not None:
        return existing
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
        if not config.spread_rows:
            return transaction.commit([report], tensors, missing)
        plan = transaction.spreading([report], tensors, missing)
        (shards,) = spread([plan], lambda task, count: [task(number) for number in range(count)])
        return transaction.commit([report], tensors, missing, shards)


class PartWriter:
    """Writes the rows of one partition: as shards, or as runs where rows are spread over the set afterwards.

    Args:
        root: of the set.
        tensors: as planned.
        config: sizes, format and seed.
        partition: its number.
        tag: of the transaction, part of every file's name.
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
        self._partition = partition
        self._converter = Converter(tensors, packed_already)
        self._writer = (RunWriter if config.spread_rows else ShardWriter)(root, partition, tag, config)

    def write(self, batch: pa.RecordBatch) -> None:
        """Take in a batch of source columns.

        Raises:
            DataError, SchemaError: its values cannot be what was planned.
            StorageError: a file cannot be written.
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
        for spec in self._converter.tensors:
            if 0 in spec.shape:  # Arrow divides by it, which ends the process
                raise DataError(
                    f"column {spec.name!r} has no number in any row of a batch, whose shape would be {spec.shape}: "
                    "drop such rows, or leave the column out"
                )
        if not self._converter.refused:
            self._writer.add(rows, batch.num_rows, self._converter.tensors)

    def finish(self) -> PartReport:
        """Write what is left and close the last file."""
        report = PartReport(
            partition=self._partition,
            tensors=self._converter.tensors,
            statistics=self._converter.statistics,
            unseen=self._converter.unseen,
        )
        if self._converter.refused:
            self.abort()
        elif isinstance(self._writer, RunWriter):
            report.runs = self._writer.finish(self._converter.tensors)
        else:
            report.shards = self._writer.finish(self._converter.tensors)
        return report

    def abort(self) -> None:
        """Remove every file of this attempt."""
        self._writer.abort()
