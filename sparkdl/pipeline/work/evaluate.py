"""Evaluation: challenger and champion on the same held-out rows, and what the gate says of them.

Each row passes both models in one query, so that all are measured on the same rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sparkdl.columns.decode import decode
from sparkdl.columns.frames import row_of, selected
from sparkdl.columns.names import quoted
from sparkdl.compat.spark_errors import task_errors
from sparkdl.config import ScoreConfig
from sparkdl.errors import BundleError, ConfigError, DataError, IntegrityError, SchemaError
from sparkdl.metrics.measure import calibration_error, metric_over
from sparkdl.metrics.rows import Floats, Rows
from sparkdl.metrics.sums import quantile_losses
from sparkdl.models.registry import ModelVersion, bundle_of
from sparkdl.observe import logger
from sparkdl.pipeline.judging.baseline import LabelSummary, baseline_of, best_guess, summary_of
from sparkdl.pipeline.judging.diagnostics import diagnose
from sparkdl.pipeline.judging.gate import Gate, decide
from sparkdl.pipeline.judging.slices import Slices
from sparkdl.pipeline.rows.expect import SLOT
from sparkdl.pipeline.rows.parts import unit_of
from sparkdl.pipeline.spec import HashSplit, PipelineSpec, TimeSplit
from sparkdl.pipeline.spec.base import hours_of
from sparkdl.pipeline.spec.operation import MIN_GROUPS, RESAMPLES, least_groups, least_resamples
from sparkdl.pipeline.state.results import Calibrated, Evaluated, Intervals, Trained
from sparkdl.pipeline.windows import WINDOW
from sparkdl.pipeline.work.labels import FittedLabel, Labels, encoded, labels_of, row_weight
from sparkdl.scoring.score import score

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_LEAST_WINDOWS = 8
MOST_SUMMED = 1_000_000
"""Training rows whose labels are summed up; of more, as many are drawn by a hash of the key."""
_LAST = "__sparkdl_last"
LABEL, CHALLENGER, _CHAMPION = "__sparkdl_label", "__sparkdl_challenger", "__sparkdl_champion"
RAW = "__sparkdl_raw"
"""Columns of a row as a struct; null of a row that was not drawn for them."""
_LEAST_KNOWN = 0.5
"""Share of held-out rows whose key was trained on, for the last value of a key to be a guess at all."""


def judged_label(spec: PipelineSpec, labels: Labels) -> FittedLabel:
    """The label that metric and floors are of."""
    return next(label for label in labels if label.name == spec.judged_label)


def label_summaries(rows: DataFrame, spec: PipelineSpec, labels: Labels, count: int) -> dict[str, LabelSummary]:
    """Sum up the labels of training rows, weighted as they train.

    Args:
        rows: to train on, with raw columns and all labels.
        spec: the pipeline.
        labels: as they were fitted.
        count: how many rows there are.
    """
    rows = drawn(rows, spec, "summed up", MOST_SUMMED, count)
    columns = [encoded(label).cast("double").alias(f"_{position}") for position, label in enumerate(labels)]
    with task_errors():
        table = rows.select(*columns, row_weight(spec).alias("_weight")).toArrow()
    weights = numbers(table["_weight"])
    return {
        label.name: summary_of(label.type, numbers(table[f"_{position}"]), weights, label.classes, label.levels)
        for position, label in enumerate(labels)
    }


def with_last_values(rows: DataFrame, training: DataFrame, spec: PipelineSpec, labels: Labels) -> DataFrame:
    """The rows with the newest training label of the same key, null where there is none; as they are without such keys.

    Args:
        rows: of the part that judges.
        training: the rows to train on, with all labels.
        spec: the pipeline.
        labels: as they were fitted.
    """
    from pyspark.sql import functions as F

    label, entity = judged_label(spec, labels), _entity(spec)
    if not entity:
        return rows
    names = [f"__sparkdl_entity_{position}" for position in range(len(entity))]
    keys = [F.col(quoted(column)).alias(name) for column, name in zip(entity, names, strict=True)]
    newest = F.max(F.struct(F.col(quoted(str(spec.source.when))), encoded(label).alias(_LAST)))
    last_values = training.groupBy(*keys).agg(newest[_LAST].alias(_LAST))
    pairs = [F.col(quoted(column)).eqNullSafe(F.col(name)) for column, name in zip(entity, names, strict=True)]
    return rows.join(last_values, functools.reduce(operator.and_, pairs), "left").drop(*names)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Held-out rows on the driver, with what the models say of them.

    Attributes:
        table: label, group, weight, slices and outputs of each row; ``RAW``, if it was asked for.
        labels: by the column of its outputs, the label as a model was trained with: the challenger's, the champion's.
        champion_error: why the champion could not predict; empty if it did, or was not asked.
    """

    table: pa.Table
    labels: Mapping[str, FittedLabel]
    champion_error: str = ""


