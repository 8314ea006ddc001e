"""Generate ride events, as dirty as life, whose best reachable error is known.

Enters: the ``events`` section of the settings. Leaves, below the raw folder (a local path):

    zones.parquet                        one row a zone
    weather/day=D/weather.parquet        one row an hour
    events/day=D/rides.parquet           the rides of a day
    late/day=D/rides.csv                 the rides of the one day that arrived late, as text
    truth.json                           what was generated, by day, and the noise floor

Each day is a function of (seed, day, rows of a day) alone: the number of processes changes nothing, and a day that
is already there is left untouched, so that a later call with ``--set.events.extra_days=1`` adds one new day. Memory is
bounded by ``CHUNK_ROWS`` rows per process, whatever the number of rows.

Exit codes: 0 done, or nothing to do; 1 refused; 4 unexpected error; 130 interrupted.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: the folder above holds the package `jobs`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from jobs.city import BOROUGHS, NOISE, City, Weather, make_city, make_weather
from jobs.entry import Run, open_session, run_job, spark_is_configured
from jobs.rides import SCHEMA, TEXT_SCHEMA, DayTruth, draw_chunk
from jobs.settings import EventSettings, Settings
from sparkdl.documents.typed import read
from sparkdl.errors import ConfigError, DataError, StorageError
from sparkdl.storage import Storage

__all__ = ["Floor", "make_events", "noise_floor"]

CHUNK_ROWS = 250_000
"""Rows generated at once; part of what decides the data, so never derived from the machine."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The best reachable error on the valid rows of some days.

    Attributes:
        rows: valid rows.
        rmse_minutes, mae_minutes: error of the true expectation.
        mean_rmse_minutes: error of the plain mean of these days.
    """

    rows: int
    rmse_minutes: float
    mae_minutes: float
    mean_rmse_minutes: float


@dataclass(frozen=True, kw_only=True)
class _Truth:
    """What ``truth.json`` holds."""

    recipe: dict[str, Any]
    noise: Any
    days: dict[str, DayTruth]
    floor: Floor | None = None


def make_events(settings: Settings) -> dict[str, Any]:
    """Write the days that are not there yet; return the content of ``truth.json`` with the days ``"written"`` added.

    Raises:
        ConfigError: the folder holds days made by another recipe, or is not a local path.
        StorageError: the folder cannot be written.
    """
    events, raw = settings.events, settings.paths.of("raw")
    root = Storage.of(raw).local_path()
    if root is None:
        raise ConfigError(
            f"paths.raw={raw} is not a folder of this machine, which make_events needs: generate into one with "
            "--set.paths.raw=file:///..., or let retrain take the rides that lie there with --set.events.generate=false"
        )
    recipe = {name: getattr(events, name) for name in ("seed", "rows_per_day", "first_day", "late_day")}
    first = date.fromisoformat(events.first_day)
    days = [first + timedelta(days=offset) for offset in range(events.days + events.extra_days)]
    try:
        truth = _earlier_truth(root, recipe, events.overwrite)
        missing = [day for day in days if day.isoformat() not in truth["days"]]
        if missing:
            _commit(root / "zones.parquet", partial(pa.parquet.write_table, _zones_table(make_city(events.seed))))
            made = _write_days(root, events, missing)
            truth["days"] |= {day.isoformat(): asdict(each) for day, each in zip(missing, made, strict=True)}
            truth["floor"] = asdict(_merge([DayTruth(**day) for day in truth["days"].values()]))
            _write_json(root / "truth.json", truth)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{raw} cannot be written ({error}): free space, or set another --set.paths.raw") from error
    return truth | {"written": [day.isoformat() for day in missing]}


def noise_floor(raw: str, days: Sequence[str]) -> Floor:
    """Return the noise floor over ``days`` (ISO texts), from the truth beside the raw data.

    Raises:
        DataError: the truth of a day is not there, as with data that was not generated.
        IntegrityError: ``truth.json`` holds something else.
    """
    folder = Storage.of(raw).local_path()
    path = folder / "truth.json" if folder is not None else None
    if path is None or not path.exists():
        raise DataError(
            f"{raw} holds no truth.json, so the noise floor of {len(days)} days is unknown: generate the data"
        )
    known = _read_truth(path).days
    absent = [day for day in days if day not in known]
    if absent or not days:
        raise DataError(f"{path} knows {len(known)} days but not {absent[:3]}: name days that were generated")
    return _merge([known[day] for day in days])


def _earlier_truth(root: Path, recipe: Mapping[str, Any], overwrite: bool) -> dict[str, Any]:
    """Read the truth of an earlier call, or start anew; refuse to mix two recipes in one folder."""
    path = root / "truth.json"
    if path.exists():
        before = _read_truth(path)
        if before.recipe == recipe:
            return {name: value for name, value in asdict(before).items() if value is not None}
        if not overwrite:
            raise ConfigError(
                f"{root} was generated by {before.recipe}, not by {dict(recipe)}: choose another --set.paths.raw, "
                "or pass --set.events.overwrite=true"
            )
        for name in ("events", "late", "weather"):
            shutil.rmtree(root / name, ignore_errors=True)
    elif root.exists() and any(root.iterdir()):
        raise ConfigError(
            f"{root} holds {sum(1 for _ in root.iterdir())} files or folders and no truth.json, so make_events did not "
            "write them: choose an empty folder with --set.paths.raw"
        )
    truth = {"recipe": dict(recipe), "noise": NOISE, "days": {}}
    _write_json(path, truth)  # first, so that a call that is cut short is recognised by the next one
    return truth


def _read_truth(path: Path) -> _Truth:
    return read(Storage.of(path), _Truth, "delete the folder of the raw data, and generate it anew")


def _write_days(root: Path, events: EventSettings, days: list[date]) -> list[DayTruth]:
    processes = min(events.processes or os.cpu_count() or 1, len(days))
    if processes == 1:
        return [_write_day(root, events, day) for day in days]
    # spawn, because the caller may hold a JVM gateway and threads, which a fork would copy
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(partial(_write_day, root, events), days))


def _write_day(root: Path, events: EventSettings, day: date) -> DayTruth:
    late = (day - date.fromisoformat(events.first_day)).days == events.late_day
    city, weather = make_city(events.seed), make_weather(events.seed, day)
    truth = DayTruth()

    def write(target: str) -> None:
        writer = pa.csv.CSVWriter(target, TEXT_SCHEMA) if late else pa.parquet.ParquetWriter(target, SCHEMA)
        with writer:
            for chunk, start in enumerate(range(0, events.rows_per_day, CHUNK_ROWS)):
                rows = slice(start, min(start + CHUNK_ROWS, events.rows_per_day))
                rng = np.random.default_rng([events.seed, 3, day.toordinal(), chunk])
                writer.write_table(draw_chunk(rng, city, weather, day, rows, late, truth))

    _commit(root / f"weather/day={day}/weather.parquet", partial(pa.parquet.write_table, _weather_table(weather)))
    _commit(root / (f"late/day={day}/rides.csv" if late else f"events/day={day}/rides.parquet"), write)
    return truth


def _commit(path: Path, write: Callable[[str], object]) -> None:
    """Let ``write(target)`` fill a hidden file and give it its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(str(target))
        target.replace(path)
    finally:
        target.unlink(missing_ok=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=1, sort_keys=True)
    _commit(path, lambda target: Path(target).write_text(text, encoding="utf-8"))


