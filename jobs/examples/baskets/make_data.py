"""Made-up baskets and what was offered beside them, drawn from a model whose AUC and log loss are kept."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.metrics import log_loss, roc_auc_score

ARTICLES, TAGS, TASTES, LONGEST, ROWS_PER_CUSTOMER = 400, 40, 4, 20, 5
BASE, STRENGTH, ROWS_PER_FILE = -0.6, 2.0, 100_000

Array = np.ndarray[Any, Any]


class World:
    """What goes with what.

    Args:
        seed: of everything.
    """

    def __init__(self, seed: int) -> None:
        self.seed, random = seed, np.random.default_rng([seed, 0])
        self.kind = random.integers(0, TASTES, ARTICLES)
        self.article = random.normal(0, 0.35, (ARTICLES, TASTES)) + np.eye(TASTES)[self.kind]
        self.tag = random.normal(0, 0.6, (TAGS, TASTES))
        self.liked = random.normal(0, 0.5, ARTICLES)
        self.tags_of = [np.sort(random.choice(TAGS, random.integers(1, 5), replace=False)) for _ in range(ARTICLES)]
        self.described = self.article + np.stack([self.tag[tags].mean(0) for tags in self.tags_of])
        self.names = np.array([f"a{n:03d}" for n in range(ARTICLES)])

    def rows(self, part: int, count: int) -> tuple[pa.Table, Array, Array]:
        """Draw rows; with them the probability of each, and what became of it."""
        random = np.random.default_rng([self.seed, 1, part])
        lengths = np.minimum(random.geometric(0.15, count) - 1, LONGEST)
        rank = np.exp(random.random(lengths.sum()) * np.log(ARTICLES + 1)).astype(int) - 1  # as frequent as 1 / rank
        basket = np.where(random.random(len(rank)) < 0.5, rank, random.integers(0, ARTICLES, len(rank)))
        basket = np.minimum(basket, ARTICLES - 1)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        sums = np.zeros((count, TASTES))
        np.add.at(sums, np.repeat(np.arange(count), lengths), self.article[basket])
        taste = sums / np.maximum(lengths, 1)[:, None]
        article = np.minimum(np.exp(random.random(count) * np.log(ARTICLES + 1)).astype(int) - 1, ARTICLES - 1)
        logit = BASE + STRENGTH * (taste * self.described[article]).sum(1) + self.liked[article]
        chance = 1 / (1 + np.exp(-logit))
        bought = random.random(count) < chance
        ids = part * ROWS_PER_FILE + np.arange(count)
        columns = {
            "id": ids,
            "customer": ids // ROWS_PER_CUSTOMER,
            "basket": pa.ListArray.from_arrays(offsets.astype(np.int32), pa.array(self.names[basket])),
            "article": pa.array(self.names[article]),
            "tags": pa.array([self.tags_of[each].tolist() for each in article], pa.list_(pa.int32())),
            "bought": bought,
        }
        return pa.table(columns), chance, bought


def make(folder: Path, rows: int = 200_000, seed: int = 0) -> dict[str, Any]:
    """Write the rows, unless they are there.

    Below the folder lie ``rows/part-*.parquet`` with the columns ``id``, ``customer``, ``basket`` (ids of 0 to 20
    articles), ``article`` (that was offered), ``tags`` (of the article, one to four) and ``bought``; and
    ``truth.json``: the recipe, and how well the probabilities that ``bought`` was drawn with predict it. Nothing
    predicts it better: they depend on basket, article and tags alone. A file follows from the recipe and its number
    alone, so that the same call leaves the same bytes.

    Args:
        folder: where they go.
        rows: how many.
        seed: of everything.

    Returns:
        what ``truth.json`` holds.

    Raises:
        SystemExit: other data lie there.
    """
    recipe, file = {"rows": rows, "seed": seed}, folder / "truth.json"
    if file.exists():
        known: dict[str, Any] = json.loads(file.read_text())
        if known["recipe"] != recipe:
            raise SystemExit(f"{folder} holds data of {known['recipe']}, not {recipe}: remove it, or name another --to")
        return known
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    world, chances, outcomes = World(seed), [], []
    for part, first in enumerate(range(0, rows, ROWS_PER_FILE)):
        table, chance, bought = world.rows(part, min(ROWS_PER_FILE, rows - first))
        pq.write_table(table, folder / "rows" / f"part-{part:05d}.parquet")
        chances.append(chance)
        outcomes.append(bought)
    chance, bought = np.concatenate(chances), np.concatenate(outcomes)
    best = {"auc": float(roc_auc_score(bought, chance)), "log_loss": float(log_loss(bought, chance))}
    truth = {"recipe": recipe, "best": {name: round(value, 5) for name, value in best.items()}}
    file.write_text(json.dumps(truth))
    return truth


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Write baskets, and which articles were bought to them.")
    parser.add_argument("--rows", type=int, default=200_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of everything")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "sparkdl-data", help="the folder")
    given = parser.parse_args()
    print(given.to, make(given.to, given.rows, given.seed))


if __name__ == "__main__":
    main()
