"""``python jobs/examples/movielens``: makes the data, runs the pipeline, compares recall with two others.

Options and exit code are those of ``sparkdl run``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from make_data import make
from pyspark.ml.recommendation import ALS
from pyspark.sql import SparkSession

from sparkdl.cli import main
from sparkdl.models.adjusted import AdjustedModel
from sparkdl.models.bundle import load_bundle
from sparkdl.models.preprocessing import features_of
from sparkdl.pipeline import Pipeline

HERE, FIRST = Path(__file__).parent, 10


def of_towers(bundle: str, users: pd.DataFrame, movies: pd.DataFrame) -> np.ndarray:
    """``(users, movies)`` scores of the champion."""
    loaded = load_bundle(bundle, trusted=["movielens_model"])
    towers: Any = loaded.model.model if isinstance(loaded.model, AdjustedModel) else loaded.model  # calibrated, or not
    features = features_of(loaded.info, ())
    assert features is not None

    def ids(column: str, lists: list[list[str]]) -> list[list[int]]:
        raw = {name: pa.array(lists if name == column else [[]] * len(lists), pa.list_(pa.string()))
               for name in ("seen", "movies")}  # fmt: skip
        made: list[list[int]] = features.apply(pa.RecordBatch.from_pydict(raw))[column].to_pylist()
        return made

    seen = ids("seen", users.seen.tolist())
    width = max(map(len, seen))
    row = {
        "seen": torch.tensor([one + [0] * (width - len(one)) for one in seen]),
        "seen_mask": torch.tensor([[n < len(one) for n in range(width)] for one in seen]),
    }
    with torch.inference_mode():
        of_movies = towers.of_movies(torch.tensor(ids("movies", [[movie] for movie in movies.movie]))[:, 0])
        scores: np.ndarray = (towers.of_user(row) @ of_movies.T).numpy()
    return scores


def of_als(spark: SparkSession, liked: pd.DataFrame, users: int, movies: int) -> np.ndarray:
    """``(users, movies)`` scores of the matrix factorisation of Hu, Koren and Volinsky (2008)."""
    spark.sparkContext.setCheckpointDir(tempfile.mkdtemp(prefix="als-"))  # its lineage overflows Java's stack otherwise
    ratings = spark.createDataFrame(liked[["user_place", "movie_place"]].assign(rating=1.0))
    als = ALS(rank=32, maxIter=10, regParam=0.1, alpha=10.0, implicitPrefs=True, seed=7, checkpointInterval=2,
              userCol="user_place", itemCol="movie_place", ratingCol="rating")  # fmt: skip
    model = als.fit(ratings)
    sides = []
    for factors, count in ((model.userFactors, users), (model.itemFactors, movies)):
        found = factors.toPandas()
        side = np.zeros((count, 32))
        side[found.id] = np.stack(found.features)
        sides.append(side)
    return sides[0] @ sides[1].T


def recall(scores: np.ndarray, seen: pd.DataFrame, held_out: np.ndarray) -> float:
    """The share of users whose held-out movie is among the first ten; -1 stands for one that nobody can rank."""
    scores = scores.copy()
    scores[seen.user_place, seen.movie_place] = -np.inf
    best = np.argpartition(-scores, FIRST, axis=1)[:, :FIRST]
    return float((best == held_out[:, None]).any(axis=1).mean())


def recalls(spark: SparkSession, file: Path, bundle: str) -> dict[str, float]:
    """Recall at 10 of the three.

    That is the share of users whose held-out movie is among the ten that each of three rankings puts first: the
    champion's, popularity's, and that of ``pyspark.ml``'s ALS. All rank the movies that somebody liked in the part
    ``train``, without those that the user liked there.

    Args:
        spark: the session.
        file: the rows.
        bundle: address of the champion's.
    """
    rows = pq.read_table(file).to_pandas()
    liked = rows.assign(movie=[movies[place] for movies, place in zip(rows.movies, rows.place, strict=True)])
    train, test = liked[liked.part == "train"], liked[liked.part == "test"].sort_values("user")
    movies = train.drop_duplicates("movie").sort_values("movie")
    user_places = {user: place for place, user in enumerate(test.user)}
    movie_places = {movie: place for place, movie in enumerate(movies.movie)}
    # the first movie that somebody liked is only in what was seen before the second
    firsts = liked.drop_duplicates("user").assign(movie=lambda each: each.seen.str[0])
    before = pd.concat([train, firsts, liked[liked.part == "validate"]])
    before = before.assign(user_place=before.user.map(user_places), movie_place=before.movie.map(movie_places))
    before = before.dropna(subset=["movie_place"]).astype({"movie_place": int, "user_place": int})
    popular = before.movie_place.value_counts().reindex(range(len(movies)), fill_value=0).to_numpy()
    scores = {
        "two towers": of_towers(bundle, test, movies),
        "popularity": np.tile(popular.astype(float), (len(test), 1)),
        "ALS": of_als(spark, before, len(test), len(movies)),
    }
    held_out = test.movie.map(movie_places).fillna(-1).to_numpy(dtype=int)
    return {name: recall(each, before, held_out) for name, each in scores.items()}


if __name__ == "__main__":
    make(HERE / "sparkdl-data")
    file = str(HERE / "movielens.yaml")
    code = main(["run", file, *sys.argv[1:]])
    if code in (0, 10, 20):
        champion = Pipeline.load(file).status().champion
        if champion is not None:
            session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
            found = recalls(session, HERE / "sparkdl-data" / "rows" / "part-00000.parquet", champion.uri)
            print("recall at 10  " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
            session.stop()
    sys.exit(code)
