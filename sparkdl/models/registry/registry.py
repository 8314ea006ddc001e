"""Versions of published models and the aliases that point to them, in one Delta table."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sparkdl.config import require
from sparkdl.documents.typed import as_json
from sparkdl.errors import ConfigError, ConflictError, IntegrityError
from sparkdl.models.copies import copy_bundle
from sparkdl.models.folder import DOCUMENT, BundleInfo, read_bundle
from sparkdl.models.registry.events import Event, ModelSummary, ModelVersion, State
from sparkdl.models.registry.garbage import Garbage, Leases, Removed, spare_versions
from sparkdl.models.registry.lineage import Lineage, ModelLineage, Reach, TrainedOn, lineage_of, trained_on
from sparkdl.models.registry.log import EventLog
from sparkdl.models.registry.signing import Keys, SigningKey
from sparkdl.observe import logger
from sparkdl.storage import Storage
from sparkdl.tables.delta import storage_of
from sparkdl.tables.engine import Fence
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from sparkdl.models.bundle import Bundle

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Promotion:
    """What became of an attempt to promote.

    Attributes:
        moved: whether the alias points to another version now, or its move to the same one was signed.
        reason: one sentence with both values.
        version: the version that the alias points to now.
        previous: the one before; None if the alias did not exist.
    """

    moved: bool
    reason: str
    version: int | None
    previous: int | None


def bundle_of(version: ModelVersion) -> BundleInfo:
    """What the bundle of a version says of itself, as it was published: whoever scores by it checks the files, too.

    Raises:
        BundleError: there is none any more.
        IntegrityError: it is another one.
    """
    info = read_bundle(version.uri)
    if info.content_hash != version.artifact:
        raise IntegrityError(
            f"the bundle {info.uri} has the content hash {info.content_hash}, version {version.version} of "
            f"{version.name!r} was published with {version.artifact}: publish it again"
        )
    return info


@dataclass(frozen=True)
class ModelRegistry:
    """A registry of models, by its address.

        <uri>/artifacts/<content hash>/   the bundles; equal models are stored once
        <uri>/events/                     Delta table: one row an event (published, aliased, rolled_back, deleted)
        <uri>/state/                      what the events were a few commits ago; not needed
        <uri>/leases/                     who publishes or uses an artifact just now

    The state is a fold over the events, and an event commits only on the table version that its decision was made on.
    So two publishers never take one number, an alias never points to a version that is gone, and a publisher that is
    killed leaves an artifact that nothing names. Whoever loses a race reads again and decides again (``log.py``). No
    Spark, and no torch but for ``load``.

    Attributes:
        uri: a local folder or ``s3://...``.
        storage_options: as ``Table`` takes them.
        key: with one, every event is signed, and a version or move of an alias that is not is refused; several: the
            first signs, each is believed. By default that of ``SPARKDL_REGISTRY_KEY`` or ``SPARKDL_REGISTRY_KEY_FILE``
            in the environment; ``()`` for none in any case.
        fence: of a run, whose publications and moves of aliases are refused once a later one has claimed the registry.
    """

    uri: str
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    key: SigningKey | Sequence[SigningKey] | None = field(default=None, repr=False, compare=False)
    fence: Fence | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", self._root.uri)
        if self.key is not None:
            Keys.of(self.key)

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
        origin = as_json("lineage", asdict(lineage or Lineage()), ConfigError)
        origin["versions"] = {**info.versions, **(origin["versions"] or {})}
        event = Event(
            kind="published",
            name=name,
            artifact=info.content_hash,
            metrics=_checked_metrics(metrics or {}),
            parameters=as_json("parameters", parameters or {}, ConfigError),
            lineage=origin,
            publication=identity,
        )

        def decide(state: State) -> Event | ModelVersion:
            version = state.by_publication(name, identity)
            return version or replace(event, version=state.next_version(name))

        self._keys.check_signs()
        version = self._log.ask(lambda state: state.by_publication(name, identity))
        if version is None:
            artifact = self._log.artifact(info.content_hash)
            with self._leases.hold(info.content_hash, f"publication of {name}"):
                copy_bundle(info, artifact)
                version = self._commit(decide, lambda state: state.by_publication(name, identity))
                if not artifact.child(DOCUMENT).exists():  # a collection of another sparkdl, which knows no leases
                    copy_bundle(info, artifact)
        assert version is not None
        return self.get(name, version.version) if self._keys else version

    def set_alias(
        self, name: str, alias: str, version: int, *, expected: int | None, reason: str = "", dry_run: bool = False
    ) -> Promotion:
        """Point ``alias`` to ``version`` if it points to ``expected`` now; with a key, a move that it lacks is signed.

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
            self._trusted(state, name, version)
            current = state.aliases(name).get(alias)
            if current != expected:
                raise ConflictError(
                    f"alias {alias!r} of {name!r} points to {current}, {expected} was expected: look at "
                    f"{current}, then decide again"
                )
            if current == version and self._is_signed(state, name, alias):
                return Promotion(moved=False, reason=f"{version} has it already", version=current, previous=current)
            return Event(kind="aliased", name=name, alias=alias, version=version, previous=current, reason=reason)

        def outcome(state: State) -> Promotion:
            return Promotion(moved=True, reason=reason, version=version, previous=expected)

        return self._commit(decide, outcome, dry_run=dry_run)

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
        decisions: list[Promotion] = []

        def decide(state: State) -> Event | Promotion:
            self._trusted(state, name, version)
            promotion = _compared(state, name, alias, version, metric, mode, min_delta)
            if promotion.previous is not None:
                self._trusted(state, name, promotion.previous)
            if promotion.previous == version and not self._is_signed(state, name, alias):
                promotion = replace(promotion, moved=True, reason=f"{promotion.reason}, signed again")
            decisions.append(promotion)
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

        return self._commit(decide, lambda state: decisions[-1], dry_run=dry_run)

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
            current = state.get(name, alias).version
            previous = state.before(name, alias)
            if previous is None:
                raise ConfigError(
                    f"alias {alias!r} of {name!r} points to {current} and has no earlier version: set it instead"
                )
            self._trusted(state, name, previous)
            moves.append(Promotion(moved=True, reason=reason, version=previous, previous=current))
            return Event(kind="rolled_back", name=name, alias=alias, version=previous, previous=current, reason=reason)

        return self._commit(decide, lambda state: moves[-1], dry_run=dry_run)

    def delete(self, name: str, version: int, *, reason: str = "") -> None:
        """Take a version out of the registry; its number is not used again.

        The artifact stays until ``gc``.

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

        self._commit(decide, lambda state: None)

    def claim(self) -> None:
        """Refuse from now on what runs before that of the ``fence`` publish and promote.

        Raises:
            FencedError: a later run has claimed it.
        """
        self._log.claim()

    def gc(
        self,
        older_than: timedelta = timedelta(days=1),
        *,
        keep_last: int | None = None,
        name: str | None = None,
        dry_run: bool = False,
    ) -> Sequence[Removed]:
        """Remove what nobody needs: artifacts without a version, what killed writers left, versions on request.

        Never removed is what a version, an alias, or somebody at work needs: a publication, a block of ``hold``.

        Args:
            older_than: what was written, deleted, or left by an alias within this time stays: a job that does not
                ``hold`` its model may be at work with it. 0 is safe while others publish, not while they read: what
                writers work in stays for a day in any case.
            keep_last: delete all but so many of the newest versions of each model, but for those with an alias; their
                artifacts follow once ``older_than`` has passed. By default no version is deleted.
            name: of the one model whose versions are deleted; by default those of all.
            dry_run: only say what would be removed.

        Raises:
            ConfigError: ``keep_last`` is below 1, or versions shall go and the registry was opened with a public key.
            StorageError: events are missing, so that nobody knows what is needed: nothing is removed.
        """
        require(keep_last is None or keep_last >= 1, f"keep_last={keep_last} is below 1: keep one version at least")
        require(keep_last is not None or name is None, f"name={name!r} is given without keep_last: give both")
        if keep_last is not None and not dry_run:
            self._keys.check_signs()
        events = self._log.every_event()
        if not dry_run:
            self._log.checkpoint()  # of all events: what follows may remove files that the last one still counts on
        removed: list[Removed] = []
        garbage = Garbage(self._root, self._log, self._leases, older_than, dry_run)
        if keep_last is not None:
            reason = f"not among the last {keep_last}, and no alias points to it"
            for event in spare_versions(events, set(self._leases.held()), keep_last, older_than, name):
                try:
                    if not dry_run:
                        self.delete(event.name, event.version, reason=f"gc: {reason}")
                except (ConflictError, ConfigError) as error:  # it got an alias meanwhile, or somebody else deleted it
                    logger.info("%s", error)
                    continue
                removed.append(Removed(kind="version", what=f"{event.name} {event.version}", bytes=0, reason=reason))
            events = self._log.every_event()
        return [*removed, *garbage.artifacts(events), *garbage.leftovers()]

    def vacuum(self, older_than: timedelta = timedelta(days=1)) -> Sequence[str]:
        """Do what ``gc`` does without deleting versions; return the addresses of the artifacts that went."""
        return [removed.what for removed in self.gc(older_than) if removed.kind == "artifact"]

    def get(self, name: str, which: int | str) -> ModelVersion:
        """The version of a number, or the one that an alias points to.

        Raises:
            ConfigError: there is no such model, version or alias; the message lists those there are.
            IntegrityError: the registry was opened with a key that has not signed it, or its bundle is another one.
        """
        return self._log.ask(lambda state: self._trusted(state, name, which))

    def bundle(self, name: str, which: int | str) -> BundleInfo:
        """What the bundle of a version or alias says of itself, checked against the hash that the registry holds.

        ``scoring.score`` takes it for a model, and checks the files against it on every worker.
        """
        return bundle_of(self.get(name, which))

    @contextmanager
    def hold(self, name: str, which: int | str) -> Iterator[ModelVersion]:
        """Keep a version's bundle where it is for the time of the block, whatever ``gc`` is asked to remove meanwhile.

        Example:
            >>> with registry.hold("churn", "champion") as version:
            ...     score(rows, bundle_of(version))
        """
        artifact = self.get(name, which).artifact
        with self._leases.hold(artifact, f"use of {name}@{which}"):
            version = self.get(name, which)
            if version.artifact != artifact:
                raise ConflictError(f"{which!r} of {name!r} was moved meanwhile: ask for it again")
            yield version

    def load(self, name: str, which: int | str, **options: Any) -> Bundle:
        """Load the model of a version or alias, checked against the hash that the registry holds.

        Args:
            name: of the model.
            which: a version, or an alias.
            options: as ``load_bundle`` takes them.
        """
        from sparkdl.models.bundle import load_bundle  # torch, which nothing else here needs

        artifact = self.get(name, which).artifact
        return load_bundle(self._log.artifact(artifact), expected_hash=artifact, **options)

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
        return self._log.ask(lambda state: state.events(name))

    def lineage(self, name: str, which: int | str) -> ModelLineage:
        """What a version was trained on, down to the files of the table, where its log still tells them.

        Raises:
            ConfigError: there is no such model, version or alias.
        """
        return lineage_of(self._log.ask(lambda state: state.get(name, which)), Reach(self.uri, self.storage_options))

    def models_of(self, table: str, version: int | None = None, *, file: str | None = None) -> TrainedOn:
        """The versions of all models that were trained on a table; the other way round than ``lineage``.

        Args:
            table: its address, or its name in a catalog, as it was trained on.
            version: of the table; any by default.
            file: one of its files, a path below the table or a whole address.

        Raises:
            ConfigError: ``table`` is neither an address nor a name, and no model was noted with it.
        """
        versions = self._log.ask(lambda state: [version for name in state.names() for version in state.versions(name)])
        return trained_on(versions, table, version, file, Reach(self.uri, self.storage_options))

    def _is_signed(self, state: State, name: str, alias: str) -> bool:
        """Whether readers with these keys believe the alias's last move; without keys they do."""
        try:
            self._keys.check(state.move(name, alias))
        except IntegrityError:
            return False
        return True

    def _commit(
        self, decide: Callable[[State], Event | T], outcome: Callable[[State], T], *, dry_run: bool = False
    ) -> T:
        if not dry_run:
            self._keys.check_signs()
        return self._log.commit(decide, outcome, seal=self._keys.signed, dry_run=dry_run)

    def _trusted(self, state: State, name: str, which: int | str) -> ModelVersion:
        """A version; with a key, only if that has signed it, and the move of the alias, and its bundle is the one."""
        version = state.get(name, which)
        if self._keys:
            if isinstance(which, str):
                self._keys.check(state.move(name, which))
            self._keys.check(state.event(name, which))
            bundle_of(version)
        return version

    @cached_property
    def _keys(self) -> Keys:
        return Keys.of(self.key)

    @cached_property
    def _leases(self) -> Leases:
        return Leases(self._root.child("leases"))

    @cached_property
    def _log(self) -> EventLog:
        table = Table(self._root.child("events").spark_uri, self.storage_options, engine="delta-rs")
        return EventLog(self._root, table, self.fence)


