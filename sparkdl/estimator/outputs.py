"""Prediction columns: which are asked for, whether loss and outputs allow them, how a model gives them; no Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from sparkdl.errors import ConfigError
from sparkdl.models.signature import Signature, TensorField
from sparkdl.train.objective.labels import Meaning, meaning_of
from sparkdl.train.objective.loss import split_outputs

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
        return tuple(_made(outputs[spec.label], spec) for spec in self.wanted)


def with_outputs(
    model: torch.nn.Module, signature: Signature, wanted: Sequence[OutputSpec]
) -> tuple[torch.nn.Module, Signature]:
    """The model that gives the wanted outputs, in evaluation mode, and its signature."""
    labels = [field.name for field in signature.outputs]
    plain = [OutputSpec(label) for label in labels]
    chosen = model if list(wanted) == plain else OutputModule(model, labels, wanted)
    chosen.eval()
    return chosen, replace(signature, outputs=tuple(output_field(signature, spec) for spec in wanted))


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


_SPARKS = ("predictionCol", "probabilityCol", "rawPredictionCol")


class Asked(Protocol):
    """Whoever knows the parameters of prediction columns: an estimator, a model, or a bundle that was published."""

    def getOrDefault(self, param: str) -> Any:
        """The value of ``outputCols``, ``predictionCol``, ``probabilityCol`` or ``rawPredictionCol``."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One prediction column.

    Attributes:
        column: its name.
        output: what it holds.
        vector: whether it is a Spark ML vector.
    """

    column: str
    output: OutputSpec
    vector: bool = False


def meanings_of(labels: Sequence[str], losses: Sequence[Any]) -> dict[str, Meaning]:
    """What each label's output means, by its loss."""
    return {label: meaning_of(loss) for label, loss in zip(labels, losses, strict=True)}


def check_columns(params: Asked, meanings: Mapping[str, Meaning]) -> None:
    """Refuse columns that the losses alone forbid.

    Raises:
        ConfigError: names the parameter and what it needs.
    """
    get = params.getOrDefault
    special, output_columns = [name for name in _SPARKS if get(name)], get("outputCols")
    if special and len(meanings) > 1:
        raise ConfigError(f"{special[0]} names one output of {len(meanings)}, {list(meanings)}: use outputCols")
    if output_columns is not None and len(output_columns) != len(meanings):
        raise ConfigError(
            f"outputCols names {len(output_columns)} columns for {len(meanings)} outputs: name one an output"
        )
    for name in special:
        if name != "predictionCol" and "value" in meanings.values():
            raise ConfigError(
                f"{name} wants a vector of classes, and the loss does not say that the output means any: drop it, or "
                "train with CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss, BCELoss or a class derived from one of them"
            )


def _by_shape(shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, Meaning]:
    return {label: "classes" if len(shape) == 1 else "value" for label, shape in shapes.items()}


def wanted_columns(params: Asked, signature: Signature, meanings: Mapping[str, Meaning] | None) -> list[Wanted]:
    """Which prediction columns the parameters ask for.

    Args:
        params: of the estimator, or of the model.
        signature: of the model.
        meanings: by label; None where no loss is known: then an output of several numbers means classes.

    Raises:
        ConfigError: names and outputs differ in number, or a classifier's column is asked of something else.
    """
    get = params.getOrDefault
    shapes = {field.name: field.shape for field in signature.outputs}
    if meanings is None:
        meanings = _by_shape(shapes)
        vector = [name for name in _SPARKS[1:] if get(name) and len(shapes) == 1]
        if vector and "value" in meanings.values():
            label, shape = next(iter(shapes.items()))
            raise ConfigError(
                f"{vector[0]} wants a vector, {label!r} gives {shape}: drop it, or say by loss= what the output means"
            )
    check_columns(params, meanings)
    label, shape = next(iter(shapes.items()))
    meaning = meanings[label]
    fits = len(shape) == 1 if meaning == "classes" else shape == ()
    for name in _SPARKS[1:]:
        if get(name) and not fits:
            raise ConfigError(
                f"{name} wants a vector with one number a class, {label!r} gives {shape} to its loss: drop it"
            )
    columns = []
    if get("predictionCol"):
        is_class = meaning != "value" and fits
        columns.append(
            Wanted(get("predictionCol"), OutputSpec(label, "class", meaning) if is_class else OutputSpec(label))
        )
    else:
        names = get("outputCols") or [f"{answer}__output" for answer in signature.answers]
        columns += [Wanted(name, OutputSpec(answer)) for name, answer in zip(names, shapes, strict=True)]
    if get("probabilityCol"):
        columns.append(Wanted(get("probabilityCol"), OutputSpec(label, "probability", meaning), vector=True))
    if get("rawPredictionCol"):
        columns.append(Wanted(get("rawPredictionCol"), OutputSpec(label, "raw", meaning), vector=True))
    return columns
