"""The raw files, as far as the driver looks at them: names, footers, headers, and the two small tables.

Enters: the raw folder, see jobs/make_events.py. Leaves: its days with a fingerprint each, the columns of its rides, the
number of rows that Parquet footers claim, the zones and the weather. No Spark: a footer costs a millisecond here and
a job there.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

import pyarrow as pa
import pyarrow.parquet

from jobs.settings import EtlSettings
from sparkdl.errors import DataError, SchemaError
from sparkdl.storage import Storage

__all__ = [
    "RIDE_COLUMNS",
    "WEATHER_COLUMNS",
    "RawDay",
    "RideFiles",
    "list_raw",
    "look_at_rides",
    "read_weather",
    "read_zones",
]

RULES = 1
"""Version of the cleaning rules; raise it when they change, and every day is processed again."""

RIDE_COLUMNS = (
    "event_id",
    "received_at",
    "pickup_at",
    "dropoff_at",
    "pickup_zone",
    "dropoff_zone",
    "vehicle",
    "passengers",
    "distance_km",
)
ZONE_COLUMNS = {
    "zone": pa.string(),
    "borough": pa.string(),
    "x_km": pa.float64(),
    "y_km": pa.float64(),
    "airport": pa.bool_(),
}
WEATHER_COLUMNS = {
    "hour": pa.int32(),
    "rain_mm": pa.float64(),
    "temperature_c": pa.float64(),
    "wind_kmh": pa.float64(),
}


@dataclass(frozen=True, kw_only=True)
class RawDay:
    """The raw files of one day, addresses in order.

    Attributes:
        day: ISO text.
        parquet: files of rides in Parquet.
        csv: files of rides in CSV.
        weather: files of weather in Parquet.
        fingerprint: of names, sizes and times of these files, and of the rules that rides are cleaned by.
    """

    day: str
    parquet: tuple[str, ...]
    csv: tuple[str, ...]
    weather: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class RideFiles:
    """What the footers and headers of some days' rides say.

    Attributes:
        parquet: files by the schema they have in common; upstream may change a type from one day to the next.
        csv: files by their header.
        parquet_rows: rows of Parquet by day, from the footers.
    """

    parquet: dict[pa.Schema, list[str]]
    csv: dict[tuple[str, ...], list[str]]
    parquet_rows: dict[str, int]


def list_raw(raw: str, etl: EtlSettings) -> dict[str, RawDay]:
    """Look at the names, sizes and times of the raw files; open none of them.

    Raises:
        DataError: there are no rides.
    """
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for kind in ("events", "late", "weather"):
        folder = Storage.of(f"{raw}/{kind}")
        for entry in folder.list() if folder.exists() else []:
            match = re.fullmatch(r"day=(\d{4}-\d{2}-\d{2})", entry.name)
            if match and entry.is_dir:
                place = folder.child(entry.name)
                files = [file for file in place.list() if not file.name.startswith((".", "_")) and not file.is_dir]
                found.setdefault(match.group(1), {})[kind] = sorted(
                    (f"{raw}/{kind}/{entry.name}/{file.name}", f"{kind}/{file.name} {file.bytes} {file.modified}")
                    for file in files
                )
    rules = [RULES, etl.max_distance_km, etl.max_duration_minutes, etl.max_passengers]
    days = {}
    for day, kinds in sorted(found.items()):
        places = {kind: tuple(place for place, _ in kinds.get(kind, ())) for kind in ("events", "late", "weather")}
        stamps = [stamp for kind in sorted(kinds) for _, stamp in kinds[kind]]
        key = hashlib.sha256(json.dumps([rules, stamps]).encode()).hexdigest()
        if places["events"] or places["late"]:
            days[day] = RawDay(
                day=day, parquet=places["events"], csv=places["late"], weather=places["weather"], fingerprint=key
            )
    if not days:
        raise DataError(
            f"{raw} holds 0 days of rides (events/day=YYYY-MM-DD/*.parquet or late/day=YYYY-MM-DD/*.csv): run "
            "jobs/make_events.py, or set --set.paths.raw"
        )
    return days


def look_at_rides(days: Iterable[RawDay]) -> RideFiles:
    """Read the footer of each Parquet file and the header of each CSV file.

    Raises:
        SchemaError: a file lacks a column; names the file.
        DataError: a file is not what its name says.
    """
    parquet: dict[pa.Schema, list[str]] = {}
    headers: dict[tuple[str, ...], list[str]] = {}
    rows: dict[str, int] = {}
    for day in days:
        for place in day.parquet:
            footer = _footer(place)
            schema = footer.schema.to_arrow_schema().remove_metadata()
            _require(schema.names, RIDE_COLUMNS, place)
            parquet.setdefault(schema, []).append(place)
            rows[day.day] = rows.get(day.day, 0) + footer.num_rows
        for place in day.csv:
            with Storage.of(place).open_input() as file:
                head = file.read(65_536).decode("utf-8", errors="replace")
            header = tuple(next(csv.reader(head.splitlines()[:1]), []))
            _require(header, RIDE_COLUMNS, place)
            headers.setdefault(header, []).append(place)
    return RideFiles(parquet=parquet, csv=headers, parquet_rows=rows)


def read_zones(raw: str) -> pa.Table:
    """Read the zones.

    Raises:
        SchemaError: a column is missing, or has another type.
        DataError: there are no zones, or one is named twice.
    """
    place = f"{raw}/zones.parquet"
    zones = _small_table(place, ZONE_COLUMNS)
    different = len(set(zones["zone"].to_pylist()) - {None})
    if not different or different < zones.num_rows:
        raise DataError(
            f"{place} holds {zones.num_rows} rows for {different} different zones: there must be one row a zone, and "
            "one zone at least"
        )
    return zones


def read_weather(days: Sequence[RawDay]) -> pa.Table:
    """Read the weather of some days: ``day`` and ``WEATHER_COLUMNS``, one row an hour; days without weather are absent.

    Raises:
        SchemaError: a column is missing, or has another type.
        DataError: a day has an hour twice.
    """
    schema = pa.schema([("day", pa.date32()), *WEATHER_COLUMNS.items()])
    tables = [schema.empty_table()]
    for day in days:
        for place in day.weather:
            table = _small_table(place, WEATHER_COLUMNS)
            when = pa.array([date.fromisoformat(day.day)] * table.num_rows, pa.date32())
            tables.append(table.add_column(0, schema.field("day"), when))
    weather = pa.concat_tables(tables)
    hours = list(zip(weather["day"].to_pylist(), weather["hour"].to_pylist(), strict=True))
    twice = next((hour for hour in hours if hours.count(hour) > 1), None) if len(set(hours)) < len(hours) else None
    if twice:
        raise DataError(
            f"the weather of {twice[0]} has the hour {twice[1]} {hours.count(twice)} times: deliver each hour once"
        )
    return weather


def _footer(place: str) -> pa.parquet.FileMetaData:
    try:
        with Storage.of(place).open_input() as file:
            return pa.parquet.read_metadata(file)
    except pa.ArrowInvalid as error:
        raise DataError(f"{place} is not a whole Parquet file ({error}): deliver it again") from error


def _small_table(place: str, columns: dict[str, pa.DataType]) -> pa.Table:
    try:
        with Storage.of(place).open_input() as file:
            table = pa.parquet.read_table(file)
    except pa.ArrowInvalid as error:
        raise DataError(f"{place} is not a whole Parquet file ({error}): deliver it again") from error
    _require(table.column_names, columns, place)
    for name, kind in columns.items():
        try:
            cast = table[name].cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise SchemaError(
                f"{name} of {place} has the type {table[name].type}, not {kind}: deliver the file with that type"
            ) from None
        table = table.set_column(table.column_names.index(name), name, cast)
    return table.select(list(columns))


def _require(there: Sequence[str], needed: Iterable[str], place: str) -> None:
    missing = [name for name in needed if name not in there]
    if missing:
        raise SchemaError(
            f"{place} has the columns {', '.join(there)} and not {', '.join(missing)}: deliver the file with them"
        )
