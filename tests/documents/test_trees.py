"""State as JSON and one file of tensors, and the same state again."""

from __future__ import annotations

import json

import torch

from sparkdl.documents.tensors import load_tensors
from sparkdl.documents.trees import Decoder, Encoder, Layout


def written_and_read(value):
    encoder = Encoder()
    tree = json.dumps(encoder.encode(value))
    layout = Layout.for_tensors(encoder.tensors)
    layout.fill(encoder.tensors)
    return Decoder(load_tensors(bytes(layout.data), "state")).decode(json.loads(tree))


def test_views_of_one_memory_that_stand_for_other_numbers_are_told_apart():
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {"same": numbers, "again": numbers, "conjugate": numbers.conj(), "imaginary": numbers.imag}
    state["negative"] = numbers.conj().imag
    read = written_and_read(state)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }
    assert read["same"] is read["again"]


def test_every_key_may_name_a_tensor():
    state = {"__metadata__": torch.ones(2), "a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "": torch.ones(3)}
    read = written_and_read(state)
    assert read["__metadata__"].tolist() == [1, 1]
    assert (read["a.b"].tolist(), read["a"]["b"].tolist(), read[""].tolist()) == ([1], [0], [1, 1, 1])
