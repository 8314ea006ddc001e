"""Reading shuffled batches, against petastorm and mosaicml-streaming in the same run, and against the memory itself.

T = 500,000 rows of 40 float32 columns and a label; V = 200,000 vectors of 128 floats; R = 200,000 token lists of 100 on
average; J = 20,000 JPEG files with decoding. One JSON line per workload, then one each for the first batch, memory,
checked blocks, and what the cache of remote blocks earns; ``python tests/bench/bench_read.py [workload ...]``.

Peers run in environments of their own (petastorm: ``peers.py``; mosaicml-streaming: made here once per user), each at
the best of a few settings, tried first. Ways are measured in turns; what is reported is the median.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    import pytest
except ImportError:  # in a peer's environment, where only the readers run
    pytest = None

ROWS = {"T": 500_000, "V": 200_000, "R": 200_000, "J": 20_000}
BATCH = {"T": 1024, "V": 1024, "R": 256, "J": 256}
TARGETS = {"T": {"petastorm batched": 8, "petastorm rows": 10, "streaming": 50}, "V": {"petastorm batched": 8}}
TURNS = 5
QUALITY_EPOCHS = 8
SECONDS = 2.0
STREAMING = "mosaicml-streaming==0.13.0"
STREAMING_NEEDS = (STREAMING, "pandas<3", "pyarrow==26.0.1")


def streaming_interpreter():
    """The Python of an environment that holds mosaicml-streaming; made on first use, with a torch of its own."""
    named = os.environ.get("SPARKDL_STREAMING_PYTHON")
    if named:
        return Path(named)
    home = Path(os.environ.get("SPARKDL_CACHE", Path.home() / ".cache" / "sparkdl")) / "peers-streaming"
    home.mkdir(parents=True, exist_ok=True)
    python = home / "venv" / "bin" / "python"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "done").exists() or (home / "done").read_text() != "\n".join(STREAMING_NEEDS):
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(home / "venv")], check=True)
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *STREAMING_NEEDS], check=True)  # with its own torch and torchvision, which must match
            (home / "done").write_text("\n".join(STREAMING_NEEDS))
    return python


# Data: every workload as Arrow columns, written in each reader's own format.


def columns_of(workload, rows=None):
    """The workload as a pyarrow table; ``label`` is the number of the row."""
    import io

    import numpy as np
    import pyarrow as pa

    rows = rows or ROWS[workload]
    random = np.random.default_rng(0)
    label = pa.array(np.arange(rows, dtype=np.float32))
    if workload == "T":
        names = {f"x{k}": random.random(rows, dtype=np.float32) for k in range(40)}
        return pa.table({**names, "label": label})
    if workload == "V":
        flat = random.random(rows * 128, dtype=np.float32)
        return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(flat), 128), "label": label})
    if workload == "R":
        edges = np.concatenate([[0], np.cumsum(random.poisson(100, rows))]).astype(np.int32)
        tokens = random.integers(0, 30_000, edges[-1]).astype(np.int32)
        return pa.table({"x": pa.ListArray.from_arrays(edges, pa.array(tokens)), "label": label})
    from PIL import Image

    files = []
    for _ in range(64):
        coarse = Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize((64, 64))
        file = io.BytesIO()
        coarse.save(file, "JPEG", quality=85)
        files.append(file.getvalue())
    return pa.table({"x": pa.array([files[k % 64] for k in range(rows)], pa.binary()), "label": label})


def decode(data):
    """A JPEG file as a (64, 64, 3) array."""
    import io

    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))


def write_all(folder, workload):
    """Write the workload as shards and as Parquet of 10,000-row groups (petastorm's unit of shuffling)."""
    import pyarrow.parquet as pq

    from sparkdl.shards.files import write_table_shards

    table = columns_of(workload)
    write_table_shards(table, str(folder / "shards"), labels=["label"])
    (folder / "parquet").mkdir()
    plain = table
    if workload == "V":
        import pyarrow as pa

        plain = table.set_column(0, "x", table["x"].cast(pa.list_(pa.float32())))
    part = -(-plain.num_rows // 8)
    for number in range(8):
        pq.write_table(
            plain.slice(number * part, part), folder / "parquet" / f"{number}.parquet", row_group_size=10_000
        )
    return table


# Readers: each is run as ``bench_read.py --reader NAME FOLDER WORKLOAD SETTING`` in its environment and prints numbers.


def count(batches, rows_of, seconds):
    """Rows per second of an iterable, over whole epochs or the time given, the first batch unmeasured."""
    iterator = iter(batches)
    next(iterator)
    rows, start = 0, time.perf_counter()
    for batch in iterator:
        rows += rows_of(batch)
        if time.perf_counter() - start > seconds:
            break
    return rows / (time.perf_counter() - start)


def endless(make):
    """The batches of one epoch after another."""
    while True:
        yield from make()


def read_sparkdl(folder, workload, setting):
    from sparkdl.batches.reading.loader import ShardedDataset
    from sparkdl.config import LoaderConfig

    data = ShardedDataset(f"{folder}/shards", config=LoaderConfig(**json.loads(setting)))
    loader = data.loader(batch_size=BATCH[workload], decode={"x": decode} if workload == "J" else None)
    if workload != "J":
        for _ in loader:  # the first epoch checks the hashes
            pass
    return count(endless(lambda: loader), lambda batch: batch.rows, SECONDS)


def petastorm_batches(folder, workload, setting):
    import warnings

    import torch
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader, DataLoader

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # its shuffling queue indexes tensors; OpenMP teams there cost it more than they give
    reader = make_batch_reader(
        f"file://{folder}/parquet",
        num_epochs=None,
        shuffle_row_groups=True,
        reader_pool_type=setting["pool"],
        workers_count=setting["workers"],
    )
    kind = BatchedDataLoader if setting["batched"] else DataLoader
    return kind(reader, batch_size=BATCH[workload], shuffling_queue_capacity=setting["queue"]), reader


def read_petastorm(folder, workload, setting):
    loader, reader = petastorm_batches(folder, workload, json.loads(setting))
    try:
        return count(loader, lambda batch: len(batch["label"]), SECONDS)
    finally:
        reader.stop()
        reader.join()


def read_petastorm_stream(folder, workload, setting):
    """Positions of the rows of about one epoch, in training order."""
    loader, reader = petastorm_batches(folder, workload, json.loads(setting))
    labels = []
    for batch in loader:
        labels += batch["label"].long().tolist()
        if len(labels) >= ROWS[workload]:
            break
    reader.stop()
    reader.join()
    return list(dict.fromkeys(labels))


def read_streaming(folder, workload, setting):
    import torch
    from streaming import MDSWriter, StreamingDataset

    setting = json.loads(setting)
    target = Path(folder) / "mds"
    if not target.exists():
        write_mds(target, Path(folder) / "parquet", workload, MDSWriter)
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    data = StreamingDataset(local=str(target), shuffle=True, shuffle_algo="py1e", batch_size=BATCH[workload])

    def collate(rows):
        if workload == "J":
            values = torch.stack([torch.from_numpy(decode(row["x"]).copy()) for row in rows])
        else:
            values = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row["x"].copy()) for row in rows], True)
        return {"x": values, "label": torch.tensor([row["label"] for row in rows])}

    loader = torch.utils.data.DataLoader(
        data,
        batch_size=BATCH[workload],
        num_workers=setting["workers"],
        collate_fn=collate if workload in "RJ" else None,
    )
    return count(endless(lambda: loader), lambda batch: len(batch["label"]), SECONDS)


