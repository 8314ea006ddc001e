"""Data-parallel efficiency: two ranks that synchronise, against the same two ranks side by side that never do.

Peers in the same run: torch's DistributedDataParallel and Horovod's DistributedOptimizer, both as they come.
One JSON line per workload and way; ``python tests/bench/bench_collective.py [workload ...]``, each within 4 minutes.

Why the MLP comes last: its steps of 27 ms move 5.2 MB of gradients, more to the millisecond than the others'. Of 30-40
interleaved rounds (medians; "of never" is the lower quartile against that of never synchronising):

| | ms a step | of never |
|---|---|---|
| waiting for each other, nothing else | 0.1-0.3 | 0.97-0.99 |
| and copying the gradients from hooks | 1.1 | 0.957 |
| and adding those of the other rank, as it was: hooks, two buckets | 2.1 | 0.931 |
| the same in hooks wherever the other rank was ahead | 2.0 | 0.936 |
| the same behind the backward pass, chunks of 0.25, 1 or 16 MiB | 1.8-2.0 | 0.939-0.945 |
| copying by memmove, or averaging by lerp | as long | as much |
| behind the backward pass, one bucket, two ranks adding in place | 1.5 | 0.935-0.947 |

The last row is 0.6 ms to copy, 0.5 to add, 0.1 to wait and 0.3 of calls that find their code gone from the cache; in
CPU time it is 0.950. Both passes run at the speed of memory: 26 MB, read or written, at 21 GB/s. Horovod adds a thread
of its own, which asks the other rank for work every 5 ms though nothing travels through it; how long its cycle is best,
by the bytes that travel, stands beside the rule in ``cycle_ms`` (``HOROVOD_CYCLE_TIME=2.5 python
tests/bench/bench_collective.py`` measures another).

Adding in place was the way of two ranks alone, 0.01-0.03 above the one for any number of them that is left (each sums a
part, and copies the others'): less than the 5 % of a step that would earn its lines.

"sparkdl torch" and "sparkdl horovod" exchange gradients in shared memory, as "auto" does on one host; ", sockets" is
the backend's own all-reduce, as for who names a backend. ", batch norm of all rows" is what ``sync_batch_norm`` costs:
two small messages a layer and step, in ResNet-18's 20 layers.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest
import torch

RANKS = 2
WORKLOADS = {  # steps of one measurement, repetitions
    "mlp": (25, 15),
    "transformer": (8, 5),
    "resnet18": (3, 7),
}
WAYS = (
    "unsynchronised",
    "sparkdl torch",
    "sparkdl torch, sockets",
    "sparkdl horovod",
    "sparkdl horovod, sockets",
    "sparkdl torch, batch norm of all rows",
    "DistributedDataParallel",
    "hvd.DistributedOptimizer",
)


def mlp():
    """1.3 million parameters, 512 rows."""
    sizes = (128, 1024, 1024, 128)
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    return model, torch.randn(512, 128), torch.randn(512, 128)


class Transformer(torch.nn.Module):
    """A small language model: 4 layers of width 256 over 64 tokens, 4.2 million parameters."""

    def __init__(self, vocabulary=2000, width=256):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens))).transpose(1, 2)


def transformer():
    return Transformer(), torch.randint(0, 2000, (16, 64)), torch.randint(0, 2000, (16, 64))


class Block(torch.nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        norm, conv = torch.nn.BatchNorm2d, partial(torch.nn.Conv2d, bias=False)
        self.body = torch.nn.Sequential(
            conv(before, after, 3, stride, 1), norm(after), torch.nn.ReLU(), conv(after, after, 3, 1, 1), norm(after)
        )
        same = before == after and stride == 1
        self.skip = torch.nn.Identity() if same else torch.nn.Sequential(conv(before, after, 1, stride), norm(after))

    def forward(self, image):
        return torch.relu(self.body(image) + self.skip(image))


def resnet18():
    """ResNet-18 as used for 32 x 32 images, 11.2 million parameters."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [Block(*width) for width in [*widths, (512, 512, 1)]]
    stem = [torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU()]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 10)]
    return torch.nn.Sequential(*stem, *blocks, *head), torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))


BUILD = {"mlp": mlp, "transformer": transformer, "resnet18": resnet18}