def judged(
    rows: DataFrame, spec: PipelineSpec, labels: Labels, trained: Trained, champion: ModelVersion | None,
    trusted: Sequence[str], count: int, raw: Sequence[str] = (), most_raw: int = 0,
) -> Judged:  # fmt: skip
    """Let both models predict held-out rows.

    Args:
        rows: of the part that judges, with raw columns and labels; see ``with_last_values``.
        spec: the pipeline.
        labels: as the challenger was trained.
        trained: the challenger.
        champion: that the challenger is compared with; None where there is none, or these rows cannot judge it.
        trusted: packages that bundles may import.
        count: how many rows there are; of more than the driver holds a share is drawn, the same each time.
        raw: columns of the rows that are collected, too, as ``RAW``.
        most_raw: of so many rows, about.

    Raises:
        SparkdlError: the challenger cannot be asked, or does not take the rows; see ``score``.
    """
    label, config = judged_label(spec, labels), ScoreConfig(batch_rows=spec.train.transform_batch_size)
    frame, columns = held_out(rows, spec, label, count, raw, most_raw)
    names = output_names(labels, label, CHALLENGER)
    error = ""
    if champion is not None:
        try:
            scored = score(frame, trained.bundle, output_columns=names, config=config, trusted=trusted)
            scored, champion_label = _with_champion(scored, champion, label, config, trusted, [*columns, CHALLENGER])
            table = _collected(scored, [*columns, CHALLENGER, _CHAMPION])
            return Judged(table=table, labels={CHALLENGER: label, _CHAMPION: champion_label})
        except (SchemaError, BundleError, IntegrityError, DataError, ConfigError, ValueError) as cause:
            error = str(cause)  # if it is the challenger that fails, it does so again
    scored = score(frame, trained.bundle, output_columns=names, keep=columns, config=config, trusted=trusted)
    table = _collected(scored, [*columns, CHALLENGER])
    return Judged(table=table, labels={CHALLENGER: label}, champion_error=error)


