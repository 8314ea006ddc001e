"""The split of a table's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from sparkdl.errors import DataError
from sparkdl.pipeline.init.count import count_hours
from sparkdl.pipeline.init.profile import Profile, has_value
from sparkdl.pipeline.init.roles import Key, Label, When
from sparkdl.pipeline.init.table import Sample
from sparkdl.pipeline.spec import Gate
from sparkdl.pipeline.spec.base import count_of
from sparkdl.pipeline.windows import split_by_time

_ENOUGH = Gate().min_rows
_TESTED = 700
"""Rows from which on a share of them judges that chose nothing."""
_LEAST = 5
"""Held-out rows below which times do not divide them."""
_VALIDATE, _SCORE = 0.15, 0.05
"""Shares of the windows."""
_COPIES = 0.5
"""The share of copies from which on rows that are alike would make parts of a few lumps."""
_NO_TEST = "too few rows for a test part, so those that choose the epoch judge, too"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sections.

    Attributes:
        split: as the file has it.
        why: of the split.
        train_rows: rows that train, about.
        held_out: rows that judge, about.
    """

    split: Mapping[str, Any]
    why: str
    train_rows: int
    held_out: int

    @property
    def min_rows(self) -> int | None:
        """Of the gate; None leaves its default."""
        return None if self.held_out >= 2 * _ENOUGH else max(5, self.held_out // 2)


def plan_for(rows: int, sample: Sample, profiles: Mapping[str, Profile], key: Key, when: When, label: Label) -> Plan:
    """Divide ``rows`` rows, about.

    Args:
        rows: of the table.
        sample: of them.
        profiles: of its columns.
        key: that tells rows apart.
        when: how they lie in time.
        label: what is predicted.
    """
    division = None if when.column is None else _by_time(rows, when, _unlabelled(sample, when.column, when, label))
    if division is None:
        division = _by_hash(rows, when, 0.0 if key.columns else _copies(sample.rows, profiles, label.name))
    return division


def _unlabelled(sample: Sample, column: str, when: When, label: Label) -> int:
    """Hours, from the end of the newest window back, in which no row of the sample has a label that older ones have."""
    times, has_label = sample.rows.column(column), has_value(sample.rows.column(label.name))
    hours, labelled = (list(count_hours([values])) for values in (times, times.filter(has_label)))
    if not labelled:
        return 0
    size = 13 if when.every == "hour" else 10
    newest, last = (datetime.fromisoformat(names[-1][:size]) for names in (hours, labelled))
    return (newest - last) // timedelta(hours=1)


def _copies(rows: pa.Table, profiles: Mapping[str, Profile], label: str) -> float:
    """The share of rows of which another one says the same of all columns but the label; 0 where it is small."""
    columns = [name for name in rows.column_names if name != label and not pa.types.is_null(rows.column(name).type)]
    nested = any(pa.types.is_nested(rows.column(name).type) for name in columns)
    if nested or any(profiles[name].distinct > rows.num_rows / 2 for name in columns):
        return 0.0
    return 1 - int(rows.select(columns).group_by(columns).aggregate([]).num_rows) / int(rows.num_rows)


def _by_hash(rows: int, when: When, copies: float) -> Plan:
    small = rows < 2000
    if rows < _TESTED:
        shares = {"train": 0.6, "validate": 0.2, "score": 0.2}
    elif small:
        shares = {"train": 0.55, "validate": 0.15, "test": 0.15, "score": 0.15}
    else:
        shares = {"train": 0.7, "validate": 0.1, "test": 0.1, "score": 0.1}
    tested = "" if "test" in shares else f"; {_NO_TEST}"
    size_text = f"{rows:,} rows are few, so more of them are held out: " if small else ""
    reason = when.why if when.column is None else f"{when.column}: {when.why}, too few to hold some out"
    why, split = f"{size_text}{reason}{tested}", {"by": "hash", **shares}
    if copies >= _COPIES:
        why += f"; {copies:.0%} of the rows are copies of others but for the label: each is dealt by itself"
        split = {"by": "hash", "copies": "spread", **shares}
    train_rows, held_out_rows = max(1, int(rows * shares["train"])), int(rows * shares["validate"])
    return Plan(split=split, why=why, train_rows=train_rows, held_out=held_out_rows)


def _by_time(rows: int, when: When, unlabelled: int) -> Plan | None:
    """Windows in time that fit the span; None where one of them would be empty, or next to nothing would judge."""
    hours = 24 if when.every == "day" else 1
    validate, score = _lengths(when)
    waiting = -(-unlabelled // hours)
    score = max(score, waiting)
    late = f"; labels of the newest {count_of(waiting, when.every)} are yet to come" if waiting else ""
    for test in (validate, 0):
        try:
            windows = split_by_time(
                list(when.windows), train=None, validate=validate * hours, test=test * hours, score=score * hours
            )
        except DataError:
            continue
        total = max(1, sum(when.windows.values()))
        parts = {"validate": windows.validate, "test": windows.test, "train": windows.train}
        sizes = {name: int(rows * sum(when.windows[window] for window in part) / total) for name, part in parts.items()}
        if test and (min(sizes["validate"], sizes["test"]) < _ENOUGH or sizes["train"] < 2 * sizes["test"]):
            continue  # so few rows would judge nothing
        if sizes["validate"] < _LEAST:
            return None
        lengths = {"validate": validate, **({"test": test} if test else {}), "score": score}
        split = {"by": "time", "train": "all", **{name: _duration(length, when) for name, length in lengths.items()}}
        why = f"{when.why}: the newest are scored, those before judge{late}{'' if test else f'; {_NO_TEST}'}"
        held_out_rows = sizes["test" if test else "validate"]
        return Plan(split=split, why=why, train_rows=max(1, sizes["train"]), held_out=held_out_rows)
    return None


def _lengths(when: When) -> tuple[int, int]:
    """Days or hours to validate and to score: shares of the windows, in which time passes between some, or most."""
    starts = [datetime.fromisoformat(name) for name in sorted(when.windows)]
    step = timedelta(**{f"{when.every}s": 1})
    validate, score = max(1, round(_VALIDATE * len(starts))), max(1, round(_SCORE * len(starts)))
    if len(starts) > validate + score and starts[-1] - starts[0] > 2 * len(starts) * step:  # such as a row a month
        scored, validated = starts[-score], starts[-score - validate]
        return (scored - validated) // step, (starts[-1] + step - scored) // step
    if when.every == "day":
        validate, score = _whole_weeks(min(28, validate)), _whole_weeks(min(7, score))
    return validate, score


def _whole_weeks(days: int) -> int:
    return days - days % 7 if days >= 7 else days


def _duration(number: int, when: When) -> str:
    return f"{number} {when.every}{'' if number == 1 else 's'}"
