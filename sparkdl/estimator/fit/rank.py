"""What the estimator runs on a rank: opens the parcel and hands it to the worker.

Enters: a ``RankJob`` in a parcel. Leaves: the rank's report in another. It imports no Spark, so that a rank loads it
at no cost.
"""

from __future__ import annotations

import os

from sparkdl.documents.payload import Parcel
from sparkdl.worker import run_rank
from sparkdl.world import World

__all__ = ["FINAL_ERRORS", "open_and_train"]

FINAL_ERRORS = ("ConfigError", "SchemaError", "DataError", "IntegrityError", "NonFiniteLossError")
"""What a rank raises that another attempt would raise again."""


def open_and_train(parcel: Parcel) -> Parcel:
    """Train as the rank that the environment names.

    Raises:
        ModuleNotFoundError: the parcel needs a module that this worker lacks.
        SparkdlError: whatever the stages refuse.
    """
    return Parcel.of(run_rank(World.from_env(os.environ), parcel.open(share=True)))
