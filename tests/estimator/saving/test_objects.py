import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparkdl.errors import BundleError, IntegrityError
from sparkdl.estimator import SparkBackend, Store
from sparkdl.estimator.saving.objects import Decoder, Encoder, NotPlain
from sparkdl.estimator.summary import TrainingSummary


def there_and_back(value, known=(), **options):
    """Through JSON text, as on disk; parameters are found again by name."""
    encoder = Encoder({id(tensor): name for name, tensor in dict(known).items()})
    text = json.dumps(encoder.encode(value))
    return Decoder(encoder.tensors, dict(known), **options).decode(json.loads(text))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "three", True, None],
        {"a": (1, (2, 3)), 4: [5]},
        torch.float16,
        {"loss": np.float32(0.1), "n": np.int64(3)},
        F.l1_loss,
        nn.Linear,
        TrainingSummary(run_id="r", metrics={"loss": 0.5}, warnings=("the loss is high",)),
    ],
)
def test_values_come_back_equal_and_of_the_same_type(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_records_of_ours_come_back(tmp_path):
    store = Store.create(str(tmp_path), keep_shards="always", save_runs=False)
    assert there_and_back(store) == store
    assert there_and_back(SparkBackend(3)).num_processes() == 3
    assert there_and_back(SparkBackend(3)).options == {}
    assert there_and_back(SparkBackend(3, verbose=0)).options == {"verbose": 0}
    backend = there_and_back(SparkBackend(3, env={"A": "1"}, start_timeout=5.0), allowed=True)
    assert (backend.num_processes(), backend.env, backend.start_timeout) == (3, {"A": "1"}, 5.0)
    backend = there_and_back(SparkBackend(3, nics="eth0", prefix_output_with_timestamp=True, stdout=io.StringIO()))
    assert (backend.options["nics"], backend.options["prefix_output_with_timestamp"]) == (["eth0"], True)
    assert backend.options.get("stdout") is None


def test_losses_come_back_with_their_arguments():
    output, label = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1, reduction="sum")
    assert torch.equal(there_and_back(loss)(output, label), loss(output, label))
    assert there_and_back(nn.HuberLoss(delta=0.3)).delta == 0.3


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.9, nesterov=True),
        lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
        lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
    ],
)
def test_an_optimizer_steps_on_as_if_nothing_had_happened(make):
    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    groups = [{"params": [*model[0].parameters()], "lr": 0.05}, {"params": [*model[2].parameters()]}]
    optimizer = make(groups)
    step(model, optimizer)
    encoder = Encoder({id(p): name for name, p in model.named_parameters()})
    text = json.dumps(encoder.encode(optimizer))
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    other.load_state_dict(model.state_dict())
    written = {name: tensor.clone() for name, tensor in encoder.tensors.items()}
    back = Decoder(written, dict(other.named_parameters())).decode(json.loads(text))
    assert type(back) is type(optimizer)
    assert back.param_groups[0]["params"][0] is other[0].weight
    for _ in range(2):
        step(model, optimizer)
        step(other, back)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Scaled(nn.Module):
    def forward(self, output, label):
        return (output - label).abs().sum()


def hooked():
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda *_: None)
    return loss


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x,
        Scaled(),
        hooked(),
        nn.Linear(2, 1),
        torch.nn.Parameter(torch.ones(2)),
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
        json.dumps,
        {"deep": [{"inside": object()}]},
    ],
)
def test_what_has_code_or_is_bound_to_something_else_is_left_to_a_pickle(value):
    encoder = Encoder()
    with pytest.raises(NotPlain):
        encoder.encode({"before": torch.ones(3), "value": value})
    assert not encoder.tensors


NONE = {"params": [], "groups": [], "defaults": {}, "state": {}}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"$name": "os:system"}, "of Python's standard library"),
        ({"$name": "sparkdl.storage:os.system"}, "which is sparkdl itself"),
        ({"$name": "torch.hub:load"}, "outside of torch.nn"),
        ({"$name": "torch.nn.functional:Tensor"}, "no class or function that torch.nn.functional defines"),
        ({"$name": "strange_package:f"}, r"allow_imports\('strange_package'\)"),
        ({"$optimizer": {**NONE, "kind": "strange_package:Best"}}, "importing strange_package"),
        ({"$name": "torch.nn.functional:no_such_loss"}, "has no 'no_such_loss'"),
        ({"$loss": {"kind": "Linear", "arguments": {}, "training": True}}, "no loss 'Linear'"),
        ({"$exec": "1"}, "does not know"),
        ({"$dtype": "load"}, "no dtype 'load'"),
        ({"$SparkBackend": {"env": {"LD_PRELOAD": "/tmp/x.so"}}}, "sets LD_PRELOAD in the environment.*allow_pickle"),
        ({"$SparkBackend": {"env": {"A": 1}}}, r"in \$.env.*Expected `str`"),
        ({"$SparkBackend": {"num_proc": "all"}}, "num_proc"),
        ({"$Store": {"prefix_path": 5}}, r"in \$.prefix_path, Expected `str`"),
        ({"$Store": {"prefix_path": "/x", "color": 1}}, "'color' is unknown"),
        ({"$TrainingSummary": {"metrics": {"mae": "x"}}}, "Expected `float`"),
        ({"$numpy": ["O", []]}, "is no number"),
        ({"$loss": {"kind": "L1Loss", "arguments": {"color": 1}, "training": True}}, "TypeError.*it was altered"),
        ({"$known": "layer.weight"}, "which the saved model lacks"),
        (
            {"$optimizer": {**NONE, "kind": "torch.nn.modules.linear:Linear"}},
            "no torch.optim.Optimizer",
        ),
    ],
)
def test_a_forged_file_makes_nothing_but_losses_optimizers_and_records(node, message):
    with pytest.raises((BundleError, IntegrityError), match=message):
        Decoder({}).decode(node)


def test_a_function_of_another_package_is_found_where_that_is_allowed():
    node = {"$name": "no_such_package_here:f"}
    with pytest.raises(BundleError, match="cannot be imported here"):
        Decoder({}, trusted=["no_such_package_here"]).decode(node)


def test_a_summary_keeps_every_field():
    summary = TrainingSummary(run_id="a", num_proc=2, best_epoch=None, seconds={"fit": 1.5}, stopped_early="done")
    assert there_and_back(replace(summary, rows=7)) == replace(summary, rows=7)


def test_no_file_makes_a_store_whose_folder_is_deleted_after_the_fit(tmp_path):
    (tmp_path / "precious").touch()
    Decoder({}).decode({"$Store": {"prefix_path": str(tmp_path), "temporary": True}}).close()
    assert (tmp_path / "precious").exists()


def test_a_dtype_imports_nothing(monkeypatch):
    monkeypatch.setattr(torch, "__getattr__", lambda name: pytest.fail(f"looked for {name}"))
    with pytest.raises(BundleError, match="no dtype"):
        Decoder({}).decode({"$dtype": "not_there"})


def test_numbers_of_numpy_in_a_summary_come_back():
    summary = TrainingSummary(metrics={"loss": np.float64(0.5), "mae": float("nan")}, seconds={"fit": np.float32(2.0)})
    back = there_and_back(summary)
    assert back.metrics["loss"] == 0.5
    assert back.seconds["fit"] == 2.0
