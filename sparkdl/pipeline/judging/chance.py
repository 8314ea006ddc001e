"""What chance alone gives: quantiles of the distributions that the gate and the drift alarm compare with.

Enters: a probability and counts. Leaves: numbers, by closed forms that need no library: sums for whole degrees of
freedom (Abramowitz and Stegun 1964, 26.4.4-5 and 26.7.3-4), inverted by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

__all__ = ["chi_squared_quantile", "count_range", "student_quantile"]

_STEPS = 200


def chi_squared_quantile(tail: float, freedom: int) -> float:
    """Return what a chi-squared variable of ``freedom`` degrees exceeds with probability ``tail``."""
    return _solve(lambda x: _chi_squared_tail(x, freedom), tail)


def student_quantile(tail: float, freedom: int) -> float:
    """Return what Student's t of ``freedom`` degrees exceeds with probability ``tail``, below one half."""
    return _solve(lambda t: _student_tail(t, freedom), tail)


def count_range(marked: int, rows: int, drawn: int, tail: float) -> tuple[int, int]:
    """Return within which counts chance alone keeps the marked among drawn rows.

    Of ``rows`` rows ``marked`` are of one kind, and ``drawn`` are taken without looking: the count of that kind is
    hypergeometric (Fisher's exact test), which holds for any sizes, also for one row or one marked row in a million.

    Returns:
        ``(low, high)``; the count is below ``low`` with probability ``tail`` at most, and above ``high`` likewise.
    """
    least, most = max(0, marked + drawn - rows), min(marked, drawn)
    mean = drawn * marked / rows
    reach = math.ceil(12 * math.sqrt(mean * (1 - marked / rows))) + 60  # beyond lies less than any tail asked for
    low, high = max(least, int(mean) - reach), min(most, int(mean) + reach)
    counts = np.arange(low, high, dtype=np.float64)
    fewer, more = (counts + 1) * (rows - marked - drawn + counts + 1), (marked - counts) * (drawn - counts)
    logs = np.concatenate([[0.0], np.cumsum(np.log(more / fewer))])
    chances = np.exp(logs - logs.max())
    below = np.cumsum(chances / chances.sum())
    above = np.cumsum((chances / chances.sum())[::-1])[::-1]
    # low: the first count that is not in the tail below; high: the last that is not in the tail above
    return low + int(np.argmax(below > tail)), high - int(np.argmax(above[::-1] > tail))


def _solve(tail_of: Callable[[float], float], tail: float) -> float:
    low, high = 0.0, 1.0
    while tail_of(high) > tail:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if tail_of(middle) > tail else (low, middle)
    return high


def _chi_squared_tail(x: float, freedom: int) -> float:
    if x <= 0:
        return 1.0
    half, odd = x / 2, freedom % 2
    terms = (math.exp(k / 2 * math.log(half) - half - math.lgamma(k / 2 + 1)) for k in range(odd, freedom, 2))
    return (math.erfc(math.sqrt(half)) if odd else 0.0) + math.fsum(terms)


def _student_tail(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for step in range(1 + odd, freedom + odd, 2):
        total += term
        term *= cosine * cosine * step / (step + 1)
    inner = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 - inner) / 2
