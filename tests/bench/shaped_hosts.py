"""What the benches on shaped links have in common: hosts, their cables, a rank on each, and what the ranks return."""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH))  # for the other benches
sys.path.insert(0, str(BENCH.parent / "launch"))

from hosts import Run, hosts, shape  # noqa: E402, F401

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "tc", "unshare")),
    reason="needs root, ip and tc",
)
WORK = """
def work(world):
    import sys
    sys.path.insert(0, {bench!r})
    import {module}
    return {module}.on_a_rank(world, *{arguments!r})
"""


def run_on_hosts(folder, module, *arguments, hosts_of_ranks, rate=None, burst="256kb", seconds=1800):
    """Run ``module.on_a_rank(world, *arguments)`` on every rank; return what each returned, by rank.

    Args:
        folder: for what the processes are told.
        module: name of a bench.
        arguments: literals; a function of the hosts stands for what it returns.
        hosts_of_ranks: by rank, the number of its host. The driver has a host of its own.
        rate: that each cable carries each way, such as ``"1gbit"``; None shapes none.
        burst: how much passes at once behind a pause.
        seconds: that the ranks may take.
    """
    with hosts(max(hosts_of_ranks) + 2) as (driver, *computing):
        for host in computing if rate is not None else ():
            host.shape(rate, burst)
        values = [argument(computing) if callable(argument) else argument for argument in arguments]
        work = WORK.format(bench=str(BENCH), module=module, arguments=values)
        run = Run(folder, [computing[number] for number in hosts_of_ranks], work, driver=driver, seconds=seconds)
        try:
            run.start_ranks()
            return ast.literal_eval(run.result()[1])
        finally:
            run.end()


def versions():
    """What a line of results says of where it was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {"git": commit, "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
