"""What a person wants to know in ten seconds: the end of a run, and where a pipeline stands, as short lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparkdl.pipeline.plan import Plan
from sparkdl.pipeline.rows.window_receipt import transformed
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Drifted, Evaluated, Live, Trained
from sparkdl.pipeline.status import Status
from sparkdl.pipeline.windows import NO_TIME, PARTS, deleted_text
from sparkdl.storage import size_text

Line = tuple[str, str]
_PLACES = ("clean", "quarantine", "predictions", "record", "report")
_SHOWN = 6


def summary_lines(record: RunRecord) -> list[Line]:
    """The end of a run: rows, windows, model, predictions, time and places, as far as it came."""
    return [line for line in _summary(record) if line[1]]


def _summary(record: RunRecord) -> Iterator[Line]:
    yield "why", record.message
    yield "rows", _rows(record)
    yield "warnings", ", ".join(f"{name} ({rows:,} rows)" for name, rows in record.warned.items())
    parts = [f"{part} {_span(record.windows[part])}" for part in PARTS if part in record.windows]
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
            f"{record.rows.get('train', 0):,} rows{without}, {trained.ranks} ranks ({trained.backend}), "
            f"{trained.epochs} epochs{best}, {trained.steps:,} steps",
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
        yield "predictions", f"{rows:,} rows of {_span(list(record.predictions))}"
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
    yield "search", f"{len(trained.trials)} trials by {trained.chosen_by}{unfinished_text}; trial {best} is the best"
    for index, trial in list(enumerate(trained.trials))[:_SHOWN]:
        settings = ", ".join(f"{name}={_short(value)}" for name, value in trial.settings.items())
        outcome = trial.failed if trial.value is None else f"{trained.chosen_by} {trial.value:.4g}"
        early = f", stopped after {trial.epochs} epochs" if trial.stopped else ""
        yield f"trial {index + 1}", f"{settings}: {outcome}{early}"
    if len(trained.trials) > _SHOWN:
        yield "trials", f"{len(trained.trials) - _SHOWN} more are in the record"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
        f"{rows['duplicates']:,} duplicates, of {_span(windows)}"
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
    measured_windows = [
        error for error in live.windows if error.measured is not None and live.metric in error.measured.values
    ]
    if measured_windows:
        last, measured = measured_windows[-1], measured_windows[-1].measured
        assert measured is not None
        value, caveat = measured.values[live.metric], ", which was trained on it" if last.trained_on else ""
        baseline_text = "" if last.baseline is None else f" (without a model {last.baseline:.4g})"
        parts.append(
            f"{live.metric} {value:.4g}{baseline_text} of {live.label} on {measured.rows:,} rows of window "
            f"{last.window} as version {last.version} predicted them{caveat}"
        )
    waiting = sum(error.waiting > 0 for error in live.windows)
    if waiting:
        parts.append(f"{waiting} windows wait for labels" if waiting > 1 else "1 window waits for labels")
    return "; ".join(filter(None, [*parts, live.reason]))


def _time(record: RunRecord) -> str:
    seconds: dict[str, float] = {}
    for note in record.steps:
        if not note.kept:
            seconds[note.name] = max(seconds.get(note.name, 0.0), note.seconds)  # windows are scored together
    kept = [note.name for note in record.steps if note.kept]
    other = record.seconds - sum(seconds.values())
    if seconds and other >= 0.05:
        seconds["Spark's start and the rest"] = other
    parts = [f"{name} {spent:.1f} s" for name, spent in seconds.items()]
    return " · ".join(parts) + (f"{'; ' if parts else ''}kept: {', '.join(dict.fromkeys(kept))}" if kept else "")


def status_lines(status: Status) -> list[Line]:
    """Where a pipeline stands."""
    lines: list[Line] = []
    last = status.last_run
    if last is None:
        lines.append(("last run", "none yet"))
    else:
        lines.append(("last run", f"{last.run_id}: {last.outcome}, exit code {last.exit_code}, {last.seconds:.1f} s"))
        if last.message:
            lines.append(("why", last.message))
    champion = status.champion
    if champion is None:
        lines.append(("champion", "none"))
    else:
        published = f"{champion.name} version {champion.version} of {champion.published:%Y-%m-%d %H:%M}"
        lines.append(("champion", f"{published}: {_metrics(status, champion.metrics)}"))
    if status.drift is not None:
        lines.append(("drift", _drift(status.drift)))
    kept_rows = sum(receipt.kept for receipt in status.done)
    lines.append(("done", f"{_span([receipt.window for receipt in status.done])}, {kept_rows:,} rows kept"))
    if status.source:
        lines.append(("due", f"cannot be told: {status.source}"))
    elif status.due is None:
        lines.append(("due", f"only Spark can tell: {status.taken_in}"))
    else:
        lines.append(("due", _span(status.due)))
    if status.ahead:
        lines.append(("ahead", f"{_span(status.ahead)}: left alone until then"))
    lines.append(("running", str(status.holder) if status.holder is not None else "nobody"))
    return lines


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


def plan_lines(plan: Plan) -> list[Line]:
    """What a run would do."""
    if plan.due is None:
        lines = [("ingest", "only Spark can tell: the source shows no windows before it is read")]
    else:
        causes: dict[str, list[str]] = {}
        for window, why in plan.due.items():
            causes.setdefault(why, []).append(window)
        parts = [f"{_span(windows)}: {why}" for why, windows in causes.items()]
        lines = [("ingest", "; ".join(parts) or f"nothing: {_span(plan.unchanged)} as before")]
    if plan.deleted:
        lines.append(("deleted", deleted_text(plan.deleted)))
    if plan.ahead:
        lines.append(("ahead", f"{_span(plan.ahead)}: left alone until then"))
    lines = [(name, text + _amount(plan, name)) for name, text in lines]
    if plan.transformed is not None:
        rows_read, rows_after = plan.transformed
        lines.append(
            ("transform", f"as last ingested: {rows_read:,} rows in the source, {rows_after:,} after the transform")
        )
    lines += [(step.name, f"{step.state}: {step.why}{_amount(plan, step.name)}") for step in plan.steps]
    if plan.recipe:
        rule = "by the number of training rows, since train leaves it out"
        lines.append(("recipe", f"{_named(plan.recipe)}: {rule}"))
    if plan.amounts:
        lines.append(("cost", _cost(plan)))
    if plan.holder is not None:
        lines.append(("first", f"{plan.holder}: a run beside it would leave with exit code 30"))
    if plan.stops:
        lines.append(("then", f"refused: {plan.stops}"))
    return lines


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
    untimed_steps = [name for name in plan.amounts if name not in timed]
    runs = ", ".join(dict.fromkeys(amount.by for amount in timed.values() if amount.by))
    by = [f"the rows and times of run {runs}"] if runs else []
    by += ["the steps of the default network at full length"] if any(not amount.by for amount in timed.values()) else []
    untimed_text = f"; nothing to go by for {', '.join(untimed_steps)}" if untimed_steps else ""
    return f"about {_seconds(total)} by {' and '.join(by)}{untimed_text}; starting Spark comes on top"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min"


def _span(windows: Sequence[str]) -> str:
    """Some windows in a few words: ``3 windows 2026-03-01 to 2026-03-04``."""
    dated = [name for name in windows if name != NO_TIME]
    undated = ["rows without a time"] if len(dated) < len(windows) else []
    if len(dated) > 1:
        return " and ".join([f"{len(dated)} windows {dated[0]} to {dated[-1]}", *undated])
    return " and ".join([*(f"window {name}" for name in dated), *undated]) or "no window"
