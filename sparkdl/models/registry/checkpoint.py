"""A registry's checkpoint: what its events added up to at a version of their table, so that only the rest is folded.

Enters: a state, and the version of the table that it is of. Leaves: the same state again, page by page. Pages are
named by the hash of what they hold, so an altered one is noticed, and one that has not changed is not written again;
``checkpoint.json`` holds the hashes of the models' heads, and these those of the rest. A checkpoint is never needed:
whoever finds it gone, altered, or made for another table folds all events.

    <registry>/state/checkpoint.json      version of the table, hash of that commit, models; written whole
    <registry>/state/pages/<hash>.json    a model's head, its publications, up to 64 of its versions
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from sparkdl.documents.typed import Count, Source, convert, encode, parse
from sparkdl.errors import SparkdlError, StorageError
from sparkdl.models.registry.model import Hash, Head, UnusableError
from sparkdl.models.registry.state import State
from sparkdl.observe import logger
from sparkdl.storage import Entry, Storage, sha256_hex

__all__ = ["Checkpoint", "Checkpoints"]

T = TypeVar("T")
_FORMAT = 1
_DOCUMENT, _PAGES = "checkpoint.json", "pages"
_MAX_BYTES = 256 << 20
_REMEDY = "it is not needed, delete it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What ``checkpoint.json`` holds.

    Attributes:
        format: of checkpoints.
        version: of the table of events.
        proof: hash of that commit, as ``Journal`` has it.
        events: how many were folded.
        columns: of the table.
        models: by name, the hash of the head and how many versions there are.
    """

    format: int = _FORMAT
    version: Count
    proof: Hash
    events: Count
    columns: tuple[str, ...]
    models: dict[str, tuple[Hash, Count]]


@dataclass(frozen=True)
class Checkpoints:
    """Where the checkpoint of a registry lies.

    Attributes:
        folder: of checkpoints alone.
    """

    folder: Storage

    def newest(self) -> Checkpoint | None:
        """The checkpoint, if there is one that can be used."""
        file = self.folder.child(_DOCUMENT)
        source = Source(file.uri, _REMEDY)
        try:
            if not file.exists():
                return None
            fields = parse(file.read_bytes(at_most=_MAX_BYTES), source, _MAX_BYTES)
            if not isinstance(fields, dict) or fields.pop("hash", None) != _hash_of(fields):
                raise source.error("it does not match its hash")
            if fields.get("format") != _FORMAT:  # another sparkdl's
                return None
            return convert(fields, Checkpoint, source)
        except SparkdlError as error:
            logger.warning("%s; until then every event is read", error)
            return None

    def state_at(self, checkpoint: Checkpoint, uri_of: Callable[[str], str]) -> State:
        """The state that a checkpoint was made of."""
        return State(uri_of, self, checkpoint.events, checkpoint.models)

    def unused(self) -> Iterator[tuple[Storage, Entry]]:
        """The pages that the checkpoint does not name.

        Raises:
            UnusableError: a page that it names is gone or altered.
        """
        found = self.newest()
        used: set[str] = set()
        for page, _ in found.models.values() if found else ():
            head = self.get(page, Head)
            used |= {page, head.publications, *(page for _, _, page in head.chunks)}
        folder = self.folder.child(_PAGES)
        for entry in folder.list():
            if entry.name.removesuffix(".json") not in used:
                yield folder.child(entry.name), entry

    def write(self, state: State, version: int, proof: str, columns: Sequence[str]) -> None:
        """Make a state the checkpoint.

        Args:
            state: whose pages are these.
            version: of the table of events.
            proof: hash of that commit.
            columns: of the table.

        Raises:
            StorageError: it cannot be written.
        """
        made = Checkpoint(version=version, proof=proof, events=state.count, columns=tuple(columns), models=state.save())
        fields = asdict(made)
        self.folder.child(_DOCUMENT).write_atomic(encode({**fields, "hash": _hash_of(fields)}))

    def get(self, page: str, kind: type[T]) -> T:
        """Read a page.

        Raises:
            UnusableError: it is gone, altered, or holds something else.
        """
        file = self.folder.child(_PAGES).child(f"{page}.json")
        source = Source(file.uri, _REMEDY)
        try:
            data = file.read_bytes(at_most=_MAX_BYTES)
            if sha256_hex(data) != page:
                raise source.error("it does not match its hash")
            return convert(parse(data, source, _MAX_BYTES, nan=True), kind, source)
        except SparkdlError as error:
            raise UnusableError(str(error)) from error

    def put(self, value: Any) -> str:
        """Write a page; return its hash.

        Raises:
            StorageError: it cannot be written.
        """
        data = encode(value, nan=True)
        page = sha256_hex(data)
        file = self.folder.child(_PAGES).child(f"{page}.json")
        try:
            known = sha256_hex(file.read_bytes(at_most=len(data))) == page
        except StorageError:  # it is not there, or another one
            known = False
        if not known:
            file.write_atomic(data)
        return page


def _hash_of(fields: Mapping[str, Any]) -> str:
    return sha256_hex(encode(dict(sorted(fields.items()))))
