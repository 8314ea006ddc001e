"""What a run would do now, and why, told without doing any of it: no Spark, no torch.

Enters: the context of a run that is never begun. Leaves: ``Plan``. It asks the ledger and the results of steps what a
run would ask them, through ``ingest.due_windows`` and ``keys``; what only the rows can tell, it says so of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.errors import ConfigError, DataError
from sparkdl.pipeline.amounts import Amount, amounts_of, with_seconds
from sparkdl.pipeline.judging.drift import Action
from sparkdl.pipeline.rows.ledger import WindowBooks, transformed
from sparkdl.pipeline.rows.parts import Parts, parts_of, parts_to_do
from sparkdl.pipeline.run import check_champion, nothing_new
from sparkdl.pipeline.state.context import LEARNING, STEPS, Context
from sparkdl.pipeline.state.keys import (
    bundle_is_whole,
    drift_inputs,
    evaluate_inputs,
    features_inputs,
    fitted_key,
    judged_against,
    publish_inputs,
    published_is_there,
    score_inputs,
    score_is_there,
    shards_are_there,
    shards_inputs,
    train_inputs,
    trial_inputs,
    windows_to_score,
)
from sparkdl.pipeline.state.lease import Holder, holder_of
from sparkdl.pipeline.state.results import Shards, Trained
from sparkdl.pipeline.state.runs import records
from sparkdl.pipeline.state.steps import content_key
from sparkdl.pipeline.trials import trials_of
from sparkdl.pipeline.windows import ahead
from sparkdl.pipeline.work.drift import kept_drift, rule_of
from sparkdl.pipeline.work.ingest import deleted_windows, due_windows, rules_of
from sparkdl.storage import Storage

__all__ = ["Plan", "PlannedStep", "plan_of"]

State = Literal["done again", "kept", "waits", "open"]
_RECORDS = 20
"""The newest records, among which one is looked for that did a step."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """One step of a run.

    Attributes:
        name: of the step.
        state: ``done again``, ``kept`` from an earlier run, ``waits`` for rows to learn from, or ``open``: only the run
            itself can tell.
        why: in words.
    """

    name: str
    state: State
    why: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would do.

    Attributes:
        pipeline: its name.
        nothing_new: whether it would end at once.
        due: why, by window that would be ingested; None where only Spark can tell.
        unchanged: windows that stay as they are.
        deleted: those of them that the source no longer holds, as far as that is known without Spark.
        ahead: windows that begin later than now, and are left alone.
        transformed: rows of the windows that were ingested in the source, and after the transform, where these differ.
        steps: all of them in order.
        holder: the run that is active now, beside which no other begins; None where there is none.
        stops: why the run would be refused; empty where nothing speaks against it.
        amounts: rows, bytes and seconds of the steps that would run, as far as they can be told.
    """

    pipeline: str
    nothing_new: bool
    due: Mapping[str, str] | None
    unchanged: tuple[str, ...]
    ahead: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    holder: Holder | None
    stops: str = ""
    deleted: tuple[str, ...] = ()
    transformed: tuple[int, int] | None = None
    amounts: Mapping[str, Amount] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """What a run would end with, as far as can be told: 10 nothing new, 30 another is active, 1 refused, else 0."""
        if self.nothing_new:
            return 10
        return 30 if self.holder is not None else 1 if self.stops else 0


