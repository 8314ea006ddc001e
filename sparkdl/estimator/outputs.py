"""Prediction columns in Spark's sense, computed with the model: classes, probabilities, raw predictions.

Enters: the outputs of a model. Leaves: the tensors of the wanted columns. No Spark, since scoring workers load it, and
so does whoever has a published model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from sparkdl.models.signature import Signature, TensorField
from sparkdl.train.objective.labels import Meaning
from sparkdl.train.objective.loss import split_outputs

__all__ = ["Kind", "OutputModule", "OutputSpec", "output_field", "with_outputs"]

Kind = Literal["output", "class", "probability", "raw"]
_MOST_LOG_ODDS = 750.0  # of the smallest double that is not 0


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One wanted column.

    Attributes:
        label: whose output it is made of.
        kind: the output itself; the class as a double; the probability of each class; or what these are made of, for
            two classes as Spark's binary classifiers have it: ``[-x, x]``, x the log-odds of class 1.
        meaning: of the output.
    """

    label: str
    kind: Kind = "output"
    meaning: Meaning = "value"


class OutputModule(torch.nn.Module):
    """A model with further outputs.

    Args:
        model: the model.
        labels: of its outputs, in their order.
        wanted: the outputs to give.
    """

    def __init__(self, model: torch.nn.Module, labels: Sequence[str], wanted: Sequence[OutputSpec]) -> None:
        super().__init__()
        self.model, self.labels, self.wanted = model, tuple(labels), tuple(wanted)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Return one tensor a wanted output."""
        outputs = dict(zip(self.labels, split_outputs(self.model(*args, **kwargs), self.labels), strict=True))
        return tuple(_made(outputs[one.label], one) for one in self.wanted)


def with_outputs(
    model: torch.nn.Module, signature: Signature, wanted: Sequence[OutputSpec]
) -> tuple[torch.nn.Module, Signature]:
    """The model that gives the wanted outputs, in evaluation mode, and its signature."""
    labels = [field.name for field in signature.outputs]
    plain = [OutputSpec(label) for label in labels]
    chosen = model if list(wanted) == plain else OutputModule(model, labels, wanted)
    chosen.eval()
    return chosen, replace(signature, outputs=tuple(output_field(signature, one) for one in wanted))


def output_field(signature: Signature, wanted: OutputSpec) -> TensorField:
    """Name, dtype and shape of a wanted output of the model with that signature."""
    field = next(field for field in signature.outputs if field.name == wanted.label)
    name = f"{wanted.label}__{wanted.kind}"
    if wanted.kind == "class":
        return TensorField(name=name, dtype="float64", shape=())
    if wanted.kind != "output" and wanted.meaning != "classes":
        return TensorField(name=name, dtype="float64", shape=(2,))
    return replace(field, name=name if wanted.kind != "output" else field.name)


def _made(output: torch.Tensor, wanted: OutputSpec) -> torch.Tensor:
    if wanted.kind == "output":
        return output
    if wanted.meaning in ("logit", "probability"):
        return _binary(output.reshape(len(output)).double(), wanted)
    if wanted.kind == "class":
        return output.argmax(dim=1).double()
    return torch.softmax(output.float(), dim=1) if wanted.kind == "probability" else output


def _binary(value: torch.Tensor, wanted: OutputSpec) -> torch.Tensor:
    is_logit = wanted.meaning == "logit"
    if wanted.kind == "class":
        return (value > (0.0 if is_logit else 0.5)).double()
    if wanted.kind == "probability":
        return torch.stack([torch.sigmoid(-value), torch.sigmoid(value)] if is_logit else [1 - value, value], dim=1)
    odds = value if is_logit else (value.log() - (-value).log1p()).clamp(-_MOST_LOG_ODDS, _MOST_LOG_ODDS)
    return torch.stack([-odds, odds], dim=1)
