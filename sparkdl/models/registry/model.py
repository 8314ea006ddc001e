"""One model of a registry: its versions and where its aliases point, loaded as far as a question needs.

Enters: events in order, and maybe the pages that an earlier fold left. Leaves: the answers, and the pages of this one.
Versions lie in chunks of ``CHUNK`` numbers: the newest in the model's head, the others in a page each, so that one of
ten thousand costs about as much as one of ten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from sparkdl.documents.typed import Count
from sparkdl.models.registry.event_log import LOG, Event
from sparkdl.storage import sha256_hex

__all__ = ["CHUNK", "Alias", "Head", "Hash", "Model", "Pages", "UnusableError"]

T = TypeVar("T")
Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

CHUNK = 32
"""Numbers whose versions lie together."""
_KEPT_MOVES = 256
"""Of an alias, in its model's head; a rollback behind them reads all events."""
_DIGITS = 8


class UnusableError(Exception):
    """What a checkpoint left is gone, altered, or not enough: all events tell."""


class Pages(Protocol):
    """Where the pages of a checkpoint lie, by their content's hash."""

    def get(self, page: str, kind: type[T]) -> T:
        """Read a page; ``UnusableError`` if it is gone or altered."""

    def put(self, value: Any) -> str:
        """Write a page; return its hash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """Where an alias points, and how it came there.

    Attributes:
        moves: the versions that a rollback goes back through, the present one last.
        cut: whether older ones were left out.
        event: its last move.
    """

    moves: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    cut: bool = False
    event: Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What a checkpoint holds of one model.

    Attributes:
        name: of the model.
        last: the highest number that it ever gave.
        newest: the publications of the newest chunk's versions.
        chunks: the others with versions: number, how many versions, hash of the page with their publications.
        aliases: by name.
        publications: hash of the page that finds a publication's chunk among these; empty without any.
    """

    name: str
    last: Count
    newest: tuple[Event, ...] = ()
    chunks: tuple[tuple[Count, Count, Hash], ...] = ()
    aliases: dict[str, Alias] = field(default_factory=dict)
    publications: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""


@dataclass(slots=True)
class _Chunk:
    """Versions whose numbers follow each other.

    Attributes:
        live: how many there are.
        page: the hash of the page that holds them as they are; empty where there is none yet.
        events: their publications, by number; None where they are not loaded.
    """

    live: int = 0
    page: str = ""
    events: dict[int, Event] | None = None


