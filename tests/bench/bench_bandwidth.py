"""Bucket sizes and accumulation on a network of known speed, as plots.

Two hosts are two network namespaces joined by a veth pair, shaped to 0.5, 1 and 10 Gbit/s by ``tc tbf``. The sweeps
are those of Li et al., "PyTorch Distributed" (VLDB 2020): time of an iteration by bucket size (Figures 7 and 8), and
by how often gradients are synchronised (Figure 10). Peer in the same run: torch's DistributedDataParallel.

What two hosts reproduce, alike for all three ways. Figures 7 and 8: with as many tensors as BERT has, iterations are
slow with one gradient a message (1.4-2 times the best bucket size at 10 Gbit/s, 1.4-1.7 at 1 and 0.5), best between
0.25 and 5 MiB, and slow again with one bucket, which overlaps with nothing (1.3-1.9 times). The left flank is what
messages cost, about 0.2 ms each: 24 MiB in 48 tensors showed none, and the best size moves with the size of a model.
The rule that follows, a quarter of all gradients within bounds, is ``bucket_bytes`` of ``gradients/buckets.py``.
Figure 10: an iteration costs less the rarer gradients are synchronised, every 8th time a fifth of every time at 0.5
Gbit/s and two thirds at 10, with ever smaller gains.

Needs root, ip and tc: ``sudo python tests/bench/bench_bandwidth.py``. Writes bench-results/*.png and one JSON line a
measurement; no namespace outlives the run.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
STORE = "SPARKDL_BENCH_STORE"
sys.path.insert(0, str(ROOT / "tests" / "ranks"))  # for run_store
RESULTS = ROOT / "bench-results"
PREFIX = "sparkdl-bw"
HOSTS = ("10.231.7.1", "10.231.7.2")
RATES = {"0.5 Gbit/s": "500mbit", "1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit"}
BUCKETS_MIB = (0.0, 0.25, 1.5, 2.5, 5.0, 10.0)  # 0: every gradient is a message of its own; 1.5: see bucket_bytes
PASSES = (1, 2, 4, 8)
WAYS = ("sparkdl torch", "sparkdl horovod", "DistributedDataParallel")
ROUNDS, ITERATIONS = 2, 5
ROWS = 128
NETWORKS = {  # layers, width
    "bucket": (96, 128),  # 192 tensors, as many as BERT has (ResNet-50: 161); 6 MiB of gradients
    "accumulation": (24, 512),  # 24 MiB of gradients
}


def sh(*command, check=True):
    return subprocess.run(command, check=check, capture_output=True, text=True)


@contextmanager
def two_hosts():
    """Yield the names of two namespaces that reach each other; remove them whatever happens."""
    names = [f"{PREFIX}-{os.getpid()}-{side}" for side in (0, 1)]
    links = [f"bw{os.getpid() % 10**6}s{side}" for side in (0, 1)]
    sweep()
    try:
        for name in names:
            sh("ip", "netns", "add", name)
        sh(
            "ip",
            "link",
            "add",
            links[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            links[1],
            "netns",
            names[1],
        )
        for name, link, host in zip(names, links, HOSTS, strict=True):
            sh("ip", "-n", name, "addr", "add", f"{host}/24", "dev", link)
            sh("ip", "-n", name, "link", "set", link, "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
        yield names, links
    finally:
        for name in names:
            sh("ip", "netns", "del", name, check=False)


def sweep():
    """Remove namespaces of runs that were killed."""
    for line in sh("ip", "netns", "list", check=False).stdout.splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX + "-") and not Path("/proc", name.split("-")[2]).exists():
            sh("ip", "netns", "del", name, check=False)


def shape(names, links, rate):
    """Limit both directions; the burst is what 10 Gbit/s need between two ticks of a 250 Hz kernel."""
    for name, link in zip(names, links, strict=True):
        limits = ["rate", rate, "burst", "5mb" if rate == "10gbit" else "256kb", "latency", "50ms"]
        sh("tc", "-n", name, "qdisc", "replace", "dev", link, "root", "tbf", *limits)


def arguments(names, links, rates, sweeps):
    """What the processes of a run are told."""
    return ["--namespaces", *names, "--links", *links, "--rates", *rates, "--sweeps", *sweeps]


def serve(names, links, rates, sweeps):
    """Run in the first namespace: hold the store of the run, start a rank in each namespace, print their rows."""
    from run_store import held_store

    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    ranks = []
    with held_store(HOSTS[0]) as store:
        environment[STORE] = pickle.dumps(store).hex()
        try:
            for rank, link in enumerate(links):
                own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": link, "HOROVOD_GLOO_IFACE": link}
                command = [sys.executable, __file__, "--rank", str(rank), *arguments(names, links, rates, sweeps)]
                # A host name that leads to the host's own address: Horovod binds its data connections to nothing else.
                named = ["unshare", "--uts", "sh", "-c", f'hostname {HOSTS[rank]} && exec "$0" "$@"', *command]
                inside = ["ip", "netns", "exec", names[rank], *named]
                ranks.append(subprocess.Popen(inside, env=environment | own))
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    sys.exit(max(abs(code) for code in codes))


def at_store(main):
    """Run ``main()`` as a rank of the run whose store the environment names."""
    from sparkdl.collective.backends.horovod import is_installed
    from sparkdl.collective.backends.torch_distributed import use_run_store
    from sparkdl.collective.rendezvous.horovod_store import horovod_rendezvous
    from sparkdl.launch.store import offered

    store = pickle.loads(bytes.fromhex(os.environ[STORE]))
    with ExitStack() as stack:
        stack.enter_context(offered(store))
        if is_installed():
            os.environ.update(stack.enter_context(horovod_rendezvous(store)))
        use_run_store()
        main()


def network(sweep):
    """A model and a batch."""
    torch.manual_seed(0)
    layers, width = NETWORKS[sweep]
    made = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(layers)]
    return torch.nn.Sequential(*made), torch.randn(ROWS, width)


@contextmanager
def prepared(way, world, model, bucket_mib):
    """Yield the model to call, a context for passes without synchronisation, and the synchronisation."""
    from sparkdl.collective.backends.horovod import HorovodCollective
    from sparkdl.collective.backends.torch_distributed import TorchCollective
    from sparkdl.config import SyncConfig

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if way == "DistributedDataParallel":
        peer = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mib)
        yield peer, peer.no_sync, lambda: None, optimizer
        return
    kind = TorchCollective if way.endswith("torch") else HorovodCollective
    collective = kind(world, timeout=timedelta(seconds=120))
    config = SyncConfig(bucket_mib=bucket_mib or 1e-4)
    sync = collective.wrap(model, optimizer, config)
    yield sync.model, sync.accumulate, sync.synchronize, optimizer
    sync.close()
    collective.close()


def iterations(sweep, way, world, bucket_mib, passes, count):
    """Milliseconds of each of ``count`` iterations, of which every ``passes``-th synchronises."""
    from contextlib import nullcontext

    import torch.distributed as dist

    (model, rows), times = network(sweep), []
    with prepared(way, world, model, bucket_mib) as (callee, accumulate, synchronize, optimizer):
        for number in range(-max(2, passes), count):
            if number == 0:
                dist.barrier()
            start = time.perf_counter()
            last = (number + 1) % passes == 0
            with nullcontext() if last else accumulate():
                callee(rows).square().mean().backward()
            if last:
                synchronize()
                optimizer.step()
                optimizer.zero_grad()
            times.append(1e3 * (time.perf_counter() - start))
    return times[-count:]


def rank_main(names, links, rates, sweeps):
    """Run in a rank: all sweeps; rank 0 shapes the network between them, and prints.

    The ways take turns at each setting, and each setting has several turns: other load on the machine hits all alike.
    """
    import torch.distributed as dist

    from sparkdl.collective.backends.horovod import is_installed
    from sparkdl.world import World

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    world = World(rank=rank, size=2, node_rank=rank, num_nodes=2)
    dist.init_process_group("gloo")
    ways = [way for way in WAYS if is_installed() or "horovod" not in way]
    plan = [("bucket", way, size, 1, ITERATIONS) for size in BUCKETS_MIB for way in ways]
    plan += [("accumulation", way, 5.0, passes, 8) for passes in PASSES for way in ways]
    plan = [setting for setting in plan if setting[0] in sweeps]
    for label in rates:
        if rank == 0:
            shape(names, links, RATES[label])
        dist.barrier()
        times = {setting: [] for setting in plan}
        for _ in range(ROUNDS):
            for setting in plan:
                times[setting] += iterations(setting[0], setting[1], world, *setting[2:])
        if rank == 0:
            for (sweep_name, way, size, passes, _), found in times.items():
                print(json.dumps(row(sweep_name, label, way, size, passes, found)), flush=True)
    dist.destroy_process_group()


def row(sweep_name, rate, way, size, passes, times):
    return {
        "workload": sweep_name, "rate": rate, "way": way, "bucket_mib": size, "passes": passes,
        "median_ms": round(statistics.median(times), 1), "mean_ms": round(statistics.fmean(times), 1),
        "spread_ms": [round(min(times), 1), round(max(times), 1)], "times_ms": [round(value, 1) for value in times],
        "torch": torch.__version__, "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip


def cycle_ms(row):
    """Milliseconds an iteration: the mean of each cycle, in which one iteration synchronises; of these the median."""
    times, passes = row["times_ms"], row["passes"]
    return statistics.median(statistics.fmean(times[start : start + passes]) for start in range(0, len(times), passes))


def draw(rows):
    """One figure a sweep that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    RESULTS.mkdir(exist_ok=True)
    for sweep_name, draw_one in (("bucket", draw_buckets), ("accumulation", draw_accumulation)):
        own = [r for r in rows if r["workload"] == sweep_name]
        ways = [way for way in WAYS if any(r["way"] == way for r in own)]
        rates = [rate for rate in RATES if any(r["rate"] == rate for r in own)]
        if own:
            draw_one(own, ways, rates)


