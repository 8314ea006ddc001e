"""From which windows the next model learns, and why none is learnt for now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.documents.typed import encode
from sparkdl.pipeline.rows.parts import Parts, parts_of, parts_to_do
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.evaluator import Stale
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.work.labels import NoLabelsError

__all__ = [
    "learn_from_all",
    "learns_from_all",
    "part_rows",
    "parts_to_learn",
    "unless_labels_are_missing",
    "windows_and_key",
]


def parts_to_learn(context: Context) -> tuple[Parts | None, str]:
    """The windows of each part, and why nothing is learnt although that was asked for.

    Where drift asks for it, the newest windows of all train and validate; unless they have no label yet.

    Raises:
        DataError: a part is left without a window, and there is no champion.
    """
    if not context.train:
        return None, ""
    windows, champion = context.windows(), context.champion()
    parts, waits = parts_to_do(context.spec, windows, train=True, champion=champion is not None)
    if waits:
        return None, waits
    choices = [parts]
    if context.spec.drift.action == "retrain" and learns_from_all(context):
        choices.insert(0, parts_of(context.spec, windows, hold_back=False))
    for chosen in choices:
        receipt = context.receipts.of("waits").get(_waits_key(context, chosen) or "")
        if receipt is None or champion is None:
            return chosen, ""
        waits = f"learning waits: {receipt.read(str)}"
    return None, waits


def windows_and_key(context: Context, stale: Stale) -> tuple[Parts, str]:
    """The windows that a step of learning is made for, and the one key that it is made by."""
    (key,) = stale.keys.values()
    parts, _ = parts_to_learn(context)
    assert parts is not None
    assert key is not None
    return parts, key


def learns_from_all(context: Context) -> bool:
    """Whether drift has asked for it, of the rows that there are now."""
    return _retrain_key(context) in context.receipts.of("retrain")


def learn_from_all(context: Context) -> None:
    """Let the newest windows train and validate, too, as drift asks for; so it stays until a window changes."""
    key = _retrain_key(context)
    if key and not learns_from_all(context):
        context.receipts.write([Receipt(step="retrain", partition=key, key=key)])


def _retrain_key(context: Context) -> str:
    """What drift has looked at: the rows of all windows; empty where one is not ingested yet."""
    rows = context.content()
    return "" if None in rows.values() else content_key("retrain", {"rows": rows, "split": context.settings["split"]})


@contextmanager
def unless_labels_are_missing(context: Context, parts: Parts) -> Iterator[None]:
    """Note that a part of these windows has no label yet, which is so until a window changes.

    Raises:
        NoLabelsError: one has none, and there is no champion that could predict all the same.
    """
    try:
        yield
    except NoLabelsError as error:
        if context.champion() is None:
            raise
        key = str(_waits_key(context, parts))
        context.receipts.write([Receipt(step="waits", partition=key, key=key, facts=encode(str(error)).decode())])


def _waits_key(context: Context, parts: Parts) -> str | None:
    """What decides whether each part has labels; None where a window is not ingested yet."""
    rows = {part: part_rows(context, parts.windows(part)) for part in ("train", "validate", "test")}
    if None in rows.values():
        return None
    return content_key("waits", {"label": context.settings["label"], "split": context.settings["split"], "rows": rows})


def part_rows(context: Context, windows: tuple[str, ...]) -> dict[str, str] | None:
    """A hash of the rows of each window of a part; None where one is not ingested yet."""
    content = context.content()
    known = {name: rows for name in windows if (rows := content[name]) is not None}
    return known if len(known) == len(windows) else None
