"""Weights of a recurrent layer change places with others inside the block, and torch refuses it outside."""

import pytest
import torch

from sparkdl.compat.recurrent_weights import swappable_weights


def zeros_like(parameter):
    return torch.nn.Parameter(torch.zeros_like(parameter))


def test_the_block_is_still_needed():
    layer = torch.nn.GRU(2, 3)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(layer.weight_ih_l0, zeros_like(layer.weight_ih_l0))


@pytest.mark.parametrize("layer", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
def test_a_layer_computes_with_what_it_got(layer):
    model = torch.nn.Sequential(torch.nn.Identity(), layer(2, 3))
    with swappable_weights(model):
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, zeros_like(parameter))
    out, _ = model(torch.ones(1, 4, 2))
    assert torch.equal(out, torch.zeros(1, 4, 3))
    with torch.no_grad():
        model[1].bias_ih_l0.fill_(0.5)
    assert (model(torch.ones(1, 4, 2))[0] > 0).all()
