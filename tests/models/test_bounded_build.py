"""Models are rebuilt without what torch only needs to compile them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from torch import nn
from sparkdl.models.bounded_build import bounded_build

model = bounded_build(lambda: nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3), nn.LSTM(3, 4)), 7)
assert {tensor.device.type for tensor in model.parameters()} == {"meta"}

labels = [{"outputs": 1, "mean": 0.5, "deviation": 2.0}, {"outputs": 3, "mean": 0.0, "deviation": 1.0}]


class Scaled(nn.Module):  # as the default network keeps the scales of its labels
    def __init__(self):
        super().__init__()
        scales = [torch.full((label["outputs"],), label["mean"], dtype=torch.float32) for label in labels]
        self.register_buffer("mean", torch.cat(scales))


mean = bounded_build(Scaled, 1).mean
assert (mean.device.type, mean.shape, mean.dtype) == ("meta", (4,), torch.float32)
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules
"""


def test_embeddings_and_joined_buffers_are_built_without_torchs_compiler():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
