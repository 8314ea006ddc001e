"""All-reduce by ring, by tree and by recursive doubling beside gloo's own, on links of known speed.

Each rank has a host of its own, a network namespace whose cable is shaped by ``tc tbf``. The three are written here
over ``isend`` and ``irecv``, as Thakur, Rabenseifner and Gropp describe them ("Optimization of Collective Communication
Operations in MPICH", IJHPCA 2005); with a seconds a message, b seconds a byte, n bytes and p ranks

    ring                 2 (p - 1) a + 2 (p - 1) / p n b
    tree                 2 log2(p) (a + n b)
    recursive doubling     log2(p) (a + n b)

a and b are measured between two ranks before. What is told is the fastest of several repeats: where a machine has
other work, the others tell of that. One JSON line a point, then one that says how often the way that the formulas
prefer was within 5 % of the fastest of the three, how often the way that ``TorchCollective`` takes (recursive
doubling of up to 16 KB, else gloo's own) was within 5 % of the fastest of all, and where the formulas' way beats
gloo's own by more than 5 %, or "gather" (all ranks gather and add up in order, as numbers of ranks that are no power
of two do).

Needs root, ip and tc: ``sudo python tests/bench/bench_all_reduce.py`` draws docs/all_reduce.png, too.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from shaped_hosts import needs_hosts, run_on_hosts, shape, versions

from sparkdl.collective.backends.group import FEW_ELEMENTS

RATES = {"0.1 Gbit/s": ("100mbit", "4kb"), "1 Gbit/s": ("1gbit", "16kb"), "10 Gbit/s": ("10gbit", "256kb")}
"""The second is what passes at once: few bytes, so that small messages take their time, too."""
RANKS = (2, 4, 8)
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)  # bytes
BUDGET_SECONDS = 0.8  # for the repeats of a way at one size


# --- the three ways -------------------------------------------------------------------------------------------------


def exchange(sent, to, received, source):
    """Send and receive at once."""
    # What says that one can receive would wait behind what is sent on the same connection.
    pending = [dist.irecv(received, source), dist.isend(sent, to)]
    for work in pending:
        work.wait()


def ring(flat, rank, size):
    """Every part of ``flat`` goes round and is added to, and goes round again."""
    parts = list(flat.tensor_split(size))
    buffer = torch.empty_like(parts[0])  # the longest
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        target = parts[(rank - step - 1) % size]
        exchange(parts[(rank - step) % size], right, buffer[: len(target)], left)
        target += buffer[: len(target)]
    for step in range(size - 1):
        exchange(parts[(rank - step + 1) % size], right, parts[(rank - step) % size], left)


def tree(flat, rank, size):
    """Pairs add up until rank 0 has the sum; it goes back the same way."""
    buffer, distances = torch.empty_like(flat), [1 << i for i in range(size.bit_length() - 1)]
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(flat, rank - distance)
            break
        dist.recv(buffer, rank + distance)
        flat += buffer
    for distance in reversed(distances):
        if rank % (2 * distance) == 0:
            dist.send(flat, rank + distance)
        elif rank % (2 * distance) == distance:
            dist.recv(flat, rank - distance)


def recursive_doubling(flat, rank, size):
    """Partners at distances 1, 2, 4 and so on exchange all that they have."""
    buffer = torch.empty_like(flat)
    for distance in (1 << i for i in range(size.bit_length() - 1)):
        exchange(flat, rank ^ distance, buffer, rank ^ distance)
        flat += buffer


def gathered(flat, group, size):
    """What ``GroupCollective.sum_of_few`` does."""
    parts = flat.new_empty((size, flat.numel()))
    dist.all_gather(list(parts.unbind()), flat, group=group)
    flat.copy_(functools.reduce(torch.add, parts))


WAYS = {"ring": ring, "tree": tree, "recursive doubling": recursive_doubling}


def predicted(way, size, count, latency, seconds_per_byte):
    """Seconds of ``way`` for ``count`` bytes, by its formula."""
    rounds, whole = math.log2(size), latency + count * seconds_per_byte
    if way == "ring":
        return 2 * (size - 1) * latency + 2 * (size - 1) / size * count * seconds_per_byte
    return (2 if way == "tree" else 1) * rounds * whole


# --- on the ranks ---------------------------------------------------------------------------------------------------


def timed(call, flat, group, repeats):
    """Seconds of each call behind the first, from a common start to the end of the rank that ends last."""
    times = []
    for _ in range(repeats + 1):
        dist.all_reduce(torch.zeros(1), group=group)
        start = time.perf_counter()
        call(flat)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[1:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def link(rank):
    """Latency of a message in seconds, and seconds a byte, between ranks 0 and 1."""
    taken = []
    for count, repeats in ((8, 60), (1 << 22, 3)):
        flat, other = torch.zeros(count // 4), 1 - rank
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            for sends in (rank == 0, rank == 1):
                (dist.send if sends else dist.recv)(flat, other)
            times.append((time.perf_counter() - start) / 2)
        taken.append(min(times))
    return taken[0], (taken[1] - taken[0]) / (1 << 22)


def on_a_rank(world, devices):
    from sparkdl.collective import open_collective

    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    groups = {size: dist.new_group(range(size)) for size in RANKS if size <= world.size}
    points = []
    for label, limits in RATES.items():
        if world.rank == 0:
            for namespace, device in devices:
                shape(namespace, device, *limits)
        collective.barrier()
        measured = link(world.rank) if world.rank < 2 else None
        latency, per_byte = collective.broadcast_object(measured)
        for size, group in groups.items():
            for count in SIZES:
                # Not waiting for those who only watch: a barrier of all would share the cables.
                if world.rank < size:
                    ways = {
                        **{
                            name: lambda flat, way=way, size=size: way(flat, world.rank, size)
                            for name, way in WAYS.items()
                        },
                        "gloo": lambda flat, group=group: dist.all_reduce(flat, group=group),
                        "gather": lambda flat, group=group, size=size: gathered(flat, group, size),
                    }
                    for name, call in ways.items():
                        flat = torch.full((count // 4,), float(world.rank + 1))
                        call(flat)
                        assert flat.eq(size * (size + 1) / 2).all(), (name, size, count)
                        flat.zero_()
                        slowest = max(predicted(way, size, count, latency, per_byte) for way in WAYS)
                        repeats = max(3, min(25, int(BUDGET_SECONDS / slowest)))
                        points.append((label, size, count, name, timed(call, flat, group, repeats), latency, per_byte))
            collective.barrier()
    collective.close()
    return points


# --- results --------------------------------------------------------------------------------------------------------


def measure(folder):
    """Yield a line a point."""

    def devices(hosts):
        return [pair for host in hosts for pair in ((host.name, "cable"), (host.switch, host.port))]

    ranks = run_on_hosts(folder, "bench_all_reduce", devices, hosts_of_ranks=range(max(RANKS)), seconds=1500)
    for label, size, count, way, times, latency, per_byte in ranks[0]:
        line = {"workload": "all_reduce", "rate": label, "ranks": size, "bytes": count, "way": way}
        line |= {
            "ms": round(1e3 * min(times), 3),
            "spread_ms": [round(1e3 * t, 3) for t in (statistics.median(times), max(times))],
        }
        if way in WAYS:
            line["formula_ms"] = round(1e3 * predicted(way, size, count, latency, per_byte), 3)
        line |= {"latency_us": round(1e6 * latency, 1), "gbit_per_second": round(8e-9 / per_byte, 3)}
        yield line | versions()


def summary(lines):
    """How good the rule is, and where it beats gloo's own all-reduce."""
    points = {}
    for line in lines:
        points.setdefault((line["rate"], line["ranks"], line["bytes"]), {})[line["way"]] = line
    right, taken, gains = {}, {}, {"gloo": [], "gather": []}
    for (rate, size, count), by_way in points.items():
        chosen = min(WAYS, key=lambda way: by_way[way]["formula_ms"])
        fastest = min(by_way[way]["ms"] for way in WAYS)
        right.setdefault(f"{rate}, {size} ranks", []).append(by_way[chosen]["ms"] <= 1.05 * fastest)
        way = by_way["recursive doubling" if count <= 4 * FEW_ELEMENTS else "gloo"]
        fastest = min(line["ms"] for line in by_way.values())
        taken.setdefault(f"{rate}, {size} ranks", []).append(way["ms"] <= 1.05 * fastest)
        for other, found in gains.items():
            ratio = by_way[other]["ms"] / by_way[chosen]["ms"]
            if ratio > 1.05:
                found.append([rate, size, count, chosen, round(ratio, 2)])
    within, of_taken = (
        {point: f"{sum(hits)} of {len(hits)}" for point, hits in found.items()} for found in (right, taken)
    )
    return {
        "workload": "all_reduce rule",
        "formulas_within_5_percent": within,
        "taken_within_5_percent": of_taken,
        **{f"beats_{k}": v for k, v in gains.items()},
    }


