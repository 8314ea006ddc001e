"""What the ETL remembers between runs, all of it in Delta tables of the lake.

Enters: the tables. Leaves: which days were processed from which files, the moments of every day, stable ids.

    etl_days     one row a processed day: fingerprint of its raw files, row counts, moments; committed last, so that a
                 day whose run was cut short counts as not processed and is simply done again
    vocabulary   one row an id: categorical, value, id; ids are given once and never change, 0 is never given
    statistics   one row a column: moments over the training days, under an id
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import pyarrow as pa

from jobs.features import CATEGORICAL, Moments, Statistics
from jobs.settings import Settings
from sparkdl.documents.typed import Count, Source, decode
from sparkdl.tables.table import Table

__all__ = ["DayState", "Vocabulary", "load_days", "save_days", "save_statistics"]

DAY_SCHEMA = pa.schema(
    [
        ("day", pa.string()),
        ("fingerprint", pa.string()),
        ("rows_in", pa.int64()),
        ("rows_out", pa.int64()),
        ("quarantined", pa.int64()),
        ("duplicates", pa.int64()),
        ("reasons", pa.string()),
        ("moments", pa.string()),
        ("features_version", pa.int64()),
        ("processed_at", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class DayState:
    """What is known of a processed day; ``rows_in = rows_out + quarantined + duplicates``."""

    day: str
    fingerprint: str
    rows_in: int
    rows_out: int
    quarantined: int
    duplicates: int
    reasons: dict[str, int]
    moments: dict[str, Moments]
    features_version: int


def load_days(settings: Settings) -> dict[str, DayState]:
    """Read what is known of the processed days, by day.

    Raises:
        IntegrityError: a row holds something else.
    """
    table = Table(settings.paths.table("etl_days"))
    if not table.exists():
        return {}
    days = {}
    for row in table.rows().to_pylist():
        row.pop("processed_at")
        where = Source(f"{table.uri}, {row['day']}", "delete the row, so that the ETL does the day again")
        row["reasons"] = decode(row["reasons"].encode(), dict[str, Count], where)
        row["moments"] = decode(row["moments"].encode(), dict[str, Moments], where)
        days[row["day"]] = DayState(**row)
    return dict(sorted(days.items()))


def save_days(settings: Settings, days: Iterable[DayState]) -> None:
    """Insert or update processed days in one commit."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    rows = []
    for state in days:
        row = {name: value for name, value in vars(state).items() if name not in ("reasons", "moments")}
        row["reasons"] = json.dumps(state.reasons, sort_keys=True)
        row["moments"] = json.dumps({name: asdict(each) for name, each in state.moments.items()})
        rows.append(row | {"processed_at": now})
    table = Table(settings.paths.table("etl_days"))
    content = pa.Table.from_pylist(rows, schema=DAY_SCHEMA)
    if table.exists():
        table.merge(content, on=["day"])
    else:
        table.append(content, expected_version=-1)


@dataclass
class Vocabulary:
    """Stable ids of the values of the categoricals; ids start at 1, since 0 is the unknown value.

    Attributes:
        ids: id by value, by categorical.
        version: of the table that they were read from; -1 before there is one.
    """

    ids: dict[str, dict[str, int]] = field(default_factory=dict)
    version: int = -1

    @staticmethod
    def load(settings: Settings) -> Vocabulary:
        """Read the ids given so far."""
        table = Table(settings.paths.table("vocabulary"))
        if not table.exists():
            return Vocabulary()
        vocabulary = Vocabulary(version=table.version())
        for row in table.rows(version=vocabulary.version).to_pylist():
            vocabulary.ids.setdefault(row["categorical"], {})[row["value"]] = row["id"]
        return vocabulary

    def add(self, categorical: str, values: Iterable[str]) -> None:
        """Give an id to each value that has none, in the order of the values."""
        ids = self.ids.setdefault(categorical, {})
        for value in sorted(set(values) - ids.keys()):
            ids[value] = max(ids.values(), default=0) + 1

    def save(self, settings: Settings, before: Vocabulary) -> None:
        """Append the ids that ``before`` did not have; of two runs that read the same version only one commits.

        Raises:
            ConflictError: another run gave ids meanwhile.
        """
        new = [
            {"categorical": categorical, "value": value, "id": number}
            for categorical, ids in sorted(self.ids.items())
            for value, number in ids.items()
            if value not in before.ids.get(categorical, {})
        ]
        if new:
            schema = pa.schema([("categorical", pa.string()), ("value", pa.string()), ("id", pa.int32())])
            table = Table(settings.paths.table("vocabulary"))
            self.version = table.append(pa.Table.from_pylist(new, schema=schema), expected_version=before.version)

    def sizes(self) -> dict[str, int]:
        """Return the number of ids of each categorical of the model, the unknown 0 among them."""
        fixed = {"hour": 25, "weekday": 8}
        source = {"pickup_zone": "zone", "dropoff_zone": "zone", "vehicle": "vehicle"}
        source |= {"pickup_borough": "borough", "dropoff_borough": "borough"}
        return {
            name: fixed.get(name) or 1 + max(self.ids.get(source[name], {}).values(), default=0) for name in CATEGORICAL
        }


def save_statistics(settings: Settings, statistics: Statistics) -> None:
    """Store statistics under their id, unless they are there."""
    table = Table(settings.paths.table("statistics"))
    key = statistics.statistics_id
    if table.exists() and table.rows(["statistics_id"], where=f"statistics_id = '{key}'").num_rows:
        return
    first = {"statistics_id": key, "first_day": statistics.days[0], "last_day": statistics.days[-1]}
    rows = [first | {"column": name} | asdict(moments) for name, moments in statistics.columns.items()]
    table.append(pa.Table.from_pylist(rows))
