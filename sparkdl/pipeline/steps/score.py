"""The step ``score``: the champion over windows of clean rows, to a Delta table by window.

The table holds the key, the columns to keep, for each label a prediction (and the probability where it is a class), and
which version, which run and when. A window is replaced as a whole, so that scoring it again leaves each row once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparkdl.columns.names import quoted
from sparkdl.config import ScoreConfig
from sparkdl.errors import SchemaError
from sparkdl.models.folder import read_bundle
from sparkdl.models.registry import ModelVersion, bundle_of
from sparkdl.pipeline.spec import TimeSplit, quantile_column
from sparkdl.pipeline.state.evaluator import Stale, Step, StepState, stale_of
from sparkdl.pipeline.state.receipts import Receipt, content_key, replacing
from sparkdl.pipeline.state.results import Scored
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.learning import parts_to_do
from sparkdl.pipeline.windows import NO_TIME, WINDOW, Parts
from sparkdl.tables.delta import delta_schema, merged_schema
from sparkdl.tables.table import AppTransaction, Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from sparkdl.pipeline.work.labels import FittedLabel, Labels

VERSION = 1
"""The version of what a row of predictions holds; raise it when that changes."""
_OWN = {WINDOW, "model_version", "run_id", "scored_at"}
"""What every table of predictions has."""


class ScoreStep(Step):
    """Windows of predictions, each by the champion of the run that made it."""

    name = "score"
    loads_torch = True

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """A key by window and table; none without a champion."""
        champion = run.champion()
        if champion is None:
            return {}
        content, settings, target = _content(run), run.project.settings, run.project.predictions.uri
        inputs = {
            "version": VERSION,
            "artifact": champion.artifact,
            "score": settings["score"],
            "split": None if run.spec.score.window == "all" else settings["split"],
            "key": run.spec.source.key,
        }

        def key(window: str) -> str | None:
            rows = content[window]
            return None if rows is None else content_key("score", {**inputs, "window": window, "rows": rows})

        return {f"{window} in {target}": key(window) for window in windows_to_score(run, parts_to_do(run)[0])}

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether the table of predictions is there, with the number that the registry has for the champion.

        It gives the model another one where it was deleted and counts from 1 again.
        """
        champion = run.champion()
        assert champion is not None
        return receipt.read(Scored).version == champion.version and run.places.table(run.project.predictions.uri)

    def planned(self, run: Run) -> tuple[StepState, str]:
        """Which windows the champion of now has not scored; another one may come of the run."""
        champion = run.champion()
        if champion is None:
            return "open", "there is no champion yet"
        if stale := stale_of(self, run):
            every = len(stale.keys) + len(stale.fresh)
            text = f"{len(stale.keys)} of {every} windows are not scored by version {champion.version} yet"
            return "done again", text
        return "kept", f"version {champion.version} has scored them all; another champion would score again"

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Let the champion predict the windows that it has not predicted yet, and replace them in the table."""
        from pyspark.sql import functions as F

        from sparkdl.pipeline.work.file_rows import part_frame

        champion, record, table = run.champion(), run.record, run.project.predictions
        assert champion is not None
        partitions = {partition.partition(" ")[0]: partition for partition in stale.keys}
        content, windows, part = _content(run), list(partitions), run.spec.score.window
        if part == "all":
            rows = run.clean(spark).where(F.col(WINDOW).isin(*windows))
        else:
            rows = part_frame(run.project, run.clean_to_divide(spark), {part: windows})
        frame = _predicted(run, rows, champion)
        with replacing(run.receipts, self.name, stale.keys) as new_receipts:
            replaced = [{WINDOW: name} for name in windows]
            table.write(frame, "replace", partition_by=[WINDOW], partitions=replaced, transaction=run.transaction())
            written = table.read(spark).where(F.col(WINDOW).isin(*windows)).groupBy(WINDOW).count().collect()
            counts = dict.fromkeys(windows, 0) | {row[WINDOW]: row["count"] for row in written}
            for window, partition in partitions.items():
                scored = Scored(
                    window=window,
                    target=table.uri,
                    content=str(content[window]),
                    rows=counts[window],
                    version=champion.version,
                    artifact=champion.artifact,
                )
                new_receipts[partition] = (str(stale.keys[partition]), scored)
        record.windows["score"] = sorted(partition.partition(" ")[0] for partition in (*stale.keys, *stale.fresh))
        record.predictions = counts
        record.places["predictions"] = table.uri
        return True

    def tell(self, run: Run) -> None:
        """The windows that are scored."""
        if run.champion() is not None:
            run.record.windows.setdefault("score", list(windows_to_score(run, parts_to_do(run)[0])))


def scored_windows(run: Run) -> dict[str, Receipt]:
    """The receipts of the windows of the table of predictions, invalidated ones among them."""
    target = run.project.predictions.uri
    receipts = [(receipt.read(Scored), receipt) for receipt in run.receipts.of("score").values()]
    return {scored.window: receipt for scored, receipt in receipts if scored.target == target}


def check_predictions(run: Run, spark: SparkSession, bundle: str) -> None:
    """Refuse a model, by the address of its bundle, whose predictions the table cannot hold beside those that it has.

    Raises:
        SchemaError: a column is of another type than in the table.
    """
    from pyspark.sql import functions as F

    from sparkdl.pipeline.work.labels import labels_of

    labels = labels_of(read_bundle(bundle))
    outputs = {
        name: F.lit(None).cast("array<float>" if label.outputs > 1 else "float")
        for name, label in zip(_output_names(labels), labels, strict=True)
    }
    _check_types(run.project.predictions, _named(run, run.clean(spark).withColumns(outputs), labels, 0))


def windows_to_score(run: Run, parts: Parts) -> tuple[str, ...]:
    """The windows that the file asks to score, and those that earlier runs owe, in order.

    Owed are, since the first window that was ever scored, those that no run came for, those whose rows have changed
    since, and, of any split, those that were scored and have no rows any more.
    """
    part, content = run.spec.score.window, _content(run)
    either = run.content(labels=True), run.content(labels=False)  # to keep a label from now on rescores nothing
    part_windows = tuple(name for name in content if content[name] != "") if part == "all" else parts.windows(part)
    receipts = scored_windows(run)
    scored = {name: receipt.read(Scored).content for name, receipt in receipts.items() if receipt.key}

    def owes(name: str) -> bool:
        if name in receipts:
            return scored.get(name) not in [rows_by_window[name] for rows_by_window in either]
        return content[name] != ""

    owed = {name for name, rows in content.items() if rows == "" and owes(name)}
    if receipts and part_windows and isinstance(run.spec.split, TimeSplit) and NO_TIME not in part_windows:
        first, last = min(receipts), max(part_windows)
        owed |= {name for name in content if first <= name < last and owes(name)}
    return tuple(sorted({*owed, *part_windows}))


def _content(run: Run) -> Mapping[str, str | None]:
    """A hash of what each window's predictions hold: of its rows with their labels where one of these is kept."""
    return run.content(labels=not set(run.spec.label).isdisjoint(run.spec.score.keep))


