"""A network eager, compiled with static and with dynamic shapes, and exported: one set of numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparkdl.interchange.export import export_bundle
from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.models.networks import TabularEnsemble
from sparkdl.models.signature import Signature, TensorField

BOUND = {"rtol": 1e-4, "atol": 1e-5}  # float32 in another order
ROWS = (5, 8, 13)
OUTPUT = (TensorField(name="y"),)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


class Attention(nn.Module):
    """A transformer of one block over six tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.qkv, self.joined, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x):
        hidden = self.tokens(x)
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = self.norm(hidden + self.joined(attended.transpose(1, 2).flatten(2)))
        return self.mlp(hidden.mean(1))


def ensemble():
    numbers = {"name": "numbers", "shape": [3], "knots": [[-1.0, 0.0, 0.5, 2.0]] * 3}
    ids = {"name": "ids", "shape": [2], "cardinalities": [4, 9]}
    label = {"name": "y", "type": "regression", "outputs": 1, "mean": 1.0, "deviation": 2.0, "loss": "mse"}
    return TabularEnsemble({"inputs": [numbers, ids], "labels": [label]}, width=8, depth=1, dropout=0.0)


def dense_batch(rows):
    return torch.randn(rows, 6)


def token_batch(rows):
    return torch.randint(11, (rows, 6))


def tabular_batch(rows):
    ids = torch.stack([torch.randint(count, (rows,)) for count in (4, 9)], dim=1)
    return {"numbers": torch.randn(rows, 3), "ids": ids}


def field(name, width, dtype="float32"):
    return TensorField(name=name, dtype=dtype, shape=(width,), columns=tuple(f"{name}{i}" for i in range(width)))


NETWORKS = {
    "dense": (Dense, dense_batch, Signature(inputs=(field("x", 6),), outputs=OUTPUT)),
    "transformer": (Attention, token_batch, Signature(inputs=(field("x", 6, "int64"),), outputs=OUTPUT)),
    "tabular": (
        ensemble,
        tabular_batch,
        Signature(inputs=(field("numbers", 3), field("ids", 2, "int64")), outputs=OUTPUT, call="dict"),
    ),
}


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gradients(net, call, batch):
    """Those of a loss, with what the network adds to it."""
    net.zero_grad()
    loss = call(batch).square().mean()
    if getattr(net, "auxiliary_loss", None) is not None:
        loss = loss + net.auxiliary_loss
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_compiled_network_answers_and_learns_as_the_eager_one(name, dynamic):
    make, batch_of, _ = NETWORKS[name]
    torch.manual_seed(0)
    net = make()
    compiled = torch.compile(net, dynamic=dynamic)
    for rows in ROWS:
        batch = batch_of(rows)
        expected = net(batch)
        # With dynamic shapes the first batch has compiled for all; with static ones each number of rows has its graph.
        with torch.compiler.set_stance("fail_on_recompile" if dynamic and rows > ROWS[0] else "default"):
            torch.testing.assert_close(compiled(batch), expected, **BOUND)
            torch.testing.assert_close(gradients(net, compiled, batch), gradients(net, net, batch), **BOUND)
    if not dynamic:
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
            compiled(batch_of(21))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_an_exported_network_answers_as_the_compiled_one(tmp_path, name):
    onnxruntime = pytest.importorskip("onnxruntime")
    make, batch_of, signature = NETWORKS[name]
    torch.manual_seed(0)
    net = make().eval()
    made = {} if name == "tabular" else {"factory": type(net), "arguments": {}}
    save_bundle(net, str(tmp_path / "bundle"), signature=signature, **made)
    trusted = [__name__]
    for format in ("onnx", "torch"):
        export_bundle(str(tmp_path / "bundle"), str(tmp_path / format), format=format, trusted=trusted)
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx"))
    program = torch.export.load(tmp_path / "torch").module()
    bundle = load_bundle(str(tmp_path / "bundle"), trusted=trusted)
    compiled = torch.compile(bundle.model, dynamic=True)
    for rows in ROWS:
        batch = batch_of(rows)
        tensors = batch if isinstance(batch, dict) else {"x": batch}
        with torch.inference_mode():
            expected = bundle.model(batch)
            answers = {"compiled": compiled(batch), "torch": program(*tensors.values())[0]}
        feeds = {name: tensor.numpy() for name, tensor in tensors.items()}
        answers["onnx"] = torch.from_numpy(session.run(None, feeds)[0])
        for answer in answers.values():
            torch.testing.assert_close(answer, expected, **BOUND)
