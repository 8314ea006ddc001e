"""How long and how fast a model learns where the section ``train`` does not say: by the number of training rows.

Where several classes are judged by their accuracy, the epoch with the best one is kept, and labels are smoothed: the
accuracy goes on rising, when the loss of a few sure mistakes has begun to rise, too.

The rules stand in words in ``RULES``; docs/quality.md says how they were chosen.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from sparkdl.pipeline.spec import PipelineSpec, Train
from sparkdl.pipeline.spec.training import RULES
from sparkdl.pipeline.trials import chosen_by, compared_by

_ROWS_READ, _LEAST_EPOCHS, _MOST_EPOCHS = 600_000, 6, 16
"""Rows that a training reads in all epochs, as long as these are no fewer and no more."""
_MOST_EPOCHS_OF_CLASSES, _RATE_OF_CLASSES = 20, 0.016
"""Of several classes, judged by their accuracy: by 0.005 storms has 7 % more errors, of other labels ames 6 % fewer."""
SMOOTHING = 0.1
"""Of labels that accuracy judges; by .05 the error of storms is 3 % above, of surveys the same (docs/quality.md)."""
_LEAST_READ, _LEAST_STEPS, _MOST_EPOCHS_OF_FEW = 100_000, 600, 60
"""Rows that a training of few rows reads, and steps that it takes, in no more epochs than these."""
_LEAST_ROWS_OF_A_RANK = 64
"""Rows of a step that keep a rank busy: with fewer, ranks spend their time on waiting for each other.

15,600 rows of 12 features train for 13 to 15 s on one rank, and for 10 s on two with 64 rows each, on one machine.
"""


def with_recipe(
    train: Train,
    rows: int,
    *,
    default_network: bool,
    accuracy: str | None = None,
    slots: int | None = None,
) -> Train:
    """Fill in what ``train`` leaves out.

    The batch is divided among the ranks, so that a training comes to the same on one as on many.

    Args:
        train: the section.
        rows: that train.
        default_network: whether sparkdl's own network is trained.
        accuracy: see ``accuracy_column``.
        slots: of the cluster; None, where nobody has asked it, leaves ``num_proc`` open where more than one could be
            taken, and the batch whole.
    """
    several = train.strategy != "all_reduce" or train.min_num_proc is not None or train.gradient_compression is not None
    whole_batch = 1 << min(9, max(4, round(math.log2(max(1, min(64, rows / 40), rows / 128)))))
    ranks = train.num_proc or slots
    if default_network and not several and train.num_proc is None:
        most_ranks = max(1, whole_batch // _LEAST_ROWS_OF_A_RANK)
        ranks = 1 if most_ranks == 1 else slots and min(slots, most_ranks)
    batch = train.batch_size or max(1, round(whole_batch / (ranks or 1)))
    steps = train.train_steps_per_epoch or max(1, math.ceil(rows / (batch * (ranks or 1))))
    most_epochs = _MOST_EPOCHS if accuracy is None else _MOST_EPOCHS_OF_CLASSES
    by_rows = min(most_epochs, max(_LEAST_EPOCHS, math.ceil(_ROWS_READ / max(1, rows))))
    of_few = min(_MOST_EPOCHS_OF_FEW, math.ceil(max(_LEAST_READ / max(1, rows), _LEAST_STEPS / steps)))
    epochs = train.epochs or max(by_rows, of_few)
    rate = 0.001 if not default_network else 0.005 if accuracy is None else _RATE_OF_CLASSES
    filled = {
        "num_proc": ranks,
        "batch_size": batch,
        "epochs": epochs,
        "learning_rate": None if ":" in train.optimizer else rate,
        "warmup_steps": min(200, math.ceil(steps * epochs / 20)),
        "decay": "cosine",
        "early_stopping_patience": max(4, epochs // 4),
        "monitor": accuracy,
    }
    return msgspec.structs.replace(
        train, **{name: value for name, value in filled.items() if getattr(train, name) is None}
    )


def settled_train(spec: PipelineSpec, rows: int, slots: int | None = None) -> Train:
    """The section ``train`` of a file with what it leaves out, for a training on so many rows; see ``with_recipe``."""
    default_network, accuracy = spec.model.factory is None, accuracy_column(spec)
    return with_recipe(spec.train, rows, default_network=default_network, accuracy=accuracy, slots=slots)


def accuracy_column(spec: PipelineSpec) -> str | None:
    """The column of an epoch with the accuracy of several classes, where that judges the model; None elsewhere."""
    label = spec.label[spec.judged_label]
    if label.type != "multiclass" or label.loss not in (None, "log_loss") or compared_by(spec) != "accuracy":
        return None
    return chosen_by(spec)


def smoothing_of(spec: PipelineSpec, name: str) -> float:
    """The share of a row's label that is spread over all classes while the label of that name is learned."""
    label = spec.label[name]
    if label.smoothing is not None:
        return label.smoothing
    return SMOOTHING if name == spec.judged_label and accuracy_column(spec) is not None else 0.0


def calibrates(spec: PipelineSpec, name: str) -> bool:
    """Whether the probabilities of the label of that name are calibrated: where labels are smoothed they need it."""
    chosen = spec.label[name].calibrate
    return chosen == "temperature" or (chosen is None and smoothing_of(spec, name) > 0)


def recipe_of(train: Train, filled: Train) -> dict[str, Any]:
    """What ``filled`` has, by name, where ``train`` leaves it out."""
    names = [name for name in RULES if getattr(train, name) is None and getattr(filled, name) is not None]
    return {name: getattr(filled, name) for name in names}
