"""What a person wants to know in ten seconds: the end of a run, and where a pipeline stands, as short lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sparkdl.estimator.space import settings_text
from sparkdl.pipeline.plan import Plan
from sparkdl.pipeline.rows.window_receipt import transformed
from sparkdl.pipeline.spec.base import count_of
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Drifted, Evaluated, Live, Trained
from sparkdl.pipeline.status import Status
from sparkdl.pipeline.windows import PARTS, deleted_text, windows_text
from sparkdl.storage import size_text

Line = tuple[str, str]
T = TypeVar("T")
_PLACES = ("clean", "quarantine", "predictions", "record", "report")
_SHOWN = 6


def _without_empty(lines: Callable[[T], Iterator[Line]]) -> Callable[[T], list[Line]]:
    @functools.wraps(lines)
    def filtered(subject: T) -> list[Line]:
        return [line for line in lines(subject) if line[1]]

    return filtered


@_without_empty
def summary_lines(record: RunRecord) -> Iterator[Line]:
    """The end of a run: rows, windows, model, predictions, time and places, as far as it came."""
    yield "why", record.message
    yield "rows", _rows(record)
    yield "warnings", ", ".join(f"{name} ({rows:,} rows)" for name, rows in record.warned.items())
    parts = [f"{part} {windows_text(record.windows[part])}" for part in PARTS if part in record.windows]
    yield "windows", "; ".join(parts)
    yield "deleted", deleted_text(record.windows.get("deleted", ()), record.windows.get("removed", ()))
    yield "live", "" if record.live is None else _live(record.live)
    yield "drift", "" if record.drift is None else _drift(record.drift)
    trained = record.trained
    if trained is not None:
        best_epoch, kept_epoch = trained.best_epoch, trained.kept_epoch
        kept_text = "" if kept_epoch in (None, best_epoch) else f", kept {kept_epoch + 1}"
        best = "" if best_epoch is None else f" (best {best_epoch + 1}{kept_text})"
        rows = sum(record.unlabelled.values())
        without = f" ({rows:,} of all held-out and training rows have no label yet, and were left out)" if rows else ""
        yield (
            "training",
            f"{record.rows.get('train', 0):,} rows{without}, {count_of(trained.ranks, 'rank')} "
            f"({trained.backend}), {count_of(trained.epochs, 'epoch')}{best}, {count_of(trained.steps, 'step')}",
        )
        yield "recipe", _named(trained.recipe)
        for sentence in trained.warnings:
            yield "losses", sentence
        yield from _trials(trained)
    if record.evaluated is not None:
        yield "quality", _quality(record.evaluated)
        if record.evaluated.intervals is not None:
            yield "intervals", record.evaluated.intervals.text()
        if record.evaluated.calibrated is not None:
            yield "calibration", record.evaluated.calibrated.text()
        yield "baseline", record.evaluated.decision.baseline_text()
        trees = record.evaluated.boosted
        yield "trees", "" if trees is None else trees.text(record.evaluated.decision.gate.metric)
    if "version" in record.model:
        champion = record.model.get("champion")
        stands = "no champion" if champion is None else f"the champion is version {champion}"
        yield "model", f"{record.model['name']} version {record.model['version']}; {stands}"
    if record.predictions:
        rows = sum(record.predictions.values())
        yield "predictions", f"{rows:,} rows of {windows_text(list(record.predictions))}"
    yield "time", _time(record)
    for name in _PLACES:
        yield name, record.places.get(name, "")


def _trials(trained: Trained) -> Iterator[Line]:
    """A search: how many trials, and what each came to."""
    if not trained.trials:
        return
    failed = sum(bool(trial.failed) for trial in trained.trials)
    stopped = sum(trial.stopped for trial in trained.trials)
    unfinished_text = (f", {failed} failed" if failed else "") + (f", {stopped} stopped early" if stopped else "")
    best = 1 + (trained.chosen or 0)
    yield (
        "search",
        f"{count_of(len(trained.trials), 'trial')} by {trained.chosen_by}{unfinished_text}; trial {best} is the best",
    )
    for number, trial in enumerate(trained.trials[:_SHOWN], 1):
        shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in trial.settings.items()}
        outcome = trial.failed if trial.value is None else f"{trained.chosen_by} {trial.value:.4g}"
        early = f", stopped after {count_of(trial.epochs, 'epoch')}" if trial.stopped else ""
        yield f"trial {number}", f"{settings_text(shown)}: {outcome}{early}"
    if len(trained.trials) > _SHOWN:
        yield "trials", f"{len(trained.trials) - _SHOWN} more are in the record"


def _rows(record: RunRecord) -> str:
    rows = record.rows
    if "read" not in rows:
        return ""
    windows = record.windows.get("ingested", [])
    if not windows:
        return "none is new"
    counts = transformed(record.books)
    source_rows = "" if counts is None else f"{counts[0]:,} in the source, {counts[1]:,} after the transform; "
    return (
        f"{source_rows}{rows['read']:,} read = {rows['kept']:,} kept + {rows['quarantined']:,} quarantined + "
        f"{rows['duplicates']:,} duplicates, of {windows_text(windows)}"
    )


def _quality(evaluated: Evaluated) -> str:
    decision = evaluated.decision
    metric, challenger_values = decision.gate.metric, decision.challenger.values
    value = f"{metric} {challenger_values[metric]:.4g}" if metric in challenger_values else f"{metric} undefined"
    champion_value = decision.champion.values.get(metric) if decision.champion is not None else None
    champion_text = "" if champion_value is None else f", the champion's {champion_value:.4g}"
    return f"{value} of {evaluated.label}{champion_text}, on {evaluated.rows_text()}"


def _drift(drift: Drifted) -> str:
    return drift.reason if drift.action == "none" else f"{drift.action}: {drift.reason}"


def _live(live: Live) -> str:
    """The newest error, and how many windows wait for labels."""
    parts = []
    last = next((error for error in reversed(live.windows) if error.value(live.metric) is not None), None)
    if last is not None and last.measured is not None:
        caveat = ", which was trained on it" if last.trained_on else ""
        baseline_text = "" if last.baseline is None else f" (without a model {last.baseline:.4g})"
        parts.append(
            f"{live.metric} {last.value(live.metric):.4g}{baseline_text} of {live.label} on {last.measured.rows:,} "
            f"rows of window {last.window} as version {last.version} predicted them{caveat}"
        )
        if last.unmatched:
            parts.append(f"{count_of(last.unmatched, 'row')} more have a gap in the key, or are gone")
    waiting = sum(error.waiting > 0 for error in live.windows)
    if waiting:
        parts.append(f"{waiting} windows wait for labels" if waiting > 1 else "1 window waits for labels")
    return "; ".join(filter(None, [*parts, live.reason]))


def _time(record: RunRecord) -> str:
    seconds: dict[str, float] = {}
    for note in record.steps:
        if not note.kept:
            seconds[note.name] = seconds.get(note.name, 0.0) + note.seconds
    kept = [note.name for note in record.steps if note.kept]
    other = record.seconds - sum(seconds.values())
    if seconds and other >= 0.05:
        seconds["Spark's start and the rest"] = other
    parts = [f"{name} {spent:.1f} s" for name, spent in seconds.items()]
    return " · ".join(parts) + (f"{'; ' if parts else ''}kept: {', '.join(dict.fromkeys(kept))}" if kept else "")


@_without_empty
def status_lines(status: Status) -> Iterator[Line]:
    """Where a pipeline stands."""
    last, champion = status.last_run, status.champion
    if last is None:
        yield "last run", "none yet"
    else:
        yield "last run", f"{last.run_id}: {last.outcome}, exit code {last.exit_code}, {last.seconds:.1f} s"
        yield "why", last.message
    if champion is None:
        yield "champion", "none"
    else:
        published = f"{champion.name} version {champion.version} of {champion.published:%Y-%m-%d %H:%M}"
        yield "champion", f"{published}: {_metrics(status, champion.metrics)}"
    yield "drift", "" if status.drift is None else _drift(status.drift)
    kept_rows = sum(receipt.kept for receipt in status.done)
    yield "done", f"{windows_text([receipt.window for receipt in status.done])}, {kept_rows:,} rows kept"
    if status.source:
        yield "due", f"cannot be told: {status.source}"
    else:
        yield "due", windows_text(status.due) if status.due is not None else f"only Spark can tell: {status.taken_in}"
    yield "ahead", _ahead(status.ahead)
    yield "running", "nobody" if status.holder is None else str(status.holder)


def _ahead(windows: Sequence[str] | None) -> str:
    return f"{windows_text(windows)}: left alone until then" if windows else ""


def _metrics(status: Status, metrics: Mapping[str, float]) -> str:
    """The champion's metrics: the one that judges first, beside the baseline's, and on which rows all were measured."""
    baseline = metrics.get(f"baseline_{status.metric}")
    names = [name for name in metrics if not name.startswith("baseline_")]
    names.sort(key=lambda name: name != status.metric)
    shown = [f"{name} {metrics[name]:.4g}" for name in names[:_SHOWN]]
    if baseline is not None and names[0] == status.metric:
        shown[0] += f" (without a model {baseline:.4g})"
    rows = "" if status.judged is None else f"; on {status.judged.rows_text()}"
    return f"{', '.join(shown)}{rows}"


@_without_empty
def plan_lines(plan: Plan) -> Iterator[Line]:
    """What a run would do."""
    if plan.due is None:
        ingest = "only Spark can tell: the source shows no windows before it is read"
    else:
        causes: dict[str, list[str]] = {}
        for window, why in plan.due.items():
            causes.setdefault(why, []).append(window)
        parts = [f"{windows_text(windows)}: {why}" for why, windows in causes.items()]
        ingest = "; ".join(parts) or f"nothing: {windows_text(plan.unchanged)} as before"
    yield "ingest", ingest + _amount(plan, "ingest")
    yield "deleted", deleted_text(plan.deleted)
    yield "ahead", _ahead(plan.ahead)
    if plan.transformed is not None:
        rows_read, rows_after = plan.transformed
        yield "transform", f"as last ingested: {rows_read:,} rows in the source, {rows_after:,} after the transform"
    for step in plan.steps:
        yield step.name, f"{step.state}: {step.why}{_amount(plan, step.name)}"
    if plan.recipe:
        yield "recipe", f"{_named(plan.recipe)}: by the number of training rows, since train leaves it out"
    yield "cost", _cost(plan) if plan.amounts else ""
    if plan.holder is not None:
        yield "first", f"{plan.holder}: a run beside it would leave with exit code 30"
    yield "then", f"refused: {plan.stops}" if plan.stops else ""


def _amount(plan: Plan, step: str) -> str:
    """What a step has before it, after its line."""
    amount = plan.amounts.get(step)
    if amount is None:
        return ""
    rows = "" if amount.rows is None else f"{f'{amount.told} ' if amount.told else ''}{amount.rows:,} rows"
    seconds = "" if amount.seconds is None else f"about {_seconds(amount.seconds)}"
    parts = [rows, "" if amount.bytes is None else size_text(amount.bytes), seconds]
    return f" ({', '.join(part for part in parts if part)})" if any(parts) else ""


def _named(recipe: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in recipe.items())


def _cost(plan: Plan) -> str:
    """What all of it may take, and what that is taken from."""
    timed = {name: amount for name, amount in plan.amounts.items() if amount.seconds is not None}
    if not timed:
        return "no earlier run to go by"
    total = sum(amount.seconds or 0.0 for amount in timed.values())
    runs = ", ".join(dict.fromkeys(amount.by for amount in timed.values() if amount.by))
    by = [f"the rows and times of run {runs}"] if runs else []
    by += ["the steps of the default network at full length"] if any(not amount.by for amount in timed.values()) else []
    untimed = ", ".join(name for name in plan.amounts if name not in timed)
    untimed_text = f"; nothing to go by for {untimed}" if untimed else ""
    return f"about {_seconds(total)} by {' and '.join(by)}{untimed_text}; starting Spark comes on top"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
