"""The state of a pipeline, explored by a machine: the real evaluator and the real steps, with makers that only pretend.

Runs are suspended between any two commits, and killed or taken over while they live; sources and settings change, and
change back; labels come late, champions are rolled back, windows are done again, runs end early or learn nothing. A
state is bad where a receipt names what its key does not decide, once a later run, which nobody disturbs, has ended.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from sparkdl.documents.typed import encode
from sparkdl.models.registry import ModelVersion
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.state.evaluator import nothing_new, stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt
from sparkdl.pipeline.state.results import Live, Published, Scored, Shards, Trained
from sparkdl.pipeline.state.run import Run as PipelineRun
from sparkdl.pipeline.state.run import RunRequest
from sparkdl.pipeline.steps import steps_asked_for
from sparkdl.pipeline.steps.drift import Looked, thresholds_key
from sparkdl.pipeline.steps.evaluate import judged_against, publish_inputs
from sparkdl.pipeline.steps.features import FittedFeatures
from sparkdl.pipeline.steps.ingest import rules_of, window_key
from sparkdl.pipeline.steps.learning import parts_to_learn
from sparkdl.pipeline.steps.train import TrainStep

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
FIRST, SECOND = "2026-03-01", "2026-03-02"
SOURCE = {FIRST: ("a", "b", "a", "a, labelled"), SECOND: ("", "c")}
"""What the source holds for each window, one change after the other, and then again."""
ASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "shards": {"until": "shards"},
    "no training": {"train": False},
    "backfill": {"again": (FIRST, FIRST)},
}
COMMITS = {
    **dict.fromkeys(("ingest", "score"), ("invalidate", "commit", "receipt")),
    **dict.fromkeys(("live", "drift"), ("invalidate", "receipt")),
    **dict.fromkeys(("features", "evaluate"), ("receipt",)),
    **dict.fromkeys(("shards", "train"), ("place", "receipt")),
    "publish": ("publish", "promote", "receipt"),
}
"""What a step commits, one after the other; a run can be suspended before each."""
UNFENCED = {("train", "place")}
"""What a run that has been taken over can still do: fill a folder that is named by a key, and that nobody believes."""


class Run(NamedTuple):
    """A run that has not ended.

    Attributes:
        epoch: of its lease.
        asks: for what.
        setting: of its file.
        source: the source as it was when it began.
        receipts: as it knows them; None while it alone writes them.
        passed: the steps that it has passed.
        step: that it makes; empty while it looks what is stale.
        keys: of the partitions that it makes.
        commits: of the step that it has done.
        remade: whether its backfill is done.
    """

    epoch: int
    asks: str
    setting: int
    source: tuple[int, ...]
    receipts: tuple[tuple[str, str, str, str], ...] | None = None
    passed: tuple[str, ...] = ()
    step: str = ""
    keys: tuple[tuple[str, str], ...] = ()
    commits: int = 0
    remade: bool = False


class State(NamedTuple):
    """Everything there is: what the source holds, what was made of it, and who is at work."""

    source: tuple[int, ...] = (0, 0)
    setting: int = 0
    clean: tuple[tuple[str, tuple[str, str]], ...] = ()
    shards: tuple[tuple[str, Any], ...] = ()
    bundles: tuple[tuple[str, Any], ...] = ()
    versions: tuple[str, ...] = ()
    moves: tuple[int, ...] = ()
    predictions: tuple[tuple[str, tuple[str, str]], ...] = ()
    receipts: tuple[tuple[str, str, str, str], ...] = ()
    epoch: int = 0
    runs: tuple[Run, ...] = ()
    changes: int = 0
    rollbacks: int = 0


@functools.cache
def project_of(setting: int) -> Project:
    """The pipeline with a setting."""
    file = loads(
        f"""
        name: shop
        root: nowhere
        source: {{kind: parquet, path: rows, key: id, partition: day, every: day}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: hash, train: 0.6, validate: 0.2, score: 0.2}}
        train: {{epochs: {1 + setting}}}
        drift: {{psi: {0.25 + setting}}}
        score: {{window: all}}
        """
    )
    return Project(file)


def windows_of(source: tuple[int, ...]) -> dict[str, str]:
    """What a source holds of each window that it has."""
    held = {name: SOURCE[name][number % len(SOURCE[name])] for name, number in zip(SOURCE, source, strict=True)}
    return {name: rows for name, rows in held.items() if rows}


class Seen(PipelineRun):
    """The pipeline's own run for one of the machine's: what there is in a state, as that sees it."""

    def __init__(self, state: State, run: Run) -> None:
        super().__init__(project_of(run.setting), RunRequest(now=NOW, **ASKS[run.asks]))
        self.again = None if run.remade else self.request.again
        self.explored, rows = state, state.receipts if run.receipts is None else run.receipts
        versions = [
            ModelVersion(
                name="shop", version=number, uri=f"registry/{number}", artifact=f"artifact of {key}", metrics={},
                parameters={}, lineage={}, published=NOW, publication=key,
            )
            for number, key in enumerate(state.versions, 1)
        ]  # fmt: skip
        history = [
            SimpleNamespace(kind="aliased", alias="champion", version=version, previous=previous)
            for previous, version in zip((None, *state.moves), state.moves, strict=False)
        ]
        self.registry = SimpleNamespace(uri="registry", list=lambda _: versions, history=lambda _: history)
        self.snapshot = SourceSnapshot(state="", windows=windows_of(run.source))
        self.receipts, self.places = Remembered(rows), self
        self._champion = [versions[state.moves[-1] - 1] if state.moves else None]

    def table(self, uri: str) -> bool:
        """Whether a table is there."""
        return bool(self.explored.predictions if uri.endswith("predictions") else self.explored.clean)

    def shards(self, shards: Shards) -> bool:
        """Whether a shard set is there."""
        return shards.train in dict(self.explored.shards)

    def bundle(self, uri: str) -> bool:
        """Whether a bundle is there."""
        return uri in dict(self.explored.bundles)

    def published(self, registry: Any, name: str) -> bool:
        """Whether anything is published."""
        return bool(self.explored.versions)


class Remembered:
    """The receipts of a state; what a key has made follows from the key."""

    def __init__(self, rows: tuple[tuple[str, str, str, str], ...]) -> None:
        self._steps: dict[str, dict[str, Receipt]] = {}
        for row in rows:
            self._steps.setdefault(row[0], {})[row[1]] = receipt_of(row)

    def of(self, step: str) -> dict[str, Receipt]:
        """Those of a step."""
        return self._steps.get(step, {})

    def result(self, step: str, key: str, kind: type) -> Any:
        """What a step has made for a key."""
        receipt = self.of(step).get(key)
        if receipt is None or receipt.key != key:
            return None
        return result_of(step, key, receipt.facts)

    def write(self, receipts: Any) -> None:
        """Not called: the machine commits."""
        raise NotImplementedError

    def keep(self, step: str, key: str, result: Any) -> None:
        """Not called: the machine commits."""
        raise NotImplementedError


@functools.cache
def receipt_of(row: tuple[str, str, str, str]) -> Receipt:
    return Receipt(step=row[0], partition=row[1], key=row[2], facts=row[3])


@functools.cache
def result_of(step: str, key: str, facts: str) -> Any:
    if step == "features":
        return FittedFeatures(features={}, labels=())
    if step == "shards":
        return Shards(train=key, validate=key, train_rows=1, validate_rows=1)
    if step == "train":
        return Trained(
            bundle=key, content_hash="", history=(), metrics={}, epochs=1, best_epoch=None, steps=1, rows=1, ranks=1,
            backend="none", windows={FIRST: facts},
        )  # fmt: skip
    if step == "publish":
        version, _, against = facts.partition(" ")
        return Published(
            version=int(version), promoted=True, reason="", against=None if against == "None" else int(against)
        )
    return object()


def put(pairs: tuple[tuple[str, Any], ...], more: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Pairs with some replaced."""
    return tuple(sorted((dict(pairs) | more).items()))


