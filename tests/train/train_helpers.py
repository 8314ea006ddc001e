"""What tests of interrupted runs and of real ranks share; it travels to the ranks with their functions."""

from __future__ import annotations

import importlib.util
import sys

import cloudpickle
import pytest
import torch

from sparkdl.train.callbacks import Callback

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NEEDS_HOROVOD = pytest.mark.skipif(not importlib.util.find_spec("horovod"), reason="Horovod is not installed")


class Interrupted(Exception):
    """The end that a test puts to a run."""


class RaiseAt(Callback):
    """Ends the run after an optimizer step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, run):
        if run.step == self.step:
            raise Interrupted


def linear_data(dtype=torch.float32):
    """103 rows, a number that nothing divides: five features, and a target that is linear in them."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(103, 5, generator=generator, dtype=dtype)
    return {"x": x, "y": x @ torch.randn(5, generator=generator, dtype=dtype)}, generator


def state_equal(left, right):
    """Whether two modules hold the same bits."""
    return all(torch.equal(a, b) for a, b in zip(left.state_dict().values(), right.state_dict().values(), strict=True))
