"""When ``torch.compile`` pays on processors: seconds of compilation against what it saves in a step.

Each network is trained and scored eager and compiled, in turns, by one thread, in a process of its own whose compiler
finds nothing compiled before. Seconds are the processor's, of the process and of the compilers that it starts: other
work on the machine does not count. With static shapes a batch of another size is compiled anew, with dynamic ones it is
not: what such a batch took is ``other_rows_seconds``. ``break_even_steps`` is how many steps pay for the compilation;
None where a compiled step is no faster. One JSON line a network, task and kind of shapes.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # for the other benches

STEPS = 20
ROWS = {"train": 256, "score": 4096}
OTHER_ROWS = {"train": 200, "score": 3000}


def mlp():
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
    return nn.Sequential(*layers), lambda rows: torch.randn(rows, 64)


def tabular():
    """The default network of tables: 12 numbers, 3 categories, as ``sparkdl init`` would make it."""
    from sparkdl.models.networks import TabularEnsemble

    numbers = {"name": "numbers", "shape": [12], "knots": [[i / 16 - 1 for i in range(33)]] * 12}
    categories = {"name": "categories", "shape": [3], "cardinalities": [5, 40, 300]}
    label = {"name": "y", "type": "regression", "outputs": 1, "mean": 0.0, "deviation": 1.0, "loss": "mse"}
    net = TabularEnsemble({"inputs": [numbers, categories], "labels": [label]})

    def batch(rows):
        ids = torch.stack([torch.randint(count, (rows,)) for count in categories["cardinalities"]], dim=1)
        return {"numbers": torch.randn(rows, 12), "categories": ids}

    return net, batch


def transformer():
    import bench_distribute

    size = bench_distribute.TOKENS, bench_distribute.POSITIONS
    return bench_distribute.transformer(), lambda rows: torch.randint(size[0], (rows, size[1]))


NETWORKS = {"mlp": mlp, "tabular": tabular, "transformer": transformer}


def train_step(net, call, optimizer, batch):
    output = call(batch)
    loss = output.square().mean()
    auxiliary = getattr(net, "auxiliary_loss", None)
    (loss if auxiliary is None else loss + auxiliary).backward()
    optimizer.step()
    optimizer.zero_grad()


def score_step(call, batch):
    with torch.inference_mode():
        call(batch)


def processor_seconds():
    usages = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def seconds(step, batch):
    start = processor_seconds()
    step(batch)
    return processor_seconds() - start


def measure(name, task, shapes):
    """What one process measures; prints it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, make_batch = NETWORKS[name]()
    net.train(task == "train")
    compiled = torch.compile(net, dynamic=shapes == "dynamic")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    calls = {"eager": net, "compiled": compiled}
    steps = {way: partial(score_step, call) for way, call in calls.items()}
    if task == "train":
        steps = {way: partial(train_step, net, call, optimizer) for way, call in calls.items()}
    batch = make_batch(ROWS[task])
    first = {way: seconds(step, batch) for way, step in steps.items()}
    times = {way: [] for way in steps}
    for number in range(STEPS):
        for way in list(steps)[:: 1 if number % 2 else -1]:
            times[way].append(seconds(steps[way], batch))
    eager, quick = (statistics.median(times[way]) for way in ("eager", "compiled"))
    compilation = first["compiled"] - quick
    other = seconds(steps["compiled"], make_batch(OTHER_ROWS[task]))
    line = {"workload": "compile", "network": name, "task": task, "shapes": shapes, "rows": ROWS[task]}
    line |= {"compilation_seconds": round(compilation, 2), "other_rows_seconds": round(other, 3)}
    line |= {"eager_milliseconds": round(1000 * eager, 2), "compiled_milliseconds": round(1000 * quick, 2)}
    line |= {f"{way}_spread": [round(1000 * end(times[way]), 2) for end in (min, max)] for way in times}
    line["ratio"] = round(statistics.median(b / a for a, b in zip(*times.values(), strict=True)), 3)
    line["break_even_steps"] = round(compilation / (eager - quick)) if quick < eager else None
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    line |= {"git": commit, "torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps(line | {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}), flush=True)


@pytest.mark.bench
@pytest.mark.parametrize(("task", "shapes"), [("train", "static"), ("train", "dynamic"), ("score", "dynamic")])
@pytest.mark.parametrize("name", NETWORKS)
def test_compile(name, task, shapes, tmp_path):
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in the process itself, which then waits for its compilers
    done = subprocess.run([sys.executable, __file__, name, task, shapes], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip(), flush=True)


if __name__ == "__main__":
    measure(*sys.argv[1:])
