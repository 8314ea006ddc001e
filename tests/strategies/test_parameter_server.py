"""What a worker notices of its weights."""

from __future__ import annotations

import pytest
import torch

from sparkdl.strategies.parameter_server import sum_of_bits


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(1,), (3,), (7, 5), (300, 301)])
def test_other_values_have_another_sum_of_bits(dtype, shape):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensor = (numbers > 0) if dtype == torch.bool else numbers.to(dtype)
    before = sum_of_bits(tensor)
    assert sum_of_bits(tensor.clone()) == before
    changed = ~tensor if dtype == torch.bool else -tensor
    assert sum_of_bits(changed) != before
    changed = tensor.clone()
    changed.view(-1)[-1] = 1 - changed.view(-1)[-1].to(torch.complex64 if dtype.is_complex else torch.float32)
    assert sum_of_bits(changed) != before


def test_no_numbers_and_numbers_out_of_order_have_a_sum_of_bits():
    assert sum_of_bits(torch.empty(0, 3)) == 0
    numbers = torch.randn(6, 5)
    assert sum_of_bits(numbers.t()) == sum_of_bits(numbers.t().contiguous())
    assert sum_of_bits(torch.tensor(1.5)) != sum_of_bits(torch.tensor(-1.5))
