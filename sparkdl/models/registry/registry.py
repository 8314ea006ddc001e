"""Versions of published models and the aliases that point to them, in one Delta table.

Enters: bundles with their metrics and lineage. Leaves: versions 1, 2, 3, ... of each model without a gap, aliases such
as ``champion`` that move only by compare-and-set, and a history of every move. No Spark, and no torch but
for ``load``.

    <uri>/artifacts/<content hash>/   the bundles; equal models are stored once
    <uri>/events/                     Delta table: one row an event (published, aliased, rolled_back, deleted)
    <uri>/state/                      what the events added up to a few commits ago; not needed

The state is a fold over the events, and an event commits only on the table version that its decision was made on.
So two publishers never take one number, an alias never points to a version that is gone, and a publisher that is killed
leaves an artifact that nothing names. Whoever loses a race reads again and decides again (``log.py``).
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sparkdl.config import require
from sparkdl.documents.typed import as_json
from sparkdl.errors import ConfigError, ConflictError
from sparkdl.models.folder import DOCUMENT, copy_bundle, read_bundle
from sparkdl.models.registry.event_log import Event, ModelVersion
from sparkdl.models.registry.log import EventLog
from sparkdl.models.registry.promotion import Promotion, decide_promotion
from sparkdl.models.registry.state import ModelSummary, State
from sparkdl.storage import Storage
from sparkdl.tables.delta import storage_of
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from sparkdl.models.bundle import Bundle

__all__ = ["Lineage", "ModelRegistry"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Where a model comes from.

    Attributes:
        source_table: address of the table it was trained on.
        source_version: the version of it.
        code_version: of the training code, such as a commit.
        shard_key: content key of the shard set.
        versions: of the software; the bundle's own are added when it is published.
    """

    source_table: str | None = None
    source_version: int | None = None
    code_version: str | None = None
    shard_key: str | None = None
    versions: Mapping[str, str] | None = None


