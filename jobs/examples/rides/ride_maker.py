"""Made-up rides, as dirty as life, whose best reachable error is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ride_city import BOROUGHS, NOISE, VEHICLES, ZONES, Array, make_city, make_weather, true_minutes

SEED, FIRST_DAY, DAYS, ROWS_PER_DAY, CHUNK_ROWS = 7, date(2026, 3, 2), 17, 200_000 // 17, 250_000
DUPLICATES, UNSEEN_ZONES = 0.015, 0.004
"""Parts of the rows that were sent twice, and of those that begin in a zone that the table does not know."""
SECOND, HOUR, DAY, STAMP = 1_000_000, 3_600_000_000, 86_400_000_000, pa.timestamp("us", "UTC")
BY_HOUR = [2, 1.4, 1, 0.7, 0.8, 1.6, 3.5, 6.5, 8, 6, 5, 5.2, 5.6, 5.4, 5.2, 5.8, 7, 8.4, 8, 6.4, 5, 4.6, 4, 3]


def truth_of(folder: Path) -> dict[str, Any]:
    """What is known of the days in a folder: by day its rows, duplicates, valid rows, dirt and squared noise."""
    path = folder / "truth.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def best_rmse(folder: Path, days: Iterable[str]) -> float:
    """The noise floor of some days in minutes: the error of the true expectation on their valid rows."""
    known = [truth_of(folder)[day] for day in days]
    return float(np.sqrt(sum(each["noise"] for each in known) / sum(each["valid"] for each in known)))


def make_rides(folder: Path, days: int | None = None, rows_per_day: int | None = None) -> list[str]:
    """Write the days that are not there yet; return them. Without numbers, what there is suffices.

    Below the folder lie ``events/day=D/rides.parquet``, ``zones.parquet``, ``weather.parquet`` by day and hour, and
    ``truth.json``: by day what was made, and the noise of the valid rows. A day follows from its date and its rows
    alone, and one that is there is left as it is: later calls add days. Memory is bounded by ``CHUNK_ROWS``, whatever
    the number of rows.
    """
    truth = truth_of(folder)
    rows = rows_per_day or next((each["rows"] for each in truth.values()), ROWS_PER_DAY)
    wanted = [FIRST_DAY + timedelta(days=n) for n in range(days or len(truth) or DAYS)]
    missing, city = [day for day in wanted if str(day) not in truth], make_city(SEED)
    if missing:
        names = pa.array(BOROUGHS).take(pa.array(city.borough[1:]))
        places = {name: getattr(city, name)[1:] for name in ("x_km", "y_km", "airport")}
        _write(folder / "zones.parquet", iter([pa.table({"zone": city.code[1:].tolist(), "borough": names, **places})]))
        hours = {"hour": pa.array(range(24), pa.int32())}
        weather = (pa.table({"day": [day] * 24, **hours, **make_weather(SEED, day)}) for day in wanted)
        _write(folder / "weather.parquet", weather)
    for day in missing:
        known = truth[str(day)] = {"rows": 0, "duplicates": 0, "valid": 0, "noise": 0.0, "dirt": {}}
        chunks = (
            _chunk(city, day, start, min(CHUNK_ROWS, rows - start), known) for start in range(0, rows, CHUNK_ROWS)
        )
        _write(folder / f"events/day={day}/rides.parquet", chunks)
    if missing:
        (folder / "truth.json").write_text(json.dumps(truth, indent=1))
    return [str(day) for day in missing]


def _write(path: Path, tables: Iterator[pa.Table]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden, first = path.with_name(f".{path.name}"), next(tables)
    with pq.ParquetWriter(hidden, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)
    hidden.replace(path)


def _chunk(city: SimpleNamespace, day: date, start: int, rows: int, truth: dict[str, Any]) -> pa.Table:
    """Draw rows of a day, make some dirty, send some twice, and add what is known of them to ``truth``."""
    rng, again = np.random.default_rng([SEED, 3, day.toordinal(), start]), round(rows * DUPLICATES)
    count = rows - again
    hour = rng.choice(24, count, p=np.array(BY_HOUR) / sum(BY_HOUR))
    second = hour * 3600 + rng.integers(0, 3600, count)
    begin, end = rng.choice(ZONES + 1, (2, count), p=city.share)
    beeline = np.hypot(city.x_km[begin] - city.x_km[end], city.y_km[begin] - city.y_km[end])
    route = 0.6 + rng.gamma(2.0, 0.5, count) + beeline * (1.15 + rng.gamma(2.0, 0.08, count))
    unseen = rng.uniform(size=count) < UNSEEN_ZONES
    km, seats = np.round(route, 2), 1 + rng.choice(6, count, p=[0.62, 0.2, 0.08, 0.06, 0.03, 0.01])
    vehicle, rain = rng.choice(len(VEHICLES), count, p=[0.62, 0.13, 0.15, 0.10]), make_weather(SEED, day)["rain_mm"]
    known = {"hour": second / 3600.0, "km": km, "seats": seats, "vehicle": vehicle, "rain": rain[hour], "dropoff": end}
    expected = true_minutes(city, day.weekday(), SimpleNamespace(**known, pickup=np.where(unseen, 0, begin)))
    lasted_ms = np.round(expected * (1 + NOISE * np.clip(rng.standard_normal(count), -3, 3)) * 60_000).astype(np.int64)
    picked = (day - date(1970, 1, 1)).days * DAY + second * SECOND
    dropped = picked + lasted_ms * 1_000
    codes = pa.array([*city.code.tolist(), *(f"Z{number}" for number in range(910, 1000))])
    columns = {
        "event_id": pa.array((day.toordinal() << 36) + start + np.arange(count)),
        "received_at": pa.array(dropped + rng.integers(5, 900, count) * SECOND, STAMP),
        "pickup_at": pa.array(picked, STAMP),
        "dropoff_at": pa.array(dropped, STAMP),
        "pickup_zone": codes.take(pa.array(np.where(unseen, ZONES + 1 + rng.integers(0, 90, count), begin))),
        "dropoff_zone": codes.take(pa.array(end)),
        "vehicle": pa.array(VEHICLES).take(pa.array(vehicle)),
        "passengers": pa.array(seats).cast(pa.string()),
        "distance_km": pa.array(km).cast(pa.string()),
    }
    clean = _make_dirty(rng, columns, picked, dropped, truth["dirt"])
    noise = (lasted_ms / 60_000 - expected)[clean]
    for name, more in (("rows", rows), ("duplicates", again), ("valid", len(noise)), ("noise", float(noise @ noise))):
        truth[name] += more
    table = pa.table(columns)
    twice = table.take(pa.array(rng.choice(np.flatnonzero(columns["event_id"].is_valid()), again, replace=False)))
    later = pa.array(np.asarray(twice["received_at"]).astype(np.int64) + 60 * SECOND, STAMP)
    both = pa.concat_tables([table, twice.set_column(1, "received_at", later)])
    return both.take(pa.array(rng.permutation(rows)))


def _make_dirty(
    rng: np.random.Generator, columns: dict[str, pa.Array], picked: Array, dropped: Array, counted: dict[str, int]
) -> Array:
    """Spoil some rows, each in one way, counted by the expectation it breaks; return which rows stay clean."""

    def missing(at: Array) -> list[None]:
        return [None] * len(at)

    def one_of(*values: str) -> Callable[[Array], Any]:
        return lambda at: rng.choice(values, len(at)).tolist()

    def drawn(low: int, high: int, unit: int, since: Array) -> Callable[[Array], Any]:
        return lambda at: since[at] + rng.integers(low, high, len(at)) * unit

    ways: list[tuple[str, float, str, Callable[[Array], Any]]] = [
        ("has an id", 0.0005, "event_id", missing),
        ("picked up on its day", 0.001, "pickup_at", missing),
        ("picked up on its day", 0.001, "pickup_at", drawn(-30, 0, DAY, picked)),
        ("dropped off after the pick-up", 0.004, "dropoff_at", missing),
        ("dropped off after the pick-up", 0.004, "dropoff_at", drawn(-3600, 0, SECOND, picked)),
        ("at most five hours", 0.001, "dropoff_at", drawn(8, 20, HOUR, dropped)),
        ("distance is a number", 0.002, "distance_km", missing),
        ("distance is a number", 0.005, "distance_km", one_of("n/a", "3,5", "-", "12 km", "NaN")),
        ("above 0, up to 100 km", 0.005, "distance_km", one_of("0", "-0.01", "-17.5", "Infinity", "-Infinity")),
        ("1 to 8 passengers", 0.005, "passengers", one_of("n/a", "two", "0", "-1", "99")),
        ("has both zones", 0.004, "dropoff_zone", missing),
        ("has a vehicle", 0.001, "vehicle", missing),
    ]
    order, clean = rng.permutation(len(picked)), np.ones(len(picked), bool)
    for reason, part, column, values in ways:
        at, order = np.split(order, [round(part * len(picked))])
        at.sort()  # the replacements go to the marked rows from the first on
        mask = np.zeros(len(picked), bool)
        mask[at], clean[at] = True, False
        columns[column] = pc.replace_with_mask(columns[column], mask, pa.array(values(at), columns[column].type))
        counted[reason] = counted.get(reason, 0) + len(at)
    return clean
