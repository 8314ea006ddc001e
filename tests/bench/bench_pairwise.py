"""All-gather, reduce-scatter and all-to-all: gloo's own, and messages between all ranks (``collective/pairwise.py``).

Ranks are network namespaces, whose cables carry 0.1 or 1 Gbit/s each way, or what the machine does. One JSON line a
rate, ranks and bytes: milliseconds of both, medians of repeats that take turns. Needs root, ip and tc.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from shaped_hosts import needs_hosts, run_on_hosts, versions

from sparkdl.collective import pairwise

BURSTS = {"100mbit": "16kb", "1gbit": "64kb", None: "64kb"}
BYTES = (64 << 10, 1 << 20, 4 << 20)
REPEATS = 7


def ways(total):
    """By operation, gloo's own and ours, over tensors of so many bytes altogether on each rank."""
    group, size = dist.group.WORLD, dist.get_world_size()
    length = total // 4 // size
    part, whole = torch.randn(length), torch.randn(size * length)
    into, output = torch.empty(size * length), torch.empty(length)
    rows = [length] * size
    return {
        "all_gather": (
            lambda: dist.all_gather_single(into, part),
            lambda: pairwise.all_gather(into, part, group),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_single(output, whole),
            lambda: pairwise.reduce_scatter(output, whole, group),
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(into, whole),
            lambda: pairwise.all_to_all(into, whole, rows, rows, group),
        ),
    }


def on_a_rank(world):
    """By bytes and operation, seconds of gloo's own and of ours, a repeat each."""
    from sparkdl.collective import open_collective

    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    taken = {}
    for total in BYTES:
        for operation, calls in ways(total).items():
            seconds = [[], []]
            for _ in range(REPEATS + 1):
                for of_way, call in zip(seconds, calls, strict=True):
                    collective.barrier()
                    begin = time.perf_counter()
                    call()
                    collective.barrier()
                    of_way.append(time.perf_counter() - begin)
            taken[total, operation] = [of_way[1:] for of_way in seconds]
    collective.close()
    return taken


@needs_hosts
@pytest.mark.bench
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rate", BURSTS)
def test_pairs(tmp_path, rate, ranks):
    taken = run_on_hosts(tmp_path, "bench_pairwise", hosts_of_ranks=range(ranks), rate=rate, burst=BURSTS[rate])[0]
    for total in BYTES:
        line = {"workload": "pairwise", "rate": rate or "unshaped", "ranks": ranks, "bytes": total}
        for operation in ("all_gather", "reduce_scatter", "all_to_all"):
            gloo, ours = (1e3 * statistics.median(seconds) for seconds in taken[total, operation])
            line[operation] = {"gloo_ms": round(gloo, 2), "ms": round(ours, 2), "gloo_to_ours": round(gloo / ours, 2)}
        print(json.dumps(line | versions()), flush=True)
