"""How well a column of a sample predicts the label alone, and which columns say the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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
    """The rows of a sample that have a label.

    Attributes:
        rows: places of them in the sample, in random order: the first half estimates, the second measures.
        targets: the label as numbers, (rows, 1); of several classes one column each.
        binary: whether it is 0 or 1.
    """

    rows: Ints
    targets: Floats
    binary: bool

    @staticmethod
    def of(sample: pa.Table, label: str, task: str) -> Labelled | None:
        """The labelled rows; None where they are too few to tell anything."""
        column = sample.column(label).combine_chunks()
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_finite(column), column, None)
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        rows = np.random.default_rng(0).permutation(rows)[:_ROWS]
        if len(rows) < _LEAST:
            return None
        if task == "regression":
            return Labelled(rows, _numbers(column)[rows, None], False)
        codes = np.asarray(column.take(pa.array(rows)).dictionary_encode().indices)
        common = np.argsort(-np.bincount(codes), kind="stable")[:_CLASSES]
        classes = (codes[:, None] == common).astype(np.float64)
        return Labelled(rows, classes[:, :1] if classes.shape[1] == 2 else classes, classes.shape[1] == 2)

    def alone(self, profile: Profile, column: pa.Array, numbers: Floats | None) -> float:
        """R2, or AUC of a binary label, that a column tells by its values, by their order or by their ranks."""
        strengths = [self.by_value(column)] if profile.distinct <= len(self.rows) // 4 else [0.0]
        if numbers is not None:
            x = numbers[self.rows]
            strengths += [self.by_order(x), self.by_order(_ranks(x))]
        return max(strengths)

    def by_value(self, column: pa.Array) -> float:
        """R2, or AUC of a binary label, of the label's mean by value; a missing one is a value, too."""
        return self._measure(_codes(column.take(pa.array(self.rows))), None)

    def by_order(self, x: Floats, *, bins: int = 100) -> float:
        """The same by a line in each of up to ``bins`` ranges of the numbers, each with as many rows; of all rows."""
        half = x[: len(x) // 2]
        present = half[np.isfinite(half)]
        if len(present) < _LEAST // 2:
            return 0.0
        edges = np.unique(np.quantile(present, np.linspace(0, 1, min(bins, max(1, len(present) // 25)) + 1)[1:-1]))
        groups = np.where(np.isfinite(x), np.searchsorted(edges, x), len(edges) + 1)
        return self._measure(groups, np.where(np.isfinite(x), x, 0.0))

    def value_and_order(self, column: pa.Array) -> tuple[float, float, float]:
        """The share of the label's variance that the values of a column tell, and that their order in few ranges tells.

        Both are adjusted, so that few rows a value, or a line, do not raise them: the first is epsilon squared of a
        one-way analysis of variance (Kelley 1935), of these rows, so that rare values count as little as they matter.
        The last number is the standard error of the first where values tell nothing.
        """
        groups = _codes(column.take(pa.array(self.rows)))
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
        bins, rows = max(1, min(8, count // 5)), len(self.rows)
        twice = Labelled(np.tile(self.rows, 2), np.tile(self.targets, (2, 1)), False)  # measured where it was estimated
        lines = twice.by_order(np.tile(_numbers(column)[self.rows], 2), bins=bins)
        adjusted = 1 - (1 - lines) * (rows - 1) / (rows - 2 * bins)  # a line has two numbers
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


def too_good(
    labelled: Labelled, sample: pa.Table, profiles: Sequence[Profile], label: str
) -> Iterator[tuple[str, str]]:
    """Yield columns that predict the label (nearly) alone, with a sentence: each alone, then two numbers together."""
    measure = "auc" if labelled.binary else "R2"
    few = replace(labelled, rows=labelled.rows[:_FEW], targets=labelled.targets[:_FEW])
    numbers: dict[str, tuple[Floats, float]] = {}
    for profile in profiles:
        if profile.kind not in ("number", "bool", "text", "when") or not profile.present:
            continue
        column = sample.column(profile.name).combine_chunks()
        values = _numbers(column) if profile.kind in ("number", "when") else None
        strength = few.alone(profile, column, values)
        if strength >= _STRONG - 0.1:
            strength = labelled.alone(profile, column, values)
        if strength >= _STRONG:
            yield (
                profile.name,
                f"predicts {label} alone ({measure} {_shown(strength)}): is it the answer in other words, or "
                "known only afterwards? remove it then",
            )
        elif profile.kind == "number" and values is not None:
            numbers[profile.name] = values[few.rows], strength
    if labelled.targets.shape[1] > 1 or labelled.binary:
        return
    for first, second in itertools.combinations(list(numbers)[:_PAIRED], 2):
        (a, strength_alone), (b, other_strength) = numbers[first], numbers[second]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            combined = {f"{first} x {second}": a * b, f"{first} / {second}": a / b, f"{second} / {first}": b / a}
        for name, values in combined.items():
            strength = few.by_order(values)
            if strength >= _STRONG and 1 - strength < (1 - max(strength_alone, other_strength)) / 2:
                for column in (first, second):
                    yield column, f"{name} predicts {label} ({measure} {_shown(strength)}): is {label} made of the two?"
                break


def near_duplicates(sample: pa.Table, profiles: Sequence[Profile]) -> dict[str, str]:
    """A sentence for each number that has (nearly) the same order as an earlier one, as x and log x have."""
    drawn = sample.take(np.sort(np.random.default_rng(0).permutation(sample.num_rows)[:_FEW]))
    ranks_by_name: dict[str, Floats] = {}
    for profile in [profile for profile in profiles if profile.kind == "number" and profile.distinct > 10][:_COMPARED]:
        values = _numbers(drawn.column(profile.name).combine_chunks())
        if np.isfinite(values).sum() >= _LEAST // 2:
            ranks_by_name[profile.name] = _ranks(values)
    duplicates: dict[str, str] = {}
    if len(ranks_by_name) < 2:
        return duplicates
    names, ranks = list(ranks_by_name), np.array(list(ranks_by_name.values()))
    centred, gaps = np.nan_to_num(ranks - np.nanmean(ranks, axis=1, keepdims=True)), np.isnan(ranks)
    length = np.sqrt((centred**2).sum(axis=1, keepdims=True))
    length[length == 0] = 1.0  # of numbers that differ beyond 64 bits alone
    correlations = np.abs(centred / length @ (centred / length).T)
    for second, first in zip(*np.nonzero(np.tril(correlations, -1) >= _SAME), strict=True):
        if names[first] not in duplicates and (gaps[first] == gaps[second]).mean() >= _SAME:
            same = f"nearly the same as {names[first]}, with one order: one of them is enough"
            duplicates.setdefault(names[second], same)
    return duplicates


def _ranks(values: Floats) -> Floats:
    """The place of each value in order, the mean place of equal ones; NaN where there is none."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.where(np.isfinite(values), (np.cumsum(counts) - (counts - 1) / 2)[places], np.nan)


def _codes(column: pa.Array) -> Ints:
    """A number for each value, and one for none."""
    plain = column.dictionary_encode(null_encoding="encode")
    return np.asarray(plain.indices, dtype=np.int64)


def _numbers(column: pa.Array) -> Floats:
    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def _shown(strength: float) -> str:
    return f"{min(strength, 0.9999):.4f}" if strength < 1 else "1"
