"""Versions of published models and the aliases that point to them, in one Delta table.

Enters: bundles with their metrics and lineage. Leaves: versions 1, 2, 3, ... of each model without a gap, aliases such
as ``champion`` that move only by compare-and-set, and a history of every move. No Spark, and no torch but
for ``load``.

    <uri>/artifacts/<content hash>/   the bundles; equal models are stored once
    <uri>/events/                     Delta table: one row an event (published, aliased, rolled_back, deleted)
    <uri>/state/                      what the events added up to a few commits ago; not needed
    <uri>/leases/                     who publishes or uses an artifact just now

The state is a fold over the events, and an event commits only on the table version that its decision was made on.
So two publishers never take one number, an alias never points to a version that is gone, and a publisher that is killed
leaves an artifact that nothing names. Whoever loses a race reads again and decides again (``log.py``).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

from sparkdl.config import require
from sparkdl.documents.typed import as_json
from sparkdl.errors import ConfigError, ConflictError, IntegrityError
from sparkdl.models.copies import copy_bundle
from sparkdl.models.folder import DOCUMENT, read_bundle
from sparkdl.models.registry.event_log import Event, ModelVersion
from sparkdl.models.registry.garbage import Garbage, Removed, spare_versions
from sparkdl.models.registry.lineage import Lineage
from sparkdl.models.registry.promotion import Promotion, decide_promotion
from sparkdl.models.registry.reader import RegistryReader
from sparkdl.models.registry.state import State
from sparkdl.observe import logger

__all__ = ["ModelRegistry"]

T = TypeVar("T")


@dataclass(frozen=True)
class ModelRegistry(RegistryReader):
    """A registry of models, by its address.

    Attributes:
        uri: a local folder or ``s3://...``.
        storage_options: as ``Table`` takes them.
        key: see ``RegistryReader``.
        fence: see there.
    """

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
            metrics=_checked_metrics(metrics or {}),
            parameters=as_json("parameters", parameters or {}, ConfigError),
            lineage=known,
            publication=identity,
        )

        def decide(state: State) -> Event | ModelVersion:
            before = state.by_publication(name, identity)
            return before or event.numbered(state.next_version(name))

        self._keys.check_signs()
        before = self._log.ask(lambda state: state.by_publication(name, identity))
        if before is None:
            place = self._log.artifact(info.content_hash)
            with self._leases.hold(info.content_hash, f"publication of {name}"):
                copy_bundle(info, place)
                before = self._commit(decide, lambda state: state.by_publication(name, identity))
                if not place.child(DOCUMENT).exists():  # a collection of another sparkdl, which knows no leases
                    copy_bundle(info, place)
        assert before is not None
        return self.get(name, before.version) if self._keys else before

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
            now = state.aliases(name).get(alias)
            if now != expected:
                raise ConflictError(
                    f"alias {alias!r} of {name!r} points to {now}, {expected} was expected: look at "
                    f"{now}, then decide again"
                )
            if now == version and self._is_signed(state, name, alias):
                return Promotion(moved=False, reason=f"{version} has it already", version=now, previous=now)
            return Event(kind="aliased", name=name, alias=alias, version=version, previous=now, reason=reason)

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
        made: list[Promotion] = []

        def decide(state: State) -> Event | Promotion:
            self._trusted(state, name, version)
            promotion = decide_promotion(state, name, alias, version, metric, mode, min_delta)
            if promotion.previous is not None:
                self._trusted(state, name, promotion.previous)
            if promotion.previous == version and not self._is_signed(state, name, alias):
                promotion = replace(promotion, moved=True, reason=f"{promotion.reason}, signed again")
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

        return self._commit(decide, lambda state: made[-1], dry_run=dry_run)

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
            self._trusted(state, name, before)
            moves.append(Promotion(moved=True, reason=reason, version=before, previous=now))
            return Event(kind="rolled_back", name=name, alias=alias, version=before, previous=now, reason=reason)

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
                writers work in, and pages of a checkpoint, stay for a day in any case.
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
            for event in spare_versions(events, set(self._leases.held()), keep_last, older_than, name):
                removed += self._spare(event, keep_last, dry_run)
            events = self._log.every_event()
        return [*removed, *garbage.artifacts(events), *garbage.leftovers()]

    def vacuum(self, older_than: timedelta = timedelta(days=1)) -> Sequence[str]:
        """Do what ``gc`` does without deleting versions; return the addresses of the artifacts that went."""
        return [each.what for each in self.gc(older_than) if each.kind == "artifact"]

    def _spare(self, event: Event, keep_last: int, dry_run: bool) -> Sequence[Removed]:
        reason = f"not among the last {keep_last}, and no alias points to it"
        try:
            if not dry_run:
                self.delete(event.name, event.version, reason=f"gc: {reason}")
        except (ConflictError, ConfigError) as error:  # it got an alias meanwhile, or was deleted by somebody else
            logger.info("%s", error)
            return []
        return [Removed(kind="version", what=f"{event.name} {event.version}", bytes=0, reason=reason)]

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