def with_receipts(state: State, run: Run, rows: list[tuple[str, str, str, str]]) -> State:
    """The state with receipts written by a run, which knows of them itself."""

    def merged(known: tuple[tuple[str, str, str, str], ...]) -> tuple[tuple[str, str, str, str], ...]:
        return tuple(sorted(({row[:2]: row for row in known} | {row[:2]: row for row in rows}).values()))

    state = state._replace(receipts=merged(state.receipts))
    return state if run.receipts is None else replaced(state, run, run._replace(receipts=merged(run.receipts)))


def replaced(state: State, run: Run, by: Run | None) -> State:
    """The state with a run that went on, or ended."""
    return state._replace(runs=tuple(each for each in (by if each == run else each for each in state.runs) if each))


class Machine:
    """What can happen next, with both guards or without one.

    Args:
        invalidates: whether receipts are invalidated before what they name is overwritten.
        fence: whether a run that has been taken over is refused its commits.
        narrow: let whole runs alone meet a source of one window that changes, to come deeper with as many states.
    """

    def __init__(self, *, invalidates: bool = True, fence: bool = True, narrow: bool = False) -> None:
        self._invalidates, self._fence, self._narrow = invalidates, fence, narrow

    def successors(self, state: State, *, runs: int, changes: int) -> Iterator[State]:
        """Every state that can follow."""
        if state.changes < changes:
            for place in range(1 if self._narrow else len(state.source)):
                source = tuple(number + (n == place) for n, number in enumerate(state.source))
                yield state._replace(source=source, changes=state.changes + 1)
            if not self._narrow:
                yield state._replace(setting=1 - state.setting, changes=state.changes + 1)
        if len(state.versions) > 1 and state.rollbacks < 1 and not self._narrow:
            other = next(n for n in range(1, len(state.versions) + 1) if n != state.moves[-1])
            yield state._replace(moves=(*state.moves, other), rollbacks=state.rollbacks + 1)
        if state.epoch < runs:
            for asks in ("all",) if self._narrow else ASKS:
                if asks != "no training" or state.moves:
                    yield self.begun(state, asks)
        for run in state.runs:
            after = self.step(state, run)
            if after is not None:
                yield after

    def begun(self, state: State, asks: str = "all") -> State:
        """A run takes over: those that live keep what they know, and learn of nothing."""
        others = tuple(each._replace(receipts=state.receipts) if each.receipts is None else each for each in state.runs)
        run = Run(epoch=state.epoch + 1, asks=asks, setting=state.setting, source=state.source)
        return state._replace(epoch=state.epoch + 1, runs=(*others, run))

    def step(self, state: State, run: Run) -> State | None:
        """The run looks, or commits once; None where it may not."""
        world = Seen(state, run)
        if not run.step:
            return replaced(state, run, self._looked(world, run))
        commit = COMMITS[run.step][run.commits]
        lost = run.epoch != state.epoch
        if self._fence and lost and (run.step, commit) not in UNFENCED:
            return None
        ends = run.commits + 1 == len(COMMITS[run.step])
        remade = run.remade or (ends and run.step == "ingest")
        after = (
            run._replace(step="", keys=(), commits=0, remade=remade) if ends else run._replace(commits=run.commits + 1)
        )
        state = replaced(state, run, after)
        return self._committed(state, world, run, after, commit)

    def _looked(self, world: PipelineRun, run: Run) -> Run | None:
        """The run with what it is to make next; None where nothing is stale."""
        for step in steps_asked_for(world.request.until, train=world.request.train):
            if step.looks and step.name in run.passed:
                continue
            if stale := stale_of(step, world):
                keys = tuple((partition, str(key)) for partition, key in stale.keys.items())
                return run._replace(step=step.name, keys=keys)
            if step.name not in run.passed:
                run = run._replace(passed=(*run.passed, step.name))
        return None

    def _committed(self, state: State, world: PipelineRun, run: Run, after: Run, commit: str) -> State:
        keys, books = dict(run.keys), world.windows()
        if commit == "invalidate":
            known = world.receipts.of(run.step)
            rows = [(run.step, name, "", known[name].facts) for name in keys if name in known and known[name].key]
            return with_receipts(state, after, rows) if rows and self._invalidates else state
        if commit == "commit" and run.step == "ingest":
            held = windows_of(run.source)
            return state._replace(
                clean=put(state.clean, {name: (rules_of(world.project), held.get(name, "")) for name in keys})
            )
        if commit == "commit":
            artifact, clean = world.champion().artifact, dict(state.clean)
            scored = {name: (artifact, clean[name.partition(" ")[0]][1].partition(",")[0]) for name in keys}
            return state._replace(predictions=put(state.predictions, scored))
        ((_, key),) = run.keys if len(run.keys) == 1 else (("", ""),)
        if commit == "place" and run.step == "shards":
            cut = tuple((name, dict(state.clean)[name][1]) for name in books if books[name].kept)
            return state._replace(shards=put(state.shards, {key: cut}))
        if commit == "place":
            return state._replace(bundles=put(state.bundles, {key: key}))
        parts = parts_to_learn(world)[0] if run.step == "publish" else None
        if parts is not None:
            training = TrainStep().key(world, parts)
            if commit == "publish":
                there = training in state.versions
                return state if there else state._replace(versions=(*state.versions, training))
            version = state.versions.index(training) + 1
            if commit == "promote":
                moved = not state.moves or state.moves[-1] != version
                return state._replace(moves=(*state.moves, version)) if moved else state
            inputs = publish_inputs(world, parts)
            facts = f"{version} {judged_against(world, inputs)}"
            return with_receipts(state, after, [("publish", key, key, facts)])
        return with_receipts(state, after, [self._receipt(world, run, name, key, books) for name, key in run.keys])

    def _receipt(
        self, world: PipelineRun, run: Run, name: str, key: str, books: dict[str, WindowReceipt]
    ) -> tuple[str, str, str, str]:
        facts: Any = {}
        if run.step == "ingest":
            rows = windows_of(run.source).get(name, "")
            facts = WindowReceipt(
                window=name, fingerprint=rows, rules=rules_of(world.project), read=int(rows != ""),
                kept=int(rows != ""), quarantined=0, duplicates=0, content=rows, unlabelled=rows.partition(",")[0],
            )  # fmt: skip
        elif run.step == "score":
            window, _, target = name.partition(" in ")
            champion, content = world.champion(), books[window].unlabelled
            facts = Scored(
                window=window,
                target=target,
                content=content,
                rows=1,
                version=champion.version,
                artifact=champion.artifact,
            )
        elif run.step == "drift":
            facts = Looked(drift=None, artifact=world.champion().artifact, thresholds=thresholds_key(world.project))
        elif run.step == "live":
            facts = Live(label="y", metric="rmse")
        elif run.step == "shards":
            return (
                run.step,
                name,
                key,
                str(tuple((window, each.content) for window, each in books.items() if each.kept)),
            )
        elif run.step == "train":
            return run.step, name, key, books[FIRST].content
        return run.step, name, key, encode(facts).decode()