def write_mds(target, parquet, workload, writer_class):
    import numpy as np
    import pyarrow.parquet as pq

    kinds = {"T": "ndarray:float32:40", "V": "ndarray:float32:128", "R": "ndarray:int32", "J": "bytes"}
    with writer_class(out=str(target), columns={"x": kinds[workload], "label": "float32"}) as writer:
        for file in sorted(parquet.glob("*.parquet")):
            table = pq.read_table(file)
            if workload == "T":
                xs = np.stack([table[f"x{k}"].to_numpy() for k in range(40)], 1)
            else:
                xs = table["x"].to_pylist() if workload == "J" else table["x"].to_pandas().tolist()
            for x, label in zip(xs, table["label"].to_numpy(), strict=True):
                writer.write({"x": x, "label": label})


def read_memory(folder, workload, setting):
    """Rows per second of gathering random rows of this size from 64 MiB in memory, all threads together.

    With ``buffer=0`` each thread gathers 1 MiB at a time into the same place, which stays in its cache: no loader can
    do that. Otherwise into three buffers of so many bytes in turn, as a loader must, whose batches are read later.
    """
    import threading

    import torch

    setting = json.loads(setting)
    width = {"T": 40, "V": 128, "R": 100, "J": 128}[workload]
    pool = torch.rand((64 << 20) // (4 * width), width)
    rows = (setting["buffer"] or 1 << 20) // (4 * width)
    torch.set_num_threads(1)
    done = []

    def gather():
        torch.get_num_threads()
        torch.set_num_threads(1)
        outs = [torch.empty(rows, width) for _ in range(3 if setting["buffer"] else 1)]
        parts = torch.randperm(len(pool)).split(rows)
        gathered, stop = 0, time.perf_counter() + SECONDS / 2
        while time.perf_counter() < stop:
            for number, part in enumerate(parts):
                torch.index_select(pool, 0, part, out=outs[number % len(outs)][: len(part)])
                gathered += len(part)
        done.append(gathered)

    workers = [threading.Thread(target=gather) for _ in range(setting["threads"])]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - start)


