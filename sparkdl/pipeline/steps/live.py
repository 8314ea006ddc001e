"""The step ``live``: earlier predictions, compared with the labels that have arrived since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.names import quoted
from sparkdl.errors import BundleError, ConfigError, DataError, IntegrityError, SchemaError
from sparkdl.metrics.measure import measure
from sparkdl.metrics.rows import Rows
from sparkdl.models.registry import bundle_of
from sparkdl.observe import logger
from sparkdl.pipeline.judging.baseline import LabelSummary, baseline_of
from sparkdl.pipeline.rows.parts import unseen_rows
from sparkdl.pipeline.spec import TimeSplit
from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.receipts import Receipt, content_key, replacing
from sparkdl.pipeline.state.results import Live, LiveError, Scored
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.drift import trained_of
from sparkdl.pipeline.steps.score import output_columns, scored_windows
from sparkdl.pipeline.windows import WINDOW

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.pipeline.work.labels import FittedLabel

VERSION = 2
"""The version of how errors are measured; raise it when that changes."""
_MOST_WINDOWS = 100
"""The newest windows with predictions that are looked at, besides those whose rows have changed since."""
_MOST_KEPT = 400
"""Errors that are kept, of the newest windows, and as many predictions that no label has come for."""


class LiveStep(Step):
    """The errors of all predictions that are looked at, one receipt for the label that is compared.

    They are measured before a run predicts anew, so that of a window whose predictions are replaced both errors are
    known, and again only where rows or predictions of a window have changed.
    """

    name = "live"
    looks = True
    listed = False

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """The key of the one receipt: the predictions of the windows with rows, and these rows."""
        spec, name = run.spec, run.spec.judged_label
        if not spec.source.key or not run.places.table(run.project.predictions.uri):
            return {}
        scored, content = {window: receipt.key for window, receipt in _predicted(run).items()}, run.content()
        rows = {window: content[window] for window in scored}
        if None in rows.values():
            return {name: None}
        return {name: content_key("live", {**_settings(run), "predictions": scored, "rows": rows})}

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Compare what was predicted with the labels that are there now."""
        ((name, key),) = stale.keys.items()
        receipt = run.receipts.of(self.name).get(name)
        earlier = Live(label=name, metric=run.spec.judged_metric) if receipt is None else receipt.read(Live)
        live = _compared(run, run.clean(spark), earlier)
        with replacing(run.receipts, self.name, stale.keys) as new_receipts:
            new_receipts[name] = (str(key), live)
        return live.windows != earlier.windows

    def tell(self, run: Run) -> None:
        """The errors, as far as there are any."""
        name, metric = run.spec.judged_label, run.spec.judged_metric
        receipt = run.receipts.of(self.name).get(name)
        reason = "" if run.spec.source.key else "without source.key no label can be joined to its prediction"
        nothing = Live(label=name, metric=metric, reason=reason)
        live = nothing if receipt is None or reason else receipt.read(Live)
        run.record.live = replace(live, metric=metric, rows={})


def _settings(run: Run) -> dict[str, Any]:
    """What decides how errors are measured."""
    label = run.project.settings["label"][run.spec.judged_label]
    return {"version": VERSION, "label": label, "metric": run.spec.judged_metric, "weight": run.spec.weight}


def _predicted(run: Run) -> dict[str, Receipt]:
    """The receipts of the predictions of windows that have rows, by window."""
    windows = run.windows()
    return {
        window: receipt
        for window, receipt in scored_windows(run).items()
        if receipt.key and window in windows and windows[window].kept
    }


def _compared(run: Run, clean: DataFrame, earlier: Live) -> Live:
    """Compare the newest windows, and those whose rows have changed since they were compared."""
    content = {window: str(rows) for window, rows in run.content().items()}
    errors = {(error.window, error.version): error for error in earlier.windows}
    metric = run.spec.judged_metric
    if earlier.metric != metric:  # of predictions that are not compared again the guess has none of this metric
        errors = {pair: replace(error, baseline=None) for pair, error in errors.items()}
    receipts = _predicted(run)
    standing = {(window, receipt.read(Scored).version) for window, receipt in receipts.items()}
    # no label comes any more for predictions that were replaced or removed
    errors = {
        pair: error if pair in standing else replace(error, waiting=0)
        for pair, error in errors.items()
        if pair in standing or error.measured is not None
    }
    rows = {window: content[window] for window in receipts}
    changed = [window for window in rows if earlier.rows.get(window) != rows[window]]
    settings = _settings(run)
    keys: dict[str, str] = {}
    by_version: dict[int, list[Scored]] = {}
    for window in sorted({*sorted(receipts)[-_MOST_WINDOWS:], *changed}):
        receipt = receipts[window]
        keys[window] = content_key("live", {**settings, "predictions": receipt.key, "rows": content[window]})
        scored = receipt.read(Scored)
        compared = errors.get((window, scored.version))
        if compared is None or compared.key != keys[window]:
            by_version.setdefault(scored.version, []).append(scored)
    reasons = []
    for version, windows in sorted(by_version.items()):
        try:
            errors |= {(error.window, version): error for error in _errors(run, clean, earlier.label, windows, keys)}
        except (SchemaError, DataError, BundleError, IntegrityError, ConfigError) as cause:
            for scored in windows:
                del rows[scored.window]  # so that it is compared again when the next label comes
            reasons.append(f"the predictions of version {version} cannot be compared: {cause}")
            logger.warning("live error: %s", reasons[-1])
    return replace(earlier, metric=metric, windows=_newest(errors), rows=rows, reason="; ".join(reasons))


