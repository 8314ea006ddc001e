"""Figures of the report, as SVG that takes its colours from the page, so that it suits light, dark and print.

Enters: plain numbers. Leaves: ``Html`` of one ``figure`` each. Values that are not finite are left out. Coordinates are
attributes, never styles: the page's policy forbids those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sparkdl.pipeline.report.html import Html, tag

__all__ = ["Axis", "Plot", "bar", "span_mark", "ticks"]

WIDTH, WIDE, HEIGHT = 440, 900, 264
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 10, 10, 42
Point = tuple[float | None, float | None]


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: what it is, with its unit.
        low: where it begins.
        high: where it ends; not below ``low``.
        whole: whether it counts something.
        names: of the whole numbers from 0, in place of numbers.
    """

    label: str
    low: float
    high: float
    whole: bool = False
    names: Sequence[str] = ()

    @staticmethod
    def over(label: str, values: Iterable[float | None], room: float = 0.06) -> Axis:
        """An axis that holds all finite ``values``, with some room at both ends."""
        finite = [float(value) for value in values if value is not None and math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        more = room * (high - low) or 0.05 * abs(high) or 1.0
        return Axis(label, low - more, high + more)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the beginning, 1 at the end."""
        return (value - self.low) / ((self.high - self.low) or 1.0)


@dataclass
class Plot:
    """A figure in the making: marks, and the words for them.

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
    _marks: list[Html] = field(default_factory=list)
    _keys: list[tuple[str, str]] = field(default_factory=list)

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
                self._marks.append(tag("polyline", points=path, class_=f"line {style}"))
            for x, y in run if dots or len(run) == 1 else ():
                self.dot(x, y, style)
        self._key(style, name)

    def dot(self, x: float, y: float, style: str, size: float = 2.6, name: str = "") -> None:
        """Mark one point with a dot of ``size`` pixels."""
        self._marks.append(
            tag("circle", cx=f"{self._at_x(x):.1f}", cy=f"{self._at_y(y):.1f}", r=f"{size:.1f}", class_=f"dot {style}")
        )
        self._key(style, name)

    def box(self, low: tuple[float, float], high: tuple[float, float], style: str, strength: float = 1.0) -> None:
        """Fill the rectangle from corner to corner, ``strength`` from 0 to 1."""
        left, right = sorted((self._at_x(low[0]), self._at_x(high[0])))
        top, bottom = sorted((self._at_y(low[1]), self._at_y(high[1])))
        place = {"x": left, "y": top, "width": right - left, "height": bottom - top}
        opacity = None if strength >= 1 else f"{strength:.2f}"
        self._marks.append(
            tag(
                "rect",
                **{key: f"{value:.1f}" for key, value in place.items()},
                class_=f"fill {style}",
                fill_opacity=opacity,
            )
        )

    def key(self, style: str, name: str) -> None:
        """Say in the legend what a style means."""
        self._key(style, name)

    def figure(self) -> Html:
        """The whole figure."""
        body = [*self._grid(), *self._marks]
        picture = tag("svg", *body, viewBox=f"0 0 {self._width} {HEIGHT}", role="img", aria_label=self.title)
        keys = [tag("span", tag("i", class_=f"key {style}"), name, class_="legend") for style, name in self._keys]
        legend = tag("p", *keys, class_="legends") if keys else None
        return tag("figure", tag("figcaption", self.title), picture, legend, class_="wide" if self.wide else None)

    def _key(self, style: str, name: str) -> None:
        if name and (style, name) not in self._keys:
            self._keys.append((style, name))

    def _at_x(self, value: float) -> float:
        return _LEFT + min(max(self.x.share(value), -0.02), 1.02) * (self._width - _LEFT - _RIGHT)

    def _at_y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - min(max(self.y.share(value), -0.02), 1.02) * (HEIGHT - _TOP - _BOTTOM)

    def _grid(self) -> Iterable[Html]:
        left, right, top, bottom = _LEFT, self._width - _RIGHT, _TOP, HEIGHT - _BOTTOM
        for value, text in _marked(self.y, 5):
            at = f"{self._at_y(value):.1f}"
            yield tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid")
            yield tag("text", text, x=left - 5, y=at, dy="0.35em", class_="end")
        for value, text in _marked(self.x, 12 if self.wide else 6):
            at = f"{self._at_x(value):.1f}"
            yield tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis")
            yield tag("text", text, x=at, y=bottom + 16, class_="middle")
        yield tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")
        yield tag("text", self.x.label, x=(left + right) / 2, y=HEIGHT - 7, class_="middle name")
        middle = (top + bottom) / 2
        turned = f"rotate(-90 11 {middle:.0f})"
        yield tag("text", self.y.label, x=11, y=f"{middle:.0f}", transform=turned, class_="middle name")


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``most`` at most: steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + number) * step for number in range(count)]


def bar(share: float, style: str = "s1") -> Html:
    """A bar for a cell of a table, ``share`` of its width."""
    full = f"{100 * min(max(share, 0.0), 1.0):.1f}"
    strip = tag("rect", x=0, y=0, width=full, height=8, class_=f"fill {style}")
    return tag("svg", strip, viewBox="0 0 100 8", preserveAspectRatio="none", class_="bar", aria_hidden="true")


def span_mark(low: float, middle: float, high: float, axis: Axis) -> Html:
    """A value with its interval for a cell of a table, and where 0 is."""
    at = [100 * min(max(axis.share(value), 0.0), 1.0) for value in (low, middle, high, 0.0)]
    marks = [
        tag("line", x1=f"{at[3]:.1f}", x2=f"{at[3]:.1f}", y1=0, y2=12, class_="axis"),
        tag("line", x1=f"{at[0]:.1f}", x2=f"{at[2]:.1f}", y1=6, y2=6, class_="line s1"),
        tag("circle", cx=f"{at[1]:.1f}", cy=6, r=2.6, class_="dot s1"),
    ]
    return tag("svg", *marks, viewBox="0 0 100 12", class_="spread", aria_hidden="true")


def _marked(axis: Axis, most: int) -> list[tuple[float, str]]:
    if axis.names:
        step = max(1, math.ceil(len(axis.names) / most))
        return [(float(number), axis.names[number]) for number in range(0, len(axis.names), step)]
    found = ticks(axis.low, axis.high, most, axis.whole)
    gap = found[1] - found[0] if len(found) > 1 else 1.0
    return [(value, _number(value, gap)) for value in found]


def _number(value: float, gap: float) -> str:
    """A tick's number, with as many digits as tell it from its neighbour."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-4):
        return f"{value:.3g}" if abs(value) > gap / 1000 else "0"
    digits = max(0, -math.floor(math.log10(gap) + 1e-9)) if gap > 0 else 0
    return f"{value:,.{digits}f}"