@dataclass(frozen=True)
class ModelRegistry:
    """A registry of models, by its address.

    Attributes:
        uri: a local folder or ``s3://...``.
        storage_options: as ``Table`` takes them.
    """

    uri: str
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", self._root.uri)

    @cached_property
    def _root(self) -> Storage:
        """What the given address means, reached with the same rights as the table of events; found out once."""
        return storage_of(self.uri, self.storage_options)

    def publish(
        self,
        name: str,
        bundle: str,
        *,
        metrics: Mapping[str, float] | None = None,
        parameters: Mapping[str, Any] | None = None,
        lineage: Lineage | None = None,
        publication: str | None = None,
    ) -> ModelVersion:
        """Copy a bundle into the registry and give it the next version of ``name``.

        Args:
            name: of the model: letters, digits, ``_``, ``-`` and ``.``.
            bundle: a folder that ``save_bundle`` wrote; it is not needed afterwards.
            metrics: what it achieved, by name.
            parameters: what it was trained with, JSON values.
            lineage: where it comes from.
            publication: an identity of this publication: with the same one again, the version that it made is
                returned and nothing is published. By default every call is one of its own.

        Raises:
            BundleError: there is no bundle at ``bundle``.
            IntegrityError: its files differ from their hashes.
            ConfigError: a name, metric or parameter is unusable.
        """
        _check_name("model", name)
        info = read_bundle(bundle)
        identity = publication or uuid.uuid4().hex
        known = as_json("lineage", asdict(lineage or Lineage()), ConfigError)
        known["versions"] = {**info.versions, **(known["versions"] or {})}
        event = Event(
            kind="published",
            name=name,
            artifact=info.content_hash,
            metrics=_metrics(metrics or {}),
            parameters=as_json("parameters", parameters or {}, ConfigError),
            lineage=known,
            publication=identity,
        )

        def decide(state: State) -> Event | ModelVersion:
            before = state.by_publication(name, identity)
            return before or event.numbered(state.next_version(name))

        before = self._log.ask(lambda state: state.by_publication(name, identity))
        if before is None:
            copy_bundle(info, self._artifact(info.content_hash))
            before = self._log.commit(decide, lambda state: state.by_publication(name, identity))
        assert before is not None
        return before

    def get(self, name: str, which: int | str) -> ModelVersion:
        """The version of a number, or the one that an alias points to.

        Raises:
            ConfigError: there is no such model, version or alias; the message lists those there are.
        """
        return self._log.ask(lambda state: state.get(name, which))

    def load(self, name: str, which: int | str, **options: Any) -> Bundle:
        """Load the model of a version or alias, checked against the hash that the registry holds.

        Args:
            name: of the model.
            which: a version, or an alias.
            options: as ``load_bundle`` takes them.
        """
        from sparkdl.models.bundle import load_bundle  # torch, which nothing else here needs

        found = self.get(name, which)
        return load_bundle(self._artifact(found.artifact), expected_hash=found.artifact, **options)

    def models(self) -> Sequence[str]:
        """The names of all models."""
        return self._log.ask(State.names)

    def list(self, name: str) -> Sequence[ModelVersion]:
        """The versions of a model, oldest first, without deleted ones; none for an unknown name."""
        return self._log.ask(lambda state: state.versions(name))

    def summaries(self) -> Sequence[ModelSummary]:
        """Every model at a glance, by name."""
        return self._log.ask(lambda state: [state.summary(name) for name in state.names()])

    def aliases(self, name: str) -> dict[str, int]:
        """What each alias of a model points to."""
        return self._log.ask(lambda state: state.aliases(name))

    def history(self, name: str) -> Sequence[Event]:
        """Every event of a model, oldest first."""
        return self._log.events(name)

    def set_alias(
        self, name: str, alias: str, version: int, *, expected: int | None, reason: str = "", dry_run: bool = False
    ) -> Promotion:
        """Point ``alias`` to ``version`` if it points to ``expected`` now.

        Args:
            name: of the model.
            alias: such as ``"champion"``.
            version: where it shall point.
            expected: where it points as far as the caller knows; None means that it does not exist yet.
            reason: kept in the history.
            dry_run: only say what would be done.

        Raises:
            ConflictError: it points somewhere else: somebody was faster.
            ConfigError: there is no such model or version.
        """
        _check_alias(alias)

        def decide(state: State) -> Event | Promotion:
            state.get(name, version)
            now = state.aliases(name).get(alias)
            if now != expected:
                raise ConflictError(
                    f"alias {alias!r} of {name!r} points to {now}, {expected} was expected: look at "
                    f"{now}, then decide again"
                )
            if now == version:
                return Promotion(moved=False, reason=f"{version} has it already", version=now, previous=now)
            return Event(kind="aliased", name=name, alias=alias, version=version, previous=now, reason=reason)

        def outcome(state: State) -> Promotion:
            return Promotion(moved=True, reason=reason, version=version, previous=expected)

        return self._log.commit(decide, outcome, dry_run=dry_run)

    def promote_if_better(
        self,
        name: str,
        alias: str,
        version: int,
        *,
        metric: str,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
        dry_run: bool = False,
    ) -> Promotion:
        """Point ``alias`` to ``version`` if its metric is better than that of the version it points to.

        If somebody moves the alias meanwhile, the comparison is made again with the newcomer.

        Args:
            name: of the model.
            alias: created if it does not exist.
            version: the challenger.
            metric: the name of a metric that both versions were published with.
            mode: whether less is better, or more.
            min_delta: how much better it must be, in the metric's unit; 0 asks for any improvement.
            dry_run: only say what would be done.

        Raises:
            ConfigError: there is no such version, or one of the two has no such metric.
        """
        _check_alias(alias)
        require(mode in ("min", "max"), f"mode={mode!r} is not one of 'min', 'max': choose one of these")
        require(min_delta >= 0, f"min_delta={min_delta} is below 0: give how much better the model must be, at least 0")
        made: list[Promotion] = []

        def decide(state: State) -> Event | Promotion:
            promotion = decide_promotion(state, name, alias, version, metric, mode, min_delta)
            made.append(promotion)
            if not promotion.moved:
                return promotion
            return Event(
                kind="aliased",
                name=name,
                alias=alias,
                version=version,
                previous=promotion.previous,
                reason=promotion.reason,
            )

        return self._log.commit(decide, lambda state: made[-1], dry_run=dry_run)

    def rollback(self, name: str, alias: str, *, reason: str = "rollback", dry_run: bool = False) -> Promotion:
        """Point ``alias`` to the version that it pointed to before its last move; again goes back further.

        Args:
            name: of the model.
            alias: such as ``"champion"``.
            reason: kept in the history.
            dry_run: only say what would be done.

        Raises:
            ConfigError: there is no such alias, or nothing before.
        """
        moves: list[Promotion] = []

        def decide(state: State) -> Event:
            now = state.get(name, alias).version
            before = state.before(name, alias)
            if before is None:
                raise ConfigError(
                    f"alias {alias!r} of {name!r} points to {now} and has no earlier version: set it instead"
                )
            moves.append(Promotion(moved=True, reason=reason, version=before, previous=now))
            return Event(kind="rolled_back", name=name, alias=alias, version=before, previous=now, reason=reason)

        return self._log.commit(decide, lambda state: moves[-1], dry_run=dry_run)

    def delete(self, name: str, version: int, *, reason: str = "") -> None:
        """Take a version out of the registry; its number is not used again.

        The artifact stays until ``vacuum``.

        Raises:
            ConflictError: an alias points to it.
            ConfigError: there is no such version.
        """

        def decide(state: State) -> Event:
            pointing = state.get(name, version).aliases
            if pointing:
                raise ConflictError(
                    f"version {version} of {name!r} is what {list(pointing)} point to: move them first, then delete it"
                )
            return Event(kind="deleted", name=name, version=version, reason=reason)

        self._log.commit(decide, lambda state: None)

    def vacuum(self, older_than: timedelta = timedelta(days=1)) -> Sequence[str]:
        """Delete artifacts that no version names; return their addresses.

        Args:
            older_than: a younger one may belong to a publication that is under way.
        """
        limit = time.time() - older_than.total_seconds()
        folder = self._root.child("artifacts")
        removed = []
        for entry in folder.list():
            if not re.fullmatch("[0-9a-f]{64}", entry.name):
                continue  # not written by a registry
            document = folder.child(entry.name).child(DOCUMENT)
            stamps = [found.modified or 0.0 for found in folder.child(entry.name).list()] or [entry.modified or 0.0]
            if max(stamps) < limit and entry.name not in self._log.ask(lambda state: state.artifacts()):
                document.delete()  # first, so that no reader finds half a bundle
                folder.child(entry.name).delete(recursive=True)
                removed.append(folder.child(entry.name).uri)
        return removed

    @cached_property
    def _log(self) -> EventLog:
        table = Table(self._root.child("events").spark_uri, self.storage_options, engine="delta-rs")
        return EventLog(self._root, table, lambda content_hash: self._artifact(content_hash).uri)

    def _artifact(self, content_hash: str) -> Storage:
        return self._root.child("artifacts").child(content_hash)


def _check_name(what: str, name: str) -> None:
    good = 0 < len(name) <= 128 and name[0].isalnum() and all(letter.isalnum() or letter in "._-" for letter in name)
    require(
        good,
        f"the {what} name {name!r} is unusable: 1 to 128 letters, digits, '_', '-' and '.', a letter or digit first",
    )


def _check_alias(alias: str) -> None:
    _check_name("alias", alias)
    require(not alias.isdigit(), f"the alias {alias!r} looks like a version: use a word")


def _metrics(values: Mapping[str, float]) -> dict[str, float]:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"metric {name!r} is a {type(value).__name__}, not a number: pass a float")
    return {name: float(value) for name, value in values.items()}
