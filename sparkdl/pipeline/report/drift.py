"""What changed since the training: drift of the features by window, and the error of predictions that came true.

Enters: a record. Leaves: sections of the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sparkdl.pipeline.judging.drift import Drift, FeatureDrift, Measure
from sparkdl.pipeline.report.charts import Axis, Plot
from sparkdl.pipeline.report.html import Child, Html, tag
from sparkdl.pipeline.report.tables import NONE, chosen, figures, number, section, sentence, table
from sparkdl.pipeline.state.results import Drifted, Live, LiveError

__all__ = ["came_true", "drifted"]

_WINDOWS, _FEATURES, _SENTENCES = 14, 30, 20
_STYLES = ("s1", "s2", "s3", "s4")


def drifted(found: Drifted | None) -> Html | None:
    """Features by window: how far each is from the champion's training rows."""
    if found is None:
        return None
    against = "" if found.against is None else f" Compared with what version {found.against} was trained on."
    told = tag("p", f"{sentence(found.reason)}{against}")
    windows, note = chosen(list(found.windows), _WINDOWS)
    if not windows:
        return section("Drift", told)
    said = list(_sentences({name: found.windows[name] for name in windows}))
    more = f"{len(said) - _SENTENCES:,} more are in the record." if len(said) > _SENTENCES else ""
    reasons = [tag("li", text) for text in said[:_SENTENCES]]
    listed = [tag("ul", reasons), tag("p", more, class_="note") if more else None] if said else None
    return section("Drift", told, _table(found.windows, windows, note), listed)


def _sentences(windows: Mapping[str, Drift]) -> Iterator[str]:
    """Why features alarmed, the newest window first."""
    for name, drift in reversed(list(windows.items())):
        if not drift.judged:
            yield f"{name}: {drift.reason}"
        for feature, each in drift.features.items():
            if each.alarm:
                yield f"{name}, {feature}: {each.reason}"


def _table(found: Mapping[str, Drift], windows: Sequence[str], note: str) -> Html | None:
    names = dict.fromkeys(feature for window in windows for feature in found[window].features)
    strength = {name: max(_ratio(found[window].features.get(name)) for window in windows) for name in names}
    order = sorted(names, key=lambda name: -strength[name])
    lines: list[Sequence[Child]] = [
        (name, *(_cell(found[window].features.get(name)) for window in windows)) for name in order[:_FEATURES]
    ]
    if not lines:
        return None
    notes = ["How far each feature is, as a share of what would alarm: 1 and above does."]
    notes += [note] if note else []
    if len(order) > _FEATURES:
        notes.append(f"{len(order) - _FEATURES:,} features that are nearer are not shown.")
    return table(("feature", *windows), lines, note=" ".join(notes))


def _cell(feature: FeatureDrift | None) -> Child:
    if feature is None or not feature.measures:
        return NONE
    text = f"{_ratio(feature):.2f}"
    return tag("b", text, class_="alarm") if feature.alarm else text


def _ratio(feature: FeatureDrift | None) -> float:
    """The measure that is nearest to an alarm, or the furthest beyond, as a share of what alarms."""
    found = [] if feature is None else [_share(one) for one in feature.measures.values()]
    return max(found, default=0.0)


def _share(measure: Measure) -> float:
    if measure.threshold is None:
        return 0.0
    bar = max(measure.threshold, measure.chance)
    return measure.value / bar if bar > 0 else float(measure.value > 0)


def came_true(live: Live | None) -> Html | None:
    """The error of predictions whose labels have arrived, over time."""
    if live is None:
        return None
    told = tag("p", sentence(live.reason)) if live.reason else None
    if not live.windows:
        return section("Live error", told)
    names = list(dict.fromkeys(each.window for each in live.windows))
    lines = [
        (each.window, number(each.version), number(each.measured.rows if each.measured else 0), number(each.waiting),
         number(each.unknown), number(_value(each, live.metric)), number(each.baseline),
         "trained on it, too low" if each.trained_on else "")
        for each in live.windows
    ]  # fmt: skip
    shown, note = lines[-40:], f"{len(lines) - 40:,} earlier ones are not shown." if len(lines) > 40 else ""
    header = ("window", "version", "rows with a label", "waiting for one", "unknown label", live.metric,
              "without a model", "")  # fmt: skip
    drawn = [_over_time(live, names)] if len(names) > 1 else []
    return section("Live error", told, figures(drawn), table(header, shown, note=note))


def _over_time(live: Live, names: Sequence[str]) -> Html:
    values = [_value(each, live.metric) for each in live.windows]
    plot = Plot(
        f"{live.metric} of {live.label} as it came true",
        Axis("window", -0.5, len(names) - 0.5, names=names),
        Axis.over(live.metric, [*values, *(each.baseline for each in live.windows)]),
        wide=True,
    )
    place = {name: float(at) for at, name in enumerate(names)}
    for number_, version in enumerate(sorted({each.version for each in live.windows})):
        points = [(place[each.window], _value(each, live.metric)) for each in live.windows if each.version == version]
        plot.line(points, _STYLES[number_ % len(_STYLES)], f"version {version}", dots=True)
    guessed = {each.window: each.baseline for each in live.windows if each.baseline is not None}
    plot.line([(place[name], value) for name, value in guessed.items()], "s4", "without a model" if guessed else "")
    return plot.figure()


def _value(each: LiveError, metric: str) -> float | None:
    return None if each.measured is None else each.measured.values.get(metric)
