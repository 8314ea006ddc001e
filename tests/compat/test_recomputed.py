"""A module that computes its activations again gives the same gradients under the same names."""

from __future__ import annotations

import torch

from sparkdl.compat.recomputed import recompute


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(3, 3), 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.layer(x))


def test_a_recomputed_module_runs_twice_and_has_the_gradients_and_names_of_a_plain_one():
    torch.manual_seed(0)
    plain, again = Counted(), Counted()
    again.load_state_dict(plain.state_dict())
    recompute([again])
    x = torch.randn(4, 3)
    for module in (plain, again):
        module(x).square().sum().backward()
    assert (plain.calls, again.calls) == (1, 2)
    assert dict(plain.named_parameters()).keys() == dict(again.named_parameters()).keys()
    for mine, theirs in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