def evaluate(rows: Judged, spec: PipelineSpec, trained: Trained, count: int, seen: str = "") -> Evaluated:
    """Measure on held-out rows, and decide.

    Args:
        rows: with the predictions.
        spec: the pipeline.
        trained: the challenger.
        count: how many rows there were to draw them from.
        seen: why these rows cannot judge the champion, which stays.

    Raises:
        DataError: there are no rows, or predictions are missing.
    """
    table, label = rows.table, rows.labels[CHALLENGER]
    classes = list(dict.fromkeys(name for model_label in rows.labels.values() for name in model_label.classes))
    outputs = [(numbers(table[column]), model_label) for column, model_label in rows.labels.items()]
    truths, groups = numbers(table[LABEL]), table["__sparkdl_group"].to_pandas().to_numpy()
    weights = numbers(table[spec.weight]) if spec.weight else None
    rows_by_model = []
    for raw, model_label in outputs:
        predictions = _in_order(predicted(model_label, raw), model_label.classes, classes)
        model_rows = Rows.of(label.type, truths, predictions, weights=weights, groups=groups, label=label.name)
        rows_by_model.append(with_quantiles(model_rows, model_label, raw, label.levels))
    challenger_rows = rows_by_model[0]
    gate, summary = gate_of(spec), trained.labels.get(label.name)
    last = numbers(table[_LAST]) if _LAST in table.column_names else None
    if last is not None and np.isnan(last).mean() > 1 - _LEAST_KNOWN:
        last = None
    baseline = guess = None
    if summary is not None:
        key = ", ".join(_entity(spec))
        baseline = baseline_of(summary, challenger_rows, classes, last, key)
        if gate.metric in baseline.guesses:
            guess = best_guess(baseline.guesses[gate.metric], summary, challenger_rows, classes, last, key)
    decision = decide(
        gate, *rows_by_model, champion_error=rows.champion_error, seen=seen, baseline=baseline, guess=guess
    )
    slices = {
        name: Slices.of(challenger_rows, table[f"__sparkdl_slice_{position}"].to_pandas().to_numpy())
        for position, name in enumerate(spec.report.slices)
    }
    slices_by_model = [
        {name: column.measure(model_rows) for name, column in slices.items()} for model_rows in rows_by_model
    ]
    diagnostics = diagnose(rows_by_model, classes)
    return Evaluated(
        label=label.name,
        decision=decision,
        slices=slices_by_model[0],
        champion_slices=slices_by_model[1] if len(outputs) > 1 else {},
        values={name: column.values for name, column in slices.items()},
        challenger=diagnostics[0],
        champion=diagnostics[1] if len(outputs) > 1 else None,
        of_rows=count,
        intervals=_intervals(label, challenger_rows, outputs[0][0]) if label.levels else None,
        calibrated=_calibrated(label, challenger_rows, outputs[0][0], trained.temperatures.get(label.name)),
        baseline_slices={
            name: _guessed(column, summary, challenger_rows, classes, last, gate.metric)
            for name, column in slices.items()
            if summary is not None
        },
    )


def with_quantiles(rows: Rows, label: FittedLabel, outputs: Floats, levels: Sequence[float]) -> Rows:
    """The rows with what a model's quantiles lose; as they are where no quantiles are predicted.

    Args:
        rows: with labels.
        label: that the model was trained with.
        outputs: (rows,) or (rows, levels) of the model.
        levels: that judge.
    """
    if not levels:
        return rows
    if label.levels != tuple(levels):
        return replace(rows, quantile_losses=np.full(len(rows), np.nan))
    return replace(rows, quantile_losses=quantile_losses(rows.labels, outputs.reshape(len(rows), -1), levels))


def _intervals(label: FittedLabel, rows: Rows, quantiles: Floats) -> Intervals:
    """How often labels lie below each of the quantiles, and what the quantiles lose."""
    truth = rows.labels[:, None]
    quantiles = quantiles.reshape(len(truth), -1)
    inside = (truth[:, 0] >= quantiles[:, 0]) & (truth[:, 0] <= quantiles[:, -1])
    return Intervals(
        levels=label.levels,
        below=tuple(np.average(truth <= quantiles, axis=0, weights=rows.weights).tolist()),
        coverage=float(np.average(inside, weights=rows.weights)),
        width=float(np.average(quantiles[:, -1] - quantiles[:, 0], weights=rows.weights)),
        pinball=float(metric_over(rows.as_one_group(), "pinball")[0]),
    )


def _calibrated(label: FittedLabel, rows: Rows, logits: Floats, temperature: float | None) -> Calibrated | None:
    """The calibration error of the model, and what it would be without its temperature."""
    if temperature is None:
        return None
    uncalibrated, calibrated = (
        calibration_error(replace(rows, predictions=predicted(label, scale * logits))) for scale in (temperature, 1.0)
    )
    return Calibrated(temperature=temperature, before=uncalibrated, after=calibrated)


