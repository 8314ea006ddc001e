"""How well a column of a sample predicts the label alone, and which columns say the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.metrics.measure import metric_over
from sparkdl.metrics.rows import Rows
from sparkdl.pipeline.init.profile import Profile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_STRONG, _SAME = 0.98, 0.999
"""The AUC or R2 above which a column is too good to be true; the rank correlation above which two are nearly one."""
_ROWS, _FEW, _LEAST, _PAIRED, _COMPARED = 50_000, 4_000, 60, 32, 1_000
"""Rows that are looked at, those that tell whether a closer look is worth it, and those that are needed; columns of
which pairs are tried; columns that are compared with each other."""
_CLASSES = 50
"""The most frequent classes that are looked at."""
_PRIOR = 5
"""Rows of the mean that each group has besides its own, so that a few rows say little."""


@dataclass(frozen=True)
class Labelled:
    """Rows that have a label, in random order: the first half estimates, the second measures.

    Attributes:
        rows: with all columns.
        targets: the label as numbers, (rows, 1); of several classes one column each.
        binary: whether it is 0 or 1.
    """

    rows: pa.Table
    targets: Floats
    binary: bool

    @staticmethod
    def of(rows: pa.Table, label: str, task: str) -> Labelled | None:
        """Some of the rows, which all have a label; None where they are too few to tell anything."""
        if len(rows) < _LEAST:
            return None
        rows = _drawn(rows, _ROWS)
        column = rows.column(label).combine_chunks()
        if task == "regression":
            return Labelled(rows, _numbers(column)[:, None], False)
        codes = _codes(column)
        common = np.argsort(-np.bincount(codes), kind="stable")[:_CLASSES]
        classes = (codes[:, None] == common).astype(np.float64)
        return Labelled(rows, classes[:, :1] if classes.shape[1] == 2 else classes, classes.shape[1] == 2)

    def alone(self, profile: Profile) -> float:
        """R2, or AUC of a binary label, that a column tells by its values, by their order or by their ranks."""
        column = self.rows.column(profile.name).combine_chunks()
        strengths = [0.0]
        if profile.distinct <= len(column) // 4:
            strengths.append(self._measure(_codes(column), None))  # a missing value is one, too
        if profile.kind in ("number", "when"):
            numbers = _numbers(column)
            strengths += [self.by_order(numbers), self.by_order(_ranks(numbers))]
        return max(strengths)

    def by_order(self, x: Floats, *, bins: int = 100) -> float:
        """R2 or AUC of a line in each of up to ``bins`` ranges of the numbers, each with as many rows; of all rows."""
        half = x[: len(x) // 2]
        present = half[np.isfinite(half)]
        if len(present) < _LEAST // 2:
            return 0.0
        edges = np.unique(np.quantile(present, np.linspace(0, 1, min(bins, max(1, len(present) // 25)) + 1)[1:-1]))
        groups = np.where(np.isfinite(x), np.searchsorted(edges, x), len(edges) + 1)
        return self._measure(groups, np.where(np.isfinite(x), x, 0.0))

    def value_and_order(self, name: str) -> tuple[float, float, float]:
        """The share of the label's variance that the values of a column tell, and that their order in few ranges tells.

        Both are adjusted, so that few rows a value, or a line, do not raise them: the first is epsilon squared of a
        one-way analysis of variance (Kelley 1935), of these rows, so that rare values count as little as they matter.
        The last number is the standard error of the first where values tell nothing.
        """
        column = self.rows.column(name).combine_chunks()
        groups = _codes(column)
        sizes = np.bincount(groups)
        sizes = sizes[sizes > 0]
        total, count = int(sizes.sum()), len(sizes)
        if not 1 < count < total:
            return 0.0, 0.0, 1.0
        centred = self.targets - self.targets.mean(axis=0)
        sums = np.array([np.bincount(groups, target) for target in centred.T])[:, np.bincount(groups) > 0]
        between, squares = float((sums**2 / sizes).sum()), float((centred**2).sum())
        within = (squares - between) / (total - count)
        share = max(0.0, (between - (count - 1) * within) / squares) if squares > 0 else 0.0
        bins = max(1, min(8, count // 5))
        twice = Labelled(self.rows, np.tile(self.targets, (2, 1)), False)  # measured where it was estimated
        lines = twice.by_order(np.tile(_numbers(column), 2), bins=bins)
        adjusted = 1 - (1 - lines) * (total - 1) / (total - 2 * bins)  # a line has two numbers
        return share, max(0.0, adjusted), float(np.sqrt(2 * (count - 1)) / total)

    def _measure(self, groups: Ints, x: Floats | None) -> float:
        """How well the means of groups, and in each a line by ``x``, of the first half predict the second half."""
        cut, count = len(groups) // 2, int(groups.max()) + 1
        learned, measured, actual = groups[:cut], groups[cut:], self.targets[cut:]
        rows = np.bincount(learned, minlength=count)
        predicted = np.empty_like(actual)
        with np.errstate(over="ignore", invalid="ignore"):
            for output, target in enumerate(self.targets[:cut].T):
                sums = np.bincount(learned, target, count)
                predicted[:, output] = ((sums + _PRIOR * target.mean()) / (rows + _PRIOR))[measured]
                if x is not None:  # least squares in each group, about its own means
                    middle = np.bincount(learned, x[:cut], count) / np.maximum(rows, 1)
                    means = sums / np.maximum(rows, 1)
                    distance = x[:cut] - middle[learned]
                    square = np.bincount(learned, distance**2, count)
                    products = np.bincount(learned, distance * (target - means[learned]), count)
                    slope = products / np.where(square > 0, square, 1.0)
                    line = means[measured] + slope[measured] * (x[cut:] - middle[measured])
                    predicted[:, output] = np.where(rows[measured] >= _PRIOR, line, predicted[:, output])
        if not np.isfinite(predicted).all():
            return 0.0
        if self.binary:
            auc = float(metric_over(Rows.of("binary", actual[:, 0], np.clip(predicted[:, 0], 0, 1)), "auc")[0])
            return auc if np.isfinite(auc) else 0.5
        total = float(((actual - actual.mean(axis=0)) ** 2).sum())
        return 1 - float(((actual - predicted) ** 2).sum()) / total if total > 0 else 0.0


def too_good(labelled: Labelled, profiles: Sequence[Profile], label: str) -> Iterator[tuple[str, str]]:
    """Yield columns that predict the label (nearly) alone, with a sentence: each alone, then two numbers together."""
    measure = "auc" if labelled.binary else "R2"
    few = Labelled(labelled.rows.slice(0, _FEW), labelled.targets[:_FEW], labelled.binary)
    strengths: dict[str, float] = {}
    for profile in profiles:
        if profile.kind not in ("number", "bool", "text", "when") or not profile.present:
            continue
        strength = few.alone(profile)
        if strength >= _STRONG - 0.1:
            strength = labelled.alone(profile)
        if strength >= _STRONG:
            yield (
                profile.name,
                f"predicts {label} alone ({measure} {_shown(strength)}): is it the answer in other words, or "
                "known only afterwards? remove it then",
            )
        elif profile.kind == "number":
            strengths[profile.name] = strength
    if labelled.targets.shape[1] > 1 or labelled.binary:
        return
    numbers = {name: _numbers(few.rows.column(name).combine_chunks()) for name in list(strengths)[:_PAIRED]}
    for first, second in itertools.combinations(numbers, 2):
        a, b = numbers[first], numbers[second]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            combined = {f"{first} x {second}": a * b, f"{first} / {second}": a / b, f"{second} / {first}": b / a}
        for name, values in combined.items():
            strength = few.by_order(values)
            if strength >= _STRONG and 1 - strength < (1 - max(strengths[first], strengths[second])) / 2:
                for column in (first, second):
                    yield column, f"{name} predicts {label} ({measure} {_shown(strength)}): is {label} made of the two?"
                break


def near_duplicates(rows: pa.Table, profiles: Sequence[Profile]) -> dict[str, str]:
    """A sentence for each number that has (nearly) the same order as an earlier one, as x and log x have."""
    drawn = _drawn(rows, _FEW)
    compared = [profile.name for profile in profiles if profile.kind == "number" and profile.distinct > 10][:_COMPARED]
    ranks_by_name = {name: _ranks(_numbers(drawn.column(name).combine_chunks())) for name in compared}
    names = [name for name, ranks in ranks_by_name.items() if np.isfinite(ranks).sum() >= _LEAST // 2]
    if len(names) < 2:
        return {}
    ranks = np.array([ranks_by_name[name] for name in names])
    gaps = np.isnan(ranks)
    with np.errstate(invalid="ignore"):  # of numbers that differ beyond 64 bits alone
        correlations = np.abs(np.corrcoef(np.where(gaps, np.nanmean(ranks, axis=1, keepdims=True), ranks)))
    duplicates: dict[str, str] = {}
    for second, first in zip(*np.nonzero(np.tril(correlations, -1) >= _SAME), strict=True):
        if names[first] not in duplicates and (gaps[first] == gaps[second]).mean() >= _SAME:
            same = f"nearly the same as {names[first]}, with one order: one of them is enough"
            duplicates.setdefault(names[second], same)
    return duplicates


def _drawn(rows: pa.Table, most: int) -> pa.Table:
    """At most so many rows, in random order."""
    return rows.take(pa.array(np.random.default_rng(0).permutation(len(rows))[:most]))


def _ranks(values: Floats) -> Floats:
    """The place of each value in order, the mean place of equal ones; NaN where there is none."""
    import pandas as pd

    return np.asarray(pd.Series(np.where(np.isfinite(values), values, np.nan)).rank(), dtype=np.float64)


def _codes(column: pa.Array) -> Ints:
    """A number for each value, and one for none."""
    return np.asarray(column.dictionary_encode(null_encoding="encode").indices, dtype=np.int64)


def _numbers(column: pa.Array) -> Floats:
    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def _shown(strength: float) -> str:
    return f"{min(strength, 0.9999):.4f}" if strength < 1 else "1"