def undisturbed(state: State) -> State:
    """The state after one more run that nobody disturbs."""
    machine, state = Machine(), Machine().begun(state._replace(runs=()))
    while state.runs:
        after = machine.step(state, state.runs[0])
        assert after is not None
        state = after
    return state


def lies(state: State) -> list[str]:
    """What receipts say, and is not so; and what is still stale."""
    run = Run(epoch=0, asks="all", setting=state.setting, source=state.source)
    world, found = Seen(state, run), []
    if not nothing_new(steps_asked_for(), world):
        found.append("a run is due after a run that nobody disturbed")
    clean, predictions, shards = dict(state.clean), dict(state.predictions), dict(state.shards)
    for step, name, key, facts in state.receipts:
        receipt = receipt_of((step, name, key, facts))
        if not key:
            continue
        if step == "ingest" and window_key(*clean[name]) != key:
            found.append(f"the clean rows of {name} are others than their receipt says")
        if step == "shards" and str(shards[key]) != facts:
            found.append(f"shards are cut from {shards[key]}, and their receipt says {facts}")
        if step == "score":
            scored = receipt.read(Scored)
            if predictions[name] != (scored.artifact, scored.content):
                found.append(f"the predictions of {name} are others than their receipt says")
    return found


def explored(machine: Machine, limit: int, *, runs: int = 3, changes: int = 2) -> tuple[int, bool, list[str]]:
    """How many states were seen, whether these are all there are, and what was wrong in the first bad one."""
    seen, waiting = {State()}, deque([State()])
    ended: set[State] = set()
    while waiting and len(seen) < limit:
        for state in machine.successors(waiting.popleft(), runs=runs, changes=changes):
            if state in seen:
                continue
            seen.add(state)
            waiting.append(state)
            at_rest = state._replace(runs=(), changes=0, rollbacks=0, epoch=0)
            if at_rest not in ended:
                ended.add(at_rest)
                if wrong := lies(undisturbed(at_rest)):
                    return len(seen), False, wrong
    return len(seen), not waiting, []


@pytest.mark.parametrize("narrow", [False, True])
def test_no_run_believes_a_receipt_that_lies(narrow):
    seen, all_of_them, wrong = explored(Machine(narrow=narrow), 2_000)
    assert not wrong
    assert all_of_them or seen >= 2_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("narrow", [False, True])
def test_no_run_believes_a_receipt_that_lies_in_a_hundred_thousand_states(narrow):
    seen, all_of_them, wrong = explored(Machine(narrow=narrow), 100_000)
    assert not wrong
    assert all_of_them or seen >= 100_000


@pytest.mark.parametrize(
    ("guard", "lie"),
    [("invalidates", "are others than their receipt says"), ("fence", "are others than their receipt says")],
)
def test_without_either_guard_a_receipt_lies(guard, lie):
    _, _, wrong = explored(Machine(**{guard: False}, narrow=True), 100_000)
    assert any(lie in sentence for sentence in wrong)