def _guessed(
    slices: Slices, summary: LabelSummary, rows: Rows, classes: Sequence[str], last: Floats | None, metric: str
) -> dict[str, float]:
    """The metric of the best guess without a model, by slice."""
    metric_by_slice = {}
    for position, name in enumerate(slices.names):
        chosen = slices.places == position
        baseline = baseline_of(summary, rows.take(chosen), classes, None if last is None else last[chosen])
        if metric in baseline.values:
            metric_by_slice[name] = baseline.values[metric]
    return metric_by_slice


def _with_champion(
    scored: DataFrame, champion: ModelVersion, label: FittedLabel, config: ScoreConfig, trusted: Sequence[str],
    keep: Sequence[str],
) -> tuple[DataFrame, FittedLabel]:  # fmt: skip
    """Columns of the rows with the champion's predictions, and its label of the same name and type.

    Raises:
        BundleError: it predicts no such label.
        SparkdlError: it reads columns that are no more, or other ones, cannot be built any more, or is damaged.
    """
    bundle = bundle_of(champion)
    labels = labels_of(bundle)
    if label.name not in labels.names:
        raise BundleError(f"it predicts {', '.join(labels.names)}, and {label.name!r} is judged")
    theirs = next(fitted for fitted in labels if fitted.name == label.name)
    if theirs.type != label.type or (label.type == "binary" and set(theirs.classes) != set(label.classes)):
        raise BundleError(
            f"it predicts {theirs.name!r} as {theirs.type} {list(theirs.classes) or ''}, and the challenger as "
            f"{label.type} {list(label.classes) or ''}"
        )
    names = output_names(labels, label, _CHAMPION)
    return score(scored, bundle, output_columns=names, keep=keep, config=config, trusted=trusted), theirs


def output_names(labels: Labels, judged: FittedLabel, column: str) -> list[str]:
    """Columns for what a model says of its labels, where that of the judged label is called ``column``."""
    return [column if label.name == judged.name else f"{column}_{n}" for n, label in enumerate(labels)]


def _collected(scored: DataFrame, columns: Sequence[str]) -> pa.Table:
    with task_errors():
        return selected(scored, columns).toArrow()


def held_out(
    rows: DataFrame, spec: PipelineSpec, label: FittedLabel, count: int, raw: Sequence[str] = (), most_raw: int = 0
) -> tuple[DataFrame, list[str]]:
    """The rows with group and label, and which columns are measured with; ``raw`` of about so many rows as one."""
    from pyspark.sql import functions as F

    if count > label.most_measured:
        logger.info("%d of %d held-out rows judge, drawn by a hash of the key", label.most_measured, count)
    rows = drawn(rows, spec, "held out", label.most_measured, count)
    group = F.col(WINDOW) if _over(spec) == "window" else unit_of(rows, spec)
    weight = [spec.weight] if spec.weight else []
    # as texts: pandas would make numbers of another type of whole numbers of which some are missing
    slices = {f"__sparkdl_slice_{n}": F.col(quoted(name)).cast("string") for n, name in enumerate(spec.report.slices)}
    judging_columns = {"__sparkdl_group": group, LABEL: encoded(label), **slices}
    if raw:
        is_drawn = _is_drawn(rows, spec, "boosted", most_raw, min(count, label.most_measured))
        judging_columns[RAW] = F.when(is_drawn, row_of(raw))
    last = [_LAST] if _LAST in rows.columns else []
    return rows.withColumns(judging_columns), list(dict.fromkeys([*judging_columns, *weight, *last]))


