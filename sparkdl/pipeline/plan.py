"""What a run would do now, and why, told without doing any of it: the walk of a run over receipts that are assumed."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.documents.typed import encode
from sparkdl.errors import ConfigError, DataError
from sparkdl.pipeline.amounts import Amount, amounts_of, with_seconds
from sparkdl.pipeline.recipe import recipe_of, settled_train
from sparkdl.pipeline.rows.window_receipt import WindowReceipt, transformed
from sparkdl.pipeline.run import check_champion
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.spec.training import RULES
from sparkdl.pipeline.state.evaluator import Stale, Step, StepState, nothing_new, stale_of
from sparkdl.pipeline.state.lease import Holder, holder_of
from sparkdl.pipeline.state.receipts import AssumedReceipts, Receipt
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.state.runs import records
from sparkdl.pipeline.steps import steps_asked_for
from sparkdl.pipeline.steps.drift import decided
from sparkdl.pipeline.steps.ingest import deleted_windows, source_windows
from sparkdl.pipeline.steps.learning import learn_from_all, parts_to_do, parts_to_learn
from sparkdl.pipeline.windows import Parts, ahead

_RECORDS = 20
"""The newest records, among which one is looked for that did a step."""
_MANY_SLOTS = 1_000
"""A number of slots by which steps are others than on one."""


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
    state: StepState
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
        recipe: by name in ``train`` that the file leaves out, what follows from the rows of a training that would run.
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
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """What a run would end with, as far as can be told: 10 nothing new, 30 another is active, 1 refused, else 0."""
        if self.nothing_new:
            return 10
        return 30 if self.holder is not None else 1 if self.stops else 0


class _AfterIngestion(Run):
    """A run as it goes on once what is due is ingested: there are windows that have rows, and nobody knows which."""

    def __init__(self, run: Run, ingest: Stale) -> None:
        super().__init__(run.project, run.request)
        self.snapshot, self.registry, self.places = run.snapshot, run.registry, run.places
        self.again, self.windows_read = None, run.windows_read
        self._champion = [run.champion()]
        windows = source_windows(run) or {}
        self._unread = {name for name in ingest.keys if name in windows}
        self.receipts = AssumedReceipts(run.receipts)
        assumed = []
        for name in ingest.keys:
            rows = int(name in self._unread)
            receipt = WindowReceipt(
                window=name, fingerprint="", rules="", read=rows, kept=rows, quarantined=0, duplicates=0
            )
            assumed.append(Receipt(step="ingest", partition=name, key="assumed", facts=encode(receipt).decode()))
        self.receipts.write(assumed)

    def content(self, *, labels: bool = True) -> Mapping[str, str | None]:
        """A hash of the clean rows of each window; None of one that is not ingested yet."""
        return {**super().content(labels=labels), **dict.fromkeys(self._unread)}


def plan_of(run: Run) -> Plan:
    """Walk the steps that a run is asked for, and make none of them.

    Raises:
        DataError: the source has no files, or the windows to do again are none of its windows.
        StorageError: the source or the pipeline's places cannot be read.
    """
    steps = steps_asked_for(run.request.until, train=run.request.train)
    known_windows, windows, ingest = run.windows(), source_windows(run), stale_of(steps[0], run)
    due = ingest.reasons(run) if ingest.known else None
    plan = Plan(
        pipeline=str(run.spec.name),
        nothing_new=False,
        due=due,
        unchanged=tuple(name for name, receipt in known_windows.items() if receipt.read and name not in (due or ())),
        ahead=tuple(ahead(windows or (), run.request.now)),
        deleted=tuple(deleted_windows(run)),
        transformed=transformed(known_windows.values()),
        holder=holder_of(run.project.runs.child("leases")),
        steps=(),
    )
    try:
        check_champion(run)
    except ConfigError as error:
        return replace(plan, stops=str(error))
    listed = [step.name for step in steps[1:] if step.listed]
    if nothing_new(steps, run):
        kept = [PlannedStep(name=name, state="kept", why="nothing has changed") for name in listed]
        return replace(plan, nothing_new=True, steps=tuple(kept))
    if len(steps) == 1:
        return replace(plan, amounts=_amounts(run, due, None))
    run_after = _AfterIngestion(run, ingest)
    try:
        parts, _ = parts_to_do(run_after)
    except DataError as error:
        if due is not None:
            return replace(plan, stops=str(error))
        unread = [PlannedStep(name=name, state="open", why="no row was read yet") for name in listed]
        return replace(plan, steps=tuple(unread), amounts=_amounts(run, due, None))
    planned, stops = _walk(steps[1:], run_after, due_is_known=due is not None)
    if stops:
        return replace(plan, steps=tuple(planned), stops=stops)
    learnt, _ = parts_to_learn(run_after)
    amounts = _amounts(run, due, learnt or parts)
    passed = {step.name for step in planned if step.state in ("kept", "waits")}
    step_names = {step.name for step in steps}
    amounts = {name: amount for name, amount in amounts.items() if name in step_names - passed}
    return replace(
        plan, steps=tuple(planned), amounts=amounts, recipe=_recipe(run.spec, amounts.get("train", Amount()))
    )


def _walk(steps: Sequence[Step], run: Run, *, due_is_known: bool) -> tuple[list[PlannedStep], str]:
    """Every step after the ingestion with its state, and why a run would be refused."""
    planned: list[PlannedStep] = []
    first_stale = ""  # of learning, whose steps each read what those before them made
    for step in steps:
        if not step.listed:  # no other step waits for it
            continue
        _, waits = parts_to_learn(run) if step.learns else (None, "")
        if waits:
            state: StepState = "waits"
            why = waits.removeprefix("learning waits: ")
        elif step.learns and first_stale:
            state, why = step.planned_after(first_stale)
        else:
            state, why = step.planned(run)
            if state != "kept" and step.learns:
                first_stale = step.name
        is_kept = state == "kept"
        if is_kept and not due_is_known:
            state, why = "open", f"{why}, if no row of the source has changed"
        planned.append(PlannedStep(name=step.name, state=state, why=why))
        if is_kept and step.name == "drift":
            action = decided(run).action
            if action == "fail" and due_is_known:
                return planned, why
            if action == "retrain":
                learn_from_all(run)
    return planned, ""


def _amounts(run: Run, due: Collection[str] | None, parts: Parts | None) -> dict[str, Amount]:
    """Rows, bytes and seconds of all steps, as far as they can be told; ``due`` is None where only Spark can tell."""
    windows, spec = source_windows(run), run.spec
    read = None if due is None else [name for name in due if windows is None or name in windows]
    amounts = amounts_of(spec, run.snapshot.sizes, read, run.windows(), parts)
    return with_seconds(spec, amounts, itertools.islice(records(run.project.runs), _RECORDS))


def _recipe(spec: PipelineSpec, training: Amount) -> dict[str, Any]:
    """What ``train`` leaves out and no search tries.

    In a file with a batch for each rank and no number of these, steps follow from slots that nobody has asked for yet:
    the rule stands there instead of a number.
    """
    if training.rows is None:
        return {}
    filled = settled_train(spec, training.rows)
    searched = {name.removeprefix("train.") for name in (spec.search.space if spec.search is not None else ())}
    recipe = {name: value for name, value in recipe_of(spec.train, filled).items() if name not in searched}
    if filled.num_proc is None and "batch_size" in recipe:
        recipe["batch_size"] = f"{filled.batch_size} of all ranks together"
    elif filled.num_proc is None:
        on_many = settled_train(spec, training.rows, slots=_MANY_SLOTS)
        recipe |= {name: f"({RULES[name]})" for name, value in recipe.items() if getattr(on_many, name) != value}
    return recipe
