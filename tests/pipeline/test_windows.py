"""What is due, what is ahead, what trains and what is scored."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import DataError
from sparkdl.pipeline.windows import WHOLE, ahead, due, split_windows, window_of

NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)
DAYS = [f"2026-03-{day:02d}" for day in range(1, 11)]


def test_what_is_new_or_changed_is_due_and_nothing_else():
    done = {day: "a" for day in DAYS[:-1] if day != "2026-03-04"}
    found = {**dict.fromkeys(DAYS, "a"), "2026-03-02": "b"}
    assert due(found, done, now=NOW) == ["2026-03-02", "2026-03-04", "2026-03-10"]


def test_a_date_to_come_is_left_alone_until_it_comes():
    found = {"2026-03-09": "a", "2026-03-11": "a", "2099-01-01": "a"}
    assert due(found, {}, now=NOW) == ["2026-03-09"]
    assert ahead(found, NOW) == ["2026-03-11", "2099-01-01"]
    assert due(found, {"2026-03-09": "a"}, now=datetime(2026, 3, 11, tzinfo=UTC)) == ["2026-03-11"]


def test_backfill_names_windows_again():
    same = dict.fromkeys(DAYS, "a")
    assert due(same, same, now=NOW) == []
    assert due(same, same, now=NOW, again=("2026-03-03", "2026-03-04")) == ["2026-03-03", "2026-03-04"]
    with pytest.raises(DataError, match="none of the 10 windows of the source, 2026-03-01 to 2026-03-10"):
        due(same, same, now=NOW, again=("2026-04-01", "2026-04-02"))


def test_a_source_without_time_is_one_window():
    assert due({WHOLE: "a"}, {}, now=NOW) == [WHOLE]
    assert due({WHOLE: "a"}, {WHOLE: "a"}, now=NOW) == []


@pytest.mark.parametrize(("size", "name"), [("hour", "2026-03-02T05"), ("day", "2026-03-02"), ("month", "2026-03")])
def test_windows_are_named_by_their_start_in_utc(size, name):
    moment = datetime.fromisoformat("2026-03-02T07:59:00+02:00")
    assert window_of(moment, size) == name
    assert ahead([name], NOW) == []


def test_a_name_that_is_no_window_is_refused():
    with pytest.raises(DataError, match="'yesterday' is no window"):
        ahead(["yesterday"], NOW)


def test_the_last_windows_are_scored_those_before_validate_those_before_train():
    split = split_windows(DAYS, train=4, validate=2, score=1)
    assert (split.training, split.validation, split.scoring) == (
        ("2026-03-04", "2026-03-05", "2026-03-06", "2026-03-07"),
        ("2026-03-08", "2026-03-09"),
        ("2026-03-10",),
    )
    assert split_windows(DAYS, train=None, validate=2, score=1).training == tuple(DAYS[:7])


@given(
    days=st.sets(st.sampled_from(DAYS)),
    train=st.none() | st.integers(1, 12),
    validate=st.integers(0, 4),
    score=st.integers(0, 4),
)
def test_a_split_is_in_order_and_without_overlap_or_is_refused(days, train, validate, score):
    try:
        split = split_windows(days, train=train, validate=validate, score=score)
    except DataError:
        assert len(days) < validate + score + 1
        return
    together = [*split.training, *split.validation, *split.scoring]
    assert together == sorted(days)[-len(together) :]
    assert (len(split.validation), len(split.scoring)) == (validate, score)
    assert 1 <= len(split.training) <= (train or len(days))


def test_too_few_windows_say_how_many_are_needed():
    with pytest.raises(DataError, match=r"has 2 windows with rows \(2026-03-01 to 2026-03-02\).*make 4"):
        split_windows(DAYS[:2], train=5, validate=2, score=1)
