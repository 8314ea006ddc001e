"""Real ratings: what judges is later than what was seen, and the three rankings are compared on the same movies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jobs.examples.movielens import make_data


@pytest.fixture(scope="module")
def rated():
    found = make_data.ratings()
    return found[found.userId <= 60]


def test_what_was_seen_was_liked_before_and_what_was_not_liked_was_not_rated(rated):
    rows = make_data.rows_of(rated, seed=0)
    for user, own in rated.groupby("userId"):
        liked = own.movieId[own.rating >= make_data.LIKED].astype(str).tolist()
        mine = rows[rows.user == user]
        if len(liked) < make_data.LEAST_LIKED:
            assert mine.empty
            continue
        assert [movies[place] for movies, place in zip(mine.movies, mine.place, strict=True)] == liked[1:]
        assert mine.part.tolist() == ["train"] * (len(liked) - 3) + ["validate", "test"]
        for place, seen in enumerate(mine.seen, 1):
            assert seen == liked[:place][-make_data.HISTORY :]
        for movies in mine.movies:
            assert len(set(movies)) == make_data.OTHERS + 1
            assert len(set(movies) & set(own.movieId.astype(str))) == 1
    assert rows.id.is_unique
    assert set(rows.place) == set(range(make_data.OTHERS + 1))


def test_rows_follow_from_the_seed_and_are_made_once(rated, tmp_path):
    first = make_data.rows_of(rated, seed=0)
    pd.testing.assert_frame_equal(first, make_data.rows_of(rated, seed=0))
    assert not first.movies.equals(make_data.rows_of(rated, seed=1).movies)
    count = make_data.make(tmp_path, users=10)
    (file,) = (tmp_path / "rows").iterdir()
    made = file.stat().st_mtime_ns
    assert make_data.make(tmp_path, users=10) == count
    assert file.stat().st_mtime_ns == made


def test_recall_counts_held_out_movies_among_the_first_ten_that_were_not_seen(monkeypatch):
    monkeypatch.syspath_prepend(Path(make_data.__file__).parent)
    from jobs.examples.movielens.__main__ import recall

    scores = np.tile(np.arange(30, 0, -1.0), (4, 1))  # the first movie is always the best
    seen = pd.DataFrame({"user_place": [0, 0], "movie_place": [0, 1]})
    held_out = np.array([11, 9, 10, -1])  # of the first user the twelfth, two of which he has seen; nobody ranks -1
    assert recall(scores, seen, held_out) == 0.5
    assert scores[0, 0] == 30
