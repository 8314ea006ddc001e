"""The windows that the next model learns from, and why none is learnt for now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from sparkdl.documents.typed import encode
from sparkdl.pipeline.rows.parts import parts_of, parts_to_do
from sparkdl.pipeline.state.evaluator import Stale
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.run import Run, State
from sparkdl.pipeline.windows import Parts
from sparkdl.pipeline.work.labels import NoLabelsError


def parts_to_learn(run: Run) -> tuple[Parts | None, str]:
    """The windows of each part, and why nothing is learnt although that was asked for.

    Where drift asks for it, the newest windows of all train and validate; unless they have no label yet.

    Raises:
        DataError: a part is left without a window, and there is no champion.
    """
    project, state = run.project, run.state
    if not run.request.train:
        return None, ""
    windows, champion = state.windows(), state.champion()
    parts, waits = parts_to_do(project.spec, windows, train=True, champion=champion is not None)
    if waits:
        return None, waits
    choices = [parts]
    if project.spec.drift.action == "retrain" and learns_from_all(project, state):
        choices.insert(0, parts_of(project.spec, windows, hold_back=False))
    for chosen in choices:
        receipt = state.receipts.of("waits").get(_waits_key(project, state, chosen) or "")
        if receipt is None or champion is None:
            return chosen, ""
        waits = f"learning waits: {receipt.read(str)}"
    return None, waits


def key_to_learn(run: Run, key_of: Callable[[Project, State, Parts], str | None]) -> Mapping[str, str | None]:
    """The one key of a step of learning, which is its partition, too; none where nothing is learnt.

    Args:
        run: that asks for it.
        key_of: what decides the step, of the windows that are learnt from.
    """
    parts, _ = parts_to_learn(run)
    return {} if parts is None else {str(key := key_of(run.project, run.state, parts)): key}


def windows_and_key(run: Run, stale: Stale) -> tuple[Parts, str]:
    """The windows that a step of learning is made for, and the one key that it is made by."""
    (key,) = stale.keys.values()
    parts, _ = parts_to_learn(run)
    assert parts is not None
    assert key is not None
    return parts, key


def learns_from_all(project: Project, state: State) -> bool:
    """Whether drift has asked for it, of the rows that there are now."""
    return _retrain_key(project, state) in state.receipts.of("retrain")


def learn_from_all(project: Project, state: State) -> None:
    """Let the newest windows train and validate, too, as drift asks for; so it stays until a window changes."""
    key = _retrain_key(project, state)
    if key and not learns_from_all(project, state):
        state.receipts.write([Receipt(step="retrain", partition=key, key=key)])


def _retrain_key(project: Project, state: State) -> str:
    """What drift has looked at: the rows of all windows; empty where one is not ingested yet."""
    rows = state.content()
    return "" if None in rows.values() else content_key("retrain", {"rows": rows, "split": project.settings["split"]})


@contextmanager
def unless_labels_are_missing(project: Project, state: State, parts: Parts) -> Iterator[None]:
    """Note that a part of these windows has no label yet, which is so until a window changes.

    Raises:
        NoLabelsError: one has none, and there is no champion that could predict all the same.
    """
    try:
        yield
    except NoLabelsError as error:
        if state.champion() is None:
            raise
        key = str(_waits_key(project, state, parts))
        state.receipts.write([Receipt(step="waits", partition=key, key=key, facts=encode(str(error)).decode())])


def _waits_key(project: Project, state: State, parts: Parts) -> str | None:
    """What decides whether each part has labels; None where a window is not ingested yet."""
    rows = {part: part_rows(state, parts.windows(part)) for part in ("train", "validate", "test")}
    if None in rows.values():
        return None
    return content_key("waits", {"label": project.settings["label"], "split": project.settings["split"], "rows": rows})


def part_rows(state: State, windows: tuple[str, ...]) -> dict[str, str] | None:
    """A hash of the rows of each window of a part; None where one is not ingested yet."""
    content = state.content()
    rows_by_window = {name: rows for name in windows if (rows := content[name]) is not None}
    return rows_by_window if len(rows_by_window) == len(windows) else None