def _predicted(run: Run, rows: DataFrame, champion: ModelVersion) -> DataFrame:
    """The rows of the table of predictions for some clean rows."""
    from sparkdl.pipeline.work.labels import labels_of
    from sparkdl.scoring.score import score

    bundle = bundle_of(champion)
    labels = labels_of(bundle)
    config = ScoreConfig(batch_rows=run.spec.train.transform_batch_size)
    keep, names = [WINDOW, *_kept_columns(run, rows)], _output_names(labels)
    scored = score(rows, bundle, output_columns=names, keep=keep, config=config, trusted=run.project.trusted)
    predicted = _named(run, scored, labels, champion.version)
    return _fitted_to(run.project.predictions, predicted, run.transaction()).repartition(WINDOW)


def _kept_columns(run: Run, rows: DataFrame) -> list[str]:
    """The columns of the rows that the table has, too."""
    spec = run.spec
    kept_columns = list(dict.fromkeys([*spec.source.key, *spec.score.keep]))
    absent = [name for name in kept_columns if name not in rows.columns]
    if absent:
        raise SchemaError(f"score.keep names {absent[0]!r}, the rows have {rows.columns}: name one of these")
    return kept_columns


def _output_names(labels: Labels) -> list[str]:
    return [f"_output_{n}" for n in range(len(labels.names))]


