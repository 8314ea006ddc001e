"""Evaluation: challenger and champion on the same held-out rows, and what the gate says of them.

Enters: the bundles of two models, the validation rows. Leaves: a ``Decision`` with the metrics of both, and the
challenger's metrics by slice. Each row passes both models in one query, so that both are measured on the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.columns.names import quoted
from sparkdl.errors import BundleError, SchemaError
from sparkdl.pipeline.gate import Gate, decide
from sparkdl.pipeline.labels import FittedLabel, Labels, encoded
from sparkdl.pipeline.metrics.measure import measure_by
from sparkdl.pipeline.metrics.rows import Rows
from sparkdl.pipeline.results import Evaluated
from sparkdl.pipeline.source import WINDOW
from sparkdl.pipeline.spec import PipelineSpec, TimeSplit
from sparkdl.pipeline.spec.operation import DEFAULT_METRICS
from sparkdl.scoring.score import score

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["evaluate", "gate_of", "judged_label", "probabilities"]

_MOST_ROWS = 5_000_000
"""Rows that are measured on the driver; of more, a share is drawn by a hash of the group."""
_LEAST_WINDOWS = 8
_LEAST_GROUPS, _LEAST_DRAWS = 5, 2000


def judged_label(spec: PipelineSpec, labels: Labels) -> FittedLabel:
    """The label that metric and floors are of."""
    name = spec.publish.label or labels.names[0]
    return next(label for label in labels if label.name == name)


def evaluate(
    rows: DataFrame, spec: PipelineSpec, labels: Labels, challenger: str, champion: str | None, trusted: Sequence[str]
) -> Evaluated:
    """Measure on held-out rows, and decide.

    Args:
        rows: of the validation part, with raw columns and labels.
        spec: the pipeline.
        labels: as the challenger was trained.
        challenger: address of its bundle.
        champion: address of the champion's bundle; None where there is none.
        trusted: packages that bundles may import.

    Raises:
        DataError: there are no rows, or predictions are missing.
    """
    from pyspark.sql import functions as F

    label = judged_label(spec, labels)
    names = [f"_challenger_{n}" for n in range(len(labels.names))]
    by_window = _over(spec) == "window"
    keyed = [F.col(quoted(name)) for name in spec.source.key]
    group = F.col(WINDOW) if by_window else F.xxhash64(*keyed) if keyed else F.monotonically_increasing_id()
    frame = rows.withColumns({"_group": group, "_label": encoded(label.name, label)})
    weight = [spec.weight] if spec.weight else []
    kept = list(dict.fromkeys(["_group", "_label", *weight, *spec.report.slices]))
    passed, error = [*names], ""
    theirs = [f"_champion_{n}" for n in range(len(labels.names))]
    scored = score(frame, challenger, output_columns=names, trusted=trusted)
    if champion is not None:
        try:
            scored = score(scored, champion, output_columns=theirs, trusted=trusted)
            passed += theirs
        except (SchemaError, BundleError, ValueError) as cause:  # it reads columns that are no more, or is damaged
            error = str(cause)
    place = labels.names.index(label.name)
    wanted = [*kept, *(name for name in passed if name.endswith(f"_{place}"))]
    table = scored.select(*[quoted(name) for name in wanted]).toPandas()
    task = label.type
    weights = table[spec.weight].to_numpy() if spec.weight else None
    common: dict[str, Any] = {"weights": weights, "groups": table["_group"].to_numpy(), "label": label.name}
    mine = Rows.of(task, table["_label"].to_numpy(), probabilities(task, table[names[place]]), **common)
    other = None
    if theirs[place] in table:
        other = Rows.of(task, table["_label"].to_numpy(), probabilities(task, table[theirs[place]]), **common)
    decision = decide(gate_of(spec, label), mine, other, champion_error=error)
    slices = {name: measure_by(mine, table[name].astype(str).to_numpy()) for name in spec.report.slices}
    return Evaluated(label=label.name, decision=decision, slices=slices)


def probabilities(task: str, outputs: Any) -> np.ndarray[Any, Any]:
    """What a model's raw outputs say: values; the probability of class 1; probabilities of all classes."""
    if task == "multiclass":
        logits = np.stack([np.asarray(row, dtype=np.float64) for row in outputs])
        powers: np.ndarray[Any, Any] = np.exp(logits - logits.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers
    values = np.asarray([np.asarray(row).reshape(()) for row in outputs], dtype=np.float64)
    return values if task == "regression" else 1 / (1 + np.exp(-np.clip(values, -700, 700)))


def _over(spec: PipelineSpec) -> str:
    from sparkdl.pipeline.spec.base import hours_of

    if spec.publish.gate.over is not None:
        return spec.publish.gate.over
    size = 1 if spec.source.every == "hour" else 24
    held_out = hours_of(spec.split.validate) // size if isinstance(spec.split, TimeSplit) else 0
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
        min_groups=max(_LEAST_GROUPS, math.ceil(math.log2(1 / (1 - given.confidence)))),  # fewer can show nothing
        resamples=max(_LEAST_DRAWS, math.ceil(round(20 / (1 - given.confidence), 6))),
        min_rows=given.min_rows,
        floors=given.floors,
    )
