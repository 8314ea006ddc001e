"""Models are rebuilt without what torch only needs to compile them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from torch import nn
from sparkdl.models.bounded_build import bounded_build

model = bounded_build(lambda: nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3), nn.LSTM(3, 4)), 7)
assert {tensor.device.type for tensor in model.parameters()} == {"meta"}
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules
"""


def test_an_embedding_is_built_without_torchs_compiler():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
