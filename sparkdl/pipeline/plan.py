"""What a run would do now, and why, told without doing any of it: the walk of a run over receipts that are assumed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from sparkdl.documents.typed import encode
from sparkdl.errors import ConfigError, DataError
from sparkdl.pipeline.amounts import Amount, amounts_of, with_seconds
from sparkdl.pipeline.rows.parts import parts_to_do
from sparkdl.pipeline.rows.window_receipt import WindowReceipt, transformed
from sparkdl.pipeline.run import check_champion
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.evaluator import Stale, Step, nothing_new, stale_of
from sparkdl.pipeline.state.lease import Holder, holder_of
from sparkdl.pipeline.state.receipts import Receipt, Receipts
from sparkdl.pipeline.state.runs import records
from sparkdl.pipeline.steps import steps_asked_for
from sparkdl.pipeline.steps.drift import decided
from sparkdl.pipeline.steps.ingest import deleted_windows, source_windows
from sparkdl.pipeline.steps.learning import learn_from_all, parts_to_learn
from sparkdl.pipeline.windows import ahead

__all__ = ["Plan", "PlannedStep", "plan_of"]

T = TypeVar("T")
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


class _Assumed:
    """Receipts as they will be once what is planned has been made; nothing is written."""

    def __init__(self, receipts: Receipts) -> None:
        self._receipts, self._assumed = receipts, dict[str, dict[str, Receipt]]()

    def of(self, step: str) -> Mapping[str, Receipt]:
        """Those that there are, with those that are assumed."""
        return dict(sorted({**self._receipts.of(step), **self._assumed.get(step, {})}.items()))

    def write(self, receipts: Sequence[Receipt]) -> None:
        """Assume receipts."""
        for receipt in receipts:
            self._assumed.setdefault(receipt.step, {})[receipt.partition] = receipt

    def result(self, step: str, key: str, kind: type[T]) -> T | None:
        """What was made for a key."""
        return self._receipts.result(step, key, kind)

    def keep(self, step: str, key: str, result: Any) -> None:
        """Not called: nothing is made."""
        raise NotImplementedError


def plan_of(context: Context) -> Plan:
    """Walk the steps that a run is asked for, and make none of them.

    Raises:
        DataError: the source has no files, or the windows to do again are none of its windows.
        StorageError: the source or the pipeline's places cannot be read.
    """
    steps = steps_asked_for(context.until, train=context.train)
    spec, known, windows = context.spec, context.windows(), source_windows(context)
    ingest = stale_of(steps[0], context)
    due = ingest.reasons(context) if ingest.known else None
    plan = Plan(
        pipeline=str(spec.name),
        nothing_new=False,
        due=due,
        unchanged=tuple(name for name, books in known.items() if books.read and name not in (due or ())),
        ahead=tuple(ahead(windows or (), context.now)),
        deleted=tuple(deleted_windows(context)),
        transformed=transformed(known.values()),
        holder=holder_of(context.runs.child("leases")),
        steps=(),
    )
    try:
        check_champion(context)
    except ConfigError as error:
        return replace(plan, stops=str(error))
    if nothing_new(steps, context):
        kept = [
            PlannedStep(name=step.name, state="kept", why="nothing has changed") for step in steps[1:] if step.listed
        ]
        return replace(plan, nothing_new=True, steps=tuple(kept))
    if len(steps) == 1:
        return replace(plan, amounts=_amounts(context, due, known, None))
    assumed = _after_ingestion(context, ingest)
    try:
        parts, _ = parts_to_do(spec, assumed.windows(), train=context.train, champion=context.champion() is not None)
    except DataError as error:
        if due is not None:
            return replace(plan, stops=str(error))
        unread = [
            PlannedStep(name=step.name, state="open", why="no row was read yet") for step in steps[1:] if step.listed
        ]
        return replace(plan, steps=tuple(unread), amounts=_amounts(context, due, known, None))
    planned, stops = _walk(steps[1:], assumed, reads_unknown=due is None)
    if stops and due is not None:
        return replace(plan, steps=tuple(planned), stops=stops)
    chosen, _ = parts_to_learn(assumed)
    amounts = _amounts(context, due, known, chosen or parts)
    passed = {step.name for step in planned if step.state in ("kept", "waits")}
    asked = {step.name for step in steps}
    amounts = {name: amount for name, amount in amounts.items() if name in asked - passed}
    return replace(plan, steps=tuple(planned), amounts=amounts)


def _after_ingestion(context: Context, ingest: Stale) -> Context:
    """The context of a run that has ingested what is due: it has rows, and nobody knows which."""
    windows = source_windows(context) or {}
    receipts = _Assumed(context.receipts)
    for name in ingest.keys:
        rows = int(name in windows)
        books = WindowReceipt(window=name, fingerprint="", rules="", read=rows, kept=rows, quarantined=0, duplicates=0)
        receipts.write([Receipt(step="ingest", partition=name, key="assumed", facts=encode(books).decode())])
    after = Context(context.file, context.now, context.again, context.until, context.train, remade=True)
    after.__dict__ |= {name: value for name, value in vars(context).items() if name not in vars(after)}
    after.__dict__["receipts"] = receipts
    after.assumed = frozenset(name for name in ingest.keys if name in windows)
    return after


def _walk(steps: Sequence[Step], context: Context, *, reads_unknown: bool) -> tuple[list[PlannedStep], str]:
    """Every step with its state, and why a run would be refused.

    Args:
        steps: from drift on.
        context: after the ingestion.
        reads_unknown: whether only Spark can tell which windows are due.
    """
    planned: list[PlannedStep] = []
    stale_steps: set[str] = set()
    for step in steps:
        if step.name == "drift":
            planned.append(_drift(step, context))
            action = decided(context).action if planned[0].state == "kept" else "none"
            if action == "fail" and not reads_unknown:
                return planned, planned[0].why
            if action == "retrain":
                learn_from_all(context)
            continue
        if step.learns:
            _, waits = parts_to_learn(context)
            if waits:
                why = waits.removeprefix("learning waits: ")
                planned += [PlannedStep(name=step.name, state="waits", why=why)] if step.listed else []
                continue
        cause = next((name for name in step.reads if name in stale_steps), None)
        if cause is not None:
            stale_steps.add(step.name)
            state, why = _follows(step, planned, cause)
        else:
            state, why = _state(step, context)
            if state != "kept":
                stale_steps.add(step.name)
        if step.listed:
            planned.append(PlannedStep(name=step.name, state=state, why=why))
    if reads_unknown:
        planned = [
            replace(each, state="open", why=f"{each.why}, if no row of the source has changed")
            if each.state == "kept"
            else each
            for each in planned
        ]
    return planned, ""


def _follows(step: Step, planned: Sequence[PlannedStep], cause: str) -> tuple[State, str]:
    """The state of a step after one that is stale."""
    if step.name == "publish":
        return "open", "evaluate decides"
    open_too = any(each.name == cause and each.state == "open" for each in planned)
    return "open" if open_too else "done again", f"it follows {cause}"


def _state(step: Step, context: Context) -> tuple[State, str]:
    """The state of a step that follows from what is known."""
    if step.name == "score":
        return _scoring(step, context)
    stale = stale_of(step, context)
    if not stale:
        return "kept", "nothing that decides it has changed"
    if None in stale.keys.values():
        return "done again", _new_windows(step, context)
    return "done again", next(iter(stale.reasons(context).values()))


def _new_windows(step: Step, context: Context) -> str:
    """Which windows of the part that a step reads are new or changed."""
    parts, _ = parts_to_learn(context)
    assert parts is not None
    part = {"features": "training", "shards": "validation"}.get(step.name, "test")
    windows = {"training": parts.train, "validation": parts.validate, "test": parts.test}[part]
    fresh = [name for name in windows if name in context.assumed]
    return f"of the {part} windows {_count(fresh)}"


def _drift(step: Step, context: Context) -> PlannedStep:
    """What is known of drift, and what a run would do about it as far as that follows from what earlier ones found."""
    champion, given = context.champion(), context.spec.drift
    if champion is None:
        return PlannedStep(name="drift", state="open", why="there is no champion yet to compare with")
    if stale := stale_of(step, context):
        then = "" if given.action == "warn" else f", and {given.action} may follow"
        why = f"{len(stale.keys)} windows are not compared with version {champion.version} yet{then}"
        return PlannedStep(name="drift", state="done again", why=why)
    drifted = decided(context)
    then = "" if drifted.action in ("none", "warn") else f"{drifted.action}: "
    return PlannedStep(name="drift", state="kept", why=f"{then}{drifted.reason}")


def _scoring(step: Step, context: Context) -> tuple[State, str]:
    """Which windows the champion of now has not scored; another one may come of this run."""
    champion = context.champion()
    if champion is None:
        return "open", "there is no champion yet"
    if stale := stale_of(step, context):
        every = len(stale.keys) + len(stale.fresh)
        return "done again", f"{len(stale.keys)} of {every} windows are not scored by version {champion.version} yet"
    return "kept", f"version {champion.version} has scored them all; another champion would score again"


def _count(windows: Sequence[str]) -> str:
    return (
        f"{len(windows)} windows are new or changed" if len(windows) > 1 else f"window {windows[0]} is new or changed"
    )


def _amounts(context: Context, due: Mapping[str, str] | None, known: Mapping[str, WindowReceipt], parts: Any) -> Any:
    there = source_windows(context)
    read = None if due is None else [name for name in due if there is None or name in there]
    found = amounts_of(context.spec, context.snapshot.sizes, read, known, parts)
    return with_seconds(context.spec, found, itertools.islice(records(context), _RECORDS))