def read_first(folder, workload, setting):
    """Milliseconds from opening the set to the first batch, imports done."""
    from sparkdl.batches.reading.loader import ShardedDataset

    start = time.perf_counter()
    stream = iter(ShardedDataset(f"{folder}/shards").loader(batch_size=BATCH[workload]))
    next(stream)
    took = (time.perf_counter() - start) * 1e3
    stream.close()
    return took


def read_usage(folder, workload, setting):
    """Memory of a reading process over two epochs, MiB: private before and at most, proportional at most, stated."""
    import psutil

    from sparkdl.batches.reading.geometry import gather_threads
    from sparkdl.batches.reading.loader import ShardedDataset
    from sparkdl.config import LoaderConfig

    me = psutil.Process()
    pool = json.loads(setting)["pool_bytes"]
    data = ShardedDataset(f"{folder}/shards", config=LoaderConfig(pool_bytes=pool))
    loader = data.loader(batch_size=1024)
    before = me.memory_full_info()
    anonymous = _anonymous()
    most = {"uss": 0, "pss": 0, "rss": 0, "anonymous": 0}
    for step, _ in enumerate(endless(lambda: loader)):
        if step % 50 == 0:
            info = me.memory_full_info()
            now = {"uss": info.uss, "pss": info.pss, "rss": info.rss, "anonymous": _anonymous()}
            most = {name: max(most[name], now[name]) for name in most}
        if loader.epoch == 2:
            break
    start = {"uss": before.uss, "pss": before.pss, "rss": before.rss, "anonymous": anonymous}
    grown = {f"{name}_grown": round((most[name] - start[name]) / 2**20, 1) for name in most}
    steps, loader_threads = loader._steps, gather_threads(data.config, 1)
    return {
        **grown,
        "stated_private": round(data.geometry.pipeline(steps, loader_threads).private_bytes / 2**20, 1),
        "stated_mapped": round(data.geometry.mapped_bytes() / 2**20, 1),
        "pool": pool / 2**20,
        "set": round(data.manifest.bytes / 2**20, 1),
    }


def read_remote(endpoint, workload, setting):
    """Seconds of each of three epochs over a set on S3, and the bytes that they fetched."""
    from sparkdl.batches.reading.loader import ShardedDataset
    from sparkdl.config import LoaderConfig

    root, fetched = remote_root(endpoint), 0
    plain = type(root).read_bytes

    def counted(file, *args, **options):
        nonlocal fetched
        data = plain(file, *args, **options)
        fetched += len(data)
        return data

    type(root).read_bytes = counted
    loader = ShardedDataset(root, config=LoaderConfig(**json.loads(setting))).loader(batch_size=1024)
    epochs = []
    for _ in range(3):
        start, before = time.perf_counter(), fetched
        for _ in loader:
            pass
        epochs.append([time.perf_counter() - start, fetched - before])
    return epochs


