"""The step ``live``: earlier predictions, compared with the labels that have arrived since.

The error of each window is that of the version that predicted it. It is measured before a run predicts anew, so that of
a window whose predictions are replaced both errors are known, and again only where the rows or the predictions of a
window have changed. Labels are found by the key of the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.columns.names import quoted
from sparkdl.errors import BundleError, ConfigError, DataError, IntegrityError, SchemaError
from sparkdl.metrics.measure import measure
from sparkdl.metrics.rows import Rows
from sparkdl.models.registry import ModelVersion, bundle_of
from sparkdl.observe import logger
from sparkdl.pipeline.judging.baseline import LabelSummary, baseline_of
from sparkdl.pipeline.rows.parts import unseen_rows
from sparkdl.pipeline.spec import PipelineSpec, TimeSplit, quantile_column
from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key, replacing
from sparkdl.pipeline.state.results import Live, LiveError, Scored
from sparkdl.pipeline.state.run import Run, State
from sparkdl.pipeline.steps.drift import trained_of
from sparkdl.pipeline.steps.score import scored_windows
from sparkdl.pipeline.windows import WINDOW
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.pipeline.work.labels import FittedLabel

VERSION = 2
"""The version of how errors are measured; raise it when that changes."""
_MOST_WINDOWS = 100
"""The newest windows with predictions that are looked at, besides those whose rows have changed since."""
_MOST_KEPT = 400
"""Errors that are kept, of the newest windows, and as many predictions that no label has come for."""


@dataclass(frozen=True, kw_only=True)
class _Predictions:
    """The predictions of one window, and the key of their comparison with its labels."""

    window: str
    scored: Scored
    key: str


class LiveStep(Step):
    """The errors of all predictions that are looked at, one receipt for the label that is compared."""

    name = "live"
    looks = True
    listed = False
    cause = "labels or predictions came since"

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """The key of the one receipt: the predictions of the windows with rows, and these rows."""
        project, state = run.project, run.state
        spec, name = project.spec, project.spec.judged_label
        if not spec.source.key or not state.places.table(str(spec.score.target)):
            return {}
        content, settings = state.content(), project.settings["label"][name]
        scored = {window: receipt.key for window, receipt in _predicted(project, state).items()}
        if any(content[window] is None for window in scored):
            return {name: None}
        rows = {window: content[window] for window in scored}
        inputs = {"label": settings, "metric": spec.judged_metric, "weight": spec.weight}
        return {name: content_key("live", {**inputs, "version": VERSION, "predictions": scored, "rows": rows})}

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Compare what was predicted with the labels that are there now."""
        project, state = run.project, run.state
        ((name, key),) = stale.keys.items()
        receipt = state.receipts.of(self.name).get(name)
        earlier = Live(label=name, metric=project.spec.judged_metric) if receipt is None else receipt.read(Live)
        live = _compared(project, state, state.clean(spark), earlier)
        with replacing(state.receipts, self.name, stale.keys) as new_receipts:
            new_receipts[name] = (str(key), live)
        return live.windows != earlier.windows

    def tell(self, run: Run) -> None:
        """The errors, as far as there are any."""
        project = run.project
        name = project.spec.judged_label
        receipt = run.state.receipts.of(self.name).get(name)
        reason = "" if project.spec.source.key else "without source.key no label can be joined to its prediction"
        metric = project.spec.judged_metric
        nothing = Live(label=name, metric=metric, reason=reason)
        live = nothing if receipt is None or reason else receipt.read(Live)
        run.record.live = replace(live, metric=metric, rows={})


def _predicted(project: Project, state: State) -> dict[str, Receipt]:
    """The receipts of the predictions of windows that have rows, by window."""
    windows = state.windows()
    return {
        window: receipt
        for window, receipt in scored_windows(project, state).items()
        if receipt.key and window in windows and windows[window].kept
    }


