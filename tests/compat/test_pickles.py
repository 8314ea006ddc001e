"""What cloudpickle refuses of torch travels in our pickles, and opens in a process that has loaded nothing yet."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import ModuleType

import cloudpickle
import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from sparkdl.compat.pickles import dumps
from sparkdl.launch.wire import dump_function

OPENER = """
import pickle, sys
print(pickle.load(sys.stdin.buffer)())
"""


def of_a_notebook():
    """A function as a cell defines it, which travels by value."""
    cell = ModuleType("__main__")
    source = """
import torch
from torch.backends import cudnn

def settings():
    torch.backends.cudnn.benchmark = True
    cudnn.deterministic = True
    return torch.backends.cudnn.benchmark, cudnn.deterministic, torch.backends.cuda.matmul.allow_tf32
"""
    exec(source, vars(cell))
    return cell.settings


def test_a_function_of_a_notebook_sets_what_torch_backends_have_elsewhere():
    with pytest.raises(TypeError, match=r"cannot pickle '.*Module' object"):
        cloudpickle.dumps(of_a_notebook())  # where it does not, compat/pickles.py can lose this
    (head,) = dump_function(of_a_notebook())
    opened = subprocess.run([sys.executable, "-c", OPENER], input=bytes(head), capture_output=True, check=True)
    assert opened.stdout.decode().strip() == "(True, True, False)"
    assert not torch.backends.cudnn.deterministic


def test_a_parametrized_layer_travels_with_a_function():
    layer, x = weight_norm(torch.nn.Linear(3, 2)), torch.randn(5, 3)
    (head, *buffers) = dump_function(lambda: layer(x))
    assert torch.equal(pickle.loads(head, buffers=buffers)(), layer(x))


def test_a_module_that_no_import_finds_is_no_name():
    class Own(ModuleType):
        pass

    with pytest.raises(TypeError, match="cannot pickle 'Own' object"):
        dumps(Own("torch"))
