"""The figures of the report as shapes of an SVG; ``report.html.j2`` draws them, in colours of the page.

Values that are not finite are left out. Shapes have attributes and never styles: the page's policy forbids those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sparkdl.pipeline.judging.diagnostics import Diagnostics, Histogram, Plane
from sparkdl.pipeline.state.results import Evaluated, Live, Trained

WIDTH, WIDE, HEIGHT = 440, 900, 264
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 10, 10, 42
MODELS = ("challenger", "champion before")
_STYLES = ("s1", "s2", "s3", "s4")
Point = tuple[float | None, float | None]


@dataclass(frozen=True)
class Shape:
    """One element of an SVG.

    Attributes:
        tag: its name.
        attributes: by name; one that is None is left out.
        text: that it holds.
    """

    tag: str
    attributes: Mapping[str, str | float | None]
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """An SVG: a figure with a title and a legend, or a mark without a title for a cell of a table.

    Attributes:
        shapes: from the back to the front.
        width: in units of its own.
        height: likewise.
        title: said above it, and to those who do not see it; empty for a mark.
        legend: pairs of a style and what it means.
        style: the class of the figure, or of the mark.
        stretched: whether the mark fills its cell.
    """

    shapes: Sequence[Shape]
    width: int
    height: int
    title: str = ""
    legend: Sequence[tuple[str, str]] = ()
    style: str | None = None
    stretched: bool = False


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
    def over(label: str, values: Iterable[float | None], room: float = 0.06) -> Axis:
        """An axis that holds all finite ``values``, with some room at both ends."""
        finite = [float(value) for value in values if value is not None and math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        margin = room * (high - low) or 0.05 * abs(high) or 1.0
        return Axis(label, low - margin, high + margin)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the beginning, 1 at the end."""
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def marked(self, most: int) -> list[tuple[float, str]]:
        """The values that are marked, about ``most`` of them, with as many digits as tell neighbours apart."""
        if self.names:
            step = max(1, math.ceil(len(self.names) / most))
            return [(float(position), self.names[position]) for position in range(0, len(self.names), step)]
        values = ticks(self.low, self.high, most, self.counts)
        gap = values[1] - values[0] if len(values) > 1 else 1.0
        digits = max(0, -math.floor(math.log10(gap) + 1e-9)) if gap > 0 else 0
        texts = []
        for value in values:
            if value and (abs(value) >= 1e6 or abs(value) < 1e-4):
                texts.append(f"{value:.3g}" if abs(value) > gap / 1000 else "0")
            else:
                texts.append(f"{value:,.{digits}f}")
        return list(zip(values, texts, strict=True))


@dataclass
class Plot:
    """A figure in the making: marks between two axes, and the words for them.

    Attributes:
        title: said above it, and to those who do not see it.
        x: the horizontal axis.
        y: the vertical axis.
        wide: it takes the page's whole width, where others stand beside each other.
    """

    title: str
    x: Axis
    y: Axis
    wide: bool = False
    shapes: list[Shape] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    @property
    def _width(self) -> int:
        return WIDE if self.wide else WIDTH

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
                self.shapes.append(Shape("polyline", {"points": path, "class": f"line {style}"}))
            for x, y in run if dots or len(run) == 1 else ():
                self.dot(x, y, style)
        self.key(style, name)

    def dot(self, x: float, y: float, style: str, size: float = 2.6, name: str = "") -> None:
        """Mark one point with a dot of ``size`` pixels."""
        circle = {"cx": f"{self._at_x(x):.1f}", "cy": f"{self._at_y(y):.1f}", "r": f"{size:.1f}"}
        self.shapes.append(Shape("circle", {**circle, "class": f"dot {style}"}))
        self.key(style, name)

    def box(self, low: tuple[float, float], high: tuple[float, float], style: str, strength: float = 1.0) -> None:
        """Fill the rectangle from corner to corner, ``strength`` from 0 to 1."""
        left, right = sorted((self._at_x(low[0]), self._at_x(high[0])))
        top, bottom = sorted((self._at_y(low[1]), self._at_y(high[1])))
        rectangle = {"x": left, "y": top, "width": right - left, "height": bottom - top}
        attributes: dict[str, str | float | None] = {name: f"{value:.1f}" for name, value in rectangle.items()}
        attributes |= {"class": f"fill {style}", "fill-opacity": None if strength >= 1 else f"{strength:.2f}"}
        self.shapes.append(Shape("rect", attributes))

    def key(self, style: str, name: str) -> None:
        """Say in the legend what a style means; an empty name says nothing."""
        if name and (style, name) not in self.legend:
            self.legend.append((style, name))

    def drawing(self) -> Drawing:
        """The whole figure."""
        return Drawing(
            shapes=[*self._grid(), *self.shapes],
            width=self._width,
            height=HEIGHT,
            title=self.title,
            legend=self.legend,
            style="wide" if self.wide else None,
        )

    def _at_x(self, value: float) -> float:
        return _LEFT + min(max(self.x.share(value), -0.02), 1.02) * (self._width - _LEFT - _RIGHT)

    def _at_y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - min(max(self.y.share(value), -0.02), 1.02) * (HEIGHT - _TOP - _BOTTOM)

    def _grid(self) -> Iterator[Shape]:
        left, right, top, bottom = _LEFT, self._width - _RIGHT, _TOP, HEIGHT - _BOTTOM
        for value, text in self.y.marked(5):
            at = f"{self._at_y(value):.1f}"
            yield Shape("line", {"x1": left, "x2": right, "y1": at, "y2": at, "class": "grid"})
            yield Shape("text", {"x": left - 5, "y": at, "dy": "0.35em", "class": "end"}, text)
        for value, text in self.x.marked(12 if self.wide else 6):
            at = f"{self._at_x(value):.1f}"
            yield Shape("line", {"x1": at, "x2": at, "y1": bottom, "y2": bottom + 4, "class": "axis"})
            yield Shape("text", {"x": at, "y": bottom + 16, "class": "middle"}, text)
        yield Shape("line", {"x1": left, "x2": right, "y1": bottom, "y2": bottom, "class": "axis"})
        yield Shape("text", {"x": (left + right) / 2, "y": HEIGHT - 7, "class": "middle name"}, self.x.label)
        middle = f"{(top + bottom) / 2:.0f}"
        turned = f"rotate(-90 11 {middle})"
        yield Shape("text", {"x": 11, "y": middle, "transform": turned, "class": "middle name"}, self.y.label)


