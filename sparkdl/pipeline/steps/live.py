"""The step ``live``: earlier predictions, compared with the labels that have arrived since.

The error of each window is that of the version that predicted it. It is measured before a run predicts anew, so that of
a window whose predictions are replaced both errors are known, and again only where the rows or the predictions of a
window have changed. Labels are found by the key of the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.columns.names import quoted
from sparkdl.errors import BundleError, ConfigError, DataError, IntegrityError, SchemaError
from sparkdl.metrics.measure import measure
from sparkdl.metrics.rows import Rows
from sparkdl.models.registry import ModelVersion
from sparkdl.observe import logger
from sparkdl.pipeline.judging.baseline import LabelSummary, baseline_of
from sparkdl.pipeline.sources.base import WINDOW
from sparkdl.pipeline.spec import PipelineSpec, TimeSplit
from sparkdl.pipeline.spec.operation import DEFAULT_METRICS
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.receipts import Receipt, content_key, replacing
from sparkdl.pipeline.state.results import Live, LiveError, Scored
from sparkdl.pipeline.steps.drift import trained_of
from sparkdl.pipeline.steps.score import scored_windows
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.pipeline.work.labels import FittedLabel

__all__ = ["LiveStep"]

VERSION = 1
"""Of how errors are measured; raise it when that changes."""
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


class LiveStep(Step):
    """The errors of all predictions that are looked at, one receipt for the label that is compared."""

    name = "live"
    looks = True
    listed = False

    def wanted(self, context: Context) -> Mapping[str, str | None]:
        """The key of the one receipt: the predictions of the windows with rows, and these rows."""
        spec, name = context.spec, _label(context.spec)
        if not spec.source.key or not context.places.table(str(spec.score.target)):
            return {}
        content, settings = context.content(), context.settings["label"][name]
        scored = {window: receipt.key for window, receipt in _predicted(context).items()}
        if any(content[window] is None for window in scored):
            return {name: None}
        rows = {window: content[window] for window in scored}
        inputs = {"version": VERSION, "label": settings, "weight": spec.weight, "predictions": scored, "rows": rows}
        return {name: content_key("live", inputs)}

    def why(self, context: Context, partition: str, receipt: Receipt | None) -> str:
        """That something came since."""
        return "labels or predictions came since"

    def make(self, context: Context, spark: SparkSession, stale: Stale) -> bool:
        """Compare what was predicted with the labels that are there now."""
        ((name, key),) = stale.keys.items()
        receipt = context.receipts.of(self.name).get(name)
        before = Live(label=name, metric=_metric(context.spec)) if receipt is None else receipt.read(Live)
        live = _compared(context, context.clean(spark), before)
        with replacing(context.receipts, self.name, stale.keys) as made:
            made[name] = (str(key), live)
        return live.windows != before.windows

    def tell(self, context: Context) -> None:
        """The errors, as far as there are any."""
        name = _label(context.spec)
        receipt = context.receipts.of(self.name).get(name)
        reason = "" if context.spec.source.key else "without source.key no label can be joined to its prediction"
        nothing = Live(label=name, metric=_metric(context.spec), reason=reason)
        known = nothing if receipt is None or reason else receipt.read(Live)
        context.record.live = replace(known, metric=nothing.metric, rows={})


def _label(spec: PipelineSpec) -> str:
    return spec.publish.label or next(iter(spec.label))


def _metric(spec: PipelineSpec) -> str:
    return spec.publish.metric or DEFAULT_METRICS[spec.label[_label(spec)].type]


def _predicted(context: Context) -> dict[str, Receipt]:
    """The receipts of the predictions of windows that have rows, by window."""
    books = context.windows()
    return {
        window: receipt
        for window, receipt in scored_windows(context).items()
        if receipt.key and window in books and books[window].kept
    }


def _compared(context: Context, clean: DataFrame, before: Live) -> Live:
    """Compare the newest windows, and those whose rows have changed since they were compared."""
    name, content = before.label, {window: str(rows) for window, rows in context.content().items()}
    known = {(one.window, one.version): one for one in before.windows}
    scored = _predicted(context)
    rows = {window: content[window] for window in scored}
    changed = [window for window in rows if before.rows.get(window) != rows[window]]
    looked_at = sorted({*sorted(scored)[-_MOST_WINDOWS:], *changed})
    due = [_due(context, window, scored[window], content[window]) for window in looked_at]
    due = [each for each in due if _differs(known, each)]
    reasons = []
    for version in sorted({each.scored.version for each in due}):
        of_version = [each for each in due if each.scored.version == version]
        try:
            known |= {(one.window, one.version): one for one in _of_version(context, clean, name, of_version)}
        except (SchemaError, DataError, BundleError, IntegrityError, ConfigError) as error:
            for each in of_version:
                del rows[each.window]  # so that it is compared again when the next label comes
            reasons.append(f"the predictions of version {version} cannot be compared: {error}")
            logger.warning("live error: %s", reasons[-1])
    return replace(before, metric=_metric(context.spec), windows=_newest(known), rows=rows, reason="; ".join(reasons))


def _newest(known: Mapping[tuple[str, int], LiveError]) -> tuple[LiveError, ...]:
    """What is kept, in order: labels may come later than hundreds of windows that still wait for theirs."""
    measured = [each for each in sorted(known) if known[each].measured is not None]
    waiting = [each for each in sorted(known) if known[each].measured is None]
    return tuple(known[each] for each in sorted([*measured[-_MOST_KEPT:], *waiting[-_MOST_KEPT:]]))


def _due(context: Context, window: str, receipt: Receipt, rows: str) -> _Due:
    """The predictions of a window, and what decides how good those were."""
    inputs = {
        "version": VERSION,
        "predictions": receipt.key,
        "rows": rows,
        "label": context.settings["label"][_label(context.spec)],
        "weight": context.spec.weight,
    }
    return _Due(window=window, scored=receipt.read(Scored), key=content_key("live", inputs))


def _differs(known: Mapping[tuple[str, int], LiveError], each: _Due) -> bool:
    found = known.get((each.window, each.scored.version))
    return found is None or found.key != each.key


def _of_version(context: Context, clean: DataFrame, name: str, due: list[_Due]) -> list[LiveError]:
    """The errors of some windows that one version predicted, a few windows at a time."""
    from sparkdl.pipeline.work.labels import labels_of

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
    trained, by_time = trained_of(context.receipts, model), isinstance(spec.split, TimeSplit)
    windows = {} if trained is None else trained.windows
    known = windows if by_time or (trained and trained.split not in ({}, context.settings["split"])) else {}
    whole = not by_time and spec.score.window == "all"
    summary = None if trained is None else trained.labels.get(label.name)
    metric = spec.publish.metric or DEFAULT_METRICS[spec.label[label.name].type]
    return [
        _error(each, label, of_window.get(each.window, rows.head(0)), whole or each.window in known, metric, summary)
        for each in due
    ]


def _joined(
    clean: DataFrame, spec: PipelineSpec, what: tuple[FittedLabel, str], due: list[_Due], version: int
) -> DataFrame:
    """Predicted rows with what came of them: ``_window``, ``_missing``, ``_label``, ``_output``, ``_weight``."""
    from pyspark.sql import functions as F

    from sparkdl.pipeline.work.labels import encoded

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
