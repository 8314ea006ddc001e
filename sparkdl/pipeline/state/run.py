"""One run of a pipeline: what was asked for, what there is, and what it has done so far."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from sparkdl.errors import BundleError
from sparkdl.models.folder import read_bundle
from sparkdl.models.registry import ModelRegistry, ModelVersion
from sparkdl.observe import emit
from sparkdl.pipeline.rows.parts import hashes_rows, with_slots
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.lease import Lease
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, ReceiptTable, StepNote
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Shards
from sparkdl.storage import Storage
from sparkdl.storage.address import looks_like_a_table
from sparkdl.tables.engine import spark_session
from sparkdl.tables.table import AppTransaction, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MOST_VALUES_KEPT = 20_000_000
"""Values of clean rows, 160 MB of numbers, up to which Spark keeps them in memory."""
_LARGE_TYPES = {"binary", "array", "map", "struct", "variant"}


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What a run is asked for.

    Attributes:
        now: the time that it is; windows that begin later are left alone.
        again: first and last window to do in any case.
        until: the last step to do; None does all.
        train: whether to learn; else rows are ingested, and the champion predicts.
    """

    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    again: tuple[str, str] | None = None
    until: str | None = None
    train: bool = True


class Places:
    """Whether what receipts name is still there.

    It looks once for each place that is: a run that holds the lease is the only one who takes any away.
    """

    def __init__(self) -> None:
        self._there: set[str] = set()

    def table(self, uri: str) -> bool:
        """Whether there is a table. A catalog is asked only where a session is; without one its receipt is believed."""
        if looks_like_a_table(uri) and spark_session() is None:
            return True
        return self._look(uri, lambda: Table(uri).exists())

    def file(self, uri: str) -> bool:
        """Whether a file or folder is there."""
        return self._look(uri, lambda: Storage.of(uri).exists())

    def shards(self, shards: Shards) -> bool:
        """Whether both sets still lie where the step left them."""
        return all(self.file(Storage.of(uri).child("manifest.json").uri) for uri in (shards.train, shards.validate))

    def bundle(self, uri: str) -> bool:
        """Whether a whole bundle lies there."""

        def whole() -> bool:
            try:
                read_bundle(uri)
            except (BundleError, OSError):
                return False
            return True

        return self._look(uri, whole)

    def published(self, registry: ModelRegistry, name: str) -> bool:
        """Whether the registry still knows the model; single versions may have been deleted."""
        return self._look(f"{registry.uri} {name}", lambda: bool(registry.list(name)))

    def _look(self, address: str, exists: Callable[[], bool]) -> bool:
        if address not in self._there and exists():
            self._there.add(address)
        return address in self._there


