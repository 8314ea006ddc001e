"""Real flights by day: nothing is known too early, and a day that arrives is all that is done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jobs.examples.flights import make_data
from sparkdl.pipeline import Pipeline
from sparkdl.tables.table import Table

FILE = Path(__file__).resolve().parents[3] / "jobs" / "examples" / "flights" / "flights.yaml"


def test_delays_are_known_once_a_flight_has_left_and_an_hour_has_passed():
    noon = pd.Timestamp("2013-01-01 12:00")
    flights = pd.DataFrame({"origin": ["EWR", "EWR", "EWR", "LGA", "EWR", "EWR"]})
    flights["at"] = noon + pd.to_timedelta([0, -60, -90, -90, -90, -241], "min")
    flights["dep_delay"] = [99.0, 0.0, 31.0, 7.0, np.nan, 0.0]
    found = make_data.known_delays(flights, ["origin"], 3)
    assert found[0] == 0.0  # of the second alone: the third left at 11:01, the last is older than three hours
    assert np.isnan(found[3])  # nothing but itself has left from there


@pytest.fixture(scope="module")
def tables():
    flights, weather = make_data.table("flights"), make_data.table("weather")
    few = (flights.month == 2) & (flights.day.isin([7, 8, 9]))  # a snowstorm
    return flights[few].reset_index(drop=True), weather[weather.month == 2].reset_index(drop=True)


def test_what_happens_later_than_an_hour_before_changes_nothing(tables):
    flights, weather = tables
    known = make_data.rows_of(flights.copy(), weather.copy())
    clock = pd.Timestamp("2013-02-08 15:00")
    left = pd.to_datetime(flights.time_hour).dt.tz_localize(None) - pd.Timedelta(hours=5)
    left += pd.to_timedelta(flights.minute + flights.dep_delay.fillna(1e4), "min")
    changed, later = flights.copy(), (left > clock - pd.Timedelta(hours=1)).to_numpy()
    changed.loc[later, ["dep_delay", "dep_time", "arr_time", "arr_delay", "air_time"]] = [1e5, 1.0, 1.0, 1.0, 1.0]
    other = weather.copy()
    seen = pd.to_datetime(other.time_hour).dt.tz_localize(None) - pd.Timedelta(hours=5)
    other.loc[seen > clock - pd.Timedelta(hours=1), make_data.WEATHER] = -999.0
    again = make_data.rows_of(changed, other)
    before = known.departs <= clock
    assert 500 < before.sum() < len(known) - 500
    pd.testing.assert_frame_equal(known[before].drop(columns="arr_delay"), again[before].drop(columns="arr_delay"))
    assert not known[~before].drop(columns="arr_delay").equals(again[~before].drop(columns="arr_delay"))


def test_the_rows_are_the_flights_and_their_weather(tables):
    flights, weather = tables
    rows = make_data.rows_of(flights.copy(), weather.copy())
    assert sorted(rows.id) == sorted(flights.rownames)
    assert (rows.arr_delay.isna().sum(), rows.day.nunique()) == (flights.arr_delay.isna().sum(), 3)
    one = rows[(rows.origin == "JFK") & (rows.departs >= "2013-02-08 09:00") & (rows.departs < "2013-02-08 10:00")]
    seen = weather[(weather.origin == "JFK") & (weather.day == 8) & (weather.hour == 8)]
    assert set(one.temp) == set(seen.temp)
    assert rows.late_airport.notna().mean() > 0.8
    assert rows.planned_minutes.between(20, 800).all()


@pytest.mark.slow
def test_flights_are_predicted_within_intervals_and_a_new_day_alone_is_ingested(spark, tmp_path):
    made = make_data.make(tmp_path, days=60)
    assert (len(made), made[-1], make_data.make(tmp_path, days=60)) == (60, "2013-03-01", [])
    given = [f"root={tmp_path}", f"source.path={tmp_path}/rows", "train.verbose=0", "split.validate=7 days",
             "split.test=7 days"]  # fmt: skip
    done = Pipeline.load(FILE, given).run(spark)
    assert done.outcome == "promoted", done.message
    assert done.evaluated.decision.beats_baseline
    assert done.evaluated.intervals.coverage == pytest.approx(0.8, abs=0.12)
    assert done.evaluated.boosted.trees.values["mae"] > 5
    predictions = Table(done.places["predictions"]).rows().to_pandas()
    assert set(predictions["_window"]) == {"2013-03-01"}
    assert (predictions.q10 <= predictions.q90).all()
    assert Pipeline.load(FILE, given).run(spark).outcome == "nothing new"
    assert make_data.make(tmp_path, days=61) == ["2013-03-02"]
    more = Pipeline.load(FILE, given).run(spark)
    assert more.windows["ingested"] == ["2013-03-02"]
    assert set(more.predictions) == {"2013-03-02"}
    assert more.drift is not None
