"""A made-up call of a pipeline's model, from its file alone; the real vocabularies come from the training rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdl.features.fitted import Features, fit
from sparkdl.features.spec import DateParts, Encoded, Feature, Vector
from sparkdl.features.statistics import KNOTS, PROBABILITIES, Statistics
from sparkdl.pipeline.spec import Label, PipelineSpec
from sparkdl.pipeline.work.labels import FittedLabel, Labels
from sparkdl.pipeline.work.network import described

_LENGTH = 3
"""The length of vectors, lists, vocabularies and classes that the file leaves open."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A made-up call of a model.

    Attributes:
        features: what the factory gets as ``features``.
        inputs: what the model gets: one tensor an input, with ``<name>_mask`` beside lists.
        outputs: numbers that the model has to say of a row, by label.
    """

    features: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, int]


def example_of(spec: PipelineSpec, rows: int = 4) -> Example:
    """Make one up.

    Args:
        spec: of the pipeline.
        rows: of the inputs.
    """
    fitted = fit(spec.features, {name: _statistics(options) for name, options in spec.features.items()})
    labels = Labels(labels=tuple(_label(name, options) for name, options in spec.label.items()))
    return Example(
        features=described(fitted, labels, spec.label),
        inputs=_inputs(fitted, rows),
        outputs={label.name: label.outputs for label in labels},
    )


def _statistics(options: Feature) -> Statistics:
    """Statistics that training rows might have had."""
    plain: dict[str, Any] = {"rows": 2, "count": 2, "mean": 0.5, "variance": 0.25}
    if isinstance(options, DateParts):
        return Statistics(**plain, minimum=2020, maximum=2026)
    if isinstance(options, Encoded):
        words = tuple(f"value {number}" for number in range(_LENGTH)) if options.buckets is None else ()
        return Statistics(**plain, values=words, value_counts=(options.least_count,) * len(words))
    if isinstance(options, Vector):
        return Statistics(**plain, minimum=0, maximum=1, total=2 * (options.size or _LENGTH))
    return Statistics(
        **plain, minimum=0, maximum=1, scaled_mean=0.5, scaled_variance=0.25,
        quantiles=(0.5,) * len(PROBABILITIES), knots=KNOTS,
    )  # fmt: skip


def _label(name: str, label: Label) -> FittedLabel:
    if label.type in ("regression", "quantiles"):
        return FittedLabel(name=name, type="regression", levels=label.quantiles)
    if label.type == "binary":
        return FittedLabel(name=name, type="binary", classes=("0", "1"))
    classes = tuple(map(str, label.classes or range(_LENGTH)))
    return FittedLabel(name=name, type="multiclass", classes=classes)


def _inputs(features: Features, rows: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for model_input in features.inputs:
        shape = (rows, *(model_input.shape or (_LENGTH,)))
        if model_input.cardinalities:
            most = torch.tensor(model_input.cardinalities)
            tensors[model_input.name] = (torch.rand(shape, generator=draw) * most).long()
            if not model_input.shape:
                tensors[f"{model_input.name}_mask"] = torch.arange(_LENGTH) < torch.arange(rows).unsqueeze(1) % (
                    _LENGTH + 1
                )
        elif model_input.dtype == "uint8":
            tensors[model_input.name] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        else:
            tensors[model_input.name] = torch.randn(shape, generator=draw)
    return tensors