def _check_name(what: str, name: str) -> None:
    good = 0 < len(name) <= 128 and name[0].isalnum() and all(letter.isalnum() or letter in "._-" for letter in name)
    require(
        good,
        f"the {what} name {name!r} is unusable: 1 to 128 letters, digits, '_', '-' and '.', a letter or digit first",
    )


def _check_alias(alias: str) -> None:
    _check_name("alias", alias)
    require(not alias.isdigit(), f"the alias {alias!r} looks like a version: use a word")


def _checked_metrics(values: Mapping[str, float]) -> dict[str, float]:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"metric {name!r} is a {type(value).__name__}, not a number: pass a float")
    return {name: float(value) for name, value in values.items()}


def _compared(state: State, name: str, alias: str, version: int, metric: str, mode: str, min_delta: float) -> Promotion:
    """Whether ``version`` deserves ``alias`` more than the version that it points to."""
    challenger = state.get(name, version)
    challenger_value = _metric(challenger, metric)
    current = state.aliases(name).get(alias)
    if current is None:
        if math.isnan(challenger_value):
            return Promotion(moved=False, reason=f"{metric} of version {version} is NaN", version=None, previous=None)
        reason = f"version {version} is the first {alias} ({metric} {challenger_value:g})"
        return Promotion(moved=True, reason=reason, version=version, previous=None)
    current_value = _metric(state.get(name, current), metric)
    if current == version:
        return Promotion(
            moved=False, reason=f"version {version} is the {alias} already", version=version, previous=version
        )
    gain = (current_value - challenger_value) if mode == "min" else (challenger_value - current_value)
    better = gain > min_delta if min_delta == 0 else gain >= min_delta
    better = better or (math.isnan(current_value) and not math.isnan(challenger_value))
    comparison = f"{metric} {challenger_value:g} of version {version} against {current_value:g} of {alias} {current}"
    needed = f", better by {gain:g} where {min_delta:g} was asked for" if min_delta else ""
    outcome = "is better" if better else "is not better"
    return Promotion(
        moved=better, reason=f"{comparison} {outcome}{needed}", version=version if better else current, previous=current
    )


def _metric(version: ModelVersion, metric: str) -> float:
    if metric not in version.metrics:
        raise ConfigError(
            f"version {version.version} of {version.name!r} has no metric {metric!r}, only {sorted(version.metrics)}: "
            "name one of these"
        )
    return version.metrics[metric]