def draw_buckets(rows, ways, rates):
    """One panel a network speed and way."""
    from matplotlib import pyplot

    size = (11, 2.6 * len(ways))
    figure, axes = pyplot.subplots(
        len(ways), len(rates), figsize=size, sharey="col", squeeze=False, layout="constrained"
    )
    for across, rate in enumerate(rates):
        for down, way in enumerate(ways):
            panel = axes[down][across]
            sizes = [r for r in rows if (r["rate"], r["way"]) == (rate, way)]
            panel.boxplot([r["times_ms"] for r in sizes], tick_labels=[f"{r['bucket_mib']:g}" for r in sizes], whis=1.5)
            panel.plot(range(1, len(sizes) + 1), [r["median_ms"] for r in sizes], color="tab:orange", alpha=0.5)
            panel.set_title(f"{way}, {rate}", fontsize=9)
            panel.grid(axis="y", alpha=0.3)
        axes[-1][across].set_ylim(bottom=0)  # once the shared axis has seen all of the column
        axes[-1][across].set_xlabel("bucket size, MiB (0: one gradient a message)", fontsize=8)
    for line in axes:
        line[0].set_ylabel("iteration, ms")
    figure.suptitle("Time of an iteration by bucket size, 6 MiB of gradients in 192 tensors, 2 hosts")
    figure.savefig(RESULTS / "bucket_size.png", dpi=110)