def plan_of(context: Context) -> Plan:
    """Look at the source, the ledger and the results of steps.

    Raises:
        DataError: the source has no files, or the windows to do again are none of its windows.
        StorageError: the source or the pipeline's places cannot be read.
    """
    known, spec, snapshot = context.tables.windows(), context.spec, context.snapshot
    due = due_windows(spec, snapshot, known, context.now, context.again)
    later = ahead(snapshot.windows or (), context.now)
    same = tuple(name for name, books in known.items() if books.read and name not in (due or ()))
    common: dict[str, Any] = {"pipeline": str(spec.name), "unchanged": same, "ahead": tuple(later)}
    if snapshot.windows is not None:
        common["deleted"] = tuple(deleted_windows(snapshot.windows, known, due or ()))
    common["transformed"] = transformed(known.values())
    common["holder"] = holder_of(context.runs.child("leases"))
    why = None if due is None else {name: _why(context, known.get(name), name) for name in due}
    if due is not None and snapshot.windows is not None:
        known |= {name: _expected(name, rows=0) for name in due if name not in snapshot.windows}
        due = [name for name in due if name in snapshot.windows]
    asked = [name for name in STEPS[1:] if context.asks_for(name)]
    try:
        check_champion(context)
    except ConfigError as error:
        return Plan(nothing_new=False, due=why, steps=(), stops=str(error), **common)
    if nothing_new(context):
        kept = [PlannedStep(name=name, state="kept", why="nothing has changed") for name in asked]
        return Plan(nothing_new=True, due=why or {}, steps=tuple(kept), **common)
    if not asked:
        return Plan(nothing_new=False, due=why, steps=(), amounts=_amounts(context, due, known, None), **common)
    expected = {**known, **{name: _expected(name) for name in due or ()}}
    try:
        parts, waits = parts_to_do(spec, expected, train=context.train, champion=context.champion() is not None)
    except DataError as error:
        if due is not None:
            return Plan(nothing_new=False, due=why, steps=(), stops=str(error), **common)
        unread = [PlannedStep(name=name, state="open", why="no row was read yet") for name in asked]
        amounts = _amounts(context, due, known, None)
        return Plan(nothing_new=False, due=None, steps=tuple(unread), amounts=amounts, **common)
    content = {name: books.content for name, books in known.items() if name not in (due or ())}
    drift, action = _drift(context, parts, content)
    if action == "fail" and due is not None:
        return Plan(nothing_new=False, due=why, steps=(drift,), stops=drift.why, **common)
    if action == "retrain" and context.train and not waits:
        parts = parts_of(spec, expected, hold_back=False)
    learning = _learning(context, parts, content) if context.train and not waits else _waiting(waits)
    scoring = _scoring(context, parts, {name: known[name].unlabelled for name in content}, due or ())
    steps = [step for step in (drift, *learning, *scoring) if step.name in asked]
    if due is None and any(step.state == "kept" for step in steps):
        steps = [step if step.state != "kept" else _if_same(step) for step in steps]
    amounts = _amounts(context, due, known, parts)
    passed = {step.name for step in steps if step.state in ("kept", "waits")}
    amounts = {name: one for name, one in amounts.items() if name not in passed and context.asks_for(name)}
    return Plan(nothing_new=False, due=why, steps=tuple(steps), amounts=amounts, **common)


def _amounts(
    context: Context, due: Sequence[str] | None, known: Mapping[str, WindowBooks], parts: Parts | None
) -> dict[str, Amount]:
    found = amounts_of(context.spec, context.snapshot.sizes, due, known, parts)
    return with_seconds(context.spec, found, itertools.islice(records(context), _RECORDS))


def _why(context: Context, books: WindowBooks | None, name: str) -> str:
    there = context.snapshot.windows
    if there is not None and name not in there:
        return "the source no longer holds it: its rows are removed"
    if books is None:
        return "new"
    if not books.rules:
        return "its clean rows are gone, or a run that replaced them was cut short"
    if books.rules != rules_of(context.spec):
        return "source, transform, expectations or their code differ from those it was made by"
    if there is not None and books.fingerprint != there[name]:
        return "its rows in the source have changed"
    return "asked for"


def _expected(name: str, rows: int = 1) -> WindowBooks:
    """Books of a window that is not ingested yet, and will have rows as far as anyone can tell, or is to be emptied."""
    return WindowBooks(window=name, fingerprint="", rules="", read=rows, kept=rows, quarantined=0, duplicates=0)


def _if_same(step: PlannedStep) -> PlannedStep:
    return PlannedStep(name=step.name, state="open", why=f"{step.why}, if no row of the source has changed")


def _drift(context: Context, parts: Parts, content: Mapping[str, str]) -> tuple[PlannedStep, Action]:
    """What is known of drift, and what a run would do about it as far as that follows from what earlier ones found."""
    champion, given = context.champion(), context.spec.drift
    if champion is None:
        return PlannedStep(name="drift", state="open", why="there is no champion yet to compare with"), "none"
    found, todo = kept_drift(context.steps, drift_inputs(context, champion, parts, content))
    todo += [name for name in (*parts.validate, *parts.score) if name not in content and name not in todo]
    if todo:
        then = "" if given.action == "warn" else f", and {given.action} may follow"
        why = f"{len(todo)} windows are not compared with version {champion.version} yet{then}"
        return PlannedStep(name="drift", state="done again", why=why), "none"
    action, reason = rule_of(given).decide(found)
    then = "" if action in ("none", "warn") else f"{action}: "
    return PlannedStep(name="drift", state="kept", why=f"{then}{reason}"), action