def _zones_table(city: City) -> pa.Table:
    known = slice(1, None)
    return pa.table(
        {
            "zone": pa.array(city.code[known].tolist()),
            "borough": pa.array(BOROUGHS).take(pa.array(city.borough[known])),
            "x_km": city.x_km[known],
            "y_km": city.y_km[known],
            "airport": pa.array(city.airport[known]).cast(pa.bool_()),
        }
    )


def _weather_table(weather: Weather) -> pa.Table:
    hours = pa.array(np.arange(24), pa.int32())
    return pa.table({"hour": hours, **vars(weather)})


def _merge(days: Sequence[DayTruth]) -> Floor:
    """Add the sums of several days up to one floor."""
    names = ("valid", "noise_abs", "noise_sq", "target", "target_sq")
    total = {name: float(sum(getattr(day, name) for day in days)) for name in names}
    rows = total["valid"]
    if not rows > 0:
        raise DataError(f"{len(days)} days hold {rows:g} valid rows, which have no noise floor: generate more rows")
    return Floor(
        rows=int(rows),
        rmse_minutes=math.sqrt(total["noise_sq"] / rows),
        mae_minutes=total["noise_abs"] / rows,
        mean_rmse_minutes=math.sqrt(max(total["target_sq"] / rows - (total["target"] / rows) ** 2, 0.0)),
    )


def _job(run: Run) -> None:
    if spark_is_configured(run.settings):  # then a path without a scheme means here what it means to the ETL
        with run.stage("spark"):
            open_session(run.settings, "runs")
    with run.stage("events"):
        made = make_events(run.settings)
    floor, days = made["floor"], made["written"]
    if not days:
        run.nothing_new("every day that is asked for is already there")
    run.record.results["events"] = {"days": len(made["days"]), "written": days, "floor": floor}
    run.record.places["raw"] = run.settings.paths.of("raw")
    run.say(
        f"{len(days)} days written, {len(made['days'])} there, {floor['rows']:,} valid rows; noise floor "
        f"RMSE {floor['rmse_minutes']:.3f} min, MAE {floor['mae_minutes']:.3f} min; plain mean RMSE "
        f"{floor['mean_rmse_minutes']:.3f} min; {run.record.places['raw']}"
    )


if __name__ == "__main__":
    sys.exit(run_job("make_events", _job))
