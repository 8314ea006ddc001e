"""Tensors in files: the same numbers, no memory of the process, and nothing left on the disk."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

from sparkdl.strategies.file_tensors import in_file, in_memory, lies_in_file, parameters_in_files


def layers():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.LayerNorm(600), torch.nn.Linear(600, 2))


def test_a_model_made_in_files_draws_the_weights_of_one_made_in_memory():
    with parameters_in_files():
        model = layers()
    assert [lies_in_file(parameter) for parameter in model.parameters()] == [True] + 5 * [False]
    in_memory(model)
    assert not any(lies_in_file(parameter) for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), layers().state_dict(), rtol=0, atol=0)
    assert not any(lies_in_file(parameter) for parameter in layers().parameters())


def test_a_tied_parameter_stays_one_object_and_its_part_lies_in_the_same_file():
    with parameters_in_files():
        first, second = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)
        second.weight = first.weight
    assert second.weight is first.weight
    assert lies_in_file(first.weight[:300])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_copy_in_a_file_has_the_values_and_the_shape(dtype):
    tensor = torch.arange(2**20).to(dtype).reshape(1024, 1024)
    copy = in_file(tensor.t())
    assert lies_in_file(copy)
    assert torch.equal(copy, tensor.t())
    copy[0, 0] = 7
    assert tensor[0, 0] == 0


def test_a_file_takes_no_name_and_no_disk_once_its_tensor_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    copy = in_file(torch.ones(2**20))
    assert list(tmp_path.iterdir()) == []
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) in maps.read()
    del copy
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) not in maps.read()


def test_a_full_disk_leaves_the_tensor_in_memory(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tensor = torch.randn(2**20)
    copy = in_file(tensor)
    assert not lies_in_file(copy)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()
