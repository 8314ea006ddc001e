"""Poisson's loss of amounts: its minimum is their mean whatever their distribution, and no label breaks it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.nn import PoissonLoss


def test_the_constant_that_minimises_it_is_the_mean_of_the_amounts():
    amounts = torch.from_numpy(np.random.default_rng(0).lognormal(8, 1.5, 4000)).float()
    loss = PoissonLoss(mean=100.0)
    constant = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([constant], lr=0.1)
    for _ in range(600):
        optimizer.zero_grad()
        loss(constant.expand(len(amounts), 1), amounts).backward()
        optimizer.step()
    assert loss.amounts(constant).item() == pytest.approx(amounts.mean().item(), rel=1e-3)


def test_it_is_half_the_deviance_and_0_where_all_is_right():
    amounts = torch.tensor([0.0, 0.5, 3.0, 700.0])
    loss = PoissonLoss(mean=2.0, reduction="none")
    right = torch.log(amounts.clamp_min(1e-30) / 2)
    assert loss(right, amounts).abs().max().item() < 1e-4
    predicted = torch.tensor([1.0, 2.0, 4.0, 500.0])
    by_hand = [
        (predicted[0]),
        0.5 * np.log(0.5 / 2) - 0.5 + 2,
        3 * np.log(3 / 4) - 3 + 4,
        700 * np.log(700 / 500) - 700 + 500,
    ]
    torch.testing.assert_close(
        loss(torch.log(predicted / 2), amounts[:, None]) * 2, torch.tensor([float(value) for value in by_hand])
    )
    assert PoissonLoss(mean=2.0)(right[:, None], amounts).item() == pytest.approx(0, abs=1e-4)


def test_huge_outputs_and_negative_amounts_leave_it_finite_and_with_a_gradient():
    outputs = torch.tensor([80.0, -80.0, 0.0, 0.0], requires_grad=True)
    value = PoissonLoss(mean=10.0)(outputs, torch.tensor([1.0, 1e12, -5.0, 0.0]))
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(outputs.grad).all()
    assert outputs.grad[2] > 0  # down, as for any amount below the prediction


def test_amounts_end_at_the_ceiling():
    loss = PoissonLoss(mean=10.0, ceiling=25.0)
    torch.testing.assert_close(loss.amounts(torch.tensor([0.0, 5.0, 500.0])), torch.tensor([10.0, 25.0, 25.0]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PoissonLoss(mean=0.0), "mean=0.0 is not above 0"),
        (lambda: PoissonLoss(mean=float("nan")), "mean=nan is not above 0"),
        (lambda: PoissonLoss(reduction="sum"), "reduction='sum' is unknown"),
        (lambda: PoissonLoss()(torch.zeros(3, 2), torch.zeros(3)), r"shape \(3, 2\) for labels of \(3,\)"),
    ],
)
def test_what_it_refuses(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