def draw(lines):
    """One panel a rate and number of ranks, formulas dotted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(RANKS), len(RATES), figsize=(10, 8), sharex=True, layout="constrained")
    colours = dict(
        zip([*WAYS, "gloo", "gather"], ["tab:blue", "tab:green", "tab:orange", "black", "tab:gray"], strict=True)
    )
    for down, size in enumerate(RANKS):
        for across, rate in enumerate(RATES):
            panel = axes[down][across]
            for way, colour in colours.items():
                own = [line for line in lines if (line["rate"], line["ranks"], line["way"]) == (rate, size, way)]
                panel.loglog(
                    [line["bytes"] for line in own], [line["ms"] for line in own], "o-", ms=3, color=colour, label=way
                )
                if way in WAYS:
                    panel.loglog(
                        [line["bytes"] for line in own], [line["formula_ms"] for line in own], ":", color=colour
                    )
            panel.set_title(f"{size} ranks, {rate}", fontsize=9)
            panel.grid(alpha=0.3)
        axes[down][0].set_ylabel("ms")
    for panel in axes[-1]:
        panel.set_xlabel("bytes")
    axes[0][0].legend(fontsize=7)
    figure.suptitle("All-reduce of one message; dotted: latency and bytes by the formulas")
    figure.savefig(Path(__file__).parents[2] / "docs" / "all_reduce.png", dpi=50)


def run(folder):
    """Measure, print, and return the lines."""
    lines = []
    for line in measure(folder):
        print(json.dumps(line), flush=True)
        lines.append(line)
    print(json.dumps(summary(lines)), flush=True)
    return lines


@needs_hosts
@pytest.mark.bench
def test_all_reduce(tmp_path):
    run(tmp_path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw(run(Path(folder)))
