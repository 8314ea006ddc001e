"""Predictions: the champion over windows of clean rows, to a Delta table by window.

Enters: a published version, windows. Leaves: rows with the key, the columns to keep, for each label a prediction (and
the probability where it is a class), and which version, which run and when. A window is replaced as a whole, so that
scoring it again, or by two runs at once, leaves each row once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.columns.names import quoted
from sparkdl.config import ScoreConfig
from sparkdl.errors import SchemaError
from sparkdl.models.registry import ModelVersion
from sparkdl.pipeline.sources.base import WINDOW
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.keys import score_inputs, score_is_there, scored_place, scored_windows
from sparkdl.pipeline.state.results import Scored, ScoredWindows
from sparkdl.pipeline.state.steps import content_key
from sparkdl.pipeline.work.labels import FittedLabel
from sparkdl.pipeline.work.prepare import labels_of
from sparkdl.scoring.score import score
from sparkdl.tables.table import AppTransaction, Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["score_windows"]

_OWN = {WINDOW, "model_version", "run_id", "scored_at"}
"""What every table of predictions has."""
_CUT_SHORT = "cut short"
"""In place of the hash of the rows of a window while its predictions are replaced: no window has it, so it is owed."""


def score_windows(
    context: Context, rows: DataFrame, champion: ModelVersion, content: Mapping[str, str]
) -> dict[str, int]:
    """Score the windows that this version has not scored yet, and replace them in the table of predictions.

    What is known of the predictions of before is forgotten first: a run that is killed once the table is written leaves
    windows that are scored again, whoever is the champion then.

    Args:
        context: of the run.
        rows: clean rows of the windows.
        champion: that predicts.
        content: a hash of the rows of each window.

    Returns:
        rows by window that were scored now.

    Raises:
        SchemaError: the rows lack a column that the version reads, or that is to be kept; names both sides.
        StorageError: the table cannot be written.
    """
    steps, table, started = context.steps, Table(str(context.spec.score.target)), time.perf_counter()
    inputs = score_inputs(context, champion, content)
    todo = [name for name, each in inputs.items() if not score_is_there(steps, table.uri, name, each)]
    place = scored_windows(context)
    before = steps.find("score", place, ScoredWindows) or ScoredWindows(content={})
    found: dict[str, int] = {}
    if todo:
        frame = _predicted(context, rows, champion, todo)
        cut_short = ScoredWindows(content={**before.content, **dict.fromkeys(todo, _CUT_SHORT)})
        steps.replace("score", [*((scored_place(table.uri, name), None) for name in todo), (place, cut_short)])
        found = _replaced(context, table, frame, todo)
    done: list[tuple[Mapping[str, Any], Any]] = []
    for name in todo:
        key = content_key("score", inputs[name])
        scored = Scored(inputs=key, rows=found[name], version=champion.version, artifact=champion.artifact)
        done.append((scored_place(table.uri, name), scored))
    made = ScoredWindows(content={**before.content, **content})
    if todo or made != before:
        steps.replace("score", [*done, (place, made)])
    for scored_at, _ in done:
        steps.timed("score", False, time.perf_counter() - started, content_key("score", scored_at))
    return found


def _predicted(context: Context, rows: DataFrame, champion: ModelVersion, todo: Sequence[str]) -> DataFrame:
    """The rows of the table of predictions for some windows."""
    from pyspark.sql import functions as F

    spec, table = context.spec, Table(str(context.spec.score.target))
    kept = list(dict.fromkeys([*spec.source.key, *spec.score.keep]))
    absent = [name for name in kept if name not in rows.columns]
    if absent:
        raise SchemaError(f"score.keep names {absent[0]!r}, the rows have {rows.columns}: name one of these")
    labels = labels_of(champion.uri)
    names = [f"_output_{n}" for n in range(len(labels.names))]
    chosen = rows.where(F.col(WINDOW).isin(*todo))
    config = ScoreConfig(batch_rows=spec.train.transform_batch_size)
    keep = [WINDOW, *kept]
    scored = score(chosen, champion.uri, output_columns=names, keep=keep, config=config, trusted=context.trusted)
    columns: list[Column] = [F.col(WINDOW), *[F.col(quoted(name)) for name in kept]]
    for label, name in zip(labels, names, strict=True):
        columns += _columns(label, F.col(name), "" if len(names) == 1 else f"{label.name}_")
    columns += [
        F.lit(champion.version).cast("int").alias("model_version"),
        F.lit(context.record.run_id).alias("run_id"),
        F.current_timestamp().alias("scored_at"),
    ]
    return _fitted_to(table, scored.select(*columns), context.transaction()).repartition(WINDOW)


def _replaced(context: Context, table: Table, frame: DataFrame, todo: Sequence[str]) -> dict[str, int]:
    """Replace windows in the table of predictions, and count the rows of each."""
    from pyspark.sql import functions as F

    windows = [{WINDOW: name} for name in todo]
    table.write(frame, "replace", partition_by=[WINDOW], partitions=windows, transaction=context.transaction())
    counted = table.read(frame.sparkSession).where(F.col(WINDOW).isin(*todo)).groupBy(WINDOW).count().collect()
    return dict.fromkeys(todo, 0) | {row[WINDOW]: row["count"] for row in counted}


def _fitted_to(table: Table, frame: DataFrame, transaction: AppTransaction | None) -> DataFrame:
    """The rows with the columns of the table, which gets those that it lacks; what is kept no longer becomes null.

    A table that no pipeline wrote stays as it is, and refuses rows with other columns.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema

    known = table.columns() if table.exists() else []
    if not set(known) >= _OWN:
        return frame
    added = [name for name in frame.columns if name not in known]
    if added:
        more = to_arrow_schema(frame.select(*map(quoted, added)).schema, timezone="UTC")
        table.append(more.with_metadata(None).empty_table(), new_columns=True, transaction=transaction)
    gone = {one.name: from_arrow_type(one.type) for one in table.schema() if one.name not in frame.columns}
    return frame.withColumns({name: F.lit(None).cast(kind) for name, kind in gone.items()}) if gone else frame


def _columns(label: FittedLabel, output: Column, prefix: str) -> list[Column]:
    from pyspark.sql import functions as F

    if label.type == "regression":
        return [output.cast("double").alias(f"{prefix}prediction")]
    names = F.array(*[F.lit(value) for value in label.classes])
    if label.type == "binary":
        positive = 1 / (1 + F.exp(-output.cast("double")))
        chosen = F.when(positive >= 0.5, F.lit(label.classes[1])).otherwise(F.lit(label.classes[0]))
        return [chosen.alias(f"{prefix}prediction"), positive.alias(f"{prefix}probability")]
    place = F.array_position(output, F.array_max(output)).cast("int")
    powers = F.transform(output, lambda value: F.exp(value.cast("double") - F.array_max(output)))
    total = F.aggregate(powers, F.lit(0.0), lambda sum_, value: sum_ + value)
    shares = F.transform(powers, lambda value: value / total)
    return [
        F.element_at(names, place).alias(f"{prefix}prediction"),
        F.element_at(shares, place).alias(f"{prefix}probability"),
        shares.alias(f"{prefix}probabilities"),
    ]
