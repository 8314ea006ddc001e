"""What a run works with: the file, the places, the source, what is known, and the time that it is."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sparkdl.models.registry import ModelRegistry, ModelVersion
from sparkdl.pipeline.code import code_hash, split_target
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.functions import named_functions
from sparkdl.pipeline.rows.window_receipt import Tables, WindowReceipt
from sparkdl.pipeline.sources import Source, source_of
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.lease import Lease
from sparkdl.pipeline.state.places import Places
from sparkdl.pipeline.state.receipts import Receipt, ReceiptTable, StepNote
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.storage import Storage
from sparkdl.tables.table import AppTransaction, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Context"]


@dataclass
class Context:
    """One run.

    Attributes:
        file: the pipeline.
        now: the time that it is; windows that begin later are left alone.
        again: first and last window to do in any case.
        until: the last step to do; None does all.
        train: whether to learn; else rows are ingested, and the champion predicts.
        lease: under which it commits; None until it has one.
        looked: hash of what the source held for each window when this run read it, where only Spark can tell.
        remade: whether the windows to do in any case have been done.
        assumed: windows that a plan takes to be ingested, and whose rows nobody knows yet.
        clean_rows: the table of clean rows, once it has been read.
        notes: what this run did about each step.
    """

    file: PipelineFile
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    again: tuple[str, str] | None = None
    until: str | None = None
    train: bool = True
    lease: Lease | None = None
    looked: Mapping[str, str] | None = None
    remade: bool = False
    assumed: frozenset[str] = frozenset()
    clean_rows: DataFrame | None = None
    notes: list[StepNote] = field(default_factory=list)
    _champion: list[ModelVersion | None] | None = None
    _windows: tuple[Mapping[str, Receipt], Mapping[str, WindowReceipt]] | None = None

    @property
    def spec(self) -> PipelineSpec:
        """What the file says."""
        return self.file.spec

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The same as JSON values, for keys."""
        return self.file.deciding()

    @cached_property
    def record(self) -> RunRecord:
        """What this run leaves, whatever comes of it."""
        started, name = self.now.isoformat(timespec="seconds"), str(self.spec.name)
        run_id = f"{self.now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
        return RunRecord(
            pipeline=name,
            run_id=run_id,
            started=started,
            settings=self.file.resolved(),
            until=self.until,
            train=self.train,
        )

    @cached_property
    def runs(self) -> Storage:
        """The folder of records, results of steps, leases and models in the making."""
        return Storage.of(str(self.spec.places.runs))

    @cached_property
    def tables(self) -> Tables:
        """The tables of the pipeline."""
        return Tables(folder=str(self.spec.places.tables))

    @cached_property
    def receipts(self) -> ReceiptTable:
        """What was made, and by which key."""
        return ReceiptTable(
            self.tables.table("receipts"), self.runs.child("steps"), lambda: self.record.run_id, self.lease
        )

    @cached_property
    def places(self) -> Places:
        """Whether what receipts name is still there."""
        return Places()

    def clean(self, spark: SparkSession) -> DataFrame:
        """The table of clean rows, as it was when it was first asked for since the last ingestion."""
        if self.clean_rows is None:
            self.clean_rows = self.tables.table("clean").read(spark)
        return self.clean_rows

    def windows(self) -> Mapping[str, WindowReceipt]:
        """What is known of the clean rows of each window, in order, those that are due again among them."""
        receipts = self.receipts.of("ingest")  # another mapping once any is written
        if self._windows is None or self._windows[0] is not receipts:
            self._windows = receipts, {name: receipt.read(WindowReceipt) for name, receipt in receipts.items()}
        return self._windows[1]

    def content(self, *, labels: bool = True) -> dict[str, str | None]:
        """A hash of the clean rows of each window, in order; None of one that is due again, in a plan.

        Args:
            labels: of the rows with their labels; else of what predictions follow from.
        """
        return {
            name: None if name in self.assumed else books.content if labels else books.unlabelled
            for name, books in self.windows().items()
        }

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
            for table in (*map(self.tables.table, ("clean", "quarantine")), Table(str(self.spec.score.target))):
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

    @cached_property
    def registry(self) -> ModelRegistry:
        """Where models are published."""
        return ModelRegistry(str(self.spec.places.registry))

    @cached_property
    def source(self) -> Source:
        """Where the rows come from."""
        return source_of(self.spec.source)

    @cached_property
    def snapshot(self) -> SourceSnapshot:
        """The source as it was when this run first looked."""
        return self.source.snapshot()

    @cached_property
    def code(self) -> dict[str, str]:
        """A hash of the code behind every function that the file names."""
        return {target: code_hash(target) for _, target in named_functions(self.spec)}

    @property
    def trusted(self) -> list[str]:
        """The packages of the functions that the file names: whoever runs the file trusts them."""
        return sorted({split_target(target)[0].split(".")[0] for target in self.code} - {"sparkdl"})

    def champion(self) -> ModelVersion | None:
        """The version that the alias points to, as ``look_again`` last saw it."""
        if self._champion is None:
            name, alias = str(self.spec.publish.name), self.spec.publish.alias
            self._champion = [self.registry.get(name, alias) if alias in self.registry.aliases(name) else None]
        return self._champion[0]

    def look_again(self) -> None:
        """Ask the registry anew for the champion, which anybody may have moved."""
        self._champion = None