@contextmanager
def prepared(way, world, model, optimizer):
    """Yield ``(model, synchronize)`` for a training step done in this way."""
    if way == "unsynchronised":
        yield model, lambda: None
    elif way == "DistributedDataParallel":
        yield torch.nn.parallel.DistributedDataParallel(model), lambda: None
    elif way == "hvd.DistributedOptimizer":
        import horovod.torch as hvd

        hvd.init()
        peer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        try:
            yield model, peer.synchronize
        finally:
            hvd.shutdown()
    else:
        from sparkdl.collective.backends.horovod import HorovodCollective
        from sparkdl.collective.backends.torch_distributed import TorchCollective
        from sparkdl.config import SyncConfig

        kind = HorovodCollective if "horovod" in way else TorchCollective
        collective = kind(world, timeout=timedelta(seconds=60))
        # As its peers do, each rank normalises by its own rows, but where the way is to measure what all rows cost.
        config = SyncConfig(shared_memory="sockets" not in way, sync_batch_norm="batch norm" in way)
        sync = collective.wrap(model, optimizer, config)
        yield sync.model, sync.synchronize
        sync.close()
        collective.close()


def measure(workload, ways, world):
    """Milliseconds a step of each repetition, on the clock and of CPU time, by way."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps, repeats = WORKLOADS[workload]
    times = {way: [] for way in ways}
    for repeat in range(repeats):
        order = ways[repeat % len(ways) :] + ways[: repeat % len(ways)]
        for way in order:
            times[way].append(one(workload, way, world, steps))
    dist.destroy_process_group()
    return times


def one(workload, way, world, steps):
    import torch.distributed as dist

    torch.manual_seed(0)
    model, batch, target = BUILD[workload]()
    loss_of = torch.nn.functional.mse_loss if target.is_floating_point() else torch.nn.functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    with prepared(way, world, model, optimizer) as (callee, synchronize):

        def step():
            optimizer.zero_grad()
            loss_of(callee(batch), target).backward()
            synchronize()
            optimizer.step()

        for _ in range(3):
            step()
        dist.barrier()
        gc.collect()
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        dist.barrier()
    return 1e3 * seconds / steps, 1e3 * busy / steps


def compare(workload, ways=WAYS):
    """Run both ranks; return one row per way."""
    import cloudpickle

    from sparkdl.collective.backends.horovod import is_installed
    from sparkdl.collective.rendezvous.horovod_store import horovod_rendezvous
    from sparkdl.config import LaunchConfig
    from sparkdl.launch.local import launch

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    usable = [way for way in ways if is_installed() or ("horovod" not in way and "hvd" not in way)]
    if workload != "resnet18":
        usable = [way for way in usable if "batch norm" not in way]
    services = [horovod_rendezvous] if is_installed() else []
    given = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    config = LaunchConfig(cpus_per_rank=1, env=given)
    by_rank = launch(partial(measure, workload, usable), num_proc=RANKS, config=config, services=services)
    rows = []
    cpu = {way: statistics.median(c for times in by_rank for _, c in times[way]) for way in usable}
    by_rank = [{way: [wall for wall, _ in times[way]] for way in usable} for times in by_rank]
    # Each step of the unsynchronised ranks takes what it takes; their mean is what perfect scaling would give.
    alone = [statistics.mean(pair) for pair in zip(*(times["unsynchronised"] for times in by_rank), strict=True)]
    for way in usable:
        own = [max(pair) for pair in zip(*(times[way] for times in by_rank), strict=True)]
        if way == "unsynchronised":
            own = alone
        ratios = [a / b for a, b in zip(alone, own, strict=True)]
        rows.append({
            "workload": workload, "way": way,
            "ratio": round(statistics.median(alone) / statistics.median(own), 3),
            "median_ms": round(statistics.median(own), 2),
            "unsynchronised_median_ms": round(statistics.median(alone), 2),
            "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
            # On a machine with other work the clock is noise; the work done is not.
            "cpu_ratio": round(cpu["unsynchronised"] / cpu[way], 3),
        })  # fmt: skip
    return rows


def surroundings():
    """What a figure depends on."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"git": git.stdout.strip(), "torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}


@pytest.mark.bench
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_efficiency(workload):
    for row in compare(workload):
        print(json.dumps(row | surroundings()))
        assert row["ratio"] > 0


if __name__ == "__main__":
    for name in sys.argv[1:] or WORKLOADS:
        for line in compare(name):
            print(json.dumps(line | surroundings()), flush=True)
