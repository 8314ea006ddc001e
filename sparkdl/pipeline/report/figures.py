"""Where the predictions of challenger and champion go wrong: residuals, calibration, ROC, confusion.

Enters: the diagnostics of both on the same held-out rows. Leaves: a section of the report; what an evaluation of an
older version did not keep is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sparkdl.pipeline.judging.metrics.diagnostics import Confusion, Diagnostics, Histogram, Plane
from sparkdl.pipeline.judging.metrics.measure import CalibrationBin
from sparkdl.pipeline.report.charts import Axis, Plot
from sparkdl.pipeline.report.html import Child, Html, shown, tag
from sparkdl.pipeline.report.tables import NONE, figures, number, section, share, table
from sparkdl.pipeline.state.results import Evaluated

__all__ = ["diagnosed"]

_NAMES = ("challenger", "champion before")
_STYLES = ("s1", "s2")
Both = Sequence[tuple[str, str, Diagnostics]]


def diagnosed(evaluated: Evaluated | None) -> Html | None:
    """What there is to see of both models."""
    if evaluated is None or evaluated.challenger is None:
        return None
    seen = [one for one in (evaluated.challenger, evaluated.champion) if one is not None]
    both: Both = list(zip(_NAMES, _STYLES, seen, strict=False))
    mine = evaluated.challenger
    drawn = list(_figures(both, evaluated.label))
    tables: list[Child] = []
    if mine.calibration:
        tables += [tag("h3", "By threshold"), _thresholds(mine.calibration)]
    tables += [part for name, _, one in both if one.confusion for part in _matrix(one.confusion, name)]
    if mine.quantiles:
        tables.append(_quantiles(both))
    rows = tag("p", f"On {evaluated.rows_text()}.")
    return section("What the predictions look like", rows, figures(drawn), *tables) if drawn or tables else None


def _figures(both: Both, label: str) -> Iterator[Html]:
    mine = both[0][2]
    if mine.plane is not None:
        yield _plane(mine.plane, label)
    if mine.residuals is not None:
        yield _residuals([(name, style, one.residuals) for name, style, one in both if one.residuals], label)
    if mine.calibration:
        yield _reliability(both)
    if mine.roc:
        yield _roc(both)


def _plane(plane: Plane, label: str) -> Html:
    edges = plane.edges
    plot = Plot(
        "Predicted against true, challenger",
        Axis(f"true {label}", edges[0], edges[-1]),
        Axis(f"predicted {label}", edges[0], edges[-1]),
    )
    most = max((weight for row in plane.weights for weight in row), default=0.0)
    for at, row in enumerate(plane.weights):
        for up, weight in enumerate(row):
            if weight > 0:
                strength = 0.08 + 0.92 * math.sqrt(weight / most)  # so that a few rows are seen beside many
                plot.box((edges[at], edges[up]), (edges[at + 1], edges[up + 1]), "s1", strength)
    plot.line([(edges[0], edges[0]), (edges[-1], edges[-1])], "s2", "predicted = true")
    plot.key("s1", "rows, the more the darker")
    return plot.figure()


def _residuals(found: Sequence[tuple[str, str, Histogram]], label: str) -> Html:
    shares = [[weight / (sum(one.weights) or 1.0) for weight in one.weights] for _, _, one in found]
    edges = found[0][2].edges
    top = 1.06 * max(map(max, shares))
    plot = Plot(
        "Residuals", Axis(f"predicted minus true {label}", edges[0], edges[-1]), Axis("share of rows", 0.0, top)
    )
    for low, high, part in zip(edges, edges[1:], shares[0], strict=False):
        if part:
            plot.box((low, 0.0), (high, part), "s1", 0.55)
    plot.key("s1", found[0][0])
    for (name, style, _), parts in zip(found[1:], shares[1:], strict=True):
        steps = [point for at, part in enumerate(parts) for point in ((edges[at], part), (edges[at + 1], part))]
        plot.line(steps, style, name)
    if edges[0] < 0 < edges[-1]:
        plot.line([(0.0, 0.0), (0.0, top)], "s4")
    return plot.figure()


def _reliability(both: Both) -> Html:
    plot = Plot("Calibration", Axis("predicted probability", 0.0, 1.0), Axis("share that came true", 0.0, 1.0))
    plot.line([(0.0, 0.0), (1.0, 1.0)], "s4", "as predicted")
    for name, style, one in both:
        most = max((each.weight for each in one.calibration), default=1.0)
        plot.line([(each.predicted, each.observed) for each in one.calibration], style, name)
        for each in one.calibration:
            plot.dot(each.predicted, each.observed, style, 2.0 + 5.0 * math.sqrt(each.weight / most))
    return plot.figure()


def _roc(both: Both) -> Html:
    plot = Plot("ROC", Axis("share of negatives taken", 0.0, 1.0), Axis("share of positives found", 0.0, 1.0))
    plot.line([(0.0, 0.0), (1.0, 1.0)], "s4", "by chance")
    for name, style, one in both:
        plot.line(one.roc, style, name)
    return plot.figure()


def _thresholds(bins: Sequence[CalibrationBin]) -> Html:
    """What taking all rows from a probability on would give; from the bins, so at their edges."""
    whole = sum(one.weight for one in bins)
    positives = sum(one.weight * one.observed for one in bins)
    lines = []
    for low in sorted({one.low for one in bins}):
        taken = [one for one in bins if one.low >= low]
        weight, hits = sum(one.weight for one in taken), sum(one.weight * one.observed for one in taken)
        here = next(one for one in bins if one.low == low)
        lines.append(
            (
                f"{low:.2g}",
                number(here.rows),
                f"{here.predicted:.3f}",
                f"{here.observed:.3f}",
                share(weight, whole),
                f"{hits / weight:.3f}" if weight else NONE,
                f"{hits / positives:.3f}" if positives else NONE,
            )
        )
    header = ("probability from", "rows in the bin", "predicted", "came true", "taken from here on", "precision",
              "recall")  # fmt: skip
    return table(header, lines, note="Precision and recall of taking every row with this probability or a higher one.")


def _matrix(confusion: Confusion, name: str) -> Iterator[Html]:
    yield tag("h3", f"Confusion, {name}")
    names = [shown(one, 40) for one in confusion.classes]
    heads = [tag("th", "true \\ predicted", scope="col"), *[tag("th", one, scope="col") for one in names]]
    lines = []
    for at, (label, row) in enumerate(zip(names, confusion.weights, strict=True)):
        whole = sum(row)
        cells = [
            tag("td", number(round(weight)), class_=f"n {'right' if at == to else 'wrong'}{_tint(weight, whole)}")
            for to, weight in enumerate(row)
        ]
        right = NONE if at == len(names) - 1 and confusion.others else share(row[at], whole)
        lines.append(tag("tr", tag("th", label, scope="row"), cells, tag("td", right, class_="n")))
    heads.append(tag("th", "recognised", scope="col", class_="n"))
    note = "A row a true class, a column a predicted one."
    if confusion.others:
        note += f" The {len(confusion.classes) - 1} most frequent; {confusion.others:,} others stand together."
    whole_table = tag("table", tag("thead", tag("tr", heads)), tag("tbody", lines), class_="matrix")
    yield tag("div", whole_table, tag("p", note, class_="note"), class_="panel")


def _tint(weight: float, whole: float) -> int:
    """How dark a cell is, from 0 for none to 5."""
    return 0 if not whole or not weight else min(5, 1 + int(5 * weight / whole))


def _quantiles(both: Both) -> Html:
    names = ("5 %", "25 %", "median", "75 %", "95 %")
    lines = [(name, *map(number, one.quantiles)) for name, _, one in both if one.quantiles]
    note = "In the figures the outermost bars and fields hold what lies beyond them, too."
    return table(("residuals of", *names), lines, note=note)
