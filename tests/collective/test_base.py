"""Bytes of tensors, however they lie."""

import pytest
import torch

from sparkdl.collective.agree import pack, unpack
from sparkdl.collective.base import as_bytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6.0)[::2],
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(4.0).view(2, 2)[:1, 1],  # one element, stride 1
        torch.arange(4.0).view(2, 2)[:, 1][:1],  # one element, stride 2: contiguous, says torch
        torch.arange(4).view(2, 2)[:1, :1],
    ],
)
def test_a_tensor_comes_back_from_its_bytes_whatever_its_strides(tensor):
    assert as_bytes(tensor).numel() == tensor.numel() * tensor.element_size()
    found = [torch.full_like(tensor, 7), torch.zeros(2)]
    unpack(pack([tensor, torch.ones(2)]), found)
    assert torch.equal(found[0], tensor)
    assert torch.equal(found[1], torch.ones(2))
