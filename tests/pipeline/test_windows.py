"""What is ahead, what trains and what is scored."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import DataError
from sparkdl.pipeline.windows import NO_TIME, ahead, deleted_text, emptied, spans, split_by_time, windows_text

NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)
DAYS = [f"2026-03-{day:02d}" for day in range(1, 11)]


def test_what_became_of_deleted_windows_is_said_with_what_can_be_done():
    assert deleted_text([]) == ""
    assert deleted_text([], ["2026-03-01"]) == "window 2026-03-01 removed from the clean rows"
    assert deleted_text(["2026-03-01", "2026-03-04"]) == (
        "2 windows 2026-03-01 to 2026-03-04 of the clean rows that the source no longer holds: "
        "--backfill 2026-03-01..2026-03-04 or source.deleted_windows=remove takes them out"
    )


@pytest.mark.parametrize(
    ("windows", "text"),
    [
        ([], "no window"),
        (["all"], "window all"),
        (["2026-03-01", "2026-03-02", "2026-03-04"], "3 windows 2026-03-01 to 2026-03-04"),
        (["2026-03-01", "2026-03-02", "none"], "2 windows 2026-03-01 to 2026-03-02 and rows without a time"),
        (["2026-03-01", "none"], "window 2026-03-01 and rows without a time"),
        (["none"], "rows without a time"),
    ],
)
def test_windows_in_a_few_words(windows, text):
    assert windows_text(windows) == text


def test_rows_without_a_time_are_no_window_where_windows_are_told():
    held = [*DAYS, NO_TIME]
    ten_days = "10 windows 2026-03-01 to 2026-03-10 and rows without a time"
    with pytest.raises(DataError, match=f"clean rows are of {ten_days}: nothing"):
        emptied([], held, now=NOW)
    for source_windows, text in ((held, ten_days), ([NO_TIME], "rows without a time")):
        with pytest.raises(DataError, match=f"no window of the source, which has {text}: name"):
            emptied(source_windows, [], now=NOW, again=("2026-04-01", "2026-04-02"))
    removed = "window 2026-03-01 and rows without a time removed from the clean rows"
    assert deleted_text([], ["2026-03-01", NO_TIME]) == removed


@pytest.mark.parametrize(
    "name",
    ["yesterday", "2026-03", "2026-3-2", "2026-03-02T5", "2026-03-02T24", "2026-02-30", "2026-13-01", "0000-01-01"],
)
def test_a_name_that_is_no_window_is_refused(name):
    with pytest.raises(DataError, match=f"'{name}' is no window"):
        ahead([name], NOW)


def test_the_newest_hours_are_scored_those_before_validate_those_before_train():
    split = split_by_time(DAYS, train=4 * 24, validate=2 * 24, score=24)
    assert (split.train, split.validate, split.score) == (
        ("2026-03-04", "2026-03-05", "2026-03-06", "2026-03-07"),
        ("2026-03-08", "2026-03-09"),
        ("2026-03-10",),
    )
    assert split_by_time(DAYS, train=None, validate=48, score=24).train == tuple(DAYS[:7])


def test_windows_to_test_lie_between_those_that_validate_and_those_that_are_scored():
    split = split_by_time(DAYS, train=None, validate=2 * 24, test=24, score=24)
    assert (split.train, split.validate) == (tuple(DAYS[:6]), ("2026-03-07", "2026-03-08"))
    assert (split.test, split.score) == (("2026-03-09",), ("2026-03-10",))
    with pytest.raises(DataError, match=r"split\.test has no window with rows: .* 24 hours to score, 24 to test"):
        split_by_time([*DAYS[:8], DAYS[9]], train=None, validate=2 * 24, test=24, score=24)


def test_a_gap_stays_in_its_part():
    days = [day for day in DAYS if day not in ("2026-03-06", "2026-03-08")]
    split = split_by_time(days, train=4 * 24, validate=2 * 24, score=24)
    assert (split.train, split.validate) == (("2026-03-04", "2026-03-05", "2026-03-07"), ("2026-03-09",))


def test_hours_are_windows_too():
    hours = [f"2026-03-02T{hour:02d}" for hour in range(12)]
    split = split_by_time(hours, train=None, validate=2, score=1)
    assert (split.validate, split.score) == (("2026-03-02T09", "2026-03-02T10"), ("2026-03-02T11",))


@given(
    days=st.sets(st.sampled_from(DAYS)),
    train=st.none() | st.integers(1, 12),
    validate=st.integers(1, 4),
    test=st.integers(0, 4),
    score=st.integers(1, 4),
)
def test_a_split_is_in_order_and_without_overlap_or_is_refused(days, train, validate, test, score):
    hours = None if train is None else 24 * train
    try:
        split = split_by_time([*days, NO_TIME], train=hours, validate=24 * validate, test=24 * test, score=24 * score)
    except DataError:
        return
    together = [*split.train, *split.validate, *split.test, *split.score]
    assert together == sorted(days)[-len(together) :]
    assert all((split.train, split.validate, split.score))
    assert bool(split.test) is bool(test)
    assert train is not None or set(together) == days


@pytest.mark.parametrize(
    ("days", "part"), [(DAYS[:1], "train"), (DAYS[:3], "train"), (["2026-03-01", "2026-03-04"], "validate")]
)
def test_a_part_without_a_window_is_named(days, part):
    with pytest.raises(DataError, match=rf"split\.{part} has no window with rows: the source has 2026-03-01"):
        split_by_time(days, train=None, validate=48, score=24)
    with pytest.raises(DataError, match="no window with rows"):
        split_by_time([], train=None, validate=48, score=24)


def test_who_only_scores_needs_no_window_to_train_on():
    found = split_by_time(["2026-03-05"], train=24, validate=24, score=24, needed=("score",))
    assert (found.train, found.score) == ((), ("2026-03-05",))
    with pytest.raises(DataError, match=r"split\.train has no window"):
        split_by_time(["2026-03-05"], train=24, validate=24, score=24)


MOMENTS = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC))


@given(
    st.lists(MOMENTS, min_size=1),
    st.sampled_from(["%Y-%m-%d", "%Y-%m-%dT%H"]),
    st.integers(0, 9),
)
def test_spans_hold_every_window_and_do_not_touch(moments, form, days):
    names = {f"{moment.year:04d}{moment.strftime(form)[moment.strftime(form).index('-') :]}" for moment in moments}
    found = spans(names, timedelta(days=days))
    assert all(any(first <= moment < end for first, end in found) for moment in moments)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
    assert spans(names, timedelta(0)) == spans(sorted(names, reverse=True), timedelta(0))


def test_spans_are_as_long_as_their_windows_and_what_is_around_them():
    day = timedelta(days=1)
    assert spans(["2026-03-09", "2026-03-02", "2026-03-10"], day) == [
        (datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 4, tzinfo=UTC)),
        (datetime(2026, 3, 8, tzinfo=UTC), datetime(2026, 3, 12, tzinfo=UTC)),
    ]
    assert spans(["2026-03-02T05"], timedelta(0)) == [
        (datetime(2026, 3, 2, 5, tzinfo=UTC), datetime(2026, 3, 2, 6, tzinfo=UTC))
    ]
    assert spans([], day) == []
