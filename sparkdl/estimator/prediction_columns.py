"""Which prediction columns a fit or a model is asked for, and whether its loss and outputs allow them.

Enters: the column parameters, what the outputs mean, and, once the model was called, their shapes. Leaves: one
``Wanted`` a column; or a refusal, at ``fit`` before anything is written as far as the loss tells. No Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.errors import ConfigError
from sparkdl.estimator.outputs import OutputSpec
from sparkdl.models.signature import Signature
from sparkdl.observe import logger
from sparkdl.train.objective.labels import Meaning, meaning_of

if TYPE_CHECKING:
    from sparkdl.estimator.inputs.probe import Probe
    from sparkdl.shards.manifest import Manifest

__all__ = ["Asked", "Wanted", "check_columns", "meanings_of", "tell_of_own_loss", "wanted_columns"]

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
    special, given = [name for name in _SPARKS if get(name)], get("outputCols")
    if special and len(meanings) > 1:
        raise ConfigError(f"{special[0]} names one output of {len(meanings)}, {list(meanings)}: use outputCols")
    if given is not None and len(given) != len(meanings):
        raise ConfigError(f"outputCols names {len(given)} columns for {len(meanings)} outputs: name one an output")
    for name in special:
        if name != "predictionCol" and "value" in meanings.values():
            raise ConfigError(
                f"{name} wants a vector of classes, and the loss does not say that the output means any: drop it, or "
                "train with CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss, BCELoss or a class derived from one of them"
            )


def tell_of_own_loss(params: Asked, found: Probe, meanings: Mapping[str, Meaning], train: Manifest) -> None:
    """Say in the log what predictionCol will hold, where it looks like a class and the loss does not make it one."""
    name, (output, *_) = params.getOrDefault("predictionCol"), found.outputs
    label = train.tensor(output.label)
    looks = len(output.shape) == 1 and output.shape[0] > 1 and label.shape == () and label.dtype.startswith("int")
    if name and looks and meanings[output.label] == "value":
        logger.warning(
            "predictionCol=%r will hold the %d numbers of the output, no class, since the loss is none of torch's for "
            "classes: train with CrossEntropyLoss or a class derived from it, or take the greatest one's index",
            name,
            output.shape[0],
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
    found = []
    if get("predictionCol"):
        is_class = meaning != "value" and fits
        found.append(
            Wanted(get("predictionCol"), OutputSpec(label, "class", meaning) if is_class else OutputSpec(label))
        )
    else:
        names = get("outputCols") or [f"{one}__output" for one in signature.answers]
        found += [Wanted(name, OutputSpec(one)) for name, one in zip(names, shapes, strict=True)]
    if get("probabilityCol"):
        found.append(Wanted(get("probabilityCol"), OutputSpec(label, "probability", meaning), vector=True))
    if get("rawPredictionCol"):
        found.append(Wanted(get("rawPredictionCol"), OutputSpec(label, "raw", meaning), vector=True))
    return found
