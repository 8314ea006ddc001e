"""Models are rebuilt without what torch only needs to compile them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from torch import nn
from sparkdl.models.bounded_build import bounded_build
from sparkdl.models.networks import TabularEnsemble

model = bounded_build(lambda: nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3), nn.LSTM(3, 4)), 7)
assert {tensor.device.type for tensor in model.parameters()} == {"meta"}

labels = [{"outputs": 1, "mean": 0.5, "deviation": 2.0}, {"outputs": 3, "mean": 0.0, "deviation": 1.0}]
inputs = [
    {"name": "numbers", "shape": [2], "knots": [[0.0, 0.5, 1.0, 2.0], []]},
    {"name": "categories", "shape": [2], "cardinalities": [3, 300]},
    {"name": "tags", "shape": [], "cardinalities": [50]},
    {"name": "image", "shape": [3, 8, 8]},
]
network = bounded_build(lambda: TabularEnsemble({"inputs": inputs, "labels": labels}), 40)
assert {tensor.device.type for tensor in network.state_dict().values()} == {"meta"}
assert (network.mean.shape, network.mean.dtype) == ((4,), torch.float32)
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules
"""


def test_torchs_layers_and_the_default_network_are_built_without_torchs_compiler():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
