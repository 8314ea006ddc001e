"""Prediction columns in Spark's sense, computed with the model: classes, probabilities, raw outputs.

Enters: the outputs of a model. Leaves: the tensors of the wanted columns. It imports torch alone, since scoring workers
load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sparkdl.train.objective.loss import split_outputs

__all__ = ["Head", "Heads", "Kind"]

Kind = Literal["output", "class", "probability"]


@dataclass(frozen=True, slots=True)
class Head:
    """One wanted column.

    Attributes:
        label: whose output it is made of.
        kind: the output itself, the number of its greatest entry, or its softmax.
    """

    label: str
    kind: Kind = "output"


class Heads(torch.nn.Module):
    """A model with further outputs.

    Args:
        model: the model.
        labels: of its outputs, in their order.
        heads: the wanted ones.
    """

    def __init__(self, model: torch.nn.Module, labels: Sequence[str], heads: Sequence[Head]) -> None:
        super().__init__()
        self.model, self.labels, self.heads = model, tuple(labels), tuple(heads)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Return one tensor a head."""
        outputs = dict(zip(self.labels, split_outputs(self.model(*args, **kwargs), self.labels), strict=True))
        return tuple(_made(outputs[head.label], head.kind) for head in self.heads)


def _made(output: torch.Tensor, kind: Kind) -> torch.Tensor:
    if kind == "class":
        return output.argmax(dim=1).double()
    return torch.softmax(output.float(), dim=1) if kind == "probability" else output
