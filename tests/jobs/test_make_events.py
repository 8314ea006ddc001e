from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from jobs.city import NOISE, make_city, make_weather
from jobs.make_events import make_events, noise_floor
from jobs.rides import DIRT, TEXT_DIRT
from sparkdl.errors import ConfigError, DataError, IntegrityError, StorageError


def digests(settings):
    root = Path(settings.paths.of("raw"))
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_number_of_processes_changes_nothing(small, with_events, tmp_path):
    from dataclasses import replace

    make_events(small)
    other = replace(small, paths=replace(small.paths, root=str(tmp_path / "other")))
    make_events(with_events(other, processes=3))
    assert digests(small) == digests(other)


def test_another_seed_makes_other_rides(small, with_events, tmp_path):
    from dataclasses import replace

    make_events(small)
    other = with_events(replace(small, paths=replace(small.paths, root=str(tmp_path / "other"))), seed=8)
    make_events(other)
    before, after = digests(small), digests(other)
    assert before.keys() == after.keys()
    assert not [name for name in before if before[name] == after[name]]


def test_a_new_day_arrives_without_touching_the_others(small, with_events):
    assert len(make_events(small)["written"]) == 4
    before = digests(small)
    assert make_events(small)["written"] == []
    more = make_events(with_events(small, extra_days=1))
    assert more["written"] == ["2026-03-06"]
    after = digests(small)
    before.pop("truth.json"), after.pop("truth.json")
    assert {name: after[name] for name in before if name != "zones.parquet"} == {
        name: digest for name, digest in before.items() if name != "zones.parquet"
    }
    assert sorted(set(after) - set(before)) == [
        "events/day=2026-03-06/rides.parquet",
        "weather/day=2026-03-06/weather.parquet",
    ]


def test_a_folder_of_another_recipe_is_refused_unless_it_may_be_overwritten(small, with_events):
    make_events(small)
    before = digests(small)
    with pytest.raises(ConfigError, match=r"'seed': 7.*'seed': 9.*overwrite"):
        make_events(with_events(small, seed=9))
    assert digests(small) == before
    make_events(with_events(small, seed=9, overwrite=True))
    assert digests(small) != before


@pytest.mark.parametrize("text", ["[]", "{", "\\ud800", '{"recipe": {}, "days": {"d": {"rows": "x"}}, "noise": 0}'])
def test_a_truth_that_somebody_altered_is_a_typed_refusal_that_names_it(small, text):
    make_events(small)
    truth = Path(small.paths.of("raw")) / "truth.json"
    truth.write_text(text)
    with pytest.raises(IntegrityError, match=r"truth\.json cannot be read"):
        make_events(small)
    with pytest.raises(IntegrityError, match=r"truth\.json cannot be read"):
        noise_floor(small.paths.of("raw"), ["2026-03-02"])


def test_days_without_a_valid_row_have_no_noise_floor(small):
    make_events(small)
    truth = Path(small.paths.of("raw")) / "truth.json"
    known = json.loads(truth.read_text())
    known["days"] = {day: fields | {"valid": 0} for day, fields in known["days"].items()}
    truth.write_text(json.dumps(known))
    with pytest.raises(DataError, match="0 valid rows"):
        noise_floor(small.paths.of("raw"), sorted(known["days"]))


def test_a_folder_that_somebody_else_filled_is_left_alone(small):
    own = Path(small.paths.of("raw")) / "events" / "mine.parquet"
    own.parent.mkdir(parents=True)
    own.write_text("precious")
    with pytest.raises(ConfigError, match=r"truth\.json"):
        make_events(small)
    assert own.read_text() == "precious"


def test_a_call_that_was_cut_short_is_finished_by_the_next(small, monkeypatch):
    import jobs.make_events as module

    whole, made = module._write_day, []

    def failing(root, events, day):
        if len(made) == 2:
            raise OSError(28, "No space left on device")
        made.append(day)
        return whole(root, events, day)

    monkeypatch.setattr(module, "_write_day", failing)
    with pytest.raises(StorageError, match="No space left"):
        make_events(small)
    assert not list(Path(small.paths.of("raw")).rglob("*.tmp"))
    monkeypatch.undo()
    assert len(make_events(small)["written"]) == 4


