"""What is stale: the one evaluator, which run, plan, status and "nothing new" ask.

A step is stale in a partition where the key that it should have been made by is not the one of its receipt, or where
what the receipt names is gone. Nothing is made here, and nothing that is made is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from sparkdl.pipeline.state.receipts import Receipt

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.pipeline.state.run import Run


StepState = Literal["done again", "kept", "waits", "open"]
"""What a run would do about a step: ``open`` is what only the run itself can tell."""


class Step:
    """One step of a pipeline: what should be there, and how it is made. Each is one file of ``steps/``.

    Attributes:
        name: that the record, ``--until`` and receipts know it by.
        learns: whether it is one from clean rows to a published model, each of which reads what those before it made.
        looks: whether it only looks at what others have made: once a run, which is not due for it alone.
        loads_torch: whether workers predict or train for it, which then start with torch in memory.
        listed: whether plan and ``--until`` know it by its name.
        notes_itself: whether it notes what each partition took; else the run notes what all of them took.
        cause: why a partition is stale, in words, where there is no more to say.
    """

    name: ClassVar[str]
    learns: ClassVar[bool] = False
    looks: ClassVar[bool] = False
    loads_torch: ClassVar[bool] = False
    listed: ClassVar[bool] = True
    notes_itself: ClassVar[bool] = False
    cause: ClassVar[str]

    def wanted(self, run: Run) -> Mapping[str, str | None] | None:
        """The key that each partition should have been made by.

        Returns:
            a key by partition, None for one that follows from what is not made yet; None in place of it all where only
            Spark can tell which partitions there are.

        Raises:
            DataError: there is nothing that the step could begin with.
        """
        raise NotImplementedError

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether what a receipt names is still there."""
        return True

    def forced(self, run: Run, partition: str) -> bool:
        """Whether a partition is made again whatever its receipt says."""
        return False

    def asks_for_a_run(self, run: Run) -> bool:
        """Whether a step that only looks has seen what a run is due for, and no run has done so yet."""
        return False

    def why(self, run: Run, partition: str, receipt: Receipt | None) -> str:
        """Why a partition is stale, in words."""
        return self.cause

    def planned(self, run: Run) -> tuple[StepState, str]:
        """What a run would do about it, and why, as far as that follows from what is known."""
        stale = stale_of(self, run)
        if not stale:
            return "kept", "nothing that decides it has changed"
        return "done again", next(iter(stale.reasons(run).values()))

    def planned_after(self, earlier: str) -> tuple[StepState, str]:
        """The same where a step of that name, whose result it reads, is done again."""
        return "done again", f"it follows {earlier}"

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Make the partitions that are stale, and leave their receipts.

        Returns:
            whether there was anything to make, where only Spark could tell.

        Raises:
            SparkdlError: what was refused, or failed.
        """
        raise NotImplementedError

    def tell(self, run: Run) -> None:
        """Tell the record of the run what the step has come to, whoever has made it.

        Raises:
            SparkdlError: the run is not to go on from here.
        """


@dataclass(frozen=True, kw_only=True)
class Stale:
    """What of a step is to be made.

    Attributes:
        step: which.
        keys: by partition, the key to make it by; None where that follows from what is not made yet.
        fresh: the partitions that stay as they are.
        known: whether the partitions are known; else only Spark can tell.
    """

    step: Step
    keys: Mapping[str, str | None]
    fresh: Sequence[str] = ()
    known: bool = True

    def __bool__(self) -> bool:
        return not self.known or bool(self.keys)

    def reasons(self, run: Run) -> dict[str, str]:
        """Why each partition is stale, in words."""
        receipts = run.receipts.of(self.step.name)
        return {name: self.step.why(run, name, receipts.get(name)) for name in self.keys}


class UnknownKeyError(Exception):
    """A key follows from what is not made yet: of a window that is due, nobody knows the rows."""


def stale_of(step: Step, run: Run) -> Stale:
    """What of a step is stale; false where nothing is.

    Raises:
        DataError: there is nothing that the step could begin with.
    """
    try:
        keys = step.wanted(run)
    except UnknownKeyError:
        keys = {"": None}
    if keys is None:
        return Stale(step=step, keys={}, known=False)
    receipts = run.receipts.of(step.name)

    def holds(partition: str, key: str | None) -> bool:
        receipt = receipts.get(partition)
        if receipt is None or key is None or receipt.key != key or step.forced(run, partition):
            return False
        return step.exists(run, receipt)

    stale = {partition: key for partition, key in keys.items() if not holds(partition, key)}
    return Stale(step=step, keys=stale, fresh=[partition for partition in keys if partition not in stale])


def nothing_new(steps: Sequence[Step], run: Run) -> bool:
    """Whether a run of these steps would find nothing to do, as far as can be told without Spark.

    Raises:
        DataError: there is nothing that a step could begin with.
    """
    if any(stale_of(step, run) for step in steps if not step.looks):
        return False
    return not any(step.asks_for_a_run(run) for step in steps)