def _compared(project: Project, state: State, clean: DataFrame, earlier: Live) -> Live:
    """Compare the newest windows, and those whose rows have changed since they were compared."""
    content = {window: str(rows) for window, rows in state.content().items()}
    errors = {(error.window, error.version): error for error in earlier.windows}
    metric = project.spec.judged_metric
    if earlier.metric != metric:  # of predictions that are not compared again the guess has none of this metric
        errors = {pair: replace(error, baseline=None) for pair, error in errors.items()}
    receipts = _predicted(project, state)
    rows = {window: content[window] for window in receipts}
    changed = [window for window in rows if earlier.rows.get(window) != rows[window]]
    settings = {
        "version": VERSION,
        "label": project.settings["label"][project.spec.judged_label],
        "metric": metric,
        "weight": project.spec.weight,
    }
    by_version: dict[int, list[_Predictions]] = {}
    for window in sorted({*sorted(receipts)[-_MOST_WINDOWS:], *changed}):
        receipt = receipts[window]
        key = content_key("live", {**settings, "predictions": receipt.key, "rows": content[window]})
        predictions = _Predictions(window=window, scored=receipt.read(Scored), key=key)
        version = predictions.scored.version
        compared = errors.get((window, version))
        if compared is None or compared.key != predictions.key:
            by_version.setdefault(version, []).append(predictions)
    reasons = []
    for version, windows in sorted(by_version.items()):
        try:
            errors |= {
                (window, version): error for window, error in _errors(project, state, clean, earlier.label, windows)
            }
        except (SchemaError, DataError, BundleError, IntegrityError, ConfigError) as cause:
            for predictions in windows:
                del rows[predictions.window]  # so that it is compared again when the next label comes
            reasons.append(f"the predictions of version {version} cannot be compared: {cause}")
            logger.warning("live error: %s", reasons[-1])
    return replace(earlier, metric=metric, windows=_newest(errors), rows=rows, reason="; ".join(reasons))


def _newest(errors: Mapping[tuple[str, int], LiveError]) -> tuple[LiveError, ...]:
    """What is kept, in order: labels may come later than hundreds of windows that still wait for theirs."""
    measured = [pair for pair in sorted(errors) if errors[pair].measured is not None]
    waiting = [pair for pair in sorted(errors) if errors[pair].measured is None]
    return tuple(errors[pair] for pair in sorted([*measured[-_MOST_KEPT:], *waiting[-_MOST_KEPT:]]))


def _errors(
    project: Project, state: State, clean: DataFrame, name: str, windows: Sequence[_Predictions]
) -> Iterator[tuple[str, LiveError]]:
    """The errors of windows that one version predicted, by window, a few windows at a time."""
    from sparkdl.pipeline.work.labels import labels_of

    spec, version = project.spec, windows[0].scored.version
    model = state.registry.get(str(spec.publish.name), version)
    if {predictions.scored.artifact for predictions in windows} - {"", model.artifact}:
        raise ConfigError(f"another model than {spec.publish.name} has made them")
    labels = labels_of(bundle_of(model))
    if name not in labels.names:
        raise BundleError(f"it predicts {', '.join(labels.names)}, and {name!r} is compared")
    label = labels.labels[labels.names.index(name)]
    column = {"regression": "prediction", "binary": "probability", "multiclass": "probabilities"}[label.type]
    prefix = "" if len(labels.names) == 1 else f"{name}_"
    outputs = [f"{prefix}{suffix}" for suffix in (map(quantile_column, label.levels) if label.levels else [column])]
    chunk: list[_Predictions] = []
    rows = 0
    for predictions in windows:
        rows += predictions.scored.rows
        if chunk and rows > label.most_measured:
            yield from _measured(project, state, clean, label, outputs, chunk, model)
            chunk, rows = [], predictions.scored.rows
        chunk.append(predictions)
    yield from _measured(project, state, clean, label, outputs, chunk, model)


