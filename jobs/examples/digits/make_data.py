"""The digits that scikit-learn ships as pictures: one row a digit, its PNG and what it shows."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold, cross_val_score
from sklearn.svm import SVC

ROWS_PER_FILE = 20_000
SHIFTS = np.array([(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)])
NOISE = 1.0  # standard deviation, of 16 shades of grey


def make(folder: Path, rows: int = 1797, seed: int = 0) -> dict[str, object]:
    """Write the rows that are not there yet.

    Below the folder lie ``rows/part-*.parquet`` with the columns ``id``, ``original``, ``picture`` and ``digit``; and
    ``truth.json`` with the recipe, and the accuracy that a support vector machine reaches on the originals in ten-fold
    cross-validation, which nothing that is published for this set beats by much.

    There are 1,797 originals. Rows beyond are copies that are shifted by a pixel at most and noisy; ``original`` says
    of which, and the pipeline keeps all copies of one on one side of its split. Files follow from recipe and place
    alone.

    Args:
        folder: where they go.
        rows: how many.
        seed: of shifts and noise.

    Returns:
        what ``truth.json`` holds.

    Raises:
        SystemExit: other data lies there.
    """
    recipe = {"rows": rows, "seed": seed}
    file = folder / "truth.json"
    if file.exists():
        truth: dict[str, object] = json.loads(file.read_text())
        if truth["recipe"] != recipe:
            raise SystemExit(f"{folder} holds data of {truth['recipe']}, not {recipe}: remove it, or name another --to")
        return truth
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    pictures, labels = load_digits(return_X_y=True)
    for first in range(0, rows, ROWS_PER_FILE):
        chunk = _rows(pictures, labels, range(first, min(first + ROWS_PER_FILE, rows)), seed)
        pq.write_table(chunk, folder / "rows" / f"part-{first // ROWS_PER_FILE:05d}.parquet")
    folds = KFold(10, shuffle=True, random_state=0)
    accuracy = cross_val_score(SVC(C=10, gamma=0.001), pictures, labels, cv=folds).mean()
    truth = {"recipe": recipe, "reference": {"accuracy": round(float(accuracy), 4)}}
    file.write_text(json.dumps(truth))
    return truth


def _rows(pictures: np.ndarray, labels: np.ndarray, which: range, seed: int) -> pa.Table:
    ids = np.arange(which.start, which.stop)
    original = ids % len(labels)
    random = np.random.default_rng([seed, which.start])
    shifts, noise = random.integers(0, len(SHIFTS), len(ids)), random.normal(0, NOISE, (len(ids), 8, 8))
    encoded = []
    for row, of, shift, grain in zip(ids, original, shifts, noise, strict=True):
        shades = pictures[of].reshape(8, 8)
        if row >= len(labels):
            shades = np.roll(shades, SHIFTS[shift], axis=(0, 1)) + grain
        stream = io.BytesIO()
        Image.fromarray(np.clip(shades * 255 / 16, 0, 255).round().astype(np.uint8)).save(stream, format="PNG")
        encoded.append(stream.getvalue())
    columns = {"id": ids, "original": original, "picture": pa.array(encoded), "digit": labels[original]}
    return pa.table(columns)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Write the digits of scikit-learn as rows of PNG pictures.")
    parser.add_argument("--rows", type=int, default=1797, help="how many; copies beyond 1797 are shifted and noisy")
    parser.add_argument("--seed", type=int, default=0, help="of shifts and noise")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "sparkdl-data", help="the folder")
    given = parser.parse_args()
    print(given.to, make(given.to, given.rows, given.seed))


if __name__ == "__main__":
    main()
