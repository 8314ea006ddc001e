"""Made-up clicks in the format of Criteo's logs, drawn from a model whose AUC and log loss are kept."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Iterator
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

CARDINALITIES = (
    1_500, 550, 1_000_000, 300_000, 300, 20, 12_000, 600, 3, 50_000, 5_000, 800_000, 3_000, 26, 12_000, 600_000, 10,
    5_000, 2_000, 4, 700_000, 18, 15, 80_000, 90, 60_000,
)  # fmt: skip
INTERACTING = ((5, 13), (8, 16), (19, 22), (4, 21))
"""Pairs of categories of which each value likes some of the other: what the dots of a DLRM are for."""
MISSING_COUNTS = (0.4, 0.0, 0.2, 0.2, 0.03, 0.2, 0.04, 0.0, 0.04, 0.4, 0.04, 0.7, 0.2)
MISSING_CATEGORIES = {2: 0.03, 5: 0.12, 11: 0.03, 18: 0.4, 19: 0.4, 21: 0.7, 24: 0.4, 25: 0.4}
UNLABELLED, CUT, BASE = 0.001, 0.0005, -1.9
FIRST_DAY, CHUNK, LARGEST = date(2024, 1, 1), 250_000, 65_534
CUT_AFTER = 1 + 13 * 6 + 10 * 9  # bytes of a line: the label, the counts, ten categories

Array = np.ndarray[Any, Any]


class World:
    """Who clicks on what: effects of all values, and the text of each.

    Args:
        seed: of everything.
    """

    def __init__(self, seed: int) -> None:
        self.seed, random = seed, np.random.default_rng([seed, 0])
        self.location, self.spread = random.uniform(0.5, 5, 13), random.uniform(0.6, 1.4, 13)
        self.slope, self.absent = random.normal(0, 0.16, 13), random.normal(0, 0.2, 13)
        self.values = [random.normal(0, 0.6 / math.log(size + 8), size).astype(np.float32) for size in CARDINALITIES]
        self.tastes = {c: random.normal(0, 0.45, (CARDINALITIES[c], 4)) for pair in INTERACTING for c in pair}

    @cached_property
    def numbers(self) -> Array:
        """``(LARGEST + 2, 5)`` the digits of -1, 0, 1, ..., with zero bytes behind them."""
        texts = np.arange(-1, LARGEST + 1).astype("S5")
        return texts.view(np.uint8).reshape(len(texts), 5)

    @cached_property
    def tokens(self) -> list[Array]:
        """The texts by category, ``(values, 8)`` hexadecimal digits; every value of every category has its own."""
        digits = np.frombuffer(b"0123456789abcdef", np.uint8)
        first = np.cumsum((0, *CARDINALITIES))
        found = []
        for start, size in zip(first, CARDINALITIES, strict=False):
            mixed = np.arange(start, start + size, dtype=np.uint32) * np.uint32(2_654_435_761) + np.uint32(self.seed)
            mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)  # each step can be undone, so no two become one
            mixed ^= mixed >> 13
            found.append(digits[(mixed[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & np.uint32(15)])
        return found

    def chunk(self, day: int, part: int, rows: int) -> tuple[Array, Array, Array, Array]:
        """Draw rows: their bytes ``(rows, width)``, in which 0 is no byte, probabilities, clicks, which are whole."""
        random = np.random.default_rng([self.seed, 1, day, part])
        line = np.zeros((rows, 314), np.uint8)
        logit = np.full(rows, BASE + 0.05 * np.sin(day), np.float32)
        place = 1
        for j in range(13):
            counts = np.exp(self.location[j] + self.spread[j] * random.standard_normal(rows, np.float32))
            whole = np.minimum(counts, LARGEST).astype(np.int32) - (j == 1)  # the second begins at -1, as Criteo's does
            there = random.random(rows, np.float32) >= MISSING_COUNTS[j]
            scaled = (np.log1p(np.maximum(whole, 0)) - self.location[j]) / self.spread[j]
            logit += np.where(there, self.slope[j] * scaled, self.absent[j])
            place = _write(line, place, self.numbers[whole + 1], there)
        chosen = {}
        for c, size in enumerate(CARDINALITIES):
            which = np.exp(random.random(rows, np.float32) * np.float32(np.log(size + 1))).astype(np.int32) - 1
            which = np.minimum(which, size - 1)
            there = random.random(rows, np.float32) >= MISSING_CATEGORIES.get(c, 0.0)
            logit += np.where(there, self.values[c][which], 0)
            place = _write(line, place, self.tokens[c][which], there)
            if c in self.tastes:
                chosen[c] = np.where(there[:, None], self.tastes[c][which], 0)
        logit += sum((chosen[a] * chosen[b]).sum(1) for a, b in INTERACTING)
        chance = 1 / (1 + np.exp(-logit.astype(np.float64)))
        clicks, fate = random.random(rows) < chance, random.random(rows)
        whole_rows = fate >= UNLABELLED + CUT
        line[:, 0] = np.where(fate < UNLABELLED, 0, clicks + ord("0"))
        line[(fate >= UNLABELLED) & ~whole_rows, CUT_AFTER:] = 0
        line[:, -1] = ord("\n")
        return line, chance, clicks, whole_rows


def _write(line: Array, place: int, text: Array, there: Array) -> int:
    line[:, place] = ord("\t")
    end = place + 1 + text.shape[1]
    line[:, place + 1 : end] = np.where(there[:, None], text, 0)
    return end


def make(folder: Path, rows: int = 30_000, days: int = 10, seed: int = 0, zipped: bool = False) -> dict[str, Any]:
    """Write the days that are not there yet.

    Below the folder lie ``rows/day=D/day_N``, text without a header, 40 fields between tabs: whether an advertisement
    was clicked, counts I1..I13, hashed categories C1..C26, each empty where it is missing; and ``truth.json``: the
    recipe, and by day how well the probabilities that the clicks were drawn with predict them. Nothing predicts them
    better. A few lines have no label, and a few are cut off, as in a log of many servers.

    A day follows from the seed, its number and its rows alone, and one that is there stays as it is: ask for one day
    more, and one is added. The values of a category are as frequent as one over their rank, so most of a million are
    rare.

    Args:
        folder: where they go.
        rows: of a day.
        days: how many.
        seed: of everything.
        zipped: whether files are compressed by gzip.

    Returns:
        what ``truth.json`` holds.

    Raises:
        SystemExit: other data lie there.
    """
    recipe, file = {"rows": rows, "seed": seed, "zipped": zipped}, folder / "truth.json"
    truth = json.loads(file.read_text()) if file.exists() else {"recipe": recipe, "days": {}}
    if truth["recipe"] != recipe:
        raise SystemExit(f"{folder} holds data of {truth['recipe']}, not {recipe}: remove it, or name another --to")
    todo = [day for day in range(days) if _date(day) not in truth["days"]]
    world = World(seed) if todo else None
    for day in todo:
        place = folder / "rows" / f"day={_date(day)}" / f"day_{day}{'.gz' if zipped else ''}"
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{place.name}.tmp"
        with unfinished.open("wb") as raw, gzip.GzipFile("", "wb", 1, raw, mtime=0) if zipped else raw as stream:
            truth["days"][_date(day)] = _day(world, day, rows, stream)
        unfinished.replace(place)
        file.write_text(json.dumps(truth, indent=1))
    return truth


def _day(world: World, day: int, rows: int, stream: Any) -> dict[str, float]:
    """Write one day; return how predictable its valid rows are."""
    chances, clicks = [], []
    for part, first in enumerate(range(0, rows, CHUNK)):
        line, chance, clicked, whole = world.chunk(day, part, min(CHUNK, rows - first))
        stream.write(line[line != 0].tobytes())
        chances.append(chance[whole])
        clicks.append(clicked[whole])
    chance, clicked = np.concatenate(chances), np.concatenate(clicks)
    return {
        "rows": rows,
        "sound": len(chance),
        "clicks": int(clicked.sum()),
        "auc": round(float(roc_auc_score(clicked, chance)), 5),
        "log_loss": round(float(log_loss(clicked, chance)), 5),
    }


def _date(day: int) -> str:
    return (FIRST_DAY + timedelta(days=day)).isoformat()


def link(folder: Path, source: Path) -> Iterator[Path]:
    """Lay out the files ``day_N`` and ``day_N.gz`` of a folder as the pipeline reads them; yields the links."""
    for path in sorted(source.glob("day_*")):
        place = folder / "rows" / f"day={_date(int(path.name.split('.')[0].removeprefix('day_')))}" / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.hardlink_to(path)  # no symbolic one: files outside of the source's folder are not read through those
        yield place


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Write clicks in the format of Criteo's logs.")
    parser.add_argument("--rows", type=int, default=30_000, help="of a day")
    parser.add_argument("--days", type=int, default=10, help="how many; days that are there stay")
    parser.add_argument("--seed", type=int, default=0, help="of everything")
    parser.add_argument("--gzip", action="store_true", help="compress the files, as Criteo's are")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "sparkdl-data", help="the folder")
    parser.add_argument("--link", type=Path, metavar="FOLDER", help="of real files day_N.gz: draw none, link these")
    given = parser.parse_args()
    if given.link:
        print(*link(given.to, given.link), sep="\n")
    else:
        for day, known in make(given.to, given.rows, given.days, given.seed, given.gzip)["days"].items():
            print(day, known)


if __name__ == "__main__":
    main()
