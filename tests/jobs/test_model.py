from __future__ import annotations

import json

import pytest
import torch

from jobs.features import CATEGORICAL, LABEL, NUMERIC, Moments, Statistics
from jobs.model import build_model, model_kwargs
from jobs.settings import ModelSettings
from sparkdl.errors import ConfigError

STATISTICS = Statistics.of(
    {"2026-03-02": {name: Moments(rows=10, mean=40.0, variance=25.0) for name in (*NUMERIC, LABEL)}}
)


def batch(rows=8):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 8, (rows, len(CATEGORICAL)), generator=generator, dtype=torch.int32)
    return torch.randn(rows, len(NUMERIC), generator=generator), ids


def test_the_factory_takes_json_and_returns_minutes():
    arguments = json.loads(json.dumps(model_kwargs(ModelSettings(), STATISTICS)))
    model = build_model(**arguments)
    minutes = model(*batch())
    assert minutes.shape == (8,)
    assert minutes.detach().mean().item() == pytest.approx(40.0, abs=5.0)  # untrained: about the mean of the label


def test_equal_arguments_and_seed_build_equal_models():
    arguments = model_kwargs(ModelSettings(), STATISTICS)
    built = []
    for _ in range(2):
        torch.manual_seed(3)
        built.append(build_model(**arguments)(*batch()))
    assert torch.equal(*built)


def test_every_input_matters_and_gets_a_gradient():
    model = build_model(**model_kwargs(ModelSettings(), STATISTICS))
    numerics, ids = batch()
    numerics.requires_grad_()
    model(numerics, ids).square().sum().backward()
    assert (numerics.grad.abs().sum(dim=0) > 0).all()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_a_table_too_few_or_too_many_is_refused():
    rows = dict(ModelSettings().embedding_rows)
    rows.pop("vehicle")
    with pytest.raises(ConfigError, match=r"6 tables.*'vehicle'"):
        model_kwargs(ModelSettings(embedding_rows=rows), STATISTICS)
    with pytest.raises(ConfigError, match="'planet'"):
        model_kwargs(ModelSettings(embedding_rows=ModelSettings().embedding_rows | {"planet": 3}), STATISTICS)


def test_widths_can_be_given():
    settings = ModelSettings(embedding_width={"vehicle": 3})
    assert model_kwargs(settings, STATISTICS)["embedding_width"][CATEGORICAL.index("vehicle")] == 3
