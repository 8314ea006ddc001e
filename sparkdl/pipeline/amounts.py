"""How much the steps of a planned run have before them: rows, bytes, seconds, as far as files and earlier runs tell.

Rows come from a table's log, from the footers of Parquet files and from receipts; what none of these tells is None.
Seconds are those of the newest run that did the step, in proportion to the rows; without such a run None, too, but for
a training of the default network, whose steps were timed when it was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparkdl.pipeline.recipe import settled_train
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.base import Size
from sparkdl.pipeline.spec import HashSplit, PipelineSpec, TimeSplit
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.trials import trials_of, with_settings
from sparkdl.pipeline.windows import WHOLE, Part, Parts

_STEP_SECONDS, _ROW_SECONDS = 5e-3, 16e-6
"""A step of the default network, and each row of it, take about as long on one processor: measured 2026-11 with layers
of 128 (64 rows of 28 features 5 ms, 256 rows of 9 7 ms), and a quarter more for those of 192 (docs/quality.md)."""


@dataclass(frozen=True, kw_only=True)
class Amount:
    """What a step has before it.

    Attributes:
        rows: that it reads; None where nothing tells.
        told: how far the rows can be relied upon: ``at most`` before expectations have judged them, ``as last
            ingested`` where only Spark can tell what has changed since; empty where they are known.
        bytes: of the files that it reads; None where nothing tells.
        seconds: that it may take; None without an earlier run to go by, unless the default network is trained.
        by: run id of that one; empty where there is none.
    """

    rows: int | None = None
    told: Literal["", "at most", "as last ingested"] = ""
    bytes: int | None = None
    seconds: float | None = None
    by: str = ""


def amounts_of(
    spec: PipelineSpec,
    sizes: Mapping[str, Size],
    due: Sequence[str] | None,
    window_receipts: Mapping[str, WindowReceipt],
    parts: Parts | None,
) -> dict[str, Amount]:
    """Rows and bytes by step.

    Args:
        spec: the pipeline.
        sizes: of the source's windows.
        due: windows that will be ingested; None where only Spark can tell.
        window_receipts: what is known of the clean rows of each window.
        parts: the windows of each part; None where there are none yet.
    """
    shows_no_windows = set(sizes) == {WHOLE}
    windows_read = [WHOLE] if due is None or shows_no_windows else list(due)
    source = source_of(spec.source)
    counted_rows = {name: source.count(sizes[name]) for name in windows_read if name in sizes}
    ingest = Amount(
        rows=_sum(counted_rows.get(name) for name in windows_read) if due != [] else 0,
        bytes=_sum(sizes[name].bytes if name in sizes else None for name in windows_read),
    )
    amounts = {"ingest": ingest}
    if parts is None:
        return amounts
    due_windows = set(due or ())
    rows_by_window: dict[str, int | None] = {name: receipt.kept for name, receipt in window_receipts.items()}
    for name in due_windows:
        rows_by_window[name] = counted_rows.get(WHOLE if shows_no_windows and len(due_windows) == 1 else name)

    def part_amount(*names: Part) -> Amount:
        rows: list[int | None] = []
        for name in names:
            windows = parts.windows(name)
            share: float | None = 1.0  # a split by time has all rows of its windows
            if not isinstance(spec.split, TimeSplit):
                share = float(getattr(spec.split, name)) if isinstance(spec.split, HashSplit) else None
            total = _sum(rows_by_window.get(window) for window in windows)
            rows.append(None if total is None or share is None else round(total * share))
        touched = {window for name in names for window in parts.windows(name)}
        return Amount(rows=_sum(rows), told=_told(due, touched))

    score = part_amount("score")
    if spec.score.window == "all":
        score = Amount(rows=_sum(rows_by_window.values()), told=_told(due, due_windows))
    return amounts | {
        "features": part_amount("train"),
        "shards": part_amount("train", "validate"),
        "train": part_amount("train"),
        "evaluate": part_amount(parts.judging),
        "score": score,
    }


def with_seconds(spec: PipelineSpec, amounts: Mapping[str, Amount], records: Iterable[RunRecord]) -> dict[str, Amount]:
    """The same with seconds, by the newest record that did each step with a known number of rows.

    Args:
        spec: the pipeline.
        amounts: by step.
        records: of earlier runs, the newest first.
    """
    timed = dict(amounts)
    open_steps = {name for name, amount in amounts.items() if amount.rows is not None}
    for record in records:
        for name in sorted(open_steps):
            work, names = _work(record, name), ("trial", "train") if name == "train" else (name,)
            notes = [note for note in record.steps if note.name in names]
            if not work or not notes or any(note.kept for note in notes):  # an earlier run has made some of the trials
                continue
            amount = amounts[name]
            assert amount.rows is not None
            passes = 1
            if name == "train":
                passes = sum(settled_train(trial, amount.rows).epochs or 0 for trial in _trials(spec))
            seconds = sum(note.seconds for note in notes) * amount.rows * passes / work
            timed[name] = replace(amount, seconds=seconds, by=record.run_id)
            open_steps.remove(name)
        if not open_steps:
            break
    if "train" in open_steps and spec.model.factory is None:
        timed["train"] = replace(timed["train"], seconds=_modelled(spec, timed["train"].rows or 0))
    return timed


def _modelled(spec: PipelineSpec, rows: int) -> float:
    """Seconds of all epochs of all trainings of the default network, as long as each rank has a processor."""
    seconds = 0.0
    for trial in _trials(spec):
        train = settled_train(trial, rows)
        assert train.batch_size is not None
        assert train.epochs is not None
        of_rank = rows / (train.num_proc or 1)
        steps = train.train_steps_per_epoch or math.ceil(of_rank / train.batch_size)
        read = min(of_rank, steps * train.batch_size)
        seconds += train.epochs * (steps * _STEP_SECONDS + read * _ROW_SECONDS)
    return seconds


def _work(record: RunRecord, step: str) -> int | None:
    """The rows that a run passed through a step, each as often as it passed."""
    rows, trained = record.rows, record.trained
    if step == "train":
        if trained is None or not trained.trials:
            return trained.rows if trained is not None else None
        return rows.get("train", 0) * sum(trial.epochs for trial in trained.trials)
    return {
        "ingest": rows.get("read"),
        "features": rows.get("train"),
        "shards": rows.get("train", 0) + rows.get("validate", 0),
        "evaluate": rows.get("test", rows.get("validate")),
        "score": sum(record.predictions.values()),
    }.get(step)


def _trials(spec: PipelineSpec) -> list[PipelineSpec]:
    """The pipeline of each training: one, or those of a search."""
    return [with_settings(spec, settings) for settings in trials_of(spec)]


def _told(due: Sequence[str] | None, touched: set[str]) -> Literal["", "at most", "as last ingested"]:
    if due is None:
        return "as last ingested"
    return "" if touched.isdisjoint(due) else "at most"


def _sum(values: Iterable[int | None]) -> int | None:
    """The sum, None where a part of it is not known."""
    numbers = list(values)
    return sum(value for value in numbers if value is not None) if None not in numbers else None