def draw_accumulation(rows, ways, rates):
    """One panel a network speed, one line a way."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(rates), figsize=(11, 3.4), squeeze=False, layout="constrained")
    for panel, rate in zip(axes[0], rates, strict=True):
        for way in ways:
            own = [r for r in rows if (r["rate"], r["way"]) == (rate, way)]
            panel.plot([r["passes"] for r in own], [cycle_ms(r) for r in own], marker="o", label=way)
        panel.set_xscale("log", base=2)
        panel.set_xticks(PASSES, [str(passes) for passes in PASSES])
        panel.set_title(rate)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.set_xlabel("iterations per synchronisation")
    axes[0][0].set_ylabel("iteration, ms, mean of a cycle")
    axes[0][0].legend(fontsize=8)
    figure.suptitle("Time of an iteration by how often gradients are synchronised, 24 MiB of gradients, 2 hosts")
    figure.savefig(RESULTS / "accumulation.png", dpi=110)


def measure(rates=tuple(RATES), sweeps=tuple(NETWORKS)):
    """``sweeps`` at ``rates``; returns their rows."""
    with two_hosts() as (names, links):
        command = [sys.executable, __file__, "--serve", *arguments(names, links, rates, sweeps)]
        # A group of its own, so that whatever it started ends with it.
        child = subprocess.Popen(
            ["ip", "netns", "exec", names[0], *command], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        rows = []
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                rows.append(json.loads(line))
            if child.wait():
                raise RuntimeError(f"a rank ended with {child.returncode}")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return rows


def usable():
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "unshare"))


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_sweeps():
    if not usable():
        pytest.skip("needs root, ip and tc")
    rows = measure()
    draw(rows)
    for name in ("bucket_size.png", "accumulation.png"):
        assert (RESULTS / name).stat().st_size > 10_000
    assert PREFIX not in sh("ip", "netns", "list").stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--namespaces", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--links", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--rates", nargs="+", choices=list(RATES), default=list(RATES), help="network speeds to measure"
    )
    parser.add_argument("--sweeps", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), help="what to measure")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw the rows of an earlier run")
    given = parser.parse_args()
    if given.serve:
        serve(given.namespaces, given.links, given.rates, given.sweeps)
    elif given.rank is not None:
        at_store(partial(rank_main, given.namespaces, given.links, given.rates, given.sweeps))
    elif given.draw:
        draw([json.loads(line) for line in given.draw.read_text().splitlines()])
    elif not usable():
        sys.exit(
            "bench_bandwidth needs root, ip, tc and unshare: apt-get install iproute2 util-linux, then run it as root"
        )
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        draw(measure(given.rates, given.sweeps))


if __name__ == "__main__":
    main()
