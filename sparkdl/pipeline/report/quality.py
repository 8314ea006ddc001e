"""How good the models are: learning curves, metrics of challenger and champion, error by slice.

Enters: a record. Leaves: sections of the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from sparkdl.pipeline.judging.gate import Decision
from sparkdl.pipeline.judging.metrics.measure import Measured
from sparkdl.pipeline.judging.metrics.slices import LEAST_ROWS, MISSING, OTHERS
from sparkdl.pipeline.report.charts import Axis, Plot, bar, span_mark
from sparkdl.pipeline.report.html import Child, Html, tag
from sparkdl.pipeline.report.tables import figures, number, section, sentence, table
from sparkdl.pipeline.spec.bounds import HIGHER_IS_BETTER
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Evaluated, Trained

__all__ = ["compared", "learned", "sliced", "tried"]

_BESIDE = ("mae", "log_loss")
"""Metrics that a slice shows beside the one that is judged by."""
History = Sequence[Mapping[str, float | int | None]]


def learned(trained: Trained | None) -> Html | None:
    """The training: its curves and its epochs."""
    if trained is None:
        return None
    best = "" if trained.best_epoch is None else f", the best was epoch {trained.best_epoch + 1}"
    if trained.kept_epoch is not None and trained.kept_epoch != trained.best_epoch:
        best += (
            f", the weights of epoch {trained.kept_epoch + 1} are kept: train.early_stopping_patience keeps the best"
        )
    warnings = [tag("p", sentence(warning), class_="alarm") for warning in trained.warnings]
    spent = trained.seconds.get("fit", 0.0)
    pace = f", {trained.rows / spent:,.0f} rows a second" if spent > 0 else ""
    text = (
        f"{trained.epochs:,} epochs{best}; {trained.steps:,} steps over {trained.rows:,} rows{pace}, on "
        f"{trained.ranks} ranks ({trained.backend})."
    )
    names = list(dict.fromkeys(name for row in trained.history for name in row if name != "epoch"))
    lines = [(number(at + 1), *(number(row.get(name)) for name in names)) for at, row in enumerate(trained.history)]
    epochs = tag("details", tag("summary", "Every epoch"), table(("epoch", *names), lines)) if lines else None
    return section("Training", tag("p", text), warnings or None, figures(list(_curves(trained))), epochs)


def tried(trained: Trained | None) -> Html | None:
    """The trials of a search: every setting, what it came to, and which was chosen."""
    if trained is None or not trained.trials:
        return None
    names = list(trained.trials[0].settings)
    lines = [
        (
            number(at + 1),
            *(str(trial.settings[name]) for name in names),
            trial.failed or number(trial.value),
            number(trial.epochs),
            number(trial.seconds),
            "chosen" if at == trained.chosen else "",
        )
        for at, trial in enumerate(trained.trials)
    ]
    failed = sum(bool(trial.failed) for trial in trained.trials)
    text = f"{len(lines)} trials on the same shards, compared by {trained.chosen_by}; {failed} failed."
    return section(
        "Search", tag("p", text), table(("trial", *names, trained.chosen_by, "epochs", "seconds", ""), lines)
    )


def _curves(trained: Trained) -> Iterator[Html]:
    """The loss first, then each metric that was watched."""
    names = dict.fromkeys(name for row in trained.history for name in row if f"val_{name}" in row)
    for name in names:
        yield _curve(trained.history, name, trained.best_epoch, wide=len(names) == 1)


def _curve(history: History, name: str, best: int | None, *, wide: bool) -> Html:
    training = [row.get(name) for row in history]
    validation = [row.get(f"val_{name}") for row in history]
    # the mean over the first epoch begins at random weights: it would press all that follows into one line
    shown = [*validation, *(training[1:] if len(training) > 2 else training)]
    x = Axis("epoch", 0.5, len(history) + 0.5, whole=True)
    plot = Plot(f"{name} by epoch", x, Axis.over(name, shown), wide)
    epochs = [float(number + 1) for number in range(len(history))]
    plot.line(zip(epochs, training, strict=True), "s1", "training, mean over the epoch", dots=True)
    plot.line(zip(epochs, validation, strict=True), "s2", "validation, after the epoch", dots=True)
    if best is not None and best < len(history) and validation[best] is not None:
        plot.dot(best + 1.0, float(validation[best] or 0.0), "ring", 6.0, f"best epoch, {best + 1}")
    return plot.figure()


def compared(record: RunRecord) -> Html | None:
    """Metrics of challenger and champion on the same rows, and what the gate said."""
    evaluated = record.evaluated
    if evaluated is None:
        return None
    decision = evaluated.decision
    kept = any(note.name == "evaluate" and note.kept for note in record.steps)
    before = "An earlier run judged this; nothing that decides it has changed since. " if kept else ""
    told = None
    if before or decision.reason not in record.message:  # else it stands at the head of the page
        told = tag("p", f"{before}{'Promoted' if decision.promote else 'Not promoted'}: {decision.reason}.")
    label = f"Measured on {evaluated.rows_text()}"
    label += "" if decision.positives is None else f", {decision.positives:,} of them positive"
    if evaluated.part == "validate":
        label += "; the same rows choose the epoch, so figures are a little too good: give split a part to test"
    if decision.groups < decision.rows:
        label += (
            f". They are of {decision.groups:,} {decision.gate.unit}: what belongs together errs together, so it is "
            "drawn together where chance is told from a gain"
        )
    notes = [tag("p", text, class_="note") for text in _undefined(decision)]
    return section("Challenger and champion", told, tag("p", f"{label}."), _metrics(decision), notes or None)


def _metrics(decision: Decision) -> Html:
    mine, gate = decision.challenger.values, decision.gate
    theirs = decision.champion.values if decision.champion is not None else None
    names = list(dict.fromkeys([*mine, *(theirs or {})]))
    names.sort(key=lambda name: name != gate.metric)
    baseline = decision.baseline
    floors = {floor.split()[0]: floor for floor in gate.floors}
    lines: list[Sequence[Child]] = []
    for name in names:
        new, old = mine.get(name), None if theirs is None else theirs.get(name)
        marks = [mark for mark in ("judged by" if name == gate.metric else "", floors.get(name, "")) if mark]
        words = f"{name} ({', '.join(marks)})" if marks else name
        line: list[Child] = [words, _mark(number(new), _wins(name, new, old))]
        line += [] if theirs is None else [_mark(number(old), _wins(name, old, new))]
        if baseline is not None:
            line += [number(baseline.values.get(name)), baseline.guesses.get(name, "")]
        lines.append(line)
    header = ["metric", "challenger", *([] if theirs is None else ["champion before"])]
    header += [] if baseline is None else ["without a model", "by predicting"]
    return table(header, lines)


def _wins(name: str, value: float | None, other: float | None) -> bool:
    if value is None or other is None or value == other or name not in HIGHER_IS_BETTER:
        return False
    return (value > other) == HIGHER_IS_BETTER[name]


def _mark(text: str, good: bool) -> Child:
    return tag("b", text) if good else text


def _undefined(decision: Decision) -> Iterator[str]:
    for who, measured in (("challenger", decision.challenger), ("champion", decision.champion)):
        for text in measured.undefined.values() if measured is not None else ():
            yield f"Of the {who}: {text}."


def sliced(record: RunRecord) -> Html | None:
    """The error by the values of the columns that the file names, of the challenger and of the champion before."""
    evaluated = record.evaluated
    if evaluated is None or not evaluated.slices:
        return None
    rows = tag("p", f"{evaluated.decision.gate.metric} of {evaluated.label} on {evaluated.rows_text()}.")
    return section("Error by slice", rows, [_slices(evaluated, column) for column in evaluated.slices])


def _slices(evaluated: Evaluated, column: str) -> list[Html]:
    mine, theirs = _in_order(evaluated.slices[column]), evaluated.champion_slices.get(column, {})
    metric = evaluated.decision.gate.metric
    without = evaluated.baseline_slices.get(column, {})
    more = [name for name in _BESIDE if name != metric and any(name in one.values for one in mine.values())]
    axis = _bias_axis(mine)
    most = max((abs(one.values.get(metric, 0.0)) for one in mine.values()), default=0.0) or 1.0
    lines: list[Sequence[Child]] = []
    for name, one in mine.items():
        value, other = one.values.get(metric), theirs[name].values.get(metric) if name in theirs else None
        line: list[Child] = [name, number(one.rows), _mark(number(value), _wins(metric, value, other))]
        line += [bar(abs(value or 0.0) / most)]
        line += [_mark(number(other), _wins(metric, other, value))] if theirs else []
        line += [number(without.get(name))] if without else []
        line += [number(one.values.get(each)) for each in more]
        lines.append([*line, *_bias(one, axis)] if axis is not None else line)
    header = [column, "rows", metric, "", *(["champion before"] if theirs else [])]
    header += [*(["without a model"] if without else []), *more]
    header += ["bias", "with 95 % interval"] if axis is not None else []
    return [tag("h3", column), table(header, lines, note=_left_out(evaluated, column))]


def _in_order(slices: Mapping[str, Measured]) -> Mapping[str, Measured]:
    """Numbers, such as the hours of a day, in their order; whatever else the largest first, as it is."""
    places: dict[str, float] = {}
    for name in slices:
        try:
            places[name] = math.inf if name in (MISSING, OTHERS) else float(name)
        except ValueError:
            return slices
    return {name: slices[name] for name in sorted(slices, key=lambda name: (places[name], name == OTHERS))}


def _left_out(evaluated: Evaluated, column: str) -> str:
    values, shown = evaluated.values.get(column, 0), [one for one in evaluated.slices[column] if one != OTHERS]
    if values <= len(shown):
        return ""
    return (
        f"{values:,} different values: the largest, and the worst of those with {LEAST_ROWS} rows or more; the other "
        f"{values - len(shown):,} stand together as {OTHERS}."
    )


def _margin(one: Measured) -> float:
    """Half the width of the 95 % interval of the mean residual."""
    rmse, bias = one.values.get("rmse", 0.0), one.values.get("bias", 0.0)
    return 1.96 * math.sqrt(max(rmse**2 - bias**2, 0.0) / one.rows) if one.rows else 0.0


def _bias_axis(slices: Mapping[str, Measured]) -> Axis | None:
    reach = [abs(one.values["bias"]) + _margin(one) for one in slices.values() if "bias" in one.values]
    return Axis("", -max(reach), max(reach)) if reach and max(reach) > 0 else None


def _bias(one: Measured, axis: Axis) -> list[Child]:
    bias = one.values.get("bias")
    if bias is None:
        return [number(None), None]
    margin = _margin(one)
    return [f"{bias:+.3g}", span_mark(bias - margin, bias, bias + margin, axis)]