def _waiting(why: str) -> Iterator[PlannedStep]:
    """The steps to a model, which are left out for now; none where nothing is to be learnt."""
    for name in LEARNING if why else ():
        yield PlannedStep(name=name, state="waits", why=why.removeprefix("learning waits: "))


def _learning(context: Context, parts: Parts, content: Mapping[str, str]) -> Iterator[PlannedStep]:
    """The steps to a published model, up to the first that is done again, and what follows from it."""
    todo = iter(LEARNING)
    cause = ""
    for state, why in _states(context, parts, content):
        name = next(todo)
        yield PlannedStep(name=name, state=state, why=why)
        if state != "kept":
            cause = name
            break
    for name in todo:
        open_too = name == "publish" or state == "open"
        word: State = "open" if open_too else "done again"
        reason = "evaluate decides" if name == "publish" else f"it follows {cause}"
        yield PlannedStep(name=name, state=word, why=reason)


def _states(context: Context, parts: Parts, content: Mapping[str, str]) -> Iterator[tuple[State, str]]:
    """State and reason of each step to a model, as long as all before it are kept."""
    steps = context.steps
    fresh = [name for name in parts.train if name not in content]
    if fresh:
        yield "done again", f"of the training windows {_count(fresh)}"
        return
    inputs = features_inputs(context, parts, content)
    known, start = _fitted(context, inputs)
    yield _kept(known, "features, label, split or the training windows differ, or the champion of then is gone")
    key = fitted_key(inputs, start)
    fresh = [name for name in parts.validate if name not in content]
    if fresh:
        yield "done again", f"of the validation windows {_count(fresh)}"
        return
    inputs = shards_inputs(context, parts, content, key)
    yield _kept(steps.find("shards", inputs, Shards, shards_are_there) is not None, "windows, weight or seed differ")
    shards = inputs
    inputs = train_inputs(context, content_key("shards", shards))
    trained = steps.find("train", inputs, Trained, lambda done: bundle_is_whole(done.bundle))
    yield _kept(trained is not None, _untrained(context, content_key("shards", shards)))
    fresh = [name for name in parts.test if name not in content]
    if fresh:
        yield "done again", f"of the test windows {_count(fresh)}"
        return
    judged = publish_inputs(context, parts, content, content_key("train", inputs))
    yield _kept(
        steps.known("evaluate", evaluate_inputs(context, judged, judged_against(context, judged))),
        "publish, report or the test windows differ" if parts.test else "publish or report differ",
    )
    published = steps.known("publish", judged) and published_is_there(context)
    yield _kept(published, "publish differs, or the registry has lost the model")


def _fitted(context: Context, inputs: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether there are fitted features that hold, and the bundle that they were taken from."""
    if context.spec.train.start != "champion":
        return context.steps.known("features", inputs), None
    found = context.steps.find("features", inputs, dict[str, Any]) or {}
    start = found.get("start")
    return bool(found) and (start is None or Storage.of(start).exists()), start


def _scoring(context: Context, parts: Parts, content: Mapping[str, str], due: Sequence[str]) -> Iterator[PlannedStep]:
    champion = context.champion()
    if champion is None:
        yield PlannedStep(name="score", state="open", why="there is no champion yet")
        return
    windows = windows_to_score(context, parts, {**content, **dict.fromkeys(due, "not ingested yet")})
    fresh, target = [name for name in windows if name not in content], str(context.spec.score.target)
    inputs = score_inputs(context, champion, {name: content[name] for name in windows if name not in fresh})
    fresh += [name for name, each in inputs.items() if not score_is_there(context.steps, target, name, each)]
    if fresh:
        why = f"{len(fresh)} of {len(windows)} windows are not scored by version {champion.version} yet"
        yield PlannedStep(name="score", state="done again", why=why)
    else:
        why = f"version {champion.version} has scored them all; another champion would score again"
        yield PlannedStep(name="score", state="kept", why=why)


def _untrained(context: Context, shards: str) -> str:
    """Why a training is due; of a search, how much of it was done."""
    if context.spec.search is None:
        return "model, train, label or their code differ"
    trials = trials_of(context.spec)
    done = sum(context.steps.known("trial", trial_inputs(context, shards, each)) for each in trials)
    return f"{done} of {len(trials)} trials of the search are done"


def _kept(known: bool, otherwise: str) -> tuple[State, str]:
    return ("kept", "nothing that decides it has changed") if known else ("done again", otherwise)


def _count(windows: Sequence[str]) -> str:
    return (
        f"{len(windows)} windows are new or changed" if len(windows) > 1 else f"window {windows[0]} is new or changed"
    )
