import pickle
import tracemalloc

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

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


class Wraps(torch.optim.Optimizer):
    """As optimizers of other packages do."""

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.base = base


def test_an_optimizer_keeps_what_its_class_has_beside_groups_and_state():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_pre_hook(lambda *_: None)
    model, back, wrapping = Payload.of((net, optimizer, Wraps(torch.optim.SGD(net.parameters(), lr=0.1)))).open()

    def closure():
        back.zero_grad()
        loss = (model(torch.ones(4, 2)) - 3).square().mean()
        loss.backward()
        return loss

    first = back.step(closure).item()
    assert closure().item() < first / 2
    assert all(mine is theirs for mine, theirs in zip(back._params, model.parameters(), strict=True))
    assert not back._optimizer_step_pre_hooks, "as torch itself does"
    assert wrapping.base.param_groups[0]["params"][0] is model.weight


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = spectral_norm(nn.Linear(4, 4), n_power_iterations=2)
        self.table = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.first(x) @ self.table

    def __getstate__(self):
        return {**self.__dict__, "left": "behind"}


def test_parametrized_modules_travel_bound_to_their_optimizer_and_train_alike():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "own": weight_norm(Normed(), "table"),
            "rnn": weight_norm(nn.LSTM(4, 4), "weight_hh_l0"),
            "q": orthogonal(nn.Linear(4, 4)),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moved, its_optimizer = sent(Payload.of((model, optimizer))).open(share=True)
    assert repr(moved) == repr(model)
    assert type(moved["own"]).__mro__[1] is Normed
    assert moved["own"].left == "behind"
    assert its_optimizer.param_groups[0]["params"][0] is next(moved.parameters())
    x = torch.randn(3, 4)
    for one, steps in ((model, optimizer), (moved, its_optimizer)):
        for _ in range(3):
            steps.zero_grad()
            (one["own"](x) + one["rnn"](x)[0] + one["q"](x)).square().sum().backward()
            steps.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(moved.state_dict()[name], tensor), name
