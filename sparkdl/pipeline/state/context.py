"""What every step of a run asks for: the file, where things lie, what is known, the time it is.

Enters: a sound pipeline file. Leaves: ``Context``, made once a run; neither Spark nor torch is loaded for it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.models.registry import ModelRegistry, ModelVersion
from sparkdl.pipeline.code import code_hash, split_target
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.file.problems import choices
from sparkdl.pipeline.functions import named_functions
from sparkdl.pipeline.rows.ledger import Tables
from sparkdl.pipeline.sources import Source, source_of
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.lease import Lease
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.steps import Steps
from sparkdl.storage import Storage
from sparkdl.tables.table import AppTransaction, Table

__all__ = ["LEARNING", "STEPS", "VERSIONS", "Context"]

VERSIONS = {"ingest": 4, "prepare": 1, "train": 1, "publish": 1, "score": 1, "drift": 1}
"""Of what the modules of ``work/`` do; raise one when that changes, and it is done again, with what follows from it."""
LEARNING = ("features", "shards", "train", "evaluate", "publish")
"""The steps from clean rows to a published model."""
STEPS = ("ingest", "drift", *LEARNING, "score")
"""All of them, in order."""


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

    Raises:
        ConfigError: there is no such step, or it is one of learning, and ``train`` is False.
    """

    file: PipelineFile
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    again: tuple[str, str] | None = None
    until: str | None = None
    train: bool = True
    lease: Lease | None = None

    def __post_init__(self) -> None:
        if self.until is not None and self.until not in STEPS:
            raise ConfigError(f"until={self.until} is no step: {choices(self.until, STEPS)}")
        if self.until in LEARNING and not self.train:
            raise ConfigError(
                f"until={self.until} is a step of learning, and this run learns nothing: give one of both"
            )

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
    def steps(self) -> Steps:
        """What was done, and is done."""
        return Steps(self.runs.child("steps"), self.tables.table("receipts"), self.lease)

    def hold(self, lease: Lease) -> None:
        """Commit under a lease from now on; what a run before may do yet, if it lives on, is refused first.

        Args:
            lease: that this run has taken; names of a catalog are asked, so that its session has started.

        Raises:
            FencedError: a later run has taken over.
            StorageError: a table cannot be written.
        """
        self.lease = lease
        self.steps.hold(lease)
        self.registry = replace(self.registry, fence=lease.fence)
        if lease.claims_due:
            self.tables.ledger.claim(lease.fence.transaction())
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

    @property
    def asked(self) -> dict[str, Any]:
        """Which part of a whole run this is; empty for a whole one."""
        return {**({"until": self.until} if self.until else {}), **({} if self.train else {"train": False})}

    def asks_for(self, step: str) -> bool:
        """Whether a step is part of this run."""
        in_time = self.until is None or STEPS.index(step) <= STEPS.index(self.until)
        return in_time and (self.train or step not in LEARNING)

    def champion(self) -> ModelVersion | None:
        """The version that the alias points to now."""
        name, alias = str(self.spec.publish.name), self.spec.publish.alias
        return self.registry.get(name, alias) if alias in self.registry.aliases(name) else None

    def whole(self) -> dict[str, Any] | None:
        """Everything that decides a run from end to end; None where only Spark can tell."""
        champion = self.champion()
        if self.snapshot.state is None:
            return None
        return {
            "versions": VERSIONS,
            "settings": {
                name: value for name, value in self.settings.items() if name not in ("notify", "keep", "show_variables")
            },
            "code": self.code,
            "source": self.snapshot.state,
            "champion": champion.version if champion else None,
        }
