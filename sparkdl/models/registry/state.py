"""What the events of a registry add up to.

Enters: all events, or a checkpoint and the events since. Leaves: a ``State``, which answers what versions and aliases
there are. From a checkpoint, only the models that are asked for are loaded. No disk, but for the checkpoint's pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sparkdl.errors import ConfigError
from sparkdl.models.registry.event_log import Event, ModelVersion
from sparkdl.models.registry.model import Head, Model, Pages, UnusableError

__all__ = ["ModelSummary", "State", "fold"]

T = TypeVar("T")
_SHOWN = 10
_SAVED_AT_ONCE = 8
"""Models; after the first fold of a registry there may be thousands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """A model at a glance.

    Attributes:
        name: of the model.
        versions: how many there are.
        newest: the highest number among all that it ever gave.
        aliases: what each points to.
    """

    name: str
    versions: int
    newest: int
    aliases: Mapping[str, int]


class _NoPages:
    """The pages of a state that no checkpoint has."""

    def get(self, page: str, kind: type[T]) -> T:
        raise UnusableError(f"there is no page {page}")

    def put(self, value: Any) -> str:
        raise AssertionError("only what has a checkpoint is saved to one")


@dataclass
class State:
    """What the events add up to; ``add`` lets one more happen.

    Attributes:
        uri_of: from content hash to the bundle's address.
        pages: of the checkpoint.
        count: how many events there were.
        stored: the models of the checkpoint: the hash of the head, and how many versions there are.
    """

    uri_of: Callable[[str], str]
    pages: Pages = field(default_factory=_NoPages)
    count: int = 0
    stored: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    _models: dict[str, Model] = field(default_factory=dict)
    _waiting: dict[str, list[Event]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Let an event happen; whether it can is looked at with the model."""
        self._waiting.setdefault(event.name, []).append(event)
        self.count += 1

    def save(self) -> dict[str, tuple[str, int]]:
        """Write what has changed to the pages; return what ``stored`` of a state from there is."""
        changed = {*self._models, *self._waiting}
        models = {name: model for name in changed if (model := self._model(name))}
        with ThreadPoolExecutor(_SAVED_AT_ONCE, thread_name_prefix="sparkdl-registry") as pool:
            heads = list(pool.map(Model.save, models.values()))
        return {**self.stored, **{name: (head, models[name].live) for name, head in zip(models, heads, strict=True)}}

    def artifacts(self) -> set[str]:
        """Content hashes of all versions."""
        models = filter(None, map(self._model, self.names()))
        return {str(event.artifact) for model in models for event in model.versions()}

    def names(self) -> list[str]:
        """The models with a version."""
        found = {name: live for name, (_, live) in self.stored.items()}
        for name in {*self._models, *self._waiting}:
            events = self._waiting.get(name, ())
            grew = name in self.stored and name not in self._models and all(each.kind != "deleted" for each in events)
            found[name] = 1 if grew else self._live(name)  # without a look at the model itself
        return sorted(name for name, live in found.items() if live)

    def summary(self, name: str) -> ModelSummary:
        """A model at a glance; of an unknown name, one without versions."""
        model = self._model(name)
        last = model.last if model else 0
        return ModelSummary(name=name, versions=self._live(name), newest=last, aliases=self.aliases(name))

    def next_version(self, name: str) -> int:
        """One above every number that the model ever had."""
        model = self._model(name)
        return 1 + (model.last if model else 0)

    def aliases(self, name: str) -> dict[str, int]:
        """Alias to version."""
        model = self._model(name)
        return {alias: path.moves[-1] for alias, path in sorted(model.aliases.items())} if model else {}

    def move(self, name: str, alias: str) -> Event:
        """The event that pointed an alias to where it points now.

        Raises:
            ConfigError: there is no such alias.
        """
        model = self._model(name)
        if model is None or alias not in model.aliases:
            there = sorted(self.aliases(name))
            if there:
                raise ConfigError(f"model {name!r} has no alias {alias!r}, only {there}: name one of these")
            newest = next((each.version for each in reversed(self.versions(name))), 1)
            raise ConfigError(
                f"model {name!r} has no alias {alias!r} nor any other: name a version, such as {name}@{newest}, or "
                f"give one the alias by set_alias or `sparkdl models promote REGISTRY {name} {newest}`"
            )
        return model.aliases[alias].event

    def versions(self, name: str) -> list[ModelVersion]:
        """The model's versions, oldest first."""
        model = self._model(name)
        return list(map(self._described, model.versions())) if model else []

    def event(self, name: str, which: int | str) -> Event:
        """The publication of a version by number or alias.

        Raises:
            ConfigError: there is none.
        """
        model = self._model(name)
        if model is None or not model.live:
            raise ConfigError(
                f"there is no model {name!r} in this registry, only {_some(self.names())}: name one of these"
            )
        number = self.move(name, which).version if isinstance(which, str) else which
        found = model.version(number)
        if found is None:
            if isinstance(which, str):
                raise UnusableError(f"the alias {which!r} of {name!r} points to version {number}, which is gone")
            there = f"{model.live:,} of them up to {model.last}"
            if model.live <= _SHOWN:
                there = str([event.version for event in model.versions()])
            raise ConfigError(f"model {name!r} has no version {which}, only {there}: name one of these")
        return found

    def get(self, name: str, which: int | str) -> ModelVersion:
        """A version by number or alias.

        Raises:
            ConfigError: there is none.
        """
        return self._described(self.event(name, which))

    def by_publication(self, name: str, publication: str) -> ModelVersion | None:
        """The version that a publication made, if it is there."""
        model = self._model(name)
        found = model.published_as(publication) if model else None
        return None if found is None else self._described(found)

    def before(self, name: str, alias: str) -> int | None:
        """The last version before the current one that the alias pointed to and that still exists."""
        model = self._model(name)
        return model.before(alias) if model and alias in model.aliases else None

    def _live(self, name: str) -> int:
        model = self._model(name)
        return model.live if model else 0

    def _model(self, name: str) -> Model | None:
        """A model with all that has happened to it; None where nothing ever did."""
        model = self._models.get(name)
        if model is None and name in self.stored:
            page, live = self.stored[name]
            model = Model.of(self.pages.get(page, Head), self.pages)
            if (model.name, model.live) != (name, live):
                raise UnusableError(f"the head of {name!r} with {live} versions is another one's")
            self._models[name] = model
        if model is None and name in self._waiting:
            model = self._models[name] = Model(name, self.pages)
        if model is not None:
            for event in self._waiting.pop(name, ()):
                model.apply(event)
        return model

    def _described(self, event: Event) -> ModelVersion:
        assert event.artifact is not None
        assert event.time is not None
        pointing = self.aliases(event.name)
        return ModelVersion(
            name=event.name,
            version=event.version,
            uri=self.uri_of(event.artifact),
            artifact=event.artifact,
            metrics=event.metrics,
            parameters=event.parameters,
            lineage=event.lineage,
            published=event.time,
            aliases=tuple(alias for alias, version in pointing.items() if version == event.version),
            publication=event.publication or "",
            signature=event.signature,
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{list(names[:_SHOWN])}{more}"


def fold(rows: Iterable[Mapping[str, Any]], uri_of: Callable[[str], str], pages: Pages | None = None) -> State:
    """Add all events up.

    Args:
        rows: of the events table, in any order.
        uri_of: from content hash to the bundle's address.
        pages: that the state can be saved to.

    Raises:
        IntegrityError: a row is no event, or contradicts those before it.
    """
    state = State(uri_of, pages or _NoPages())
    events = sorted((Event.from_row(row) for row in rows), key=lambda event: event.sequence)
    for event in events:
        state.add(event)
    state.names()  # looks at each model, and so at each event
    return state
