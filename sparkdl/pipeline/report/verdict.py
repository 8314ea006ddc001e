"""What came of a run, in plain words, and the few numbers that say it.

Enters: a record. Leaves: the head of the report.
"""

from __future__ import annotations

from collections.abc import Iterator

from sparkdl.pipeline.report.html import Child, Html, shown, tag
from sparkdl.pipeline.report.tables import cards, number, sentence
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Evaluated

__all__ = ["headline", "mood", "verdict"]

_MOODS = {
    "promoted": "good",
    "scored": "good",
    "stopped": "calm",
    "nothing new": "calm",
    "not promoted": "calm",
    "lost": "calm",
}


def mood(record: RunRecord) -> str:
    """The class of the page's head: good, calm or bad."""
    return "bad" if any(_alarms(record)) else _MOODS.get(record.outcome, "bad")


def headline(record: RunRecord) -> str:
    """The one line that a person reads."""
    version, rows = record.model.get("version"), sum(record.predictions.values())
    champion = record.model.get("champion")
    first = record.evaluated is not None and record.evaluated.decision.outcome == "first"
    return {
        "promoted": f"Version {version} is the champion now" + (", the first one" if first else ""),
        "not promoted": f"Version {version} was not promoted",
        "scored": f"Version {champion} predicted {rows:,} rows; nothing new was learned",
        "nothing new": "There was nothing new to do",
        "lost": "Another run was first",
        "refused": "The run was refused",
        "failed": "The run was interrupted" if record.exit_code == 130 else "The run failed",
        "stopped": "The run stopped where it was asked to" if record.until else "The run did what was due",
        "running": "The run has not ended",
    }[record.outcome]


def verdict(record: RunRecord) -> Html:
    """The head of the report."""
    origin = f"{record.pipeline} · run {record.run_id} · started {record.started} · {record.seconds:.1f} s"
    said: list[Child] = [tag("p", origin, class_="sub"), tag("h1", headline(record)), tag("p", _why(record))]
    said += [tag("p", text) for text in _sentences(record)]
    said += [tag("p", tag("b", text), class_="alarm") for text in _alarms(record)]
    return tag("header", said, cards(_numbers(record)), class_=mood(record))


def _why(record: RunRecord) -> str:
    message = shown(record.message, 2000)
    text = f"{record.error}: {message}" if record.error else f"{message[:1].upper()}{message[1:]}"
    return text if text.endswith((".", "!", "?")) or not text else f"{text}."


def _sentences(record: RunRecord) -> Iterator[str]:
    if record.outcome in ("refused", "failed"):
        done = list(dict.fromkeys(note.name for note in record.steps))
        if done:
            yield f"It came as far as {', '.join(done)}; what they left is kept, and the next run goes on from there."
        else:
            yield "It ended before any step was done."
    if "champion" in record.model and record.outcome != "promoted":
        champion = record.model["champion"]
        same = record.model.get("before", champion) == champion
        since = ", which this run promoted" if record.promoted else ", as before" if same else ""
        yield "There is no champion." if champion is None else f"The champion is version {champion}{since}."


def _alarms(record: RunRecord) -> Iterator[str]:
    """What speaks against the model, whatever became of it."""
    if record.evaluated is not None and record.evaluated.decision.beats_baseline is False:
        said = record.evaluated.decision.baseline_text()
        yield "Beats the baseline: no." if said in record.message else sentence(f"{said} on the same rows")
    for warning in record.trained.warnings if record.trained is not None else ():
        yield sentence(warning)


def _numbers(record: RunRecord) -> Iterator[tuple[str, str]]:
    if record.evaluated is not None:
        yield from _quality(record.evaluated)
    if record.rows.get("read"):
        yield number(record.rows["read"]), "rows read"
    if record.predictions:
        yield number(sum(record.predictions.values())), "rows predicted"
    yield f"{record.seconds:.1f} s", "from start to end"


def _quality(evaluated: Evaluated) -> Iterator[tuple[str, str]]:
    decision = evaluated.decision
    metric, baseline = decision.gate.metric, decision.baseline
    yield number(decision.challenger.values.get(metric)), f"{metric} of {evaluated.label}, on {evaluated.rows_text()}"
    if baseline is not None and metric in baseline.values:
        guess = baseline.guesses[metric]
        yield number(baseline.values[metric]), f"{metric} without a model: {guess}, on the same rows"
    if decision.champion is not None:
        yield number(decision.champion.values.get(metric)), f"{metric} of the champion before, on the same rows"
    if decision.gain is not None:
        sure = f"{100 * decision.gate.confidence:.4g} % confidence"
        bound = f"no bound at {sure}" if decision.lower is None else f"with {sure} above {_signed(decision.lower)}"
        yield _signed(decision.gain), f"gain in {metric} over the champion; {bound}"


def _signed(value: float) -> str:
    return f"{value:+.3g}"
