"""All shards of a set or none: the transaction between the first file and the manifest."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sparkdl import errors
from sparkdl.columns.layout import Layout
from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.statistics import ColumnStats, RunningStats
from sparkdl.columns.types import UNKNOWN
from sparkdl.config import ShardConfig
from sparkdl.errors import (
    ConflictError,
    DataError,
    IntegrityError,
    NoRowsError,
    SchemaError,
    SparkdlError,
    StorageError,
)
from sparkdl.observe import logger
from sparkdl.shards.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    Source,
    schema_hash,
    shard_from_json,
    shard_to_json,
)
from sparkdl.shards.spread import Run, Spreading
from sparkdl.storage import TEMPORARY, Storage

ORPHAN_SECONDS = 86_400.0
"""A file that no manifest names is left alone this long, seconds: its writer may still be at work."""


@dataclass(slots=True)
class PartReport:
    """What one task wrote, or why it could not.

    Attributes:
        partition: number of the partition.
        shards: its files in order, where rows stay in the order of the frame.
        runs: its files in order, where rows are spread over the set afterwards.
        tensors: as planned, unknown lengths filled in.
        statistics: by source column.
        unseen: by string column, values missing from its dictionary.
        error: name and message of the error that ended the task; None if it succeeded.
    """

    partition: int
    shards: list[ShardInfo] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    tensors: list[TensorSpec] = field(default_factory=list)
    statistics: dict[str, RunningStats] = field(default_factory=dict)
    unseen: dict[str, int] = field(default_factory=dict)
    error: tuple[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able values; dictionaries are left out, the driver has them."""
        return {
            "partition": self.partition,
            "shards": [shard_to_json(shard) for shard in self.shards],
            "runs": [asdict(run) for run in self.runs],
            "tensors": [asdict(replace(spec, dictionary=())) for spec in self.tensors],
            "statistics": {name: stats.to_json() for name, stats in self.statistics.items()},
            "unseen": self.unseen,
            "error": self.error,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> PartReport:
        """What ``to_json`` gave."""
        return cls(
            partition=fields["partition"],
            shards=[shard_from_json(shard) for shard in fields["shards"]],
            runs=[Run(**{**run, "slices": tuple(run["slices"])}) for run in fields["runs"]],
            tensors=[TensorSpec(**spec) for spec in fields["tensors"]],
            statistics={name: RunningStats.from_json(stats) for name, stats in fields["statistics"].items()},
            unseen=fields["unseen"],
            error=tuple(fields["error"]) if fields["error"] else None,
        )


class Transaction:
    """One write of one set; leaving its ``with`` block without a commit removes its files.

        existing()   a set of the same content key: done. Another one: ConflictError, unless it may be overwritten
        (tasks write shards/<partition>-<index>-<transaction>-<attempt>.arrow, or runs, from which others write shards)
        commit()     checks the reports, writes manifest.json in one step, removes what lost attempts of this
                     transaction and forgotten ones of others have left
        rollback     of a failed ``with`` block removes this transaction's files; those of a killed driver are
                     invisible, and are removed by a later commit or by ``gc`` once they are a day old

    Args:
        uri: of the set's directory.
        layout: how columns become tensors.
        source: the pinned table, if any.
        config: how shards are written.
        key: the content key; empty if the source is not pinned.
        overwrite: whether a set that stands there may be replaced.
        before_commit: called last before the manifest is written; what it raises ends the write.
    """

    def __init__(
        self,
        uri: str | Storage,
        *,
        layout: Layout,
        source: Source | None,
        config: ShardConfig,
        key: str,
        overwrite: bool,
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        self.root = Storage.of(uri)
        self.tag = uuid.uuid4().hex[:16]
        self.layout, self._source, self._config = layout, source, config
        self._key, self._overwrite = key, overwrite
        self._committed, self._before_commit = False, before_commit

    def existing(self) -> Manifest | None:
        """The set that stands at the target if it is the one to be written; None if there is work to do.

        Raises:
            ConflictError: another set stands there and must not be overwritten.
        """
        if not self.root.child(MANIFEST_NAME).exists():
            return None
        try:
            manifest = Manifest.load(self.root)
        except (IntegrityError, SchemaError):
            if not self._overwrite:
                raise
            return None
        if self._key and manifest.content_key == self._key:
            if _is_whole(self.root, manifest):
                return manifest
            logger.warning("shard set %s has lost files: it is written again", self.root.uri)
            self._overwrite = True
        elif not self._overwrite:
            raise ConflictError(
                f"{self.root.uri} holds another shard set of {manifest.rows} rows: pass overwrite=True, or "
                "write elsewhere"
            )
        return None

    def spreading(
        self, reports: Sequence[PartReport], tensors: Sequence[TensorSpec], collected: Sequence[str]
    ) -> Spreading:
        """What becomes of the runs that the reports name.

        Raises:
            DataError, NoRowsError: as ``commit``.
        """
        shaped, _, _ = self._checked(reports, tensors, collected)
        runs = [run for report in reports for run in report.runs]
        if self.root.local_path() is not None and not all(self.root.child(run.path).exists() for run in runs):
            raise self._not_here()
        return Spreading.of(self.root, self.tag, self._config, shaped, runs)

    def commit(
        self,
        reports: Sequence[PartReport],
        tensors: Sequence[TensorSpec],
        collected: Sequence[str],
        shards: Sequence[ShardInfo] | None = None,
    ) -> Manifest:
        """Make the set visible, if every task succeeded and the data are as they have to be.

        Args:
            reports: one a task, in any order.
            tensors: as planned, dictionaries included.
            collected: the string columns whose dictionaries were taken from the rows themselves.
            shards: of the set; None takes those that the reports name.

        Raises:
            DataError: nulls where the policy forbids them, no rows, values missing from a dictionary, rows of one
                column that differ in shape.
            ConflictError: another writer committed first.
            StorageError: the files lie on disks of other machines, or the manifest cannot be written.
        """
        shaped, statistics, rows = self._checked(reports, tensors, collected)
        ordered = sorted(reports, key=lambda report: report.partition)
        shards = [shard for report in ordered for shard in report.shards] if shards is None else shards
        written = sum(shard.rows for shard in shards)
        if written != rows:
            raise IntegrityError(f"{self.root.uri} would hold {written} rows of {rows}: write the set again")
        manifest = Manifest(
            rows=rows,
            bytes=sum(shard.bytes for shard in shards),
            shards=tuple(shards),
            tensors=shaped,
            statistics=statistics,
            schema_hash=schema_hash(shaped),
            content_key=self._key,
            source=self._source,
            spread=self._config.spread_rows,
            seed=self._config.seed,
            format=self._config.format,
            compression=self._config.compression,
            created=time.time(),
        )
        if self.root.local_path() is not None and not _is_whole(self.root, manifest):
            raise self._not_here()
        if self._before_commit is not None:
            self._before_commit()
        manifest = manifest.commit(self.root, overwrite=self._overwrite)
        self._committed = True
        self._vacuum(manifest)
        return manifest

    def _not_here(self) -> StorageError:
        return StorageError(
            f"what executors wrote to {self.root.uri} is not there on the driver: give a folder that all machines "
            "share, or a URI such as s3://bucket/set or hdfs://host/set"
        )

    def _checked(
        self, reports: Sequence[PartReport], tensors: Sequence[TensorSpec], collected: Sequence[str]
    ) -> tuple[tuple[TensorSpec, ...], dict[str, ColumnStats], int]:
        """The tensors with all shapes, the statistics of columns, and the rows."""
        reports = sorted(reports, key=lambda report: report.partition)
        for report in reports:
            if report.error is not None:
                kind, message = report.error
                raise getattr(errors, kind, SparkdlError)(message)
        statistics = _merged(reports)
        _check_unseen(reports, tensors, collected)
        _check_nulls(tensors, statistics)
        rows = sum(file.rows for report in reports for file in (report.shards or report.runs))
        if not rows:
            raise NoRowsError(f"there are 0 rows to write to {self.root.uri}: check the filters before it")
        return _with_known_shapes(tensors, reports, statistics, self.layout), statistics, rows

    def _vacuum(self, manifest: Manifest | None) -> None:
        """Remove what the transaction leaves behind, and what dead ones left long ago; never fails."""
        with suppress(StorageError):
            for name, _, age in orphans(self.root, manifest):
                if self.tag in name or (manifest is not None and age > ORPHAN_SECONDS):
                    with suppress(StorageError):
                        self.root.child(name).delete()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if not self._committed:
            self._vacuum(None)


def orphans(root: Storage, manifest: Manifest | None) -> list[tuple[str, int, float]]:
    """Files of a set's directory that its manifest does not name: path, bytes, and age in seconds."""
    named = {shard.path for shard in manifest.shards} if manifest else set()
    now = time.time()
    folders = []
    for entry in root.child("shards").list():
        path = f"shards/{entry.name}"
        if path not in named and not entry.is_dir:
            folders.append((path, entry.bytes, now - entry.modified if entry.modified else 0.0))
    for entry in root.list():
        if entry.name.startswith(TEMPORARY):
            folders.append((entry.name, entry.bytes, now - entry.modified if entry.modified else 0.0))
    return folders


def _is_whole(root: Storage, manifest: Manifest) -> bool:
    sizes = {f"shards/{entry.name}": entry.bytes for entry in root.child("shards").list()}
    return all(sizes.get(shard.path) == shard.bytes for shard in manifest.shards)


def _merged(reports: Sequence[PartReport]) -> dict[str, ColumnStats]:
    merged: dict[str, RunningStats] = {}
    for report in reports:
        for name, stats in report.statistics.items():
            merged.setdefault(name, RunningStats()).merge(stats)
    return {name: stats.result() for name, stats in merged.items()}


def _check_unseen(reports: Sequence[PartReport], tensors: Sequence[TensorSpec], collected: Sequence[str]) -> None:
    for spec in tensors:
        unseen = sum(report.unseen.get(spec.name, 0) for report in reports)
        if unseen and spec.name in collected:
            raise DataError(
                f"column {spec.name!r} has {unseen} values that were not there when its {len(spec.dictionary)} were "
                f"collected: the frame changes each time it is computed, so save or cache it first"
            )
        if unseen and spec.nulls == "error":
            raise DataError(
                f"column {spec.name!r} has {unseen} values that are none of the {len(spec.dictionary)} of its "
                f"dictionary: extend the dictionary, or set nulls to 'fill' or 'mask'"
            )


def _check_nulls(tensors: Sequence[TensorSpec], statistics: dict[str, ColumnStats]) -> None:
    bad = [
        (column, statistics[column].null_count)
        for spec in tensors
        if spec.nulls == "error" and spec.mask_of is None
        for column in spec.columns
        if column in statistics and statistics[column].null_count
    ]
    if bad:
        (column, nulls), others = bad[0], bad[1:]
        more = f" (also {', '.join(f'{name}: {count}' for name, count in others)})" if others else ""
        raise DataError(
            f"column {column!r} has {nulls} nulls{more}, allowed are 0: fill or drop them first "
            "(write_shards does so by nulls='fill' or 'mask' of its layout)"
        )


def _with_known_shapes(
    tensors: Sequence[TensorSpec], reports: Sequence[PartReport], statistics: dict[str, ColumnStats], layout: Layout
) -> tuple[TensorSpec, ...]:
    """Fill in the shapes that the rows told, and find arrays that are ragged by type but not by content."""
    shaped = []
    for position, spec in enumerate(tensors):
        if UNKNOWN in spec.shape:
            shapes = {
                report.tensors[position].shape: report.partition for report in reports if report.shards or report.runs
            }
            if len(shapes) > 1:
                (shape, first), (other_shape, second) = list(shapes.items())[:2]
                raise DataError(
                    f"column {spec.name!r} has rows of shape {shape} in partition {first} and of {other_shape} in "
                    f"partition {second}: make them equal"
                )
            spec = replace(spec, shape=next(iter(shapes)))
        elif spec.ragged and layout.shapes.get(spec.name) is None:
            lengths = statistics[spec.name]
            if lengths.min_length == lengths.max_length and lengths.min_length:
                spec = replace(spec, ragged=False, stored_as_list=True, shape=(lengths.min_length,))
        shaped.append(spec)
    return tuple(shaped)