def remote_root(endpoint):
    """The folder of shards on the S3 server at ``endpoint``."""
    from sparkdl.storage import Storage

    return Storage.of("s3://bench/shards", {"key": "k", "secret": "s", "endpoint_url": endpoint})


def read_hold(folder, workload, setting):
    """Read the whole set once, say its size in MiB, and stay until told to go."""
    from sparkdl.batches.reading.loader import ShardedDataset
    from sparkdl.config import LoaderConfig

    data = ShardedDataset(f"{folder}/shards", config=LoaderConfig(pool_bytes=1 << 30))
    for _ in data.loader(batch_size=1024):
        pass
    print(round(data.manifest.bytes / 2**20, 1), flush=True)
    sys.stdin.readline()
    return 0


def _anonymous():
    """Bytes of this process that belong to no file."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


READERS = {
    "sparkdl": read_sparkdl,
    "petastorm": read_petastorm,
    "petastorm-stream": read_petastorm_stream,
    "streaming": read_streaming,
    "memory": read_memory,
    "first": read_first,
    "usage": read_usage,
    "hold": read_hold,
    "remote": read_remote,
}


# Measuring: readers in turns, each in a fresh process.


def command(python, reader, folder, workload, **setting):
    return [str(python), __file__, "--reader", reader, str(folder), workload, json.dumps(setting)]


def ask(python, reader, folder, workload, **setting):
    """What a reader prints, as JSON."""
    done = subprocess.run(command(python, reader, folder, workload, **setting), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{reader} failed on {workload}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def best(python, reader, folder, workload, settings):
    """The fastest of a few settings."""
    speeds = [ask(python, reader, folder, workload, **setting) for setting in settings]
    return settings[speeds.index(max(speeds))]


def ways_of(workload, folder):
    """Each way as (interpreter, reader, setting)."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from peers import interpreter

    petastorm, streaming = interpreter(), streaming_interpreter()
    threads = [{"pool": "thread", "workers": workers} for workers in (1, 2, 4)]
    pools = [*threads, {"pool": "dummy", "workers": 1}]
    ways = {"sparkdl": (sys.executable, "sparkdl", {})}
    if workload in "TV":  # petastorm's loaders refuse lists of different lengths and byte strings
        for name, batched in (("petastorm batched", True), ("petastorm rows", False)):
            settings = [{**pool, "batched": batched, "queue": 50_000} for pool in pools]
            ways[name] = (petastorm, "petastorm", best(petastorm, "petastorm", folder, workload, settings))
    workers = [{"workers": 0}, {"workers": 2}]
    ways["streaming"] = (streaming, "streaming", best(streaming, "streaming", folder, workload, workers))
    return ways


def measure(workload, folder):
    """One line: rows per second of each way, our share of the memory's speed, and the quality of the shuffle."""
    write_all(folder, workload)
    ways = ways_of(workload, folder)
    cores = len(os.sched_getaffinity(0))
    speeds = {way: [] for way in ways}
    limit = {
        "one thread": ({"threads": 1, "buffer": 8 << 20}, []),
        f"{cores} threads": ({"threads": cores, "buffer": 8 << 20}, []),
        f"{cores} threads into their caches": ({"threads": cores, "buffer": 0}, []),
    }
    for _ in range(TURNS):
        for way, (python, reader, setting) in ways.items():
            speeds[way].append(ask(python, reader, folder, workload, **setting))
        for setting, found in limit.values():
            found.append(ask(sys.executable, "memory", folder, workload, **setting))
    median = {way: statistics.median(values) for way, values in speeds.items()}
    line = {
        "workload": f"read {workload}",
        "ratio": {way: round(median["sparkdl"] / speed, 1) for way, speed in median.items() if way != "sparkdl"},
        "target": TARGETS.get(workload, {}),
        "krows_per_s": {way: round(speed / 1e3, 1) for way, speed in median.items()},
        "spread": {way: round((max(v) - min(v)) / median[way], 2) for way, v in speeds.items()},
        "settings": {way: setting for way, (_, _, setting) in ways.items()},
    }
    if workload in "TV":
        line["gather_limit_krows_per_s"] = {name: round(statistics.median(v) / 1e3) for name, (_, v) in limit.items()}
        line["share_of_limit"] = {
            name: round(median["sparkdl"] / statistics.median(found), 2) for name, (_, found) in limit.items()
        }
        line["shuffle"] = quality(workload, folder, ways)
    return line | provenance()


