"""Live errors: earlier predictions, compared with the labels that have arrived since.

Enters: the table of predictions, clean rows. Leaves: ``Live``, the error of each window by the version that predicted
it. It is measured before a run predicts anew, so that of a window whose predictions are replaced both errors are known,
and again only where the rows or the predictions of a window have changed. Labels are found by the key of the source.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.columns.names import quoted
from sparkdl.errors import BundleError, ConfigError, DataError, IntegrityError, SchemaError
from sparkdl.models.registry import ModelVersion
from sparkdl.observe import logger
from sparkdl.pipeline.judging.baseline import LabelSummary, baseline_of
from sparkdl.pipeline.judging.metrics.measure import measure
from sparkdl.pipeline.judging.metrics.rows import Rows
from sparkdl.pipeline.sources.base import WINDOW
from sparkdl.pipeline.spec import PipelineSpec, TimeSplit
from sparkdl.pipeline.spec.operation import DEFAULT_METRICS
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.keys import scored_place, scored_windows, trained_of
from sparkdl.pipeline.state.results import Live, LiveError, Scored, ScoredWindows
from sparkdl.pipeline.state.steps import content_key
from sparkdl.pipeline.work.labels import FittedLabel, encoded
from sparkdl.pipeline.work.prepare import labels_of
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

__all__ = ["live_errors"]

_LIVE = 1
"""Version of what this module does; raise it when that changes."""
_MOST_WINDOWS = 100
"""The newest windows with predictions that are looked at, besides those whose rows have changed since."""
_MOST_KEPT = 400
"""Errors that are kept, of the newest windows, and as many predictions that no label has come for."""


@dataclass(frozen=True, kw_only=True)
class _Due:
    """Predictions of one window that are to be compared."""

    window: str
    scored: Scored
    key: str


def live_errors(context: Context, clean: DataFrame, content: Mapping[str, str]) -> Live:
    """Compare what was predicted with the labels that are there now.

    Args:
        context: of the run.
        clean: the clean rows.
        content: a hash of the rows of each window.
    """
    spec, target = context.spec, str(context.spec.score.target)
    name = spec.publish.label or next(iter(spec.label))
    metric = spec.publish.metric or DEFAULT_METRICS[spec.label[name].type]
    nothing = Live(label=name, metric=metric)
    if not spec.source.key:
        return Live(label=name, metric=metric, reason="without source.key no label can be joined to its prediction")
    if not Table(target).exists():
        return nothing
    place = {"target": target, "label": name}
    before = context.steps.find("live", place, Live) or nothing
    known = {(one.window, one.version): one for one in before.windows}
    scored = _scored(context)
    predicted = {window: rows for window, rows in content.items() if rows and window in scored}
    changed = [window for window, rows in predicted.items() if before.rows.get(window) != rows]
    looked_at = sorted({*sorted(predicted)[-_MOST_WINDOWS:], *changed})
    due = [each for each in _predictions(context, looked_at, content, name) if _differs(known, each)]
    if not due:
        if changed:
            context.steps.replace("live", [(place, replace(before, rows=predicted))])
        return Live(label=name, metric=metric, windows=before.windows)
    started, reasons = time.perf_counter(), []
    for version in sorted({each.scored.version for each in due}):
        try:
            found = _of_version(context, clean, name, [each for each in due if each.scored.version == version])
            known |= {(one.window, one.version): one for one in found}
        except (SchemaError, DataError, BundleError, IntegrityError, ConfigError) as error:
            predicted = {each: rows for each, rows in predicted.items() if each not in _of(due, version)}
            reasons.append(f"the predictions of version {version} cannot be compared: {error}")
            logger.warning("live error: %s", reasons[-1])
    newest = _newest(known)
    made = Live(label=name, metric=metric, windows=newest, rows=predicted)
    context.steps.put("live", place, made, time.perf_counter() - started)
    return Live(label=name, metric=metric, windows=newest, reason="; ".join(reasons))


def _newest(known: Mapping[tuple[str, int], LiveError]) -> tuple[LiveError, ...]:
    """What is kept, in order: labels may come later than hundreds of windows that still wait for theirs."""
    measured = [each for each in sorted(known) if known[each].measured is not None]
    waiting = [each for each in sorted(known) if known[each].measured is None]
    return tuple(known[each] for each in sorted([*measured[-_MOST_KEPT:], *waiting[-_MOST_KEPT:]]))


def _scored(context: Context) -> Mapping[str, str]:
    known = context.steps.find("score", scored_windows(context), ScoredWindows)
    return {} if known is None else known.content


def _of(due: Sequence[_Due], version: int) -> set[str]:
    return {each.window for each in due if each.scored.version == version}


def _predictions(context: Context, windows: Sequence[str], content: Mapping[str, str], label: str) -> Iterator[_Due]:
    """The predictions of some windows, and what decides how good those were."""
    target, settings = str(context.spec.score.target), context.settings
    for window in windows:
        scored = context.steps.find("score", scored_place(Table(target).uri, window), Scored)
        if scored is not None:
            inputs = {
                "version": _LIVE,
                "predictions": scored.inputs,
                "rows": content[window],
                "label": settings["label"][label],
                "weight": context.spec.weight,
            }
            yield _Due(window=window, scored=scored, key=content_key("live", inputs))


def _differs(known: Mapping[tuple[str, int], LiveError], each: _Due) -> bool:
    found = known.get((each.window, each.scored.version))
    return found is None or found.key != each.key


def _of_version(context: Context, clean: DataFrame, name: str, due: list[_Due]) -> list[LiveError]:
    """The errors of some windows that one version predicted, a few windows at a time."""
    spec, version = context.spec, due[0].scored.version
    model = context.registry.get(str(spec.publish.name), version)
    artifacts = {each.scored.artifact for each in due} - {"", model.artifact}
    if artifacts:
        raise ConfigError(f"another model than {spec.publish.name} has made them")
    labels = labels_of(model.uri)
    if name not in labels.names:
        raise BundleError(f"it predicts {', '.join(labels.names)}, and {name!r} is compared")
    label = labels.labels[labels.names.index(name)]
    column = {"regression": "prediction", "binary": "probability", "multiclass": "probabilities"}[label.type]
    output = column if len(labels.names) == 1 else f"{name}_{column}"
    found: list[LiveError] = []
    chunk: list[_Due] = []
    for each in due:
        if chunk and sum(one.scored.rows for one in (*chunk, each)) > label.most_measured:
            found += _measured(context, clean, (label, output), chunk, model)
            chunk = []
        chunk.append(each)
    return found + _measured(context, clean, (label, output), chunk, model)


def _measured(
    context: Context, clean: DataFrame, what: tuple[FittedLabel, str], due: list[_Due], model: ModelVersion
) -> list[LiveError]:
    label, spec = what[0], context.spec
    rows = _joined(clean, spec, what, due, model.version).toPandas()
    of_window = dict(tuple(rows.groupby("_window", sort=False)))
    trained, by_time = trained_of(context, model), isinstance(spec.split, TimeSplit)
    windows = {} if trained is None else trained.windows
    known = windows if by_time or (trained and trained.split not in ({}, context.settings["split"])) else {}
    whole = not by_time and spec.score.window == "all"
    summary = None if trained is None else trained.labels.get(label.name)
    metric = spec.publish.metric or DEFAULT_METRICS[label.type]
    return [
        _error(each, label, of_window.get(each.window, rows.head(0)), whole or each.window in known, metric, summary)
        for each in due
    ]


def _joined(
    clean: DataFrame, spec: PipelineSpec, what: tuple[FittedLabel, str], due: list[_Due], version: int
) -> DataFrame:
    """Predicted rows with what came of them: ``_window``, ``_missing``, ``_label``, ``_output``, ``_weight``."""
    from pyspark.sql import functions as F

    label, output = what
    windows, key = [each.window for each in due], spec.source.key
    predictions = Table(str(spec.score.target)).read(clean.sparkSession)
    absent = [name for name in (*key, output, "model_version") if name not in predictions.columns]
    if absent:
        raise SchemaError(f"the table of predictions has no column {absent[0]!r}, but {predictions.columns}")
    if label.name not in clean.columns:
        raise SchemaError(f"the rows have no label {label.name!r}, but {clean.columns}")
    made = predictions.where(F.col(WINDOW).isin(*windows) & (F.col("model_version") == version))
    most = max(each.scored.rows for each in due)
    if most > label.most_measured:
        hashed = F.xxhash64(*[F.col(quoted(name)) for name in key])
        made = made.where(F.pmod(hashed, F.lit(most)) < label.most_measured)
    keys = [f"_key_{place}" for place in range(len(key))]
    columns = [F.col(quoted(name)).alias(as_) for name, as_ in zip(key, keys, strict=True)]
    made = made.select(WINDOW, *columns, F.col(quoted(output)).alias("_output"))
    weight = F.lit(1.0) if spec.weight is None else F.col(quoted(spec.weight)).cast("double")
    actual = clean.where(F.col(WINDOW).isin(*windows)).select(
        WINDOW,
        *columns,
        F.col(quoted(label.name)).isNull().alias("_missing"),
        encoded(label.name, label).cast("double").alias("_label"),
        weight.alias("_weight"),
    )
    return made.join(actual, on=[WINDOW, *keys]).drop(*keys)


def _error(
    each: _Due, label: FittedLabel, rows: pd.DataFrame, seen: bool, metric: str, summary: LabelSummary | None
) -> LiveError:
    missing = rows["_missing"].to_numpy(dtype=bool)
    numbers = rows["_label"].to_numpy(dtype=np.float64)
    there = ~missing & np.isfinite(numbers)
    measured, baseline = None, None
    if there.any():
        outputs: Any = rows["_output"][there]
        outputs = np.stack(outputs.to_list()) if label.type == "multiclass" else outputs.to_numpy(dtype=np.float64)
        weights = rows["_weight"][there].to_numpy(dtype=np.float64)
        known = Rows.of(label.type, numbers[there], outputs, weights=weights, label=label.name)
        measured = measure(known)
        if summary is not None:
            baseline = baseline_of(summary, known, label.classes).values.get(metric)
    return LiveError(
        window=each.window,
        version=each.scored.version,
        key=each.key,
        waiting=int(missing.sum()),
        unknown=int((~missing & ~there).sum()),
        measured=measured,
        trained_on=seen,
        baseline=baseline,
    )