def _measured(
    project: Project,
    state: State,
    clean: DataFrame,
    label: FittedLabel,
    outputs: Sequence[str],
    windows: Sequence[_Predictions],
    model: ModelVersion,
) -> Iterator[tuple[str, LiveError]]:
    """The errors of windows, by window.

    Args:
        project: the pipeline.
        state: what there is of it.
        clean: the clean rows.
        label: that is compared.
        outputs: the columns of the predictions of it: one, or one a quantile.
        windows: few enough for the driver to hold their rows.
        model: that predicted them.
    """
    spec = project.spec
    rows = _joined(clean, spec, label, outputs, windows, model.version).toPandas()
    rows_by_window = dict(tuple(rows.groupby("_window", sort=False)))
    trained = trained_of(state.receipts, model)
    taught = [] if trained is None else [item.window for item in windows if item.window in trained.windows]
    if trained is not None and unseen_rows(clean, spec, taught, trained.split, trained.columns, trained.labels) is None:
        taught = []  # rows of these windows, of which others are scored
    all_rows_scored = not isinstance(spec.split, TimeSplit) and spec.score.window == "all"
    summary = None if trained is None else trained.labels.get(label.name)
    for predictions in windows:
        window = predictions.window
        window_rows, is_taught = rows_by_window.get(window, rows.head(0)), all_rows_scored or window in taught
        yield window, _error(predictions, label, window_rows, is_taught, spec.judged_metric, summary)


def _joined(
    clean: DataFrame,
    spec: PipelineSpec,
    label: FittedLabel,
    outputs: Sequence[str],
    predicted: Sequence[_Predictions],
    version: int,
) -> DataFrame:
    """Predicted rows with what came of them: ``_window``, ``_missing``, ``_label``, ``_output``, ``_weight``."""
    from pyspark.sql import functions as F

    from sparkdl.pipeline.work.labels import encoded, row_weight

    windows, key = [predictions.window for predictions in predicted], spec.source.key
    predictions = Table(str(spec.score.target)).read(clean.sparkSession)
    absent = [name for name in (*key, *outputs, "model_version") if name not in predictions.columns]
    if absent:
        raise SchemaError(f"the table of predictions has no column {absent[0]!r}, but {predictions.columns}")
    if label.name not in clean.columns:
        raise SchemaError(f"the rows have no label {label.name!r}, but {clean.columns}")
    version_predictions = predictions.where(F.col(WINDOW).isin(*windows) & (F.col("model_version") == version))
    most = max(predictions.scored.rows for predictions in predicted)
    if most > label.most_measured:
        hashed = F.xxhash64(*[F.col(quoted(name)) for name in key])
        version_predictions = version_predictions.where(F.pmod(hashed, F.lit(most)) < label.most_measured)
    keys = [f"_key_{position}" for position in range(len(key))]
    columns = [F.col(quoted(name)).alias(as_) for name, as_ in zip(key, keys, strict=True)]
    output = F.array(*[F.col(quoted(name)) for name in outputs]) if label.levels else F.col(quoted(outputs[0]))
    version_predictions = version_predictions.select(WINDOW, *columns, output.alias("_output"))
    actual = clean.where(F.col(WINDOW).isin(*windows)).select(
        WINDOW,
        *columns,
        F.col(quoted(label.name)).isNull().alias("_missing"),
        encoded(label.name, label).cast("double").alias("_label"),
        row_weight(spec).alias("_weight"),
    )
    return version_predictions.join(actual, on=[WINDOW, *keys]).drop(*keys)


def _error(
    predictions: _Predictions,
    label: FittedLabel,
    rows: pd.DataFrame,
    seen: bool,
    metric: str,
    summary: LabelSummary | None,
) -> LiveError:
    from sparkdl.pipeline.work.evaluate import with_quantiles

    missing = rows["_missing"].to_numpy(dtype=bool)
    numbers = rows["_label"].to_numpy(dtype=np.float64)
    labelled = ~missing & np.isfinite(numbers)
    measured, baseline = None, None
    if labelled.any():
        outputs: Any = rows["_output"][labelled]
        several = label.type == "multiclass" or label.levels
        outputs = np.stack(outputs.to_list()) if several else outputs.to_numpy(dtype=np.float64)
        weights = rows["_weight"][labelled].to_numpy(dtype=np.float64)
        values = outputs[:, label.middle] if label.levels else outputs
        predicted = Rows.of(label.type, numbers[labelled], values, weights=weights, label=label.name)
        predicted = with_quantiles(predicted, label, outputs, label.levels)
        measured = measure(predicted)
        if summary is not None:
            baseline = baseline_of(summary, predicted, label.classes).values.get(metric)
    return LiveError(
        window=predictions.window,
        version=predictions.scored.version,
        key=predictions.key,
        waiting=int(missing.sum()),
        unknown=int((~missing & ~labelled).sum()),
        measured=measured,
        trained_on=seen,
        baseline=baseline,
    )
