"""The figures of the report as shapes of an SVG; ``report.html.j2`` draws them, in colours of the page.

Values that are not finite are left out. Shapes have attributes and never styles: the page's policy forbids those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparkdl.pipeline.judging.diagnostics import Diagnostics, Histogram, Plane
from sparkdl.pipeline.state.results import Evaluated, Live, Trained

WIDTH, WIDE, HEIGHT = 440, 900, 264
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 10, 10, 42
MODELS = ("challenger", "champion before")
_STYLES = ("s1", "s2", "s3", "s4")
Point = tuple[float | None, float | None]


class Shape(NamedTuple):
    """One element of an SVG: its tag, its attributes, without those that are None, and the text that it holds."""

    tag: str
    attributes: Mapping[str, str | float | None]
    text: str = ""


def _shape(tag: str, style: str, text: str = "", **attributes: str | float | None) -> Shape:
    """A shape with the class ``style``; an underscore stands for a hyphen, and fractions are written with one digit."""
    rounded = {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in attributes.items()}
    return Shape(tag, {name.replace("_", "-"): value for name, value in rounded.items()} | {"class": style}, text)


class Mark(NamedTuple):
    """A drawing for a cell of a table.

    Attributes:
        style: the class of the page that it has.
        height: in units of which its width has 100.
        shapes: from the back to the front.
    """

    style: str
    height: int
    shapes: Sequence[Shape]


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: what it is, with its unit.
        low: where it begins.
        high: where it ends; not below ``low``.
        counts: whether it counts something.
        names: of the whole numbers from 0, in place of numbers.
    """

    label: str
    low: float
    high: float
    counts: bool = False
    names: Sequence[str] = ()

    @staticmethod
    def over(label: str, values: Iterable[float | None]) -> Axis:
        """An axis that holds all finite ``values``, with some room at both ends."""
        finite = [float(value) for value in values if value is not None and math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return Axis(label, low - margin, high + margin)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the beginning, 1 at the end, and little beyond these."""
        return min(max((value - self.low) / ((self.high - self.low) or 1.0), -0.02), 1.02)

    def marked(self, most: int) -> list[tuple[float, str]]:
        """The values that are marked, about ``most`` of them, with as many digits as tell neighbours apart.

        They are steps of 1, 2 or 5 times a power of ten.
        """
        if self.names:
            every = max(1, math.ceil(len(self.names) / most))
            return [(float(position), self.names[position]) for position in range(0, len(self.names), every)]
        raw = (self.high - self.low) / most
        if not (raw > 0 and math.isfinite(raw)):
            return [(self.low, f"{self.low:,.0f}")]
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
        step = max(step, 1.0) if self.counts else step
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        marks = []
        for number in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            value = number * step
            is_plain = not value or 1e-4 <= abs(value) < 1e6
            marks.append((value, f"{value:,.{digits}f}" if is_plain else f"{value:.3g}"))
        return marks


class Plot:
    """A figure: marks between two axes, and the words for them.

    Args:
        title: said above it, and to those who do not see it.
        x: the horizontal axis.
        y: the vertical axis.
        wide: it takes the page's whole width, where others stand beside each other.

    Attributes:
        shapes: from the back to the front.
        legend: pairs of a style and what it means.
    """

    def __init__(self, title: str, x: Axis, y: Axis, *, wide: bool = False) -> None:
        self.title, self.x, self.y, self.wide = title, x, y, wide
        self.width, self.height = WIDE if wide else WIDTH, HEIGHT
        self.shapes: list[Shape] = []
        self.legend: list[tuple[str, str]] = []
        left, right, bottom, middle = _LEFT, self.width - _RIGHT, HEIGHT - _BOTTOM, (_TOP + HEIGHT - _BOTTOM) // 2
        for value, text in y.marked(5):
            at = self._at_y(value)
            self.shapes.append(_shape("line", "grid", x1=left, x2=right, y1=at, y2=at))
            self.shapes.append(_shape("text", "end", text, x=left - 5, y=at, dy="0.35em"))
        for value, text in x.marked(12 if wide else 6):
            at = self._at_x(value)
            self.shapes.append(_shape("line", "axis", x1=at, x2=at, y1=bottom, y2=bottom + 4))
            self.shapes.append(_shape("text", "middle", text, x=at, y=bottom + 16))
        self.shapes.append(_shape("line", "axis", x1=left, x2=right, y1=bottom, y2=bottom))
        self.shapes.append(_shape("text", "middle name", x.label, x=(left + right) / 2, y=HEIGHT - 7))
        turned = f"rotate(-90 11 {middle})"
        self.shapes.append(_shape("text", "middle name", y.label, x=11, y=middle, transform=turned))

    def line(self, points: Iterable[Point], style: str, name: str = "", *, dots: bool = False) -> None:
        """Join points; a gap stays where one has no value.

        Args:
            points: pairs of x and y.
            style: a class of the page, ``s1`` or ``s2`` for instance.
            name: for the legend.
            dots: mark each point, too.
        """
        runs: list[list[tuple[float, float]]] = [[]]
        for x, y in points:
            if x is None or y is None or not (math.isfinite(x) and math.isfinite(y)):
                runs.append([])
            else:
                runs[-1].append((x, y))
        for run in runs:
            if len(run) > 1:
                path = " ".join(f"{self._at_x(x):.1f},{self._at_y(y):.1f}" for x, y in run)
                self.shapes.append(_shape("polyline", f"line {style}", points=path))
            for x, y in run if dots or len(run) == 1 else ():
                self.dot(x, y, style)
        self.key(style, name)

    def dot(self, x: float, y: float, style: str, size: float = 2.6, name: str = "") -> None:
        """Mark one point with a dot of ``size`` pixels."""
        self.shapes.append(_shape("circle", f"dot {style}", cx=self._at_x(x), cy=self._at_y(y), r=size))
        self.key(style, name)

    def box(self, low: tuple[float, float], high: tuple[float, float], style: str, strength: float) -> None:
        """Fill the rectangle from corner to corner, ``strength`` from 0 to 1."""
        left, right = sorted((self._at_x(low[0]), self._at_x(high[0])))
        top, bottom = sorted((self._at_y(low[1]), self._at_y(high[1])))
        width, height, opacity = right - left, bottom - top, None if strength >= 1 else f"{strength:.2f}"
        self.shapes.append(
            _shape("rect", f"fill {style}", x=left, y=top, width=width, height=height, fill_opacity=opacity)
        )

    def key(self, style: str, name: str) -> None:
        """Say in the legend what a style means; an empty name says nothing."""
        if name:
            self.legend.append((style, name))

    def _at_x(self, value: float) -> float:
        return _LEFT + self.x.share(value) * (self.width - _LEFT - _RIGHT)

    def _at_y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - self.y.share(value) * (HEIGHT - _TOP - _BOTTOM)


def bar(share: float, style: str = "s1") -> Mark:
    """A bar for a cell of a table, ``share`` of its width."""
    strip = _shape("rect", f"fill {style}", x=0, y=0, width=100 * min(max(share, 0.0), 1.0), height=8)
    return Mark("bar", 8, [strip])


def interval(middle: float, margin: float, reach: float) -> Mark:
    """A value with its interval for a cell of a table, and where 0 is; the cell goes from -``reach`` to ``reach``."""
    low, at, high = (50.0 + 50.0 * value / reach for value in (middle - margin, middle, middle + margin))
    zero = _shape("line", "axis", x1=50.0, x2=50.0, y1=0, y2=12)
    line = _shape("line", "line s1", x1=low, x2=high, y1=6, y2=6)
    return Mark("spread", 12, [zero, line, _shape("circle", "dot s1", cx=at, cy=6, r=2.6)])


def learning_curves(trained: Trained) -> list[Plot]:
    """The loss first, then each metric that was watched, by epoch, for training and validation rows."""
    history, best = trained.history, trained.best_epoch
    names = dict.fromkeys(name for row in history for name in row if f"val_{name}" in row)
    epochs = [float(number + 1) for number in range(len(history))]
    plots = []
    for name in names:
        training = [row.get(name) for row in history]
        validation = [row.get(f"val_{name}") for row in history]
        # the mean over the first epoch begins at random weights: it would press all that follows into one line
        heights = [*validation, *(training[1:] if len(training) > 2 else training)]
        x = Axis("epoch", 0.5, len(history) + 0.5, counts=True)
        plot = Plot(f"{name} by epoch", x, Axis.over(name, heights), wide=len(names) == 1)
        plot.line(zip(epochs, training, strict=True), "s1", "training, mean over the epoch", dots=True)
        plot.line(zip(epochs, validation, strict=True), "s2", "validation, after the epoch", dots=True)
        if best is not None and best < len(history) and validation[best] is not None:
            plot.dot(best + 1.0, float(validation[best] or 0.0), "ring", 6.0, f"best epoch, {best + 1}")
        plots.append(plot)
    return plots


def live_error(live: Live) -> Plot:
    """The error of predictions that came true by window, a line a version, beside that of the best guess."""
    names = list(dict.fromkeys(error.window for error in live.windows))
    points = [(float(names.index(error.window)), error.value(live.metric), error) for error in live.windows]
    plot = Plot(
        f"{live.metric} of {live.label} as it came true",
        Axis("window", -0.5, len(names) - 0.5, names=names),
        Axis.over(live.metric, [height for _, value, error in points for height in (value, error.baseline)]),
        wide=True,
    )
    for number, version in enumerate(sorted({error.version for error in live.windows})):
        line = [(position, value) for position, value, error in points if error.version == version]
        plot.line(line, _STYLES[number % len(_STYLES)], f"version {version}", dots=True)
    guesses = {position: error.baseline for position, _, error in points if error.baseline is not None}
    plot.line(guesses.items(), "s4", "without a model" if guesses else "")
    return plot


def diagnostic_figures(evaluated: Evaluated) -> list[Plot]:
    """Where the predictions of challenger and champion go wrong: residuals, calibration, ROC."""
    models = [model for model in (evaluated.challenger, evaluated.champion) if model is not None]
    challenger, label = models[0], evaluated.label
    plots = []
    if challenger.plane is not None:
        plots.append(_predicted_against_true(challenger.plane, label))
    if challenger.residuals is not None:
        plots.append(_residuals([model.residuals for model in models if model.residuals], label))
    if challenger.calibration:
        plots.append(_calibration(models))
    if challenger.roc:
        plot = Plot("ROC", Axis("share of negatives taken", 0.0, 1.0), Axis("share of positives found", 0.0, 1.0))
        plot.line([(0.0, 0.0), (1.0, 1.0)], "s4", "by chance")
        for name, style, model in zip(MODELS, _STYLES, models, strict=False):
            plot.line(model.roc, style, name)
        plots.append(plot)
    return plots


def _predicted_against_true(plane: Plane, label: str) -> Plot:
    edges = plane.edges
    x, y = (Axis(f"{name} {label}", edges[0], edges[-1]) for name in ("true", "predicted"))
    plot = Plot("Predicted against true, challenger", x, y)
    most = max((weight for row in plane.weights for weight in row), default=0.0)
    for at, row in enumerate(plane.weights):
        for up, weight in enumerate(row):
            if weight > 0:
                strength = 0.08 + 0.92 * math.sqrt(weight / most)  # so that a few rows are seen beside many
                plot.box((edges[at], edges[up]), (edges[at + 1], edges[up + 1]), "s1", strength)
    plot.line([(edges[0], edges[0]), (edges[-1], edges[-1])], "s2", "predicted = true")
    plot.key("s1", "rows, the more the darker")
    return plot


def _residuals(histograms: Sequence[Histogram], label: str) -> Plot:
    shares = [[weight / (sum(histogram.weights) or 1.0) for weight in histogram.weights] for histogram in histograms]
    edges, top = histograms[0].edges, 1.06 * max(map(max, shares))
    x, y = Axis(f"predicted minus true {label}", edges[0], edges[-1]), Axis("share of rows", 0.0, top)
    plot = Plot("Residuals", x, y)
    for low, high, part in zip(edges, edges[1:], shares[0], strict=False):
        if part:
            plot.box((low, 0.0), (high, part), "s1", 0.55)
    plot.key("s1", MODELS[0])
    if len(shares) > 1:
        steps = [point for at, part in enumerate(shares[1]) for point in ((edges[at], part), (edges[at + 1], part))]
        plot.line(steps, "s2", MODELS[1])
    if edges[0] < 0 < edges[-1]:
        plot.line([(0.0, 0.0), (0.0, top)], "s4")
    return plot


def _calibration(models: Sequence[Diagnostics]) -> Plot:
    plot = Plot("Calibration", Axis("predicted probability", 0.0, 1.0), Axis("share that came true", 0.0, 1.0))
    plot.line([(0.0, 0.0), (1.0, 1.0)], "s4", "as predicted")
    for name, style, model in zip(MODELS, _STYLES, models, strict=False):
        most = max((part.weight for part in model.calibration), default=1.0)
        plot.line([(part.predicted, part.observed) for part in model.calibration], style, name)
        for part in model.calibration:
            plot.dot(part.predicted, part.observed, style, 2.0 + 5.0 * math.sqrt(part.weight / most))
    return plot
