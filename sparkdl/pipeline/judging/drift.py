"""Whether a window of rows still looks like the rows that the champion was trained with, feature by feature.

The reference is the training rows' counts, which travel with the model; a window is counted in the same cells.

A feature drifts where a measure is above its practical threshold AND above what chance alone gives to samples of these
sizes, so that neither a million rows make a trifle an alarm nor a hundred rows a fluke. All measures of a window
together alarm falsely with the probability ``false_alarms`` at most (Bonferroni).
    missing           share of rows without a value, up or down; chance: hypergeometric (Fisher's exact test)
    new_categories    share of values that the reference did not name; what it would give to fresh rows of its own is
                      known from its rarest values (Good 1953); chance: hypergeometric
    psi               population stability index; chance: (1/n + 1/m) chi-squared (Yurdakul 2018, chapter 3)
    jensen_shannon    distance, base 2, 0..1 (Lin 1991); chance: (1/n + 1/m) chi-squared / (8 ln 2), its root
    ks                largest gap of the cumulated shares at the edges; chance: Smirnov's bound, wide for few bins
Chi-squared needs cells of some rows: those in which the smaller sample expects less than ``LEAST_EXPECTED`` are joined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparkdl.errors import DataError
from sparkdl.metrics.rows import Floats
from sparkdl.pipeline.judging.counts import Categories, Counts, Histogram
from sparkdl.pipeline.spec import Drift as Section

Action = Literal["none", "warn", "retrain", "fail"]
FALSE_ALARMS = 0.01
LEAST_EXPECTED = 5
_NAMED = 5
"""Features that a sentence names."""
MOST_CELLS = 50
"""The cells of a feature with many categories; the rarer ones stand together."""
_OF_NUMBERS = ("missing", "psi", "js", "ks")
_OF_CATEGORIES = ("missing", "unseen", "psi", "js")
"""Thresholds of the section, by what they are of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One measure of one feature.

    Attributes:
        value: what was found.
        chance: what samples of these sizes give without drift, but for the agreed false alarms.
        threshold: the practical one; None where the measure alarms nobody.
        reference: the share in the reference, of shares.
        current: the share in the window, of shares.
    """

    value: float
    chance: float
    threshold: float | None
    reference: float | None = None
    current: float | None = None

    @property
    def alarm(self) -> bool:
        """Whether it is above both."""
        return self.threshold is not None and self.value > max(self.threshold, self.chance)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureDrift:
    """What became of one feature.

    Attributes:
        alarm: whether a measure is above its limits.
        reason: one sentence.
        measures: by name.
    """

    alarm: bool
    reason: str
    measures: Mapping[str, Measure]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """What became of a window; a document as it is (``documents.typed``).

    Attributes:
        reason: one sentence.
        alarm: whether any feature drifts.
        judged: whether there were rows to look at.
        rows: of the window.
        features: by name.
    """

    reason: str
    alarm: bool
    judged: bool
    rows: int
    features: Mapping[str, FeatureDrift]

    @property
    def alarmed(self) -> list[str]:
        """The features that drift."""
        return [name for name, feature in self.features.items() if feature.alarm]


def decide(section: Section, windows: Mapping[str, Drift]) -> tuple[Action, str]:
    """What to do about windows now, and why in one sentence.

    Args:
        section: of the file: what to do after how many windows with an alarm, among how many of the last.
        windows: by name, the oldest first; those without rows do not count.
    """
    recent = [(name, drift) for name, drift in windows.items() if drift.judged][-section.of :]
    alarmed = [(name, drift) for name, drift in recent if drift.alarm]
    if not recent:
        return "none", "no window with rows was compared"
    span = f"the last {len(recent)} windows" if len(recent) > 1 else f"window {recent[0][0]}"
    if not alarmed:
        return "none", f"{recent[-1][1].reason}, in {span}"
    name, last = alarmed[-1]
    features = last.alarmed
    reasons = "; ".join(f"{feature}: {last.features[feature].reason}" for feature in features[:_NAMED])
    unnamed_text = f"; and {len(features) - _NAMED} more features" if len(features) > _NAMED else ""
    scope = f"{len(alarmed)} of the last {len(recent)} windows drift, lately {name}" if len(recent) > 1 else span
    finding = f"{scope}: {reasons}{unnamed_text}"
    if len(alarmed) >= section.after:
        return section.action, finding
    return "none", f"{finding}; {section.action} waits for {section.after} of {section.of} windows"


def compare(
    reference: Mapping[str, Counts],
    current: Mapping[str, Counts],
    section: Section,
    false_alarms: float = FALSE_ALARMS,
) -> Drift:
    """Compare a window with the reference.

    Args:
        reference: counts over the training rows, by feature.
        current: counts of the same features over the window, in the same cells.
        section: of the file: the practical thresholds; one that is None never alarms.
        false_alarms: probability that a window without drift alarms, at most.

    Raises:
        DataError: the reference counted no rows of a feature.
    """
    for name, counts in reference.items():
        if not counts.present + counts.missing:
            raise DataError(f"the reference of the feature {name!r} counts no rows: make it of the training rows")
    rows = max((counts.present + counts.missing for counts in current.values()), default=0)
    if not rows:
        reason = "the window has no rows, so its drift cannot be judged"
        return Drift(reason=reason, alarm=False, judged=False, rows=0, features={})
    tests = sum(
        getattr(section, name) is not None
        for counts in reference.values()
        for name in (_OF_NUMBERS if isinstance(counts, Histogram) else _OF_CATEGORIES)
    )
    tail = false_alarms / max(tests, 1)
    features = {name: _judge(counts, current[name], section, tail) for name, counts in reference.items()}
    alarmed = [name for name, drift in features.items() if drift.alarm]
    reason = f"none of {len(features)} features drifts"
    if alarmed:
        reason = f"{len(alarmed)} of {len(features)} features drift{'s' * (len(alarmed) == 1)} ({', '.join(alarmed)})"
    return Drift(reason=reason, alarm=bool(alarmed), judged=True, rows=rows, features=features)


def _judge(reference: Counts, current: Counts, section: Section, tail: float) -> FeatureDrift:
    measures = {"missing": _missing(reference, current, section.missing, tail)}
    if reference.independent and current.independent:
        spread = 1 / reference.independent + 1 / current.independent
        if isinstance(reference, Histogram) and isinstance(current, Histogram):
            measures |= _shapes(_bins(reference, current), spread, section, tail)
            measures["ks"] = _ks(reference, current, spread, section.ks, tail)
        elif isinstance(reference, Categories) and isinstance(current, Categories):
            measures["new_categories"] = _new_categories(reference, current, section.unseen, tail)
            measures |= _shapes(_frequent_values(reference, current), spread, section, tail)
    over = [_sentence(name, measure) for name, measure in measures.items() if measure.alarm]
    doubtful = [
        _sentence(name, measure)
        for name, measure in measures.items()
        if measure.threshold is not None and measure.threshold < measure.value <= measure.chance
    ]
    if over:
        reason = "; ".join(over)
    elif doubtful:
        reason = f"no drift in {current.present:,} values: {'; '.join(doubtful)}"
    elif not current.present:
        reason = "every value is missing, as in the reference" if not reference.present else "no value to compare"
    else:
        reason = "no drift: " + ", ".join(f"{name} {measure.value:.3g}" for name, measure in measures.items())
    return FeatureDrift(alarm=bool(over), reason=reason, measures=measures)


def _sentence(name: str, measure: Measure) -> str:
    if measure.reference is None or measure.current is None:
        return f"{name} of {measure.value:.3g} is above {measure.threshold:.3g} (chance alone: {measure.chance:.3g})"
    went = f"{name} went from {measure.reference:.2%} to {measure.current:.2%}"
    return f"{went}, by more than {measure.threshold:.2%} (chance alone: {measure.chance:.2%})"


def _missing(reference: Counts, current: Counts, threshold: float | None, tail: float) -> Measure:
    n, m = reference.present + reference.missing, current.present + current.missing
    total, now = reference.missing + current.missing, current.missing
    low, high = count_range(total, n + m, m, tail / 2)

    def change(count: int) -> float:
        return count / m - (total - count) / n

    shift = change(now)
    chance = change(high) if shift >= 0 else -change(low)
    reference_share = reference.missing / n
    return Measure(
        value=abs(shift), chance=max(chance, 0.0), threshold=threshold, reference=reference_share, current=now / m
    )


def _new_categories(reference: Categories, current: Categories, threshold: float | None, tail: float) -> Measure:
    """Compare the share of unnamed values with what fresh rows of the reference would show.

    Values that a sample names are those it happened to hold often enough: in fresh rows more values are unnamed. Their
    expected share is that of values seen up to ``minimum`` times in the sample (Good 1953, "The population frequencies
    of species", equation 9). Since such rows come ``minimum`` at a time, and one more is not known, the estimate is
    only as sure as one of so many times fewer rows.
    """
    n, m = reference.independent, current.independent
    expected = reference.other + sum(count for count in reference.counts.values() if count == reference.minimum)
    unnamed = current.other + sum(count for name, count in current.counts.items() if name not in reference.counts)
    expected_share, share = expected / reference.total, unnamed / current.total
    fewer = max(1, n // (reference.minimum + 1))
    _, high = count_range(math.ceil(expected_share * fewer) + round(share * m), fewer + m, m, tail)
    chance, value = max(high / m - expected_share, 0.0), max(share - expected_share, 0.0)
    return Measure(value=value, chance=chance, threshold=threshold, reference=expected_share, current=share)


def count_range(marked: int, rows: int, drawn: int, tail: float) -> tuple[int, int]:
    """Return within which counts chance alone keeps the marked among drawn rows.

    Of ``rows`` rows ``marked`` are of one kind, and ``drawn`` are taken without looking: the count of that kind is
    hypergeometric (Fisher's exact test), which holds for any sizes, also for one row or one marked row in a million.

    Sums of its terms, in place of the quantiles of scipy.stats, which takes seconds to load.

    Returns:
        ``(low, high)``; the count is below ``low`` with probability ``tail`` at most, and above ``high`` likewise.
    """
    least, most = max(0, marked + drawn - rows), min(marked, drawn)
    mean = drawn * marked / rows
    reach = math.ceil(12 * math.sqrt(mean * (1 - marked / rows))) + 60  # beyond lies less than any tail asked for
    low, high = max(least, int(mean) - reach), min(most, int(mean) + reach)
    counts = np.arange(low, high, dtype=np.float64)
    denominators, numerators = (counts + 1) * (rows - marked - drawn + counts + 1), (marked - counts) * (drawn - counts)
    logs = np.concatenate([[0.0], np.cumsum(np.log(numerators / denominators))])
    chances = np.exp(logs - logs.max())
    below = np.cumsum(chances / chances.sum())
    above = np.cumsum((chances / chances.sum())[::-1])[::-1]
    # low: the first count that is not in the tail below; high: the last that is not in the tail above
    return low + int(np.argmax(below > tail)), high - int(np.argmax(above[::-1] > tail))


def _shapes(cells: tuple[Floats, Floats], spread: float, section: Section, tail: float) -> dict[str, Measure]:
    from scipy.special import chdtri  # half a second to load, for those who compare

    freedom = len(cells[0]) - 1
    chance = spread * float(chdtri(freedom, tail)) if freedom else 0.0
    # Half a row more a cell: what a sample by chance lacks makes no infinity.
    p, q = ((counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in cells)
    measures = {"psi": Measure(value=float((q - p) @ np.log(q / p)), chance=chance, threshold=section.psi)}
    middle = (p + q) / 2
    divergence = float(p @ np.log2(p / middle) + q @ np.log2(q / middle)) / 2
    measures["jensen_shannon"] = Measure(
        value=math.sqrt(max(divergence, 0.0)),
        chance=math.sqrt(chance / (8 * math.log(2))),
        threshold=section.js,
    )
    return measures


def _ks(reference: Histogram, current: Histogram, spread: float, threshold: float | None, tail: float) -> Measure:
    gap = np.abs(np.cumsum(reference.counts) / reference.present - np.cumsum(current.counts) / current.present).max()
    return Measure(value=float(gap), chance=math.sqrt(math.log(2 / tail) / 2 * spread), threshold=threshold)


def _bins(reference: Histogram, current: Histogram) -> tuple[Floats, Floats]:
    """The counts of both, (cells,), small cells joined: which ones depends on the sum alone, so chance stays chance."""
    n, m = reference.present, current.present
    least = LEAST_EXPECTED * (n + m) / min(n, m)
    counts = np.array([reference.counts, current.counts], dtype=np.float64)
    totals = counts.sum(axis=0)
    starts, room = [0], 0.0
    for cell, total in enumerate(totals):
        if room >= least and totals[cell:].sum() >= least:
            starts.append(cell)
            room = 0.0
        room += total
    joined = np.add.reduceat(counts, starts, axis=1)
    return joined[0], joined[1]


def _frequent_values(reference: Categories, current: Categories) -> tuple[Floats, Floats]:
    """The counts of both, (cells,), by value, the others together: which ones depends on the sum alone, likewise."""
    n, m = reference.independent, current.independent
    # Whether a value is named depends on the reference alone: those that nearly were not, stand with the unnamed.
    least = max(LEAST_EXPECTED * (n + m) / min(n, m), 2 * reference.minimum * (n + m) / n)
    scale, current_scale = n / reference.total, m / current.total
    pairs = [(scale * count, current_scale * current.counts.get(name, 0)) for name, count in reference.counts.items()]
    pairs = sorted((pair for pair in pairs if sum(pair) >= least), key=sum, reverse=True)[: MOST_CELLS - 1]
    counts = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    unnamed = np.maximum(np.array([n, m]) - counts.sum(axis=0), 0.0)
    if not len(counts):
        return unnamed[:1], unnamed[1:]
    if unnamed.sum() >= least:
        counts = np.vstack([counts, unnamed])
    else:
        counts[-1] += unnamed
    return counts[:, 0], counts[:, 1]
