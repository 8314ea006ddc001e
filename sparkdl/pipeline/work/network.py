"""The network of a pipeline: the user's, or sparkdl's own, made from what the features are.

The description of features and labels is plain values, with which the network is made here, and again wherever its
bundle is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.features.fitted import Features
from sparkdl.features.spec import NUMBERS
from sparkdl.models.importing import makes_a_model
from sparkdl.pipeline.code import imported, unannotated
from sparkdl.pipeline.spec import Label, Model
from sparkdl.pipeline.spec.data import LOSSES
from sparkdl.pipeline.trials import factory_of
from sparkdl.pipeline.work.labels import Labels


def described(features: Features, labels: Labels, sections: Mapping[str, Label]) -> dict[str, Any]:
    """What a factory is called with as ``features``: plain values that travel in the bundle.

    Args:
        features: fitted.
        labels: fitted.
        sections: of the labels, in the file, by name: which loss they have, and its weight.

    Returns:
        ``{"inputs": [{"name", "dtype", "shape", "names", "cardinalities"}, ...], "labels": [{"name", "type",
        "outputs", "classes", "mean", "deviation", "loss", "weight"}, ...]}``, and ``levels`` of quantiles; a list of
        ids has the shape ``[]``, and ``numbers`` has ``knots``, see ``Features.knots``.
    """
    inputs = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "names": list(tensor.names),
            "cardinalities": list(tensor.cardinalities),
            **({"knots": [list(knots) for knots in features.knots]} if tensor.name == NUMBERS else {}),
        }
        for tensor in features.inputs
    ]
    described_labels = [
        {
            "name": label.name,
            "type": label.type,
            "outputs": label.outputs,
            "classes": list(label.classes),
            "mean": label.mean if label.type == "regression" and label.ceiling is None else 0.0,
            "deviation": label.deviation if label.ceiling is None else 1.0,  # of amounts the logarithm is asked for
            **({"levels": list(label.levels)} if label.levels else {}),
            "loss": sections[label.name].loss or LOSSES[sections[label.name].type][0],
            "weight": 1.0 if sections[label.name].weight is None else sections[label.name].weight,
        }
        for label in labels
    ]
    return {"inputs": inputs, "labels": described_labels}


def make_network(model: Model, features: dict[str, Any], seed: int) -> nn.Module:
    """Call the factory.

    Raises:
        ConfigError: it cannot be imported, is not annotated to return a module, fails, or returns something else.
    """
    target = factory_of(model)
    factory = imported(target, "model.factory")
    if not makes_a_model(factory):
        raise ConfigError(f"model.factory={unannotated(target)}")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = factory(features=features, **model.arguments)
    except Exception as error:
        raise ConfigError(f"model.factory={target} failed: {type(error).__name__}: {error}") from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model.factory={target} returned a {type(network).__name__}: return a torch.nn.Module")
    return network