def _newest(errors: Mapping[tuple[str, int], LiveError]) -> tuple[LiveError, ...]:
    """What is kept, in order: labels may come later than hundreds of windows that still wait for theirs."""
    measured = [pair for pair in sorted(errors) if errors[pair].measured is not None]
    waiting = [pair for pair in sorted(errors) if errors[pair].measured is None]
    return tuple(errors[pair] for pair in sorted([*measured[-_MOST_KEPT:], *waiting[-_MOST_KEPT:]]))


def _errors(
    run: Run, clean: DataFrame, name: str, windows: Sequence[Scored], keys: Mapping[str, str]
) -> Iterator[LiveError]:
    """The errors of windows that one version predicted, each with the key of its comparison."""
    from sparkdl.pipeline.work.labels import labels_of

    spec = run.spec
    model = run.registry.get(str(spec.publish.name), windows[0].version)
    if {scored.artifact for scored in windows} - {"", model.artifact}:
        raise ConfigError(f"another model than {spec.publish.name} has made them")
    labels = labels_of(bundle_of(model))
    if name not in labels.names:
        raise BundleError(f"it predicts {', '.join(labels.names)}, and {name!r} is compared")
    label = labels.labels[labels.names.index(name)]
    outputs = output_columns(labels, label)
    trained = trained_of(run.receipts, model)
    all_rows_scored = not isinstance(spec.split, TimeSplit) and spec.score.window == "all"
    taught, unseen = [scored.window for scored in windows], None
    if trained is not None:
        taught = [window for window in taught if window in trained.windows]
        unseen = unseen_rows(clean, spec, taught, trained.split, trained.columns, trained.labels)
    if unseen is None and not all_rows_scored:
        taught = []  # rows of these windows, of which others are scored
    summary = None if trained is None else trained.labels.get(name)
    for chunk in _chunks(windows, label.most_measured):
        rows = _joined(run, clean, label, outputs, chunk).toArrow()
        for scored in chunk:
            window_rows = rows.filter(pc.equal(rows[WINDOW], scored.window))
            is_taught = scored.window in taught
            yield _error(scored, keys[scored.window], label, window_rows, is_taught, spec.judged_metric, summary)


def _chunks(windows: Sequence[Scored], most: int) -> Iterator[list[Scored]]:
    """A few windows at a time, so that the driver can hold their rows."""
    chunk: list[Scored] = []
    for scored in windows:
        if chunk and sum(earlier.rows for earlier in chunk) + scored.rows > most:
            yield chunk
            chunk = []
        chunk.append(scored)
    yield chunk


def _joined(
    run: Run, clean: DataFrame, label: FittedLabel, outputs: Sequence[str], predicted: Sequence[Scored]
) -> DataFrame:
    """Predicted rows with what came of them: ``_window``, ``_missing``, ``_label``, ``_output``, ``_weight``.

    ``_missing`` is null where no clean row has the key: it has a gap, or the row is gone.
    """
    from pyspark.sql import functions as F

    from sparkdl.pipeline.work.labels import encoded, row_weight

    windows, key = [scored.window for scored in predicted], run.spec.source.key
    predictions = run.project.predictions.read(clean.sparkSession)
    absent = [name for name in (*key, *outputs, "model_version") if name not in predictions.columns]
    if absent:
        raise SchemaError(f"the table of predictions has no column {absent[0]!r}, but {predictions.columns}")
    if label.name not in clean.columns:
        raise SchemaError(f"the rows have no label {label.name!r}, but {clean.columns}")
    of_version = F.col("model_version") == predicted[0].version
    version_predictions = predictions.where(F.col(WINDOW).isin(*windows) & of_version)
    most = max(scored.rows for scored in predicted)
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
        encoded(label).cast("double").alias("_label"),
        row_weight(run.spec).alias("_weight"),
    )
    return version_predictions.join(actual, on=[WINDOW, *keys], how="left").drop(*keys)


def _error(
    scored: Scored,
    key: str,
    label: FittedLabel,
    rows: pa.Table,
    seen: bool,
    metric: str,
    summary: LabelSummary | None,
) -> LiveError:
    from sparkdl.pipeline.work.evaluate import numbers, with_quantiles

    matched = rows.filter(rows["_missing"].is_valid())
    missing = numbers(matched["_missing"]) != 0
    truths = numbers(matched["_label"])
    labelled = ~missing & np.isfinite(truths)
    measured, baseline = None, None
    if labelled.any():
        outputs, weights = (numbers(matched[name])[labelled] for name in ("_output", "_weight"))
        values = outputs[:, label.middle] if label.levels else outputs
        predicted = Rows.of(label.type, truths[labelled], values, weights=weights, label=label.name)
        predicted = with_quantiles(predicted, label, outputs, label.levels)
        measured = measure(predicted)
        if summary is not None:
            baseline = baseline_of(summary, predicted, label.classes).values.get(metric)
    return LiveError(
        window=scored.window,
        version=scored.version,
        key=key,
        waiting=int(missing.sum()),
        unknown=int((~missing & ~labelled).sum()),
        unmatched=len(rows) - len(matched),
        measured=measured,
        trained_on=seen,
        baseline=baseline,
    )
