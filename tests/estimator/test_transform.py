"""What a fitted model keeps between two transforms."""

import torch

from sparkdl.estimator.transform import Weights


def test_weights_are_told_from_any_others_that_a_model_has_had_or_gets():
    model = torch.nn.BatchNorm1d(2)
    weights = Weights(model)
    assert weights.are_those_of(model)
    for value in range(20):  # an object that is made may get the address of one that is gone
        model.weight = torch.nn.Parameter(torch.full((2,), float(value)))
        assert not weights.are_those_of(model)
    weights = Weights(model)
    with torch.no_grad():
        model.running_mean += 1
    assert not weights.are_those_of(model)
    weights = Weights(model)
    model.load_state_dict(model.state_dict())
    assert not weights.are_those_of(model)
    assert not Weights(model).are_those_of(torch.nn.Linear(2, 2))


def test_a_layer_without_weights_and_a_number_of_a_layer_are_told_from_those_before():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Identity(), torch.nn.Hardtanh())
    weights = Weights(model)
    model[1] = torch.nn.Tanh()
    assert not weights.are_those_of(model)
    weights = Weights(model)
    model.eval()
    assert weights.are_those_of(model)
    model[2].max_val = 0.5
    assert not weights.are_those_of(model)