def drawn(rows: DataFrame, spec: PipelineSpec, salt: str, most: int, count: int) -> DataFrame:
    """About ``most`` of ``count`` rows, the same each time: whole keys or groups, whose rows stay together."""
    from pyspark.sql import functions as F

    if count <= most:
        return rows
    return rows.withColumn(SLOT, _is_drawn(rows, spec, salt, most, count)).where(F.col(SLOT)).drop(SLOT)


def _is_drawn(rows: DataFrame, spec: PipelineSpec, salt: str, most: int, count: int) -> Column:
    """Whether a row is among about ``most`` of ``count``."""
    from pyspark.sql import functions as F

    if count <= most:
        return F.lit(True)
    return F.pmod(F.xxhash64(F.lit(salt), unit_of(rows, spec)), F.lit(count)) < most


def _entity(spec: PipelineSpec) -> tuple[str, ...]:
    """What comes again at other times: the columns of the key beside the time; none where rows have no such key."""
    when = spec.source.when
    if not isinstance(spec.split, TimeSplit) or when not in spec.source.key:
        return ()
    return tuple(name for name in spec.source.key if name != when)


def _in_order(predictions: Floats, classes: Sequence[str], wanted: Sequence[str]) -> Floats:
    """Probabilities of ``classes`` as those of ``wanted``; a class that a model does not know has none."""
    if predictions.ndim == 1:  # of the second class of two
        return predictions if list(classes) == list(wanted) else 1 - predictions
    ordered = np.zeros((len(predictions), len(wanted)))
    ordered[:, [wanted.index(name) for name in classes]] = predictions
    return ordered


def numbers(column: pa.ChunkedArray) -> Floats:
    """Numbers (rows,), or (rows, width) of lists of as many each; a null is NaN."""
    values = decode("", column.combine_chunks())
    shape = tuple(max(1, width) for width in values.shape or ())  # of lists that are all null
    return values.dense(values.elements.astype(np.float64), shape, np.nan)


def predicted(label: FittedLabel, outputs: Floats) -> Floats:
    """What a model's raw outputs say: values; the probability of class 1; probabilities of all classes.

    Args:
        label: what is predicted.
        outputs: (rows,) or (rows, 1) numbers; (rows, levels) quantiles, of which the middle one is the value; (rows,
            classes) logits for ``multiclass``.
    """
    if label.type == "multiclass":
        powers: Floats = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers
    if label.levels:
        return outputs.reshape(len(outputs), -1)[:, label.middle]
    values = outputs.reshape(len(outputs))
    return values if label.type == "regression" else 1 / (1 + np.exp(-np.clip(values, -700, 700)))


def _over(spec: PipelineSpec) -> str:
    if spec.publish.gate.over is not None:
        return spec.publish.gate.over
    split, size = spec.split, spec.source.window_hours
    windows = hours_of(split.test or split.validate) // size if isinstance(split, TimeSplit) else 0
    return "window" if windows >= _LEAST_WINDOWS else "key"


def _unit(spec: PipelineSpec) -> str:
    """What the bootstrap draws, in the plural."""
    if _over(spec) == "window":
        return f"{spec.source.every}s"
    columns = (spec.split.group if isinstance(spec.split, HashSplit) else ()) or spec.source.key
    if columns:
        return f"values of {', '.join(columns)}"
    return "rows" if isinstance(spec.split, HashSplit) and spec.split.copies == "spread" else "different rows"


def gate_of(spec: PipelineSpec) -> Gate:
    """The gate that the file asks for."""
    gate = spec.publish.gate
    better = gate.rule == "better"
    return Gate(
        metric=spec.judged_metric,
        mode=gate.rule,
        effect=gate.margin if better else 0.0,
        margin=0.0 if better else gate.margin,
        confidence=gate.confidence,
        min_rows=gate.min_rows,
        min_groups=max(MIN_GROUPS, least_groups(gate.confidence)),
        resamples=max(RESAMPLES, least_resamples(gate.confidence)),
        floors=gate.floors,
        baseline=gate.baseline,
        unit=_unit(spec),
    )
