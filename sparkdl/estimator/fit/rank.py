"""What the estimator runs on a rank: opens the parcel and hands it to the worker.

Enters: a ``RankJob`` in a parcel. Leaves: the rank's report in another. It imports no Spark, so that a rank loads it
at no cost.
"""

from __future__ import annotations

import os

from sparkdl.documents.payload import Parcel
from sparkdl.errors import (
    CheckpointError,
    IntegrityError,
    LaunchTimeoutError,
    RankFailedError,
    SparkdlError,
    StorageError,
    UnreachableError,
)
from sparkdl.worker import run_rank
from sparkdl.world import World

__all__ = ["is_transient", "open_and_train"]

_TRANSIENT = (RankFailedError, LaunchTimeoutError, UnreachableError, StorageError, CheckpointError)
_USERS_BUGS = ("TypeError", "AttributeError", "NameError", "ImportError", "ModuleNotFoundError", "NotImplementedError")


def is_transient(error: SparkdlError) -> bool:
    """Whether another attempt may go better: not where the rows, the settings or the user's code are at fault."""
    if isinstance(error, RankFailedError):
        return error.cause.partition(":")[0] not in _USERS_BUGS
    return isinstance(error, _TRANSIENT) and not isinstance(error, IntegrityError)


def open_and_train(parcel: Parcel) -> Parcel:
    """Train as the rank that the environment names.

    Raises:
        ModuleNotFoundError: the parcel needs a module that this worker lacks.
        SparkdlError: whatever the stages refuse.
    """
    return Parcel.of(run_rank(World.from_env(os.environ), parcel.open(share=True)))