def quality(workload, folder, ways):
    """Expected distance and neighbour survival of our order and of petastorm's, from the rows as they came.

    One order's distance scatters around what is expected of the way, the more so the fewer pieces are shuffled; so both
    are means over several epochs, with the standard error.
    """
    import torch

    from sparkdl.batches.reading.loader import ShardedDataset

    data = ShardedDataset(folder / "shards", tensors=["label"])
    in_files = torch.cat([b["label"] for b in data.loader(batch_size=4096, shuffle=False)]).long()
    place = torch.empty_like(in_files)
    place[in_files] = torch.arange(len(in_files))
    loader = data.loader(batch_size=BATCH[workload])
    ours = [place[torch.cat([b["label"] for b in loader]).long()].numpy() for _ in range(QUALITY_EPOCHS)]
    python, _, setting = ways["petastorm batched"]
    theirs = []
    for _ in range(QUALITY_EPOCHS):
        rows = ask(python, "petastorm-stream", folder, workload, **setting)
        rank = {row: number for number, row in enumerate(sorted(rows))}  # a few rows may be in the queue still
        theirs.append([rank[row] for row in rows])
    return {"sparkdl": summary(ours, BATCH[workload]), "petastorm": summary(theirs, BATCH[workload])}


def summary(orders, batch):
    """Mean and standard error of the shuffle quality of some epochs."""
    from sparkdl.batches.order.quality import measure as measure_quality

    found = [measure_quality(order, batch) for order in orders]
    values = {name: [getattr(quality, name) for quality in found] for name in ("distance", "neighbours", "excess")}
    error = {name: statistics.stdev(each) / len(each) ** 0.5 for name, each in values.items()}
    return {name: [round(statistics.mean(each), 5), round(error[name], 5)] for name, each in values.items()}


def provenance():
    import pyarrow
    import torch

    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "git": head.stdout.strip(),
        "versions": {
            "torch": torch.__version__,
            "pyarrow": pyarrow.__version__,
            "petastorm": "0.12.1",
            "streaming": STREAMING.split("==")[1],
        },
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def measure_first(folder):
    """One line: milliseconds from opening T to its first batch."""
    if not (folder / "shards").exists():
        write_all(folder, "T")
    times = [ask(sys.executable, "first", folder, "T") for _ in range(9)]
    return {
        "workload": "first batch of T, ms",
        "median": round(statistics.median(times), 1),
        "best": round(min(times), 1),
        "target": 50,
        "spread": round((max(times) - min(times)) / statistics.median(times), 2),
    } | provenance()


def measure_memory(folder):
    """One line: memory of one rank on a set 8 x its pool, and of two ranks that have the whole set mapped, MiB."""
    from sparkdl.shards.files import write_table_shards

    if not (folder / "shards").exists():
        write_table_shards(columns_of("V", 500_000), str(folder / "shards"), labels=["label"])
    return {
        "workload": "memory of reading, MiB",
        "one rank": ask(sys.executable, "usage", folder, "V", pool_bytes=32 << 20),
        "two ranks": sharing(folder),
    } | provenance()


def measure_verify(folder):
    """One line: rows per second where blocks are checked at first sight alone, and again in every epoch, in turns."""
    from sparkdl.shards.files import write_table_shards

    write_table_shards(columns_of("T"), str(folder / "shards"), labels=["label"])
    speeds = {"first": [], "epoch": []}
    for _ in range(TURNS):
        for verify, found in speeds.items():
            found.append(ask(sys.executable, "sparkdl", folder, "T", verify=verify))
    median = {verify: statistics.median(found) for verify, found in speeds.items()}
    return {
        "workload": "read T, blocks checked once or in every epoch",
        "ratio": round(median["epoch"] / median["first"], 3),
        "krows_per_s": {verify: round(speed / 1e3, 1) for verify, speed in median.items()},
        "spread": {verify: round((max(v) - min(v)) / median[verify], 2) for verify, v in speeds.items()},
    } | provenance()


