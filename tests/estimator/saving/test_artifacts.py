import hashlib
import os

import pytest
import torch

from sparkdl.errors import IntegrityError
from sparkdl.estimator.saving.artifacts import read_objects, read_tensors, write_objects, write_tensors
from sparkdl.storage import Storage


def stepped():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_models_optimizers_and_functions_come_back_with_their_references(tmp_path):
    model, optimizer = stepped()
    facts = write_objects({"model": model, "optimizer": optimizer, "f": lambda x: x + 1}, Storage.of(tmp_path))
    back = read_objects(Storage.of(tmp_path), facts)
    assert back["optimizer"].param_groups[0]["params"][0] is back["model"][0].weight
    moment = back["optimizer"].state[back["model"][0].weight]["exp_avg"]
    assert torch.equal(moment, optimizer.state[model[0].weight]["exp_avg"])
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), back["model"].state_dict().values(), strict=True)
    )
    assert back["model"][0].weight.requires_grad
    assert back["f"](1) == 2


def test_the_numbers_are_in_safetensors_and_not_in_the_pickle(tmp_path):
    model = torch.nn.Linear(1000, 100)
    facts = write_objects(model, Storage.of(tmp_path))
    assert facts["tensors.safetensors"]["bytes"] > 400_000
    assert facts["code.pkl"]["bytes"] < 5_000


def test_tensors_that_are_kept_elsewhere_are_referred_to_by_name(tmp_path):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts = write_objects(optimizer, Storage.of(tmp_path), {id(p): name for name, p in model.named_parameters()})
    assert list(facts) == ["code.pkl"]
    other = torch.nn.Linear(3, 1)
    back = read_objects(Storage.of(tmp_path), facts, dict(other.named_parameters()))
    assert back.param_groups[0]["params"][0] is other.weight


@pytest.mark.parametrize("name", ["code.pkl", "tensors.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_an_altered_file_is_found_before_anything_is_read(tmp_path, name, damage):
    facts = write_objects(torch.nn.Linear(3, 1), Storage.of(tmp_path))
    file = tmp_path / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()
    if damage != "gone":
        file.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(IntegrityError, match=name):
        read_objects(Storage.of(tmp_path), facts)


@pytest.mark.parametrize("data", [b"", b"\x05\0\0\0\0\0\0\0hello", b"\xff" * 64])
def test_a_file_of_tensors_that_is_none_is_refused_by_type_though_its_hash_fits(tmp_path, data):
    (tmp_path / "t.safetensors").write_bytes(data)
    fact = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with pytest.raises(IntegrityError, match="cannot be read as safetensors"):
        read_tensors(Storage.of(tmp_path).child("t.safetensors"), fact)


def test_a_pipe_in_the_place_of_tensors_does_not_make_its_reader_wait(tmp_path):
    file = Storage.of(tmp_path).child("t.safetensors")
    fact = write_tensors(file, {"a": torch.ones(2)})
    os.unlink(tmp_path / "t.safetensors")
    os.mkfifo(tmp_path / "t.safetensors")
    with pytest.raises(IntegrityError, match="no regular file"):
        read_tensors(file, fact | {"bytes": 0})
