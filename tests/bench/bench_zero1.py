"""A step and the exchange behind it: torch's ZeroRedundancyOptimizer and the dealing of ``strategies/zero1.py``.

Sixteen layers of 256, AdamW, 4.2 MB of weights in 32 tensors; each rank is a network namespace, whose cable carries 0.2
or 1 Gbit/s each way, or what the machine does. One JSON line a rate and number of ranks: medians of steps that take
turns, and whether the weights are the same to the bit. Needs root, ip and tc.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from shaped_hosts import needs_hosts, run_on_hosts, versions

BURSTS = {None: "64kb", "1gbit": "64kb", "200mbit": "16kb"}
STEPS = 9


def on_a_rank(world):
    """Seconds of each step by torch's and by ours, and whether their weights are the same."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from sparkdl.collective import open_collective
    from sparkdl.strategies.zero1 import _Dealt

    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(16)]))
        for param in nets[-1].parameters():
            param.grad = torch.ones_like(param)
    optimizers = [
        ZeroRedundancyOptimizer(nets[0].parameters(), torch.optim.AdamW),
        _Dealt(torch.optim.AdamW(nets[1].parameters()), world.rank, world.size),
    ]
    seconds = [[], []]
    for _ in range(STEPS + 1):
        for of_way, optimizer in zip(seconds, optimizers, strict=True):
            collective.barrier()
            begin = time.perf_counter()
            optimizer.step()
            of_way.append(time.perf_counter() - begin)
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    same = all(torch.equal(theirs, ours) for theirs, ours in pairs)
    collective.close()
    return [of_way[1:] for of_way in seconds], same


@needs_hosts
@pytest.mark.bench
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rate", BURSTS)
def test_zero1(tmp_path, rate, ranks):
    found = run_on_hosts(tmp_path, "bench_zero1", hosts_of_ranks=range(ranks), rate=rate, burst=BURSTS[rate])
    theirs, ours = (1e3 * statistics.median(seconds) for seconds in found[0][0])
    line = {"workload": "zero1", "rate": rate or "unshaped", "ranks": ranks, "torch_ms": round(theirs, 1)}
    line |= {"ms": round(ours, 1), "same_weights": all(same for _, same in found)}
    print(json.dumps(line | versions()), flush=True)
    assert line["same_weights"]