def measure_remote(folder):
    """One line: epochs over V on S3, blocks kept on this host's disk, and fetched again in every epoch, in turns.

    The server is moto's, on the loopback interface: what a network adds to each fetch comes on top.
    """
    from sparkdl.shards.files import write_table_shards

    log = folder / "server.log"
    server_command = [sys.executable, "-c", "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"]
    with log.open("wb") as stream:
        server = subprocess.Popen(server_command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        while (address := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) is None:
            if server.poll() is not None:
                raise RuntimeError(f"the S3 server ended:\n{log.read_text()}")
            time.sleep(0.05)
        endpoint = address[0]
        remote_root(endpoint)._fs.call_s3("create_bucket", Bucket="bench")
        write_table_shards(columns_of("V"), remote_root(endpoint), labels=["label"])
        ways = {"kept": 32 << 30, "fetched in every epoch": 1}
        epochs = {way: [] for way in ways}
        for turn in range(3):
            for way, cache_bytes in ways.items():
                setting = {
                    "cache_dir": str(folder / f"{way} {turn}"),
                    "cache_bytes": cache_bytes,
                    "pool_bytes": 16 << 20,
                }
                epochs[way].append(ask(sys.executable, "remote", endpoint, "V", **setting))
    finally:
        server.terminate()
        server.wait(10)
    seconds = {
        way: [statistics.median(turn[epoch][0] for turn in turns) for epoch in range(3)]
        for way, turns in epochs.items()
    }
    later = {way: [turn[epoch][0] for turn in turns for epoch in (1, 2)] for way, turns in epochs.items()}
    median = {way: statistics.median(values) for way, values in later.items()}
    return {
        "workload": "read V from S3, epochs after the first, blocks kept or fetched again",
        "ratio": round(median["fetched in every epoch"] / median["kept"], 1),
        "epoch_seconds": {way: [round(value, 2) for value in values] for way, values in seconds.items()},
        "epoch_mib_fetched": {
            way: [round(turns[0][epoch][1] / 2**20) for epoch in range(3)] for way, turns in epochs.items()
        },
        "spread": {way: round((max(values) - min(values)) / median[way], 2) for way, values in later.items()},
    } | provenance()


def sharing(folder):
    """Memory of the set's files in two ranks that have read it whole, summed over both at one moment, MiB.

    The resident size counts a page in each process that has it, the proportional one splits it between them.
    """
    ranks = [
        subprocess.Popen(command(sys.executable, "hold", folder, "V"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    sizes = [json.loads(process.stdout.readline()) for process in ranks]
    found = [mapped(process.pid, folder / "shards") for process in ranks]
    for process in ranks:
        process.communicate(b"\n")
    return {name: round(sum(one[name] for one in found) / 1024, 1) for name in found[0]} | {"set": sizes[0]}


def mapped(pid, folder):
    """Resident and proportional size of what a process has mapped of the files in a folder, KiB."""
    sums, inside = {"Rss": 0, "Pss": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split(" ")[0]:
            inside = str(folder) in line
        elif inside and name in sums:
            sums[name] += int(value.split()[0])
    return sums


if pytest is not None:

    @pytest.mark.bench
    @pytest.mark.timeout(3000)
    @pytest.mark.parametrize("workload", [*ROWS, "first", "memory", "verify", "remote"])
    def test_read(workload, tmp_path, capsys):
        line = run(workload, tmp_path)
        with capsys.disabled():
            print("\n" + json.dumps(line))


def run(workload, folder):
    others = {
        "first": measure_first,
        "memory": measure_memory,
        "verify": measure_verify,
        "remote": measure_remote,
    }
    return others[workload](folder) if workload in others else measure(workload, folder)


def main(workloads):
    """Print one line per workload."""
    for workload in workloads or [*ROWS, "first", "memory", "verify", "remote"]:
        folder = Path(tempfile.mkdtemp())
        try:
            print(json.dumps(run(workload, folder)), flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reader"]:
        print(json.dumps(READERS[sys.argv[2]](*sys.argv[3:])))
        os._exit(0 if sys.stdout.flush() is None else 1)
    main(sys.argv[1:])
