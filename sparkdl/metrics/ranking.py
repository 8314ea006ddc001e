"""Metrics of the order of scores: area under the ROC curve, average precision; exact, with ties and weights."""

from __future__ import annotations

import numpy as np

from sparkdl.metrics.rows import Floats, Rows


def auc(rows: Rows, draws: Floats | None = None) -> Floats:
    """Return the area under the ROC curve.

    AUC is a two-sample U-statistic, the share of pairs (positive, negative) that stand in the right order, a tie
    counting one half (Hanley and McNeil 1982). So over groups of rows it is a quadratic form: with ``wins[g, h]``, the
    weight of such pairs between positives of group g and negatives of group h, a draw that takes group g ``c[g]`` times
    has ``c wins c`` of ``(c positives)(c negatives)``: rows are sorted once, whatever the number of draws.

    Args:
        rows: of two classes.
        draws: (draws, groups), how often each draw takes each group; None takes all rows once.

    Returns:
        (draws,), (1,) without draws; NaN where only one class has weight.
    """
    if draws is None:
        rows = rows.as_one_group()
        draws = np.ones((1, 1))
    positive = rows.labels == 1
    of_positives, of_negatives = (
        draws @ np.bincount(rows.groups[mask], rows.weights[mask], rows.group_count) for mask in (positive, ~positive)
    )
    won = ((draws @ wins_by_group(rows)) * draws).sum(axis=1)
    pairs = of_positives * of_negatives
    return np.where(pairs > 0, won / np.where(pairs > 0, pairs, 1), np.nan)


def wins_by_group(rows: Rows) -> Floats:
    """Return ``wins[g, h]``, the weight of pairs whose positive, of group g, outscores the negative, of group h.

    One sort, then one pass over the positives a group: (positives x groups) steps.
    """
    positive = rows.labels == 1
    up, down = rows.take(positive), rows.take(~positive)
    up = up.take(np.argsort(up.predictions, kind="stable"))
    # A negative wins nothing against positives from ``above`` on, and half against its ties, from ``tied`` on.
    tied = np.searchsorted(up.predictions, down.predictions, side="left")
    above = np.searchsorted(up.predictions, down.predictions, side="right")
    order = np.argsort(down.groups, kind="stable")
    ends = np.cumsum(np.bincount(down.groups, minlength=rows.group_count))
    wins = np.zeros((rows.group_count, rows.group_count))
    for group, of in enumerate(np.split(order, ends[:-1])):
        if len(of):
            half = down.weights[of] / 2
            steps = np.bincount(tied[of], half, len(up) + 1) + np.bincount(above[of], half, len(up) + 1)
            beaten = np.cumsum(steps)[: len(up)]
            wins[:, group] = np.bincount(up.groups, up.weights * beaten, rows.group_count)
    return wins


def average_precision(rows: Rows, draws: Floats | None = None) -> Floats:
    """Return the mean precision over the ranks of the positives, as sklearn defines it (no interpolation).

    Args:
        rows: of two classes.
        draws: (draws, groups), how often each draw takes each group; None takes all rows once.

    Returns:
        (draws,), (1,) without draws; NaN where class 1 has no weight. Rows are sorted once, and walked once a draw.
    """
    if not len(rows):
        return np.full(1 if draws is None else len(draws), np.nan)
    rows = rows.take(np.argsort(-rows.predictions, kind="stable"))
    last = np.flatnonzero(np.append(np.diff(rows.predictions) != 0, True))  # of each run of ties
    precisions = []
    for draw in [None] if draws is None else draws:
        weights = rows.weights if draw is None else rows.weights * draw[rows.groups]
        hits, ranked_weight = np.cumsum(weights * rows.labels)[last], np.cumsum(weights)[last]
        precision = hits / np.where(ranked_weight > 0, ranked_weight, 1)
        precisions.append(np.diff(hits, prepend=0.0) @ precision / hits[-1] if hits[-1] > 0 else np.nan)
    return np.array(precisions)
