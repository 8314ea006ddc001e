import pickle
import tracemalloc

import numpy as np
import torch
from torch import nn

from sparkdl.documents.payload import _SHARED_BYTES, Payload
from sparkdl.launch.wire import dump_value, load_value


def sent(payload):
    """As it arrives at the other end of a connection."""
    return load_value([bytearray(part) for part in dump_value(payload)])


def tensors():
    return {
        "half": torch.arange(6).half(),
        "brain": torch.arange(6).bfloat16(),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "part": torch.arange(10)[3:5],
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.tensor([1 + 2j]),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }


def test_tensors_of_every_kind_come_back_equal():
    for way in (lambda p: p.open(), lambda p: sent(p).open(share=True), lambda p: pickle.loads(pickle.dumps(p)).open()):
        found = way(Payload.of(tensors()))
        for name, tensor in tensors().items():
            assert found[name].dtype == tensor.dtype
            assert found[name].stride() == tensor.stride() if name == "turned" else True
            assert torch.equal(found[name].to_dense(), tensor.to_dense()), name


def test_an_opened_payload_is_a_copy_whose_references_are_as_they_were():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    flat = torch.zeros(6)
    model.one, model.other = flat[:3], flat[3:]
    optimizer = torch.optim.Adam(model.parameters())
    payload = Payload.of((model, optimizer))
    (first, stepper), (second, _) = payload.open(), payload.open()
    assert first[1].weight is first[0].weight
    assert stepper.param_groups[0]["params"][0] is first[0].weight
    assert first.one.untyped_storage().data_ptr() == first.other.untyped_storage().data_ptr()
    with torch.no_grad():
        first[0].weight.add_(1)
    assert torch.equal(second[0].weight, model[0].weight)
    assert not torch.equal(first[0].weight, model[0].weight)


def test_packing_and_sending_copy_no_large_tensor():
    model = nn.Linear(_SHARED_BYTES // 4, 1, bias=False)
    tracemalloc.start()  # numpy's and Python's memory; torch's is not seen, so an opened copy is not counted
    parts = dump_value(Payload.of(model))
    packed = tracemalloc.get_traced_memory()[1]
    received = load_value([bytearray(part) if part.nbytes < 1000 else part for part in parts])
    again = received.open(share=True)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20 > packed
    tracemalloc.stop()
    assert again.weight.data_ptr() == np.frombuffer(parts[1], dtype="u1").ctypes.data == model.weight.data_ptr()
    assert received.open().weight.data_ptr() != model.weight.data_ptr()
