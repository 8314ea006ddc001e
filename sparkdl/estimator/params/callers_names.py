"""Settings of the stages under the names that a user of the estimator gave them.

Enters: an error of a stage, which names the fields of its own config. Leaves: the same error, which names the
estimator's parameters, wherever in a fit it came up: on the driver, or on a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.errors import LaunchTimeoutError, RankFailedError, SparkdlError

__all__ = ["PARAMETER_OF", "callers_names", "in_callers_names"]

PARAMETER_OF = {
    "accumulate_steps": "backward_passes_per_step",
    "compression": "gradient_compression",
    "every_steps": "checkpoint_every",
    "keep_last": "keep_checkpoints",
    "log_to_driver": "verbose",
    "pool_bytes": "shuffle_buffer_size in bytes",
    "repartition": "partitions_per_process",
    "scheduler": "lr_scheduler",
    "scheduler_interval": "per_step of lr_scheduler",
    "seed": "random_seed",
    "start_timeout": "timeout",
    "start_timeout_seconds": "timeout",
    "steps_per_epoch": "train_steps_per_epoch",
    "tensorboard_dir": "logs of the store",
    "threads": "train_reader_num_workers or val_reader_num_workers",
    "uri": "store",
    "validation_batch_size": "val_batch_size",
    "validation_steps": "validation_steps_per_epoch",
}
"""The parameter that sets a field of a config, where they are called differently."""

_QUOTED = r"'[^']*'|\"[^\"]*\"|`[^`]*`"
_WORDS = {"compression", "repartition", "scheduler", "seed", "threads", "uri"}  # of English, too
_SET = "|".join(sorted(PARAMETER_OF.keys() - {"start_timeout"}, key=len, reverse=True))  # which a backend has as well
_MENTIONED = "|".join(sorted(PARAMETER_OF.keys() - _WORDS, key=len, reverse=True))
_NAMED = re.compile(rf"{_QUOTED}|(?<![\w./-])(?:({_SET})(?==| is )|({_MENTIONED})(?![\w./(=-]))")


def in_callers_names(text: str) -> str:
    """Return a message with the estimator's parameters in the place of fields; what is quoted stays as it is."""

    def renamed(found: re.Match[str]) -> str:
        field = found[1] or found[2]
        return PARAMETER_OF[field] if field else found[0]

    return _NAMED.sub(renamed, text)


@contextmanager
def callers_names() -> Iterator[None]:
    """Let errors of sparkdl leave the block in the names of the estimator's user."""
    try:
        yield
    except RankFailedError:
        raise  # quotes what the user's own code raised
    except SparkdlError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (in_callers_names(error.args[0]), *error.args[1:])
        if isinstance(error, LaunchTimeoutError):
            error.message = in_callers_names(error.message)
        raise
