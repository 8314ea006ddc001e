"""The pinball loss: its minimum is the quantile, and rows are averaged as every loss averages them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.nn import QuantileLoss

LEVELS = (0.1, 0.5, 0.9)


def test_the_constants_that_minimise_it_are_the_quantiles_of_the_labels():
    labels = torch.from_numpy(np.random.default_rng(0).gamma(2, 5, 4000)).float()
    constants = torch.nn.Parameter(torch.full((3,), 10.0))
    optimizer, loss = torch.optim.Adam([constants], lr=0.1), QuantileLoss(LEVELS)
    for _ in range(600):
        optimizer.zero_grad()
        loss(constants.expand(len(labels), 3), labels).backward()
        optimizer.step()
    wanted = np.quantile(labels.numpy(), LEVELS)
    np.testing.assert_allclose(constants.detach().numpy(), wanted, rtol=0.05)


def test_labels_in_a_column_are_those_in_a_row_and_losses_a_row_have_the_same_mean():
    output, labels = torch.randn(7, 3), torch.randn(7)
    mean, rows = QuantileLoss(LEVELS), QuantileLoss(LEVELS, reduction="none")
    by_hand = np.mean([
        max(level * error, (level - 1) * error)
        for row, label in zip(output.tolist(), labels.tolist(), strict=True)
        for level, error in zip(LEVELS, (label - value for value in row), strict=True)
    ])  # fmt: skip
    assert mean(output, labels).item() == pytest.approx(by_hand, rel=1e-5)
    assert mean(output, labels[:, None]).item() == pytest.approx(by_hand, rel=1e-5)
    assert rows(output, labels).shape == (7, 3)
    assert rows(output, labels).mean().item() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("levels", [(), (0.0, 0.5), (0.5, 1.0), (0.5, 7)])
def test_levels_that_are_no_quantiles_are_refused(levels):
    with pytest.raises(ConfigError, match="give numbers above 0 and below 1"):
        QuantileLoss(levels)


def test_another_number_of_outputs_is_refused():
    with pytest.raises(ConfigError, match=r"has the shape \(4, 2\) for 3 levels: make the model return one number"):
        QuantileLoss(LEVELS)(torch.zeros(4, 2), torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_in_half_precision_move_neither_labels_nor_levels(dtype):
    """A label of 70,000 is infinite in float16, and a level of 0.99 is 0.988 in bfloat16."""
    loss, labels = QuantileLoss((0.5, 0.99)), torch.tensor([70_000.0, 1_234.5])
    output = torch.zeros(2, 2, dtype=dtype)
    assert loss(output, labels).item() == loss(output.float(), labels).item()
