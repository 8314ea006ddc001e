"""Evaluation: challenger and champion on the same held-out rows, and what the gate says of them.

Enters: the bundles of two models, the rows to judge them by. Leaves: a ``Decision`` with the metrics of both, and the
challenger's metrics by slice. Each row passes both models in one query, so that both are measured on the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.columns.names import quoted
from sparkdl.compat.spark_errors import task_errors
from sparkdl.config import ScoreConfig
from sparkdl.errors import BundleError, ConfigError, DataError, IntegrityError, SchemaError
from sparkdl.observe import logger
from sparkdl.pipeline.judging.gate import Gate, decide
from sparkdl.pipeline.judging.metrics.diagnostics import diagnose
from sparkdl.pipeline.judging.metrics.rows import Floats, Rows
from sparkdl.pipeline.judging.metrics.slices import Slices
from sparkdl.pipeline.rows.parts import unit_of
from sparkdl.pipeline.rows.source import WINDOW
from sparkdl.pipeline.spec import PipelineSpec, TimeSplit
from sparkdl.pipeline.spec.bounds import MIN_GROUPS, RESAMPLES, least_groups, least_resamples
from sparkdl.pipeline.spec.operation import DEFAULT_METRICS
from sparkdl.pipeline.state.results import Evaluated
from sparkdl.pipeline.work.labels import FittedLabel, Labels, encoded
from sparkdl.pipeline.work.prepare import labels_of
from sparkdl.scoring.score import score

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["evaluate", "gate_of", "judged_label"]

_LEAST_WINDOWS = 8


def judged_label(spec: PipelineSpec, labels: Labels) -> FittedLabel:
    """The label that metric and floors are of."""
    name = spec.publish.label or labels.names[0]
    return next(label for label in labels if label.name == name)


def evaluate(
    rows: DataFrame, spec: PipelineSpec, labels: Labels, challenger: str, champion: str | None, trusted: Sequence[str],
    count: int, seen: str = "",
) -> Evaluated:  # fmt: skip
    """Measure on held-out rows, and decide.

    Args:
        rows: of the part that judges, with raw columns and labels.
        spec: the pipeline.
        labels: as the challenger was trained.
        challenger: address of its bundle.
        champion: address of the champion's bundle; None where there is none.
        trusted: packages that bundles may import.
        count: how many rows there are; of more than the driver holds a share is drawn, the same each time.
        seen: why these rows cannot judge the champion; it is not asked then, and stays.

    Raises:
        DataError: there are no rows, or predictions are missing.
    """
    label, config = judged_label(spec, labels), ScoreConfig(batch_rows=spec.train.transform_batch_size)
    frame, kept = _held_out(rows, spec, label, count)
    mine = f"_challenger_{labels.names.index(label.name)}"
    names = [f"_challenger_{n}" for n in range(len(labels.names))]
    scored = score(frame, challenger, output_columns=names, config=config, trusted=trusted)
    kept.append(mine)
    rival = None if seen else champion
    table, theirs, known, error = _predicted(scored, kept, label, rival, {"config": config, "trusted": trusted})
    common: dict[str, Any] = {
        "weights": _numbers(table[spec.weight]) if spec.weight else None,
        "groups": table["_group"].to_pandas().to_numpy(),
        "label": label.name,
    }
    actual = _numbers(table["_label"])
    classes = list(dict.fromkeys([*label.classes, *known.classes]))
    found = [
        Rows.of(label.type, actual, _in_order(_probabilities(label.type, outputs), of.classes, classes), **common)
        for outputs, of in ((_numbers(table[name]), of) for name, of in ((mine, label), (theirs, known)) if name)
    ]
    decision = decide(gate_of(spec, label), *found, champion_error=error, seen=seen)
    slices = {
        name: Slices.of(found[0], table[f"_slice_{place}"].to_pandas().to_numpy())
        for place, name in enumerate(spec.report.slices)
    }
    by_model = [{name: one.measure(rows) for name, one in slices.items()} for rows in found]
    views = diagnose(found, classes)
    return Evaluated(
        label=label.name,
        decision=decision,
        slices=by_model[0],
        champion_slices=by_model[1] if theirs else {},
        values={name: one.values for name, one in slices.items()},
        challenger=views[0],
        champion=views[1] if theirs else None,
    )


def _predicted(
    scored: DataFrame, kept: Sequence[str], label: FittedLabel, champion: str | None, options: Mapping[str, Any]
) -> tuple[pa.Table, str, FittedLabel, str]:
    """The challenger's predictions and the champion's beside them, in one pass.

    Returns:
        the rows; the column of the champion's predictions, empty if it has none; its label; and why it has none: it
        reads columns that are no more, or other ones, predicts something else, cannot be built any more, or is damaged.
    """
    if champion is None:
        return _collected(scored, kept), "", label, ""
    try:
        known, place, outputs = _champions(champion, label)
        names = [f"_champion_{n}" for n in range(outputs)]
        both = score(scored, champion, output_columns=names, **options)
        return _collected(both, [*kept, names[place]]), names[place], known, ""
    except (SchemaError, BundleError, IntegrityError, DataError, ConfigError, ValueError) as cause:
        return _collected(scored, kept), "", label, str(cause)  # if it is the challenger that fails, it does so again


def _collected(scored: DataFrame, columns: Sequence[str]) -> pa.Table:
    with task_errors():
        return scored.select(*[quoted(name) for name in columns]).toArrow()


def _held_out(rows: DataFrame, spec: PipelineSpec, label: FittedLabel, count: int) -> tuple[DataFrame, list[str]]:
    """The rows with ``_group`` and ``_label``, and which columns are measured with."""
    from pyspark.sql import functions as F

    unit = unit_of(rows, spec)
    most = label.most_measured
    if count > most:  # whole keys or groups, so that the rows of one stay together
        logger.info("%d of %d held-out rows judge, drawn by a hash of the key", most, count)
        rows = rows.where(F.pmod(F.xxhash64(F.lit("held out"), unit), F.lit(count)) < most)
    group = F.col(WINDOW) if _over(spec) == "window" else unit
    weight = [spec.weight] if spec.weight else []
    # as texts: pandas would make numbers of another type of whole numbers of which some are missing
    slices = {f"_slice_{n}": F.col(quoted(name)).cast("string") for n, name in enumerate(spec.report.slices)}
    added = {"_group": group, "_label": encoded(label.name, label), **slices}
    return rows.withColumns(added), list(dict.fromkeys([*added, *weight]))


def _champions(bundle: str, label: FittedLabel) -> tuple[FittedLabel, int, int]:
    """The champion's label of the same name and type, its place among the champion's outputs, and their number.

    Raises:
        BundleError: it predicts no such label.
    """
    labels = labels_of(bundle)
    if label.name not in labels.names:
        raise BundleError(f"it predicts {', '.join(labels.names)}, and {label.name!r} is judged")
    place = labels.names.index(label.name)
    known = labels.labels[place]
    if known.type != label.type or (label.type == "binary" and set(known.classes) != set(label.classes)):
        raise BundleError(
            f"it predicts {known.name!r} as {known.type} {list(known.classes) or ''}, and the challenger as "
            f"{label.type} {list(label.classes) or ''}"
        )
    return known, place, len(labels.names)


def _in_order(found: Floats, classes: Sequence[str], wanted: Sequence[str]) -> Floats:
    """Probabilities of ``classes`` as those of ``wanted``; a class that a model does not know has none."""
    if found.ndim == 1:  # of the second class of two
        return found if list(classes) == list(wanted) else 1 - found
    ordered = np.zeros((len(found), len(wanted)))
    ordered[:, [wanted.index(name) for name in classes]] = found
    return ordered


def _numbers(column: pa.ChunkedArray) -> Floats:
    """Numbers (rows,), or (rows, width) of lists of as many each; a null is NaN."""
    if not pa.types.is_list(column.type):
        values: Floats = column.cast(pa.float64()).to_numpy()
        return values
    lists = column.combine_chunks()
    there = lists.is_valid().to_numpy(zero_copy_only=False)
    flat = lists.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False)
    width = max(1, len(flat) // max(1, int(there.sum())))
    found = np.full((len(lists), width), np.nan)
    found[there] = flat.reshape(-1, width)
    return found


def _probabilities(task: str, outputs: Floats) -> Floats:
    """What a model's raw outputs say: values; the probability of class 1; probabilities of all classes.

    Args:
        task: what the label is.
        outputs: (rows,) or (rows, 1) numbers; (rows, classes) logits for ``multiclass``.
    """
    if task == "multiclass":
        powers: Floats = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers
    values = outputs.reshape(len(outputs))
    return values if task == "regression" else 1 / (1 + np.exp(-np.clip(values, -700, 700)))


def _over(spec: PipelineSpec) -> str:
    from sparkdl.pipeline.spec.base import hours_of

    if spec.publish.gate.over is not None:
        return spec.publish.gate.over
    size = 1 if spec.source.every == "hour" else 24
    split = spec.split
    held_out = hours_of(split.test or split.validate) // size if isinstance(split, TimeSplit) else 0
    return "window" if held_out >= _LEAST_WINDOWS else "key"


def gate_of(spec: PipelineSpec, label: FittedLabel) -> Gate:
    """The gate that the file asks for, for a label."""
    given = spec.publish.gate
    better = given.rule == "better"
    return Gate(
        metric=spec.publish.metric or DEFAULT_METRICS[label.type],
        mode=given.rule,
        effect=given.margin if better else 0.0,
        margin=0.0 if better else given.margin,
        confidence=given.confidence,
        min_rows=given.min_rows,
        min_groups=max(MIN_GROUPS, least_groups(given.confidence)),
        resamples=max(RESAMPLES, least_resamples(given.confidence)),
        floors=given.floors,
    )
