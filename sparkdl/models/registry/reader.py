"""Questions to a registry: which versions and aliases there are, where they come from, their bundles.

Enters: the address of a registry, names, versions, aliases. Leaves: what its events say, believed as far as a key asks
for. Nothing here changes the registry but leases, which end with their block. No Spark, and no torch but for ``load``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConflictError, IntegrityError
from sparkdl.models.folder import BundleInfo, read_bundle
from sparkdl.models.registry.event_log import Event, ModelVersion
from sparkdl.models.registry.leases import Leases
from sparkdl.models.registry.lineage import ModelLineage, Reach, TrainedOn, lineage_of, trained_on
from sparkdl.models.registry.log import EventLog
from sparkdl.models.registry.signing import Keys, SigningKey
from sparkdl.models.registry.state import ModelSummary, State
from sparkdl.storage import Storage
from sparkdl.tables.delta import storage_of
from sparkdl.tables.table import Fence, Table

if TYPE_CHECKING:
    from sparkdl.models.bundle import Bundle

__all__ = ["RegistryReader"]


@dataclass(frozen=True)
class RegistryReader:
    """A registry of models, by its address: what can be asked.

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
        return self._checked_bundle(self.get(name, which))

    @contextmanager
    def hold(self, name: str, which: int | str) -> Iterator[ModelVersion]:
        """Keep a version's bundle where it is for the time of the block, whatever ``gc`` is asked to remove meanwhile.

        Example:
            >>> with registry.hold("churn", "champion") as version:
            ...     score(rows, version.uri)
        """
        artifact = self.get(name, which).artifact
        with self._leases.hold(artifact, f"use of {name}@{which}"):
            found = self.get(name, which)
            if found.artifact != artifact:
                raise ConflictError(f"{which!r} of {name!r} was moved meanwhile: ask for it again")
            yield found

    def load(self, name: str, which: int | str, **options: Any) -> Bundle:
        """Load the model of a version or alias, checked against the hash that the registry holds.

        Args:
            name: of the model.
            which: a version, or an alias.
            options: as ``load_bundle`` takes them.
        """
        from sparkdl.models.bundle import load_bundle  # torch, which nothing else here needs

        found = self.get(name, which)
        return load_bundle(self._log.artifact(found.artifact), expected_hash=found.artifact, **options)

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
        return self._log.events_of(name)

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
        every = self._log.ask(lambda state: [each for name in state.names() for each in state.versions(name)])
        return trained_on(every, table, version, file, Reach(self.uri, self.storage_options))

    def _trusted(self, state: State, name: str, which: int | str) -> ModelVersion:
        """A version; with a key, only if that has signed it, and the move of the alias, and its bundle is the one."""
        found = state.get(name, which)
        if self._keys:
            if isinstance(which, str):
                self._keys.check(state.move(name, which))
            self._keys.check(state.event(name, which))
            self._checked_bundle(found)
        return found

    def _checked_bundle(self, found: ModelVersion) -> BundleInfo:
        info = read_bundle(self._log.artifact(found.artifact))
        if info.content_hash != found.artifact:
            raise IntegrityError(
                f"the bundle {info.uri} has the content hash {info.content_hash}, version {found.version} of "
                f"{found.name!r} was published with {found.artifact}: publish it again"
            )
        return info

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
