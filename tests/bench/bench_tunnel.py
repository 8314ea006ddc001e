"""What encryption between hosts costs: an all-reduce between two network namespaces, with and without WireGuard.

Run as root on a quiet machine, with ``wireguard-go`` and ``wg`` installed: ``python tests/bench/bench_tunnel.py``. It
prints one JSON line; times are medians, in ms. Userspace WireGuard is the slow case: a kernel's own takes less.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "launch")]

from hosts import Run, hosts  # noqa: E402
from test_encryption_integration import tunnel  # noqa: E402

SIZES_MIB = (1, 8, 32)

WORK = f"""
def work(world):
    import statistics, time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    found = []
    for size in {SIZES_MIB}:
        numbers, times = torch.ones(size << 18), []
        for _ in range(23):
            begun = time.perf_counter()
            dist.all_reduce(numbers)
            times.append(time.perf_counter() - begun)
            numbers.fill_(1.0)
        found.append(round(1e3 * statistics.median(times[3:]), 2))
    return found
"""


def measured(pair, **where):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), pair, WORK, **where)
        try:
            run.start_ranks()
            return ast.literal_eval(run.result()[1])[0]
        finally:
            run.end()


def main():
    with hosts(2) as pair:
        plain = measured(pair)
        with tunnel(pair) as addresses:
            encrypted = measured(pair, addresses=addresses)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    row = {
        "workload": "all-reduce between two hosts over gloo, userspace WireGuard against none",
        "mib": SIZES_MIB,
        "plain_ms": plain,
        "wireguard_ms": encrypted,
        "ratio": [round(one / other, 2) for one, other in zip(encrypted, plain, strict=True)],
        "git": git.strip(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