@dataclass(slots=True)
class Model:
    """One model; events change it.

    Attributes:
        name: of the model.
        pages: of the checkpoint that it was loaded from, and is saved to.
        last: the highest number that it ever gave.
        aliases: by name.
    """

    name: str
    pages: Pages
    last: int = 0
    aliases: dict[str, Alias] = field(default_factory=dict)
    _chunks: dict[int, _Chunk] = field(default_factory=dict)
    _prints: dict[int, str] | None = None
    _prints_page: str = ""

    @classmethod
    def of(cls, head: Head, pages: Pages) -> Model:
        """Back from a checkpoint.

        Raises:
            UnusableError: an alias points elsewhere than its last move says, or a version is none.
        """
        for name, alias in head.aliases.items():
            if (alias.event.name, alias.event.alias, alias.event.version) != (head.name, name, alias.moves[-1]):
                raise UnusableError(f"the alias {name!r} of {head.name!r} is not where its last move left it")
        chunks = {number: _Chunk(live, page) for number, live, page in head.chunks}
        if head.newest:
            number = head.last // CHUNK
            chunks[number] = _Chunk(len(head.newest), events=_by_number(head.newest, head.name, number))
        return cls(head.name, pages, head.last, dict(head.aliases), chunks, None, head.publications)

    @property
    def live(self) -> int:
        """How many versions there are."""
        return sum(chunk.live for chunk in self._chunks.values())

    def version(self, number: int) -> Event | None:
        """The publication of a version; None if there is no such version."""
        chunk = self._chunks.get(number // CHUNK)
        return None if chunk is None else self._loaded(number // CHUNK, chunk).get(number)

    def versions(self) -> Iterator[Event]:
        """The publications of all versions, oldest first."""
        for key in sorted(self._chunks):
            yield from _sorted(self._loaded(key, self._chunks[key]))

    def published_as(self, publication: str) -> Event | None:
        """The version that a publication made, if it is there."""
        wanted = _print(publication)
        for key, chunk in sorted(self._chunks.items()):
            if chunk.events is not None or wanted in self._known_prints().get(key, ""):
                for event in self._loaded(key, chunk).values():
                    if event.publication == publication:
                        return event
        return None

    def before(self, alias: str) -> int | None:
        """The last version before the present one that the alias pointed to and that still exists."""
        found = self.aliases[alias]
        for number in reversed(found.moves[:-1]):
            if self.version(number) is not None:
                return number
        if found.cut:
            raise UnusableError(f"a checkpoint holds the last {_KEPT_MOVES} moves of {alias!r} of {self.name!r}")
        return None

    def apply(self, event: Event) -> None:
        """Let an event happen.

        Raises:
            IntegrityError: no registry commits it after those before.
        """
        wrong = self._wrong(event)
        if wrong:
            raise LOG.error(
                f"event {event.sequence} is {event.kind!r} of {event.name!r} {event.version}, which {wrong}"
            )
        if event.kind in ("published", "deleted"):
            chunk = self._chunks.setdefault(event.version // CHUNK, _Chunk(events={}))
            events = self._loaded(event.version // CHUNK, chunk)
            chunk.page = ""
            if event.kind == "published":
                events[event.version] = event
                self.last = max(self.last, event.version)
            else:
                del events[event.version]
            chunk.live = len(events)
            return
        assert event.alias is not None
        path = self.aliases.get(event.alias)
        moves, cut = (path.moves, path.cut) if path else ((), False)
        if event.kind == "aliased":
            moves = moves if moves[-1:] == (event.version,) else (*moves, event.version)  # signed again: no way back
        else:
            moves = moves[: len(moves) - moves[::-1].index(event.version)]
        self.aliases[event.alias] = Alias(moves=moves, cut=cut, event=event)

    def save(self) -> str:
        """Write what has changed to pages; return the hash of the head."""
        live = {key: chunk for key, chunk in sorted(self._chunks.items()) if chunk.live}
        newest = live.pop(self.last // CHUNK, _Chunk())
        changed = {key: _sorted(chunk.events or {}) for key, chunk in live.items() if not chunk.page}
        if changed:
            prints = {key: text for key, text in self._known_prints().items() if key in live}
            prints |= {key: "".join(_print(each.publication or "") for each in found) for key, found in changed.items()}
            for key, found in changed.items():
                live[key].page = self.pages.put(found)
            self._prints, self._prints_page = prints, self.pages.put({str(key): text for key, text in prints.items()})
        head = Head(
            name=self.name,
            last=self.last,
            newest=_sorted(newest.events or {}),
            chunks=tuple((key, chunk.live, chunk.page) for key, chunk in live.items()),
            aliases={name: _short(alias) for name, alias in self.aliases.items()},
            publications=self._prints_page,
        )
        return self.pages.put(head)

    def _loaded(self, key: int, chunk: _Chunk) -> dict[int, Event]:
        if chunk.events is None:
            chunk.events = _by_number(self.pages.get(chunk.page, tuple[Event, ...]), self.name, key)
            if len(chunk.events) != chunk.live:
                raise UnusableError(f"page {chunk.page} holds {len(chunk.events)} versions, {chunk.live} are known")
        return chunk.events

    def _known_prints(self) -> dict[int, str]:
        if self._prints is None:
            found = self.pages.get(self._prints_page, dict[str, str]) if self._prints_page else {}
            self._prints = {int(key): text for key, text in found.items() if key.isdecimal()}
        return self._prints

    def _wrong(self, event: Event) -> str:
        """Why no registry commits an event here; empty if one does."""
        known = self.version(event.version)
        if event.kind == "published":
            return "has no artifact or time" if not _is_publication(event) else "exists" if known else ""
        if known is None:
            return "does not exist"
        if event.kind == "deleted":
            pointing = [name for name, alias in self.aliases.items() if alias.moves[-1] == event.version]
            return f"is what {pointing} point to" if pointing else ""
        if event.alias is None:
            return "is given to no alias"
        path = self.aliases.get(event.alias)
        if event.kind == "rolled_back" and (path is None or event.version not in path.moves):
            if path is not None and path.cut:
                raise UnusableError(f"a checkpoint holds the last {_KEPT_MOVES} moves of {event.alias!r}")
            return f"{event.alias!r} never pointed to"
        return ""


def _is_publication(event: Event) -> bool:
    return event.kind == "published" and event.artifact is not None and event.time is not None


def _by_number(events: Sequence[Event], name: str, chunk: int) -> dict[int, Event]:
    """The publications of a chunk's versions.

    Raises:
        UnusableError: they are others.
    """
    found = {event.version: event for event in events}
    right = all(_is_publication(event) and event.name == name for event in events)
    if not right or len(found) != len(events) or any(number // CHUNK != chunk for number in found):
        raise UnusableError(f"a page holds other versions than {name!r} has there")
    return found


def _sorted(events: dict[int, Event]) -> tuple[Event, ...]:
    return tuple(event for _, event in sorted(events.items()))


def _print(publication: str) -> str:
    """A few digits by which a publication's chunk is found; that it is the same one, its event says."""
    return sha256_hex(publication.encode())[:_DIGITS]


def _short(alias: Alias) -> Alias:
    cut = alias.cut or len(alias.moves) > _KEPT_MOVES
    return Alias(moves=alias.moves[-_KEPT_MOVES:], cut=cut, event=alias.event)
