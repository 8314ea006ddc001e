"""The optimizers of ``train.optimizer``: torch's own, whichever kernel makes their step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparkdl.pipeline.work.optimizer import make_optimizer


@pytest.mark.parametrize(("name", "plain"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
def test_one_kernel_steps_as_torchs_loop_over_parameters_does_and_goes_on_from_its_state(name, plain):
    torch.manual_seed(0)
    ours, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(16, 3)
    theirs = copy.deepcopy(ours)
    pairs = [
        (ours, make_optimizer(ours, name, {"lr": 0.01, "weight_decay": 0.1})),
        (theirs, plain(theirs.parameters(), lr=0.01, weight_decay=0.1, foreach=False)),
    ]
    assert pairs[0][1].defaults["fused"]

    def steps(count):
        for net, optimizer in pairs:
            for _ in range(count):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)

    steps(20)
    pairs[1][1].load_state_dict(copy.deepcopy(pairs[0][1].state_dict()))
    steps(5)


def test_parameters_that_one_kernel_cannot_step_are_stepped_one_by_one():
    net = nn.Linear(2, 1)
    net.register_parameter("turned", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    optimizer = make_optimizer(net, "adamw", {"lr": 0.01})
    assert not optimizer.defaults["fused"]
    (net(torch.ones(1, 2)).sum() + net.turned.abs().sum()).backward()
    optimizer.step()