def test_a_target_that_cannot_be_written_is_refused(small):
    raw = Path(small.paths.of("raw"))
    raw.parent.mkdir(parents=True)
    raw.write_text("a file where a folder is needed")
    with pytest.raises(StorageError, match="cannot be written"):
        make_events(small)


def test_the_floor_is_the_error_of_the_truth_and_far_below_the_plain_mean(small):
    truth = make_events(small)
    days = sorted(truth["days"])
    floor = noise_floor(small.paths.of("raw"), days)
    valid = sum(day["valid"] for day in truth["days"].values())
    assert floor.rows == valid
    assert floor.rmse_minutes == pytest.approx(math.sqrt(sum(d["noise_sq"] for d in truth["days"].values()) / valid))
    # noise is NOISE * expected duration: the floor follows from the spread of the target within a few percent
    square = sum(day["target_sq"] for day in truth["days"].values()) / valid
    assert floor.rmse_minutes == pytest.approx(NOISE * math.sqrt(square), rel=0.06)
    assert floor.mae_minutes < floor.rmse_minutes < floor.mean_rmse_minutes / 3
    with pytest.raises(DataError, match="2030-01-01"):
        noise_floor(small.paths.of("raw"), ["2030-01-01"])


def test_the_rides_are_as_dirty_as_the_truth_says(small):
    truth = make_events(small)
    raw = Path(small.paths.of("raw"))
    day = truth["days"]["2026-03-02"]
    rides = pq.read_table(raw / "events/day=2026-03-02/rides.parquet")
    ids = rides["event_id"].to_pylist()
    known = [each for each in ids if each is not None]
    assert len(ids) == day["rows"] == 500
    assert len(known) - len(set(known)) == day["duplicates"] > 0
    assert ids.count(None) == day["dirt"]["event_id: missing"]
    assert set(day["dirt"]) == set(DIRT)
    late = pyarrow.csv.read_csv(raw / "late/day=2026-03-03/rides.csv")
    assert late.num_rows == 500
    assert not (raw / "events/day=2026-03-03").exists()
    assert set(truth["days"]["2026-03-03"]["dirt"]) == {*DIRT, *TEXT_DIRT}
    zones = pq.read_table(raw / "zones.parquet")["zone"].to_pylist()
    assert [zone for zone in rides["pickup_zone"].to_pylist() if zone is not None and zone not in zones]
    shares = np.sort(np.unique(rides["pickup_zone"].drop_null().to_numpy(zero_copy_only=False), return_counts=True)[1])
    assert shares[-2:].sum() > 0.55 * shares.sum()


def test_chunks_of_a_day_are_all_written_and_ids_are_unique(small, monkeypatch):
    import jobs.make_events as module

    monkeypatch.setattr(module, "CHUNK_ROWS", 150)
    truth = make_events(small)
    rides = pq.read_table(Path(small.paths.of("raw")) / "events/day=2026-03-02/rides.parquet")
    known = rides["event_id"].drop_null().to_pylist()
    day = truth["days"]["2026-03-02"]
    assert rides.num_rows == day["rows"] == 500
    assert len(known) - len(set(known)) == day["duplicates"]


def test_truth_json_is_stored_beside_the_data(small):
    returned = make_events(small)
    stored = json.loads((Path(small.paths.of("raw")) / "truth.json").read_text())
    assert stored == {key: value for key, value in returned.items() if key != "written"}


def test_city_and_weather_follow_from_the_seed():
    from datetime import date

    assert (make_city(3).x_km == make_city(3).x_km).all()
    assert (make_city(3).x_km != make_city(4).x_km).any()
    weather = make_weather(3, date(2026, 3, 2))
    assert weather.rain_mm.shape == (24,)
    assert (weather.rain_mm >= 0).all()