class Run:
    """One run, and what there is of its pipeline: source, receipts, clean rows and models, as it sees and changes them.

    It is also one that is only planned, or never begun, where it is asked how a pipeline stands.

    Args:
        project: the pipeline.
        request: what is asked for; None asks for everything, now.

    Attributes:
        run_id: that its receipts carry.
        lease: that it commits under; None until it has one.
        places: whether what receipts name is still there.
        again: first and last window that are still to be done in any case.
        compares_anew: whether drift is compared by other thresholds than it was, for which alone a run is due.
        windows_read: a hash of what the source held for each window when it was read, where only Spark can tell.
    """

    def __init__(self, project: Project, request: RunRequest | None = None) -> None:
        self.project = project
        self.request = RunRequest() if request is None else request
        self.run_id = f"{self.request.now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
        self.lease: Lease | None = None
        self.places = Places()
        self.again = self.request.again
        self.compares_anew = False
        self.windows_read: Mapping[str, str] | None = None
        self._champion: list[ModelVersion | None] | None = None
        self._windows: tuple[Mapping[str, Receipt], Mapping[str, WindowReceipt]] | None = None
        self._clean: tuple[Mapping[str, Receipt], DataFrame] | None = None
        self._divided: tuple[Mapping[str, Receipt], DataFrame] | None = None
        self._in_memory: DataFrame | None = None

    @property
    def spec(self) -> PipelineSpec:
        """What the file says."""
        return self.project.spec

    @cached_property
    def receipts(self) -> ReceiptTable:
        """What was made, and by which key."""
        table, folder = self.project.table("receipts"), self.project.runs.child("steps")
        return ReceiptTable(table, folder, self.run_id)

    @cached_property
    def registry(self) -> ModelRegistry:
        """Where models are published."""
        return ModelRegistry(str(self.spec.places.registry))

    @cached_property
    def snapshot(self) -> SourceSnapshot:
        """The source as it was when this run first looked."""
        return self.project.source.snapshot()

    def windows(self) -> Mapping[str, WindowReceipt]:
        """What is known of the clean rows of each window, in order, those that are due again among them."""
        receipts = self.receipts.of("ingest")  # another mapping once any is written
        if self._windows is None or self._windows[0] is not receipts:
            self._windows = receipts, {name: receipt.read(WindowReceipt) for name, receipt in receipts.items()}
        return self._windows[1]

    def content(self, *, labels: bool = True) -> Mapping[str, str | None]:
        """A hash of the clean rows of each window, in order; None of one that a plan takes to be ingested anew.

        Args:
            labels: of the rows with their labels; else of what predictions follow from.
        """
        return {name: receipt.content if labels else receipt.unlabelled for name, receipt in self.windows().items()}

    def clean(self, spark: SparkSession) -> DataFrame:
        """The table of clean rows, as it was when it was first asked for since the last ingestion."""
        receipts = self.receipts.of("ingest")
        if self._clean is None or self._clean[0] is not receipts:
            self._clean = receipts, self.project.table("clean").read(spark)
        return self._clean[1]

    def clean_to_divide(self, spark: SparkSession) -> DataFrame:
        """The same rows with their slots, see ``with_slots``.

        Where Spark hashes all that a row holds, few rows are kept in memory until the run ends: some ten passes ask
        which rows are of a part. Workers hash most tables themselves, see ``part_frame``, and nothing is kept then.
        """
        receipts = self.receipts.of("ingest")
        if self._divided is None or self._divided[0] is not receipts:
            self.release()
            clean, rows = self.clean(spark), sum(receipt.kept for receipt in self.windows().values())
            large = any(field.dataType.typeName() in _LARGE_TYPES for field in clean.schema.fields)
            divided = with_slots(clean, self.spec)
            if hashes_rows(self.spec) and not large and rows * len(clean.columns) <= _MOST_VALUES_KEPT:
                self._in_memory = divided.persist()
            self._divided = receipts, divided
        return self._divided[1]

    def release(self) -> None:
        """Let go of the rows that are kept in memory; a session that is gone has done so."""
        if self._in_memory is not None:
            with suppress(Exception):
                self._in_memory.unpersist()
        self._divided = self._in_memory = None

    def champion(self) -> ModelVersion | None:
        """The version that the alias points to, as ``look_again`` last saw it."""
        if self._champion is None:
            name, alias = str(self.spec.publish.name), self.spec.publish.alias
            self._champion = [self.registry.get(name, alias) if alias in self.registry.aliases(name) else None]
        return self._champion[0]

    def champion_version(self) -> int | None:
        """Its number; None where there is no champion."""
        champion = self.champion()
        return None if champion is None else champion.version

    def look_again(self) -> None:
        """Ask the registry anew for the champion, which anybody may have moved."""
        self._champion = None

    def hold(self, lease: Lease) -> None:
        """Commit under a lease from now on; what a run before may do yet, if it lives on, is refused first.

        Args:
            lease: that this run has taken; names of a catalog are asked, so that its session has started.

        Raises:
            FencedError: a later run has taken over.
            StorageError: a table cannot be written.
        """
        self.lease = lease
        self.receipts.hold(lease)
        self.registry = replace(self.registry, fence=lease.fence)
        if lease.claims_due:
            project = self.project
            for table in (project.table("clean"), project.table("quarantine"), project.predictions):
                table.claim(lease.fence.transaction())
            self.registry.claim()
            lease.claims_due = False

    def transaction(self) -> AppTransaction | None:
        """The identity of this run's next commit to a table; None without a lease."""
        return None if self.lease is None else self.lease.fence.transaction()

    def check_lease(self) -> None:
        """Refuse to go on where a later run has taken over, before what no table's log can refuse.

        Raises:
            LeaseLostError: one has.
        """
        if self.lease is not None:
            self.lease.check()

    def note(self, note: StepNote) -> None:
        """Note what was done about a step, and tell whoever listens."""
        self.record.steps.append(note)
        emit("step", name=note.name, state="kept" if note.kept else "done", seconds=note.seconds)

    @property
    def made(self) -> list[str]:
        """The steps of which this run has made something, in order."""
        return list(dict.fromkeys(note.name for note in self.record.steps if not note.kept))

    @cached_property
    def record(self) -> RunRecord:
        """What this run leaves, whatever comes of it."""
        return RunRecord(
            pipeline=str(self.spec.name),
            run_id=self.run_id,
            started=self.request.now.isoformat(timespec="seconds"),
            settings=self.project.file.resolved(),
            until=self.request.until,
            train=self.request.train,
        )
