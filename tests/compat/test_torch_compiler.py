"""Training that compiles nothing does not load torch's compiler; whatever wants it gets the real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import sys, torch
from sparkdl.compat.torch_compiler import eager

def step(optimizer, net):
    optimizer.zero_grad()
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()

def loaded():
    module = sys.modules.get("torch._dynamo")
    return module is not None and type(module).__name__ == "module" and "torch._dynamo.convert_frame" in sys.modules

def settled():
    import torch._dynamo
    assert torch._dynamo is sys.modules["torch._dynamo"] and loaded()
    assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_Submodules"]
    assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
    for method in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        hidden = getattr(getattr(torch.optim.Optimizer, method).__wrapped__, "__dynamo_disable", None)
        assert hidden is None or hasattr(hidden, "_torchdynamo_disable"), method

net = torch.nn.Linear(2, 1)
"""
TRAINS = """
with eager():
    optimizer = torch.optim.Adam(net.parameters())
    step(optimizer, net)
    optimizer.load_state_dict(optimizer.state_dict())
    with eager():
        step(optimizer, net)
    assert not loaded(), sorted(name for name in sys.modules if "dynamo" in name)
    assert "sympy" not in sys.modules
assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
step(optimizer, net)
settled()
"""
COMPILES = """
with eager():
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    {wanted}
    settled()
    step(optimizer, net)
settled()

@torch.compile(backend="eager")
def compiled():
    step(optimizer, net)

before = net.weight.detach().clone()
compiled()
assert not torch.equal(before, net.weight)
settled()
"""
TWO_THREADS = """
import threading, time
from importlib.util import find_spec
from sparkdl.compat import torch_compiler

def slow(name):
    spec = find_spec(name)
    time.sleep(0.5)  # in which the other thread comes, too
    return spec

def train(seconds):
    with eager():
        time.sleep(seconds)

torch_compiler.find_spec = slow
threads = [threading.Thread(target=train, args=[seconds]) for seconds in (0.2, 0.6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
settled()
"""
WAYS = [
    "assert torch.compile(net, backend='eager')(torch.ones(3, 2)).shape == (3, 1)",
    "import torch._dynamo.config as config; config.suppress_errors = False",
    "from torch._dynamo.utils import counters; assert counters is torch._dynamo.utils.counters",
    "assert hasattr(torch.compiler.disable(len), '_torchdynamo_disable')",
]


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", PRELUDE + program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_optimizers_train_without_the_compiler():
    run(TRAINS)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", WAYS)
def test_whoever_wants_the_compiler_has_the_real_one(wanted):
    run(COMPILES.format(wanted=wanted))


@pytest.mark.slow
def test_threads_that_start_at_once_leave_no_finder_behind():
    run(TWO_THREADS)


def test_whoever_asks_all_finders_for_distributions_wants_no_compiler():
    asks = "from importlib.metadata import entry_points; entry_points()"
    run(f"with eager():\n    {asks}\n    assert not loaded()\n    step(torch.optim.SGD(net.parameters(), lr=0.1), net)")
