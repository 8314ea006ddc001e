"""What the steps from clean rows to a published model have in common, and the windows that they learn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sparkdl.documents.typed import encode
from sparkdl.errors import DataError
from sparkdl.pipeline.rows.parts import parts_of
from sparkdl.pipeline.state.evaluator import Stale, Step, StepState, UnknownKeyError, stale_of
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.windows import Part, Parts
from sparkdl.pipeline.work.labels import NoLabelsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_PART_WORDS: Mapping[Part, str] = {"train": "training", "validate": "validation", "test": "test"}


class LearningStep(Step):
    """A step that is made once for the windows that are learnt from: its one partition is its key.

    What it makes is kept by that key, so that it is there again once the windows are what they were.

    Attributes:
        result: the dataclass of what is kept.
        part: that it reads, and no step before it.
    """

    learns = True
    result: ClassVar[type[Any]]
    part: ClassVar[Part] = "test"

    def key(self, run: Run, parts: Parts) -> str:
        """What decides the result for these windows; raises UnknownKeyError where one is not ingested yet."""
        raise NotImplementedError

    def is_there(self, run: Run, result: Any) -> bool:
        """Whether what a result names is still there."""
        return True

    def result_of(self, run: Run, spark: SparkSession, parts: Parts, key: str) -> Any:
        """Make the result for these windows.

        Raises:
            NoLabelsError: a part has no label yet.
            SparkdlError: what was refused, or failed.
        """
        raise NotImplementedError

    def tell_result(self, run: Run, parts: Parts) -> None:
        """Tell the record what was made of these windows, whoever has made it."""

    def kept(self, run: Run, parts: Parts) -> Any:
        """The result for these windows; None where it was not made yet."""
        return run.receipts.result(self.name, self.key(run, parts), self.result)

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """The one key; none where nothing is learnt."""
        parts, _ = parts_to_learn(run)
        return {} if parts is None else {(key := self.key(run, parts)): key}

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether the result can be read, and what it names is there."""
        result = run.receipts.result(self.name, receipt.key, self.result)
        return result is not None and self.is_there(run, result)

    def planned(self, run: Run) -> tuple[StepState, str]:
        """What a run would do; where windows of its part are not ingested yet, how many that are."""
        if None not in stale_of(self, run).keys.values():
            return super().planned(run)
        parts, _ = parts_to_learn(run)
        assert parts is not None
        content = run.content()
        unread = [name for name in parts.windows(self.part) if content[name] is None]
        count = f"{len(unread)} windows are" if len(unread) > 1 else f"window {unread[0]} is"
        return "done again", f"of the {_PART_WORDS[self.part]} windows {count} new or changed"

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Make and keep the result; where labels are missing, note that, which is so until a window changes."""
        (key,) = stale.keys.values()
        parts, _ = parts_to_learn(run)
        assert parts is not None
        assert key is not None
        try:
            run.receipts.keep(self.name, key, self.result_of(run, spark, parts, key))
        except NoLabelsError as error:
            if run.champion() is None:  # who could predict all the same
                raise
            waits = _waits_key(run, parts)
            run.receipts.write([Receipt(step="waits", partition=waits, key=waits, facts=encode(str(error)).decode())])
        return True

    def tell(self, run: Run) -> None:
        """What was made, if anything is learnt."""
        parts, _ = parts_to_learn(run)
        if parts is not None:
            self.tell_result(run, parts)


def parts_to_do(run: Run) -> tuple[Parts, str]:
    """The windows of each part, and why nothing is learnt although that was asked for, while a champion predicts.

    Raises:
        DataError: a part that is needed is left without a window.
    """
    try:
        return parts_of(run.spec, run.windows(), train=run.request.train), ""
    except DataError as error:
        if not run.request.train or run.champion() is None:
            raise
        return parts_of(run.spec, run.windows(), train=False), f"learning waits: {error}"


def parts_to_learn(run: Run) -> tuple[Parts | None, str]:
    """The windows of each part, and why nothing is learnt although that was asked for.

    Where drift asks for it, the newest windows of all train and validate; unless they have no label yet.

    Raises:
        DataError: a part is left without a window, and there is no champion.
    """
    if not run.request.train:
        return None, ""
    parts, waits = parts_to_do(run)
    if waits:
        return None, waits
    choices = [parts]
    if run.spec.drift.action == "retrain" and learns_from_all(run):
        choices.insert(0, parts_of(run.spec, run.windows(), hold_back=False))
    for chosen in choices:
        receipt = run.receipts.of("waits").get(_waits_key(run, chosen))
        if receipt is None or run.champion() is None:
            return chosen, ""
        waits = f"learning waits: {receipt.read(str)}"
    return None, waits


def learns_from_all(run: Run) -> bool:
    """Whether drift has asked for it, of the rows that there are now."""
    return _retrain_key(run) in run.receipts.of("retrain")


def learn_from_all(run: Run) -> None:
    """Let the newest windows train and validate, too, as drift asks for; so it stays until a window changes."""
    key = _retrain_key(run)
    if not learns_from_all(run):
        run.receipts.write([Receipt(step="retrain", partition=key, key=key)])


def _retrain_key(run: Run) -> str:
    """What drift has looked at: the rows of all windows."""
    return content_key("retrain", {"rows": run.content(), "split": run.project.settings["split"]})


def _waits_key(run: Run, parts: Parts) -> str:
    """What decides whether each part has labels."""
    content, settings = run.content(), run.project.settings
    rows = {part: {name: content[name] for name in parts.windows(part)} for part in ("train", "validate", "test")}
    return content_key("waits", {"label": settings["label"], "split": settings["split"], "rows": rows})


def part_rows(run: Run, windows: Sequence[str]) -> dict[str, str]:
    """A hash of the rows of each window of a part; raises UnknownKeyError where one is not ingested yet."""
    content = run.content()
    rows_by_window = {name: rows for name in windows if (rows := content[name]) is not None}
    if len(rows_by_window) < len(windows):
        raise UnknownKeyError
    return rows_by_window
