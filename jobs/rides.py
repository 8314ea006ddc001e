"""Rides of one day, chunk by chunk: drawn clean, made dirty, some sent twice.

Enters: the city, the day's weather, a random generator. Leaves: Arrow tables as an upstream system would write them,
and what is known of them: how many rows have which dirt, and the squared noise of the valid ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jobs.city import NOISE, VEHICLES, City, Rides, Weather, true_minutes

__all__ = ["DIRT", "SCHEMA", "TEXT_DIRT", "TEXT_SCHEMA", "DayTruth", "draw_chunk"]

DUPLICATES = 0.015
"""Part of the rows that were sent twice."""

UNSEEN_ZONES = 0.004
"""Part of the rows whose pick-up zone the zones table does not know; they are valid."""

DIRT = {
    "event_id: missing": 0.0005,
    "pickup_at: missing": 0.001,
    "pickup_at: outside the day": 0.001,
    "dropoff_at: missing": 0.004,
    "dropoff_at: before pickup_at": 0.004,
    "duration: too long": 0.001,
    "distance_km: missing": 0.002,
    "distance_km: not a number": 0.004,
    "distance_km: not finite": 0.001,
    "distance_km: not positive": 0.004,
    "passengers: not a number": 0.003,
    "passengers: out of range": 0.002,
    "pickup_zone: missing": 0.002,
    "dropoff_zone: missing": 0.002,
    "vehicle: missing": 0.001,
}
"""Part of the rows that have each kind of dirt, named as the quarantine names it; a row has one kind at most."""

TEXT_DIRT = {"pickup_at: not a timestamp": 0.002, "dropoff_at: not a timestamp": 0.002}
"""Dirt that only text can hold."""

SCHEMA = pa.schema(
    [
        ("event_id", pa.int64()),
        ("received_at", pa.timestamp("us", "UTC")),
        ("pickup_at", pa.timestamp("us", "UTC")),
        ("dropoff_at", pa.timestamp("us", "UTC")),
        ("pickup_zone", pa.string()),
        ("dropoff_zone", pa.string()),
        ("vehicle", pa.string()),
        ("passengers", pa.string()),
        ("distance_km", pa.string()),
    ]
)
TEXT_SCHEMA = pa.schema([(name, pa.string()) for name in SCHEMA.names])

RIDES_BY_HOUR = np.array(
    [2, 1.4, 1, 0.7, 0.8, 1.6, 3.5, 6.5, 8, 6, 5, 5.2, 5.6, 5.4, 5.2, 5.8, 7, 8.4, 8, 6.4, 5, 4.6, 4, 3]
)
US_PER_SECOND, US_PER_DAY = 1_000_000, 86_400_000_000
EPOCH = date(1970, 1, 1)

IntArray = npt.NDArray[np.int64]


@dataclass
class DayTruth:
    """What is known of the rows of a day; sums run over the valid rows, in minutes."""

    rows: int = 0
    duplicates: int = 0
    valid: int = 0
    dirt: dict[str, int] = field(default_factory=dict)
    noise_abs: float = 0.0
    noise_sq: float = 0.0
    target: float = 0.0
    target_sq: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """Clean rides, each array ``(rows,)``: what is known when they start, how long they are expected to last and do."""

    rides: Rides
    second: IntArray
    pickup_code: IntArray
    dropoff_code: IntArray
    expected_minutes: npt.NDArray[np.float64]
    duration_ms: IntArray


def draw_chunk(
    rng: np.random.Generator, city: City, weather: Weather, day: date, rows: slice, as_text: bool, truth: DayTruth
) -> pa.Table:
    """Draw rows ``rows`` of a day and add what is known of them to ``truth``.

    Args:
        rng: decides everything that is drawn.
        city: the zones.
        weather: of that day.
        day: the day of the pick-ups.
        rows: which rows of the day, duplicates included; their event ids follow from it.
        as_text: every column a string, with the dirt that only text can hold.
        truth: grows.

    Returns:
        A table of ``SCHEMA``, or of ``TEXT_SCHEMA``, in random order.
    """
    resent = round((rows.stop - rows.start) * DUPLICATES)
    count = rows.stop - rows.start - resent
    drawn = _draw(rng, city, weather, day, count)
    kinds = list(DIRT | (TEXT_DIRT if as_text else {}))
    kind = _choose_dirt(rng, count, (DIRT | TEXT_DIRT), kinds)
    pickup_us = (day - EPOCH).days * US_PER_DAY + drawn.second * US_PER_SECOND
    dropoff_us = pickup_us + drawn.duration_ms * 1_000
    received_us = dropoff_us + rng.integers(5, 900, count) * US_PER_SECOND
    unseen = [f"Z{number}" for number in range(910, 1000)]
    codes = pa.array([*city.code.tolist(), *unseen])
    columns = {
        "event_id": pa.array((day.toordinal() << 36) + rows.start + np.arange(count)),
        "received_at": pa.array(received_us, SCHEMA.field("received_at").type),
        "pickup_at": pa.array(pickup_us, SCHEMA.field("pickup_at").type),
        "dropoff_at": pa.array(dropoff_us, SCHEMA.field("dropoff_at").type),
        "pickup_zone": codes.take(pa.array(drawn.pickup_code)),
        "dropoff_zone": codes.take(pa.array(drawn.dropoff_code)),
        "vehicle": pa.array(VEHICLES).take(pa.array(drawn.rides.vehicle)),
        "passengers": pa.array(drawn.rides.passengers).cast(pa.string()),
        "distance_km": pa.array(drawn.rides.distance_km).cast(pa.string()),
    }
    if as_text:
        columns = {name: column.cast(pa.string()) for name, column in columns.items()}
    for name, at, values in _dirt(rng, kinds, kind, pickup_us, dropoff_us):
        mask = np.zeros(count, dtype=bool)
        mask[at] = True
        replacement = pa.array(values).cast(columns[name].type)
        columns[name] = pc.replace_with_mask(columns[name], pa.array(mask), replacement)
    _account(truth, drawn, kind, kinds, resent)
    without_id = kinds.index("event_id: missing")
    again = rng.choice(np.flatnonzero(kind != without_id), resent, replace=False)
    return _resend(rng, pa.table(columns), again, received_us)


def _draw(rng: np.random.Generator, city: City, weather: Weather, day: date, count: int) -> _Drawn:
    hour = rng.choice(24, count, p=RIDES_BY_HOUR / RIDES_BY_HOUR.sum())
    second = hour * 3600 + rng.integers(0, 3600, count)
    zones = len(city.share)
    pickup, dropoff = rng.choice(zones, count, p=city.share), rng.choice(zones, count, p=city.share)
    beeline_km = np.hypot(city.x_km[pickup] - city.x_km[dropoff], city.y_km[pickup] - city.y_km[dropoff])
    route_km = 0.6 + rng.gamma(2.0, 0.5, count) + beeline_km * (1.15 + rng.gamma(2.0, 0.08, count))
    unseen = rng.uniform(size=count) < UNSEEN_ZONES
    rides = Rides(
        hour=second / 3600.0,
        distance_km=np.round(np.minimum(route_km, 60.0), 2).astype(np.float64),
        pickup=np.where(unseen, 0, pickup),
        dropoff=dropoff,
        passengers=1 + rng.choice(6, count, p=[0.62, 0.2, 0.08, 0.06, 0.03, 0.01]),
        vehicle=rng.choice(len(VEHICLES), count, p=[0.62, 0.13, 0.15, 0.10]),
        rain_mm=weather.rain_mm[hour],
    )
    expected = true_minutes(city, day.weekday(), rides)
    noise = np.clip(rng.standard_normal(count), -3, 3)
    return _Drawn(
        rides=rides,
        second=second,
        pickup_code=np.where(unseen, zones + rng.integers(0, 90, count), pickup),
        dropoff_code=dropoff,
        expected_minutes=expected,
        duration_ms=np.round(expected * (1 + NOISE * noise) * 60_000).astype(np.int64),
    )


def _choose_dirt(rng: np.random.Generator, count: int, parts: dict[str, float], kinds: list[str]) -> IntArray:
    """Return the dirt of each row as an index into ``kinds``, -1 for a clean row."""
    kind, order = np.full(count, -1), rng.permutation(count)
    for number, name in enumerate(kinds):
        rows = round(count * parts[name])
        kind[order[:rows]] = number
        order = order[rows:]
    return kind


def _dirt(
    rng: np.random.Generator, kinds: list[str], kind: IntArray, pickup_us: IntArray, dropoff_us: IntArray
) -> Iterator[tuple[str, IntArray, list[object] | IntArray]]:
    """Yield ``(column, rows, values that replace the true ones)`` for each kind of dirt."""
    stamp = SCHEMA.field("pickup_at").type
    for number, name in enumerate(kinds):
        at = np.flatnonzero(kind == number)
        column, fault = name.split(": ")
        count = len(at)
        if fault == "missing":
            yield column, at, pa.nulls(count)
        elif fault == "outside the day":
            yield column, at, pa.array(pickup_us[at] - rng.integers(1, 30, count) * US_PER_DAY, stamp)
        elif fault == "before pickup_at":
            yield column, at, pa.array(pickup_us[at] - rng.integers(1, 3_600, count) * US_PER_SECOND, stamp)
        elif fault == "too long":
            yield "dropoff_at", at, pa.array(dropoff_us[at] + rng.integers(8, 20, count) * 3_600 * US_PER_SECOND, stamp)
        elif fault == "not a number":
            yield column, at, rng.choice(["n/a", "two", "3,5", "-", "12 km"], count).tolist()
        elif fault == "not finite":
            yield column, at, rng.choice(["NaN", "Infinity", "-Infinity"], count).tolist()
        elif fault == "not positive":
            yield column, at, np.round(-rng.uniform(0.01, 20, count), 2)
        elif fault == "out of range":
            yield column, at, rng.choice(["0", "-1", "99"], count).tolist()
        elif fault == "not a timestamp":
            yield column, at, rng.choice(["yesterday", "0000-00-00", "31/31/2026 25:61"], count).tolist()
        else:
            raise AssertionError(f"no way to make {name!r}")


def _account(truth: DayTruth, drawn: _Drawn, kind: IntArray, kinds: list[str], resent: int) -> None:
    valid = kind < 0
    target = drawn.duration_ms[valid] / 60_000
    noise = target - drawn.expected_minutes[valid]
    truth.rows += len(kind) + resent
    truth.duplicates += resent
    truth.valid += int(valid.sum())
    for number, name in enumerate(kinds):
        truth.dirt[name] = truth.dirt.get(name, 0) + int((kind == number).sum())
    truth.noise_abs += float(np.abs(noise).sum())
    truth.noise_sq += float((noise**2).sum())
    truth.target += float(target.sum())
    truth.target_sq += float((target**2).sum())


def _resend(rng: np.random.Generator, table: pa.Table, again: IntArray, received_us: IntArray) -> pa.Table:
    """Append rows ``again`` as received once more, later, and shuffle: a client that saw no answer repeats itself."""
    at = table.schema.get_field_index("received_at")
    later = received_us[again] + rng.integers(30, 600, len(again)) * US_PER_SECOND
    column = pa.array(later, SCHEMA.field("received_at").type).cast(table.schema.field(at).type)
    second = table.take(pa.array(again)).set_column(at, "received_at", column)
    both = pa.concat_tables([table, second]).combine_chunks()
    return both.take(pa.array(rng.permutation(both.num_rows)))
