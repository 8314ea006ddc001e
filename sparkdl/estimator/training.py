"""What of a training travels in its model's bundle: the epochs, what outputs mean, how prediction columns are called.

Enters: epochs as the loop reports them, or what a bundle says. Leaves: a ``Training``. No Spark, so that a published
model makes its prediction columns where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.documents.typed import Source, convert
from sparkdl.models.folder import DOCUMENT, BundleInfo
from sparkdl.train.objective.labels import Meaning

__all__ = ["COLUMNS", "TRAINING", "Training", "plain_epochs", "training_of"]

COLUMNS = ("outputCols", "predictionCol", "probabilityCol", "rawPredictionCol")
TRAINING = "training"
"""Under which a bundle's preprocessing holds the following."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What of a training travels in the model's bundle.

    Attributes:
        history: the epochs, without their seconds: the same training makes the same bundle; None is not finite.
        meanings: by label, what its output means.
        columns: names of the prediction columns, by parameter.
    """

    history: tuple[Mapping[str, float | int | None], ...] = ()
    meanings: Mapping[str, Meaning] | None = None
    columns: Mapping[Literal["outputCols", "predictionCol", "probabilityCol", "rawPredictionCol"], str | list[str]] = (
        field(default_factory=dict)
    )


def plain_epochs(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, float | int | None]]:
    """Epochs as JSON takes them: None for what is not finite."""
    found = []
    for row in rows:
        numbers = {name: one.item() if hasattr(one, "item") else one for name, one in row.items()}
        found.append(
            {
                name: one if not isinstance(one, float) or math.isfinite(one) else None
                for name, one in numbers.items()
                if isinstance(one, float | int | None)
            }
        )
    return found


def training_of(info: BundleInfo) -> Training:
    """What a bundle says of its training; of one that was saved otherwise, nothing.

    Raises:
        IntegrityError: it holds what no training is.
    """
    source = Source(f"{info.uri}/{DOCUMENT}", "it was altered, or saved by another sparkdl: publish it again")
    return convert(info.preprocessing.get(TRAINING, {}), Training, source, f"$.preprocessing.{TRAINING}")
