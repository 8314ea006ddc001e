"""A table that is sorted, by whatever it may be, trains the model that the same rows in random order train."""

import functools

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparkdl.batches.order.quality import content_excess
from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.config import LoaderConfig, ShardConfig
from sparkdl.shards.files import write_table_shards
from sparkdl.world import World

ROWS, HELD_OUT, BATCH, EPOCHS = 24_000, 20_000, 256, 3
COLUMNS = ("time", "key", "x0", "x1", "x2")


@pytest.fixture(autouse=True)
def one_thread():
    """Steps this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def table_of(seed):
    """Five features, the first the time and the second a key with few values, and the probability of a label."""
    rng = np.random.default_rng(seed)
    rows = ROWS + HELD_OUT
    x = rng.normal(size=(rows, 5))
    x[:, 0] = np.linspace(-1.7, 1.7, rows)[rng.permutation(rows)]
    x[:, 1] = rng.integers(0, 12, rows) / 4 - 1.4
    score = 1.5 * np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3] - 0.5 * x[:, 4] ** 2
    y = (rng.random(rows) < 1 / (1 + np.exp(-score))).astype("f4")
    return x.astype("f4"), y


def order_of(kind, x, y):
    if kind == "label, then features":
        return np.lexsort([*x.T, y])
    return np.argsort(x[:, COLUMNS.index(kind)], kind="stable")


def trained(steps, x, y, seed):
    """The loss on rows held out, after training on batches."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loss = torch.nn.BCEWithLogitsLoss()
    for features, label in steps:
        optimizer.zero_grad()
        loss(model(features)[:, 0], label).backward()
        optimizer.step()
    with torch.no_grad():
        return loss(model(torch.from_numpy(x[ROWS:]))[:, 0], torch.from_numpy(y[ROWS:])).item()


@functools.cache
def of_shuffled_rows(data_seed, seed):
    """The median loss after training on rows in memory, shuffled anew each epoch, in five orders: one may be odd."""
    x, y = table_of(data_seed)
    features, labels = torch.from_numpy(x[:ROWS]), torch.from_numpy(y[:ROWS])
    losses = []
    for order_seed in range(5):
        generator = torch.Generator().manual_seed(order_seed)
        orders = [torch.randperm(ROWS, generator=generator) for _ in range(EPOCHS)]
        losses.append(trained(((features[i], labels[i]) for order in orders for i in order.split(BATCH)), x, y, seed))
    return float(np.median(losses))


def global_batches(folder, config, world, seed):
    """What all ranks read in each step of all epochs."""
    loaders = [
        ShardedDataset(str(folder), config=config).loader(
            world=World(rank=rank, size=world), global_batch_size=BATCH, seed=seed
        )
        for rank in range(world)
    ]
    for epoch in range(EPOCHS):
        for loader in loaders:
            loader.set_epoch(epoch)
        for parts in zip(*loaders, strict=True):
            yield tuple(torch.cat([part[name].clone() for part in parts]) for name in ("features", "y"))


def written(folder, kind, seed, **settings):
    x, y = table_of(seed)
    order = order_of(kind, x[:ROWS], y[:ROWS])
    table = pa.table({**{name: x[order, i] for i, name in enumerate(COLUMNS)}, "y": y[order]})
    config = ShardConfig(**{"block_rows": 64, "shard_bytes": 20_000, "seed": seed, **settings})
    write_table_shards(table, folder, labels=["y"], config=config)


KINDS = ("label, then features", *COLUMNS)
SMALL_POOL = LoaderConfig(pool_bytes=ROWS * 24 // 20)
FAST = [(("label, then features", 1, 0), "holds the set"), (("x0", 2, 1), "holds a twentieth")]
ALL = [(kind, world, seed) for kind in KINDS for world in (1, 2, 4) for seed in (0, 1, 2)]


@pytest.mark.parametrize(
    ("kind", "world", "seed", "pool"),
    [
        pytest.param(*case, pool, marks=() if (case, pool) in FAST else pytest.mark.slow)
        for case in ALL
        for pool in ("holds the set", "holds a twentieth")
    ],
)
def test_a_sorted_table_trains_what_shuffled_rows_train(tmp_path, kind, world, seed, pool):
    written(tmp_path, kind, seed)
    x, y = table_of(seed)
    config = LoaderConfig() if pool == "holds the set" else SMALL_POOL
    loss = trained(global_batches(tmp_path, config, world, seed), x, y, seed)
    assert loss == pytest.approx(of_shuffled_rows(seed, seed), rel=0.01)


def test_rows_left_in_their_order_train_worse_once_they_exceed_the_pool(tmp_path):
    """The test above can fail: this is the set that it would fail with."""
    written(tmp_path, "label, then features", 0, spread_rows=False)
    x, y = table_of(0)
    sorted_loss = trained(global_batches(tmp_path, SMALL_POOL, 1, 0), x, y, 0)
    assert sorted_loss > 1.01 * of_shuffled_rows(0, 0)
    in_pool = trained(global_batches(tmp_path, LoaderConfig(), 1, 0), x, y, 0)  # is permuted as a whole
    assert in_pool == pytest.approx(of_shuffled_rows(0, 0), rel=0.01)


@pytest.mark.parametrize("spread_rows", [True, False])
def test_what_rows_hold_comes_as_evenly_as_under_a_uniform_shuffle(tmp_path, spread_rows):
    """Labels times features, by steps and by sixteenths of an epoch; positions in files do not show it."""
    written(tmp_path, "label, then features", 0, spread_rows=spread_rows)
    for config, bound in ((LoaderConfig(), 3), (SMALL_POOL, 3 if spread_rows else None)):
        steps = [torch.cat([x, y[:, None], x * y[:, None]], 1) for x, y in global_batches(tmp_path, config, 1, 0)]
        values = torch.cat(steps[: len(steps) // EPOCHS]).numpy()
        excess = max(content_excess(values, span) for span in (BATCH, ROWS // 16))
        assert bound is None or excess < bound
        assert bound is not None or excess > 10
