"""Rows by the values of a column: the largest slices, and the worst."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.metrics.measure import Measured, measure
from sparkdl.metrics.rows import Ints, Rows
from sparkdl.metrics.sums import losses_of

MISSING, OTHERS = "(missing)", "(others)"
LEAST_ROWS = 30
"""Rows that a slice needs to be among the worst: the worst of all are slices of one row, by chance."""


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The slices of a column that are shown.

    Attributes:
        values: how many different ones the column has; a missing one counts.
        names: of the slices shown, the largest first; ``OTHERS`` at the end, if there are more.
        places: (rows,), which of these each row is of.
    """

    values: int
    names: tuple[str, ...]
    places: Ints

    @staticmethod
    def of(rows: Rows, keys: npt.ArrayLike, *, largest: int = 20, worst: int = 10) -> Slices:
        """Choose slices.

        Args:
            rows: held-out rows, with the predictions that "worst" is meant of: by squared error, or log loss.
            keys: (rows,), the value of each row; a missing one is a slice, too.
            largest: so many of the largest.
            worst: so many of the worst of the others that have ``LEAST_ROWS`` rows.
        """
        import pandas as pd

        codes, values = pd.factorize(np.asarray(keys, dtype=object))
        names = [repr(name) if name in (MISSING, OTHERS) else name for name in map(str, values)]
        if (codes < 0).any():
            names.append(MISSING)
            codes = np.where(codes < 0, len(names) - 1, codes)
        counts = np.bincount(codes, minlength=len(names))
        order = np.array(sorted(range(len(names)), key=lambda code: (-counts[code], names[code])), dtype=np.int64)
        weight = np.bincount(codes, rows.weights, len(names))
        loss = np.bincount(codes, rows.weights * losses_of(rows), len(names)) / np.where(weight > 0, weight, 1.0)
        smaller_codes = [code for code in order[largest:] if counts[code] >= LEAST_ROWS]
        worst_codes = set(sorted(smaller_codes, key=lambda code: -loss[code])[:worst])
        shown = [*order[:largest], *(code for code in smaller_codes if code in worst_codes)]
        position = np.full(len(names), len(shown))
        position[shown] = np.arange(len(shown))
        others_name = (OTHERS,) if len(names) > len(shown) else ()
        return Slices(
            values=len(names),
            names=(*[names[code] for code in shown], *others_name),
            places=position[codes].astype(np.int64),
        )

    def measure(self, rows: Rows) -> dict[str, Measured]:
        """The metrics of each slice, over the predictions of any model of the same rows."""
        return {name: measure(rows.take(self.places == position)) for position, name in enumerate(self.names)}
