"""Windows of time: which are due, which train, which validate, which are scored. Pure arithmetic on names.

Enters: windows with the fingerprint of what the source holds for each, and what was done before. Leaves: the windows
to do, and the split. A window is named by its start, ``2026-03-02`` (a day), ``2026-03-02T05`` (an hour) or ``2026-03``
(a month), so that names sort as time does.

What is due follows from what was written for which input, never from the clock: a gap heals by itself, a late row makes
its own window due and no other. The clock has one say: windows that begin after ``now`` are left alone, so that one
row with a date in 2099 cannot become the newest day.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sparkdl.errors import DataError

__all__ = ["WHOLE", "Split", "ahead", "due", "split_windows", "window_of"]

WHOLE = "all"
"""The one window of a source without a time column."""

_FORMATS = {"month": "%Y-%m", "day": "%Y-%m-%d", "hour": "%Y-%m-%dT%H"}
_NAME = re.compile(r"\d{4}-\d{2}(-\d{2}(T\d{2})?)?")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which windows train, which validate, which are scored; each in order, and each after those before it."""

    training: tuple[str, ...]
    validation: tuple[str, ...]
    scoring: tuple[str, ...]


def window_of(moment: datetime, size: str) -> str:
    """The name of the window of ``size`` (``"hour"``, ``"day"``, ``"month"``) that a moment lies in, in UTC."""
    return moment.astimezone(UTC).strftime(_FORMATS[size])


def ahead(windows: Collection[str], now: datetime) -> list[str]:
    """Those of the windows that begin after ``now``, in order."""
    return sorted(name for name in windows if name != WHOLE and _start(name) > now)


def due(
    found: Mapping[str, str],
    done: Mapping[str, str],
    *,
    now: datetime,
    again: tuple[str, str] | None = None,
) -> list[str]:
    """The windows to do, in order.

    Args:
        found: fingerprint of what the source holds, by window.
        done: fingerprint that each window was last done for.
        now: windows that begin later are not due.
        again: first and last window to do in any case, both included.

    Raises:
        DataError: ``again`` names no window that the source holds.
    """
    later = set(ahead(found, now))
    forced = {name for name in found if again is not None and again[0] <= name <= again[1]}
    if again is not None and not forced - later:
        raise DataError(
            f"--backfill {again[0]}..{again[1]} names none of the {len(found)} windows of the source, "
            f"{_span(sorted(found))}: name some of these"
        )
    return sorted(name for name in found if name not in later and (name in forced or done.get(name) != found[name]))


def split_windows(windows: Collection[str], *, train: int | None, validate: int, score: int, least: int = 1) -> Split:
    """Divide windows by time: the last are scored, those before validate, those before train.

    Args:
        windows: all that have rows.
        train: how many windows train, the newest of those left (a window that slides); None takes all (one that grows).
        validate: how many validate.
        score: how many are scored.
        least: how many must be left to train.

    Raises:
        DataError: there are too few windows.
    """
    ordered = sorted(windows)
    held = validate + score
    if len(ordered) < held + least:
        raise DataError(
            f"the source has {len(ordered)} windows with rows ({_span(ordered)}), and {validate} to validate, {score} "
            f"to score and {least} to train make {held + least}: wait for more data, or lower them in split"
        )
    first = len(ordered) - held
    training = ordered[:first] if train is None else ordered[max(0, first - train) : first]
    return Split(
        training=tuple(training),
        validation=tuple(ordered[first : first + validate]),
        scoring=tuple(ordered[first + validate :]),
    )


def _start(name: str) -> datetime:
    if not _NAME.fullmatch(name):
        raise DataError(f"{name!r} is no window: windows are called 2026-03, 2026-03-02 or 2026-03-02T05")
    size = {7: "month", 10: "day", 13: "hour"}[len(name)]
    return datetime.strptime(name, _FORMATS[size]).replace(tzinfo=UTC)


def _span(ordered: Sequence[str]) -> str:
    if not ordered:
        return "none"
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
