"""What has been done is found again: results of steps by a key over everything that decides them.

Enters: a step's name, the values that decide its result, and a function that does the work. Leaves: the result, from
the function or from an earlier run, and a note of which it was.

A result is one small document, ``<folder>/<step>/<key>.json``, written last and never changed; what is large (a table's
version, a shard set, a bundle) lies elsewhere, and the result says where. A run that is killed leaves no result, so
its step is done again, and each step is built to bear that. A result counts only while what it names is still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sparkdl.documents.typed import encode, read
from sparkdl.errors import IntegrityError
from sparkdl.observe import emit, logger
from sparkdl.storage import Storage, sha256_hex

__all__ = ["StepNote", "Steps", "content_key"]

T = TypeVar("T")

_MAX_BYTES = 256 << 20
"""Of a result: vocabularies of fitted features are the largest."""


def content_key(step: str, inputs: Mapping[str, Any]) -> str:
    """The key of a step's result: 32 hexadecimal digits that follow from its name and inputs, whatever their order.

    Args:
        step: name of the step; raise a number in ``inputs`` when what the step does changes.
        inputs: JSON values and dataclasses of them.

    Raises:
        TypeError: a value is no JSON value, so that it has no one spelling.
    """
    return sha256_hex(encode([step, _sorted(inputs)]))[:32]


@dataclass(frozen=True, kw_only=True)
class StepNote:
    """What a run did about one step.

    Attributes:
        name: of the step.
        key: of its result; empty where a step keeps it elsewhere.
        kept: whether an earlier run's result was taken.
        seconds: it took, wall-clock.
    """

    name: str
    key: str
    kept: bool
    seconds: float


class Steps:
    """The steps of one pipeline, with their results.

    Args:
        folder: where the results lie.
    """

    def __init__(self, folder: Storage) -> None:
        self._folder = folder
        self.notes: list[StepNote] = []

    def find(
        self, step: str, inputs: Mapping[str, Any], kind: type[T], holds: Callable[[T], bool] = lambda _: True
    ) -> T | None:
        """The result that an earlier run left for these inputs; None where there is none that still holds.

        Args:
            step: its name.
            inputs: everything that decides the result.
            kind: the dataclass of the result.
            holds: whether what the result names is still there.
        """
        found = self.result(step, content_key(step, inputs), kind)
        return found if found is not None and holds(found) else None

    def result(self, step: str, key: str, kind: type[T]) -> T | None:
        """The result of a step by its key; None where there is none that can be read."""
        place = self._place(step, key)
        if not place.exists():
            return None
        try:
            return read(place, kind, "delete it, and the step is done again", _MAX_BYTES)
        except IntegrityError as error:
            logger.warning("%s: the step is done again", error)
            return None

    def known(self, step: str, inputs: Mapping[str, Any]) -> bool:
        """Whether a result for these inputs was kept; ``find`` says, too, whether it holds."""
        return self._place(step, content_key(step, inputs)).exists()

    def do(
        self,
        step: str,
        inputs: Mapping[str, Any],
        kind: type[T],
        work: Callable[[], T],
        holds: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Return the result for these inputs; do the work only if no earlier run did, or what it left is gone.

        Raises:
            StorageError: results cannot be read or written.
        """
        started = time.perf_counter()
        result = self.find(step, inputs, kind, holds)
        if result is not None:
            self._note(step, content_key(step, inputs), True, time.perf_counter() - started)
            return result
        emit("step", name=step, state="started")
        result = work()
        self.put(step, inputs, result, time.perf_counter() - started)
        return result

    def put(self, step: str, inputs: Mapping[str, Any], result: Any, seconds: float) -> None:
        """Keep a result, of a step that makes several at once.

        Args:
            step: its name.
            inputs: everything that decides the result.
            result: a dataclass.
            seconds: that it took.
        """
        self.keep(step, inputs, result)
        self._note(step, content_key(step, inputs), False, seconds)

    def keep(self, step: str, inputs: Mapping[str, Any], result: Any) -> None:
        """Keep a value, in place of that of before, which is no work that a run has done."""
        self._place(step, content_key(step, inputs)).write_atomic(encode(result))

    def forget(self, step: str, inputs: Mapping[str, Any]) -> None:
        """Delete the result for these inputs, before what it names is overwritten."""
        self._place(step, content_key(step, inputs)).delete()

    def timed(self, step: str, kept: bool, seconds: float) -> None:
        """Note a step that keeps its results itself, as ingestion does in the ledger."""
        self._note(step, "", kept, seconds)

    def _note(self, step: str, key: str, kept: bool, seconds: float) -> None:
        self.notes.append(StepNote(name=step, key=key, kept=kept, seconds=seconds))
        emit("step", name=step, state="kept" if kept else "done", seconds=seconds)

    def _place(self, step: str, key: str) -> Storage:
        return self._folder.child(step).child(f"{key}.json")


def _sorted(value: Any) -> Any:
    """The value with the keys of every mapping in order, as plain lists, dicts and scalars."""
    if isinstance(value, Mapping):
        return {str(name): _sorted(value[name]) for name in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_sorted(each) for each in value]
    if isinstance(value, set | frozenset):
        raise TypeError(f"{value!r} has no order: give a sorted list")
    return value
