"""Windows of time: which are to be emptied, and which train, validate, test and are scored. Pure arithmetic on names.

A window is named by its start in UTC, ``2026-03-02`` (a day) or ``2026-03-02T05`` (an hour), so that names sort as time
does.

What is due follows from what was written for which input, never from the clock: a gap heals by itself, a late row makes
its own window due and no other. A window that was written and that the source no longer holds stays, or is due to be
emptied, as the file says; a source that holds nothing at all is refused, since that is rarely what anybody meant. The
clock has one say: windows that begin after ``now`` are left alone, so that one row with a date in 2099 cannot become
the newest day.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from sparkdl.errors import DataError

WHOLE = "all"
"""The one window of a source without a time column."""

WINDOW = "_window"
"""The column with the name of a row's window."""

MALFORMED = "_malformed"
"""The column with the text of a row that does not fit its file's columns; null where it does."""

NO_TIME = "none"
"""The window of rows that do not say when they happened; it is never trained on."""

_FORMATS = {10: "%Y-%m-%d", 13: "%Y-%m-%dT%H"}
_NAME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2})?")


class Span(NamedTuple):
    """A stretch of time, from its start to before its end, both in UTC."""

    start: datetime
    end: datetime


Part = Literal["train", "validate", "test", "score"]
PARTS: tuple[Part, ...] = ("train", "validate", "test", "score")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The windows of each part, in order; by time each part lies after those before it."""

    train: tuple[str, ...]
    validate: tuple[str, ...]
    score: tuple[str, ...]
    test: tuple[str, ...] = ()

    def windows(self, part: Part) -> tuple[str, ...]:
        """Those of one part."""
        windows: tuple[str, ...] = getattr(self, part)
        return windows

    @property
    def judging(self) -> Part:
        """The part whose rows judge champion and challenger: those to test, if there are any."""
        return "test" if self.test else "validate"


def ahead(windows: Collection[str], now: datetime) -> list[str]:
    """Those of the windows that begin after ``now``, in order."""
    return sorted(name for name in windows if name not in (WHOLE, NO_TIME) and _start(name) > now)


def emptied(
    source_windows: Collection[str],
    held: Collection[str],
    *,
    now: datetime,
    again: tuple[str, str] | None = None,
    remove: bool = False,
) -> set[str]:
    """The windows that are to be emptied, since the source no longer holds them.

    Args:
        source_windows: those that the source holds.
        held: those that rows were written of.
        now: windows that begin later are left alone.
        again: first and last window to do in any case, both included.
        remove: whether all that the source no longer holds are emptied; else only those that ``again`` names, and those
            whose rows can only be in other windows now.

    Raises:
        DataError: ``again`` names no window, or the source holds nothing any more.
    """
    later, deleted = set(ahead(source_windows, now)), set(held) - set(source_windows)
    remaining = set(source_windows) - later - {NO_TIME} if remove else set(source_windows)
    if deleted and not remaining:
        raise DataError(
            f"the source holds no rows{' of any window that has begun' if source_windows else ''}, and the clean rows "
            f"are of {windows_text(sorted(held))}: nothing is changed; check what source names, or wait for data"
        )
    forced = {name for name in {*source_windows, *deleted} if again is not None and again[0] <= name <= again[1]}
    if again is not None and not forced - later:
        raise DataError(
            f"--backfill {again[0]}..{again[1]} names no window of the source, which has "
            f"{windows_text(sorted(source_windows))}: name some of these"
        )
    days_by_hour = {name[:10] for name in source_windows if len(name) == 13}

    def moved(name: str) -> bool:
        """Whether the rows of a deleted window are in others now, since the source has another time or ``every``."""
        return (
            name in (WHOLE, NO_TIME) or WHOLE in source_windows or name in days_by_hour or name[:10] in source_windows
        )

    return {name for name in deleted if remove or name in forced or moved(name)}


def deleted_text(staying: Sequence[str], removed: Sequence[str] = ()) -> str:
    """What became of windows that the source no longer holds, in words; empty where there are none.

    Args:
        staying: those whose rows stay, in order.
        removed: those whose rows were taken out of the clean rows, in order.
    """
    parts = [f"{windows_text(removed)} removed from the clean rows"] if removed else []
    if staying:
        remedy = f"--backfill {staying[0]}..{staying[-1]} or source.deleted_windows=remove takes them out"
        parts.append(f"{windows_text(staying)} of the clean rows that the source no longer holds: {remedy}")
    return "; ".join(parts)


def split_by_time(
    windows: Collection[str],
    *,
    train: int | None,
    validate: int,
    score: int,
    test: int = 0,
    needed: Collection[Part] = PARTS,
) -> Parts:
    """Divide windows by time: the newest hours are scored, those before test, validate and train, in this order.

    Hours are counted back from the end of the newest window; a gap in the data is a gap in its part, and moves nothing.

    Args:
        windows: all that have rows, days or hours.
        train: hours that train: a window that slides; None takes all there are: one that grows.
        validate: hours that validate.
        score: hours that are scored.
        test: hours that test; none by default.
        needed: parts that must have a window.

    Raises:
        DataError: a part that is needed is left without a window.
    """
    ordered = sorted(name for name in windows if name != NO_TIME)
    if not ordered:
        raise DataError("the source has no window with rows: check the source, or wait for data")
    size = timedelta(hours=1 if len(ordered[-1]) == 13 else 24)
    end = _start(ordered[-1]) + size
    lengths = {"train": train, "validate": validate, "test": test, "score": score}
    parts: dict[str, tuple[str, ...]] = {}
    for part, hours in reversed(lengths.items()):
        begin = None if hours is None else end - timedelta(hours=hours)
        parts[part] = tuple(name for name in ordered if _start(name) < end and (begin is None or _start(name) >= begin))
        end = end if begin is None else begin
    for part, hours in lengths.items():
        if part in needed and not parts[part] and hours != 0:
            tested = f", {test} to test" if test else ""
            raise DataError(
                f"split.{part} has no window with rows: the source has {span(ordered)} ({len(ordered)} windows), "
                f"{score} hours to score{tested} and {validate} to validate end with the newest: wait for data, or "
                "change split"
            )
    return Parts(**parts)


def spans(windows: Collection[str], around: timedelta) -> list[Span]:
    """Stretches of time that hold the windows, in order.

    Args:
        windows: days or hours.
        around: what each stretch has more at both ends; stretches that touch are one.
    """
    stretches: list[Span] = []
    for name in sorted(windows):
        first = _moved(_start(name), -around)
        end = _moved(_start(name), timedelta(hours=1 if len(name) == 13 else 24) + around)
        if stretches and first <= stretches[-1].end:
            stretches[-1] = Span(stretches[-1].start, max(stretches[-1].end, end))
        else:
            stretches.append(Span(first, end))
    return stretches


def _moved(moment: datetime, by: timedelta) -> datetime:
    try:
        return moment + by
    except OverflowError:  # rows of the year 1 are someone's "always"
        return (datetime.max if by > timedelta(0) else datetime.min).replace(tzinfo=UTC)


@functools.lru_cache(maxsize=100_000)
def _start(name: str) -> datetime:
    if _NAME.fullmatch(name):
        with suppress(ValueError):  # the 30th of February, hour 24, year 0
            return datetime.strptime(name, _FORMATS[len(name)]).replace(tzinfo=UTC)
    raise DataError(f"{name!r} is no window: windows are called 2026-03-02 or 2026-03-02T05")


def span(ordered: Sequence[str]) -> str:
    """The first and the last of some windows, in words."""
    if not ordered:
        return "none"
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def windows_text(windows: Sequence[str]) -> str:
    """Some windows, in order, in a few words: ``3 windows 2026-03-01 to 2026-03-04``."""
    dated = [name for name in windows if name != NO_TIME]
    undated = ["rows without a time"] if len(dated) < len(windows) else []
    if len(dated) > 1:
        return " and ".join([f"{len(dated)} windows {span(dated)}", *undated])
    return " and ".join([*(f"window {name}" for name in dated), *undated]) or "no window"