def _named(run: Run, scored: DataFrame, labels: Labels, version: int) -> DataFrame:
    """What the model says of rows, as the columns of the table of predictions."""
    from pyspark.sql import functions as F

    kept_columns = _kept_columns(run, scored)
    columns: list[Column] = [F.col(WINDOW), *[F.col(quoted(name)) for name in kept_columns]]
    for label, name in zip(labels, _output_names(labels), strict=True):
        columns += _columns(label, F.col(name), _prefix(labels, label))
    columns += [
        F.lit(version).cast("int").alias("model_version"),
        F.lit(run.record.run_id).alias("run_id"),
        F.current_timestamp().alias("scored_at"),
    ]
    return scored.select(*columns)


def _check_types(table: Table, frame: DataFrame) -> list[str]:
    """The columns of a table that a pipeline wrote, if it can hold the rows; empty of any other, and of none."""
    columns = table.columns() if table.exists() else []
    if not set(columns) >= _OWN:
        return []
    remedy = "name another table with score.target, or delete this one, for predictions of another type"
    merged_schema(table.uri, table.schema_json(), delta_schema(frame.schema.json()).to_json(), remedy)
    return columns


def _fitted_to(table: Table, frame: DataFrame, transaction: AppTransaction | None) -> DataFrame:
    """The rows with the columns of the table, which gets those that it lacks; what is kept no longer becomes null.

    A table that no pipeline wrote stays as it is, and refuses rows with other columns.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema

    columns = _check_types(table, frame)
    if not columns:
        return frame
    new_names = [name for name in frame.columns if name not in columns]
    if new_names:
        schema = to_arrow_schema(frame.select(*map(quoted, new_names)).schema, timezone="UTC")
        table.append(schema.with_metadata(None).empty_table(), new_columns=True, transaction=transaction)
    absent = {field.name: from_arrow_type(field.type) for field in table.schema() if field.name not in frame.columns}
    return frame.withColumns({name: F.lit(None).cast(kind) for name, kind in absent.items()}) if absent else frame


def output_columns(labels: Labels, label: FittedLabel) -> list[str]:
    """The columns of the table of predictions that hold all that a model says of a label."""
    names = {"regression": "prediction", "binary": "probability", "multiclass": "probabilities"}
    suffixes = [quantile_column(level) for level in label.levels] or [names[label.type]]
    return [f"{_prefix(labels, label)}{suffix}" for suffix in suffixes]


def _prefix(labels: Labels, label: FittedLabel) -> str:
    """What the columns of a label begin with, where there are several."""
    return "" if len(labels.names) == 1 else f"{label.name}_"


def _columns(label: FittedLabel, output: Column, prefix: str) -> list[Column]:
    from pyspark.sql import functions as F

    if label.levels:
        several = [F.element_at(output, position) for position in range(1, len(label.levels) + 1)]
        quantiles = [value.cast("double") for value in (several if len(label.levels) > 1 else [output])]
        named = zip(map(quantile_column, label.levels), quantiles, strict=True)
        middle = quantiles[label.middle].alias(f"{prefix}prediction")
        return [middle, *(value.alias(f"{prefix}{name}") for name, value in named)]
    if label.type == "regression":
        return [output.cast("double").alias(f"{prefix}prediction")]
    names = F.array(*[F.lit(value) for value in label.classes])
    if label.type == "binary":
        positive = 1 / (1 + F.exp(-output.cast("double")))
        chosen = F.when(positive > 0.5, F.lit(label.classes[1])).otherwise(F.lit(label.classes[0]))
        return [chosen.alias(f"{prefix}prediction"), positive.alias(f"{prefix}probability")]
    position = F.array_position(output, F.array_max(output)).cast("int")
    powers = F.transform(output, lambda value: F.exp(value.cast("double") - F.array_max(output)))
    total = F.aggregate(powers, F.lit(0.0), lambda sum_, value: sum_ + value)
    shares = F.transform(powers, lambda value: value / total)
    return [
        F.element_at(names, position).alias(f"{prefix}prediction"),
        F.element_at(shares, position).alias(f"{prefix}probability"),
        shares.alias(f"{prefix}probabilities"),
    ]