def ticks(low: float, high: float, most: int, counts: bool = False) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``most`` at most: steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    step = max(step, 1.0) if counts else step
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + number) * step for number in range(count)]


def bar(share: float, style: str = "s1") -> Drawing:
    """A bar for a cell of a table, ``share`` of its width."""
    width = f"{100 * min(max(share, 0.0), 1.0):.1f}"
    strip = Shape("rect", {"x": 0, "y": 0, "width": width, "height": 8, "class": f"fill {style}"})
    return Drawing(shapes=[strip], width=100, height=8, style="bar", stretched=True)


def interval(low: float, middle: float, high: float, reach: float) -> Drawing:
    """A value with its interval for a cell of a table, and where 0 is; the cell goes from -``reach`` to ``reach``."""
    axis = Axis("", -reach, reach)
    at = [f"{100 * min(max(axis.share(value), 0.0), 1.0):.1f}" for value in (low, middle, high, 0.0)]
    shapes = [
        Shape("line", {"x1": at[3], "x2": at[3], "y1": 0, "y2": 12, "class": "axis"}),
        Shape("line", {"x1": at[0], "x2": at[2], "y1": 6, "y2": 6, "class": "line s1"}),
        Shape("circle", {"cx": at[1], "cy": 6, "r": 2.6, "class": "dot s1"}),
    ]
    return Drawing(shapes=shapes, width=100, height=12, style="spread")


def learning_curves(trained: Trained) -> list[Drawing]:
    """The loss first, then each metric that was watched, by epoch, for training and validation rows."""
    history, best = trained.history, trained.best_epoch
    names = dict.fromkeys(name for row in history for name in row if f"val_{name}" in row)
    epochs = [float(number + 1) for number in range(len(history))]
    drawings = []
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
        drawings.append(plot.drawing())
    return drawings


def live_error(live: Live) -> Drawing:
    """The error of predictions that came true by window, a line a version, beside that of the best guess."""
    names = list(dict.fromkeys(error.window for error in live.windows))
    places = {name: float(position) for position, name in enumerate(names)}
    values = [None if error.measured is None else error.measured.values.get(live.metric) for error in live.windows]
    plot = Plot(
        f"{live.metric} of {live.label} as it came true",
        Axis("window", -0.5, len(names) - 0.5, names=names),
        Axis.over(live.metric, [*values, *(error.baseline for error in live.windows)]),
        wide=True,
    )
    for number, version in enumerate(sorted({error.version for error in live.windows})):
        points = [
            (places[error.window], value)
            for error, value in zip(live.windows, values, strict=True)
            if error.version == version
        ]
        plot.line(points, _STYLES[number % len(_STYLES)], f"version {version}", dots=True)
    guesses = {error.window: error.baseline for error in live.windows if error.baseline is not None}
    points = [(places[name], value) for name, value in guesses.items()]
    plot.line(points, "s4", "without a model" if guesses else "")
    return plot.drawing()


def diagnostic_figures(evaluated: Evaluated) -> list[Drawing]:
    """Where the predictions of challenger and champion go wrong: residuals, calibration, ROC."""
    models = [model for model in (evaluated.challenger, evaluated.champion) if model is not None]
    challenger, label = models[0], evaluated.label
    drawings = []
    if challenger.plane is not None:
        drawings.append(_predicted_against_true(challenger.plane, label))
    if challenger.residuals is not None:
        drawings.append(_residuals([model.residuals for model in models if model.residuals], label))
    if challenger.calibration:
        drawings.append(_calibration(models))
    if challenger.roc:
        plot = Plot("ROC", Axis("share of negatives taken", 0.0, 1.0), Axis("share of positives found", 0.0, 1.0))
        plot.line([(0.0, 0.0), (1.0, 1.0)], "s4", "by chance")
        for name, style, model in zip(MODELS, _STYLES, models, strict=False):
            plot.line(model.roc, style, name)
        drawings.append(plot.drawing())
    return drawings


def _predicted_against_true(plane: Plane, label: str) -> Drawing:
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
    return plot.drawing()


def _residuals(histograms: Sequence[Histogram], label: str) -> Drawing:
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
    return plot.drawing()


def _calibration(models: Sequence[Diagnostics]) -> Drawing:
    plot = Plot("Calibration", Axis("predicted probability", 0.0, 1.0), Axis("share that came true", 0.0, 1.0))
    plot.line([(0.0, 0.0), (1.0, 1.0)], "s4", "as predicted")
    for name, style, model in zip(MODELS, _STYLES, models, strict=False):
        most = max((part.weight for part in model.calibration), default=1.0)
        plot.line([(part.predicted, part.observed) for part in model.calibration], style, name)
        for part in model.calibration:
            plot.dot(part.predicted, part.observed, style, 2.0 + 5.0 * math.sqrt(part.weight / most))
    return plot.drawing()
