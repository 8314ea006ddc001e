"""A model that the memory of one rank does not hold trains on four."""

from __future__ import annotations

import functools
import os
import resource
import sys
import traceback
from pathlib import Path

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.strategies.base import open_strategy
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO, World

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WIDTH, BLOCKS = 768, 32
PARAMETERS = BLOCKS * (2 * WIDTH * WIDTH + 2 * WIDTH)
LIMIT = 11 * PARAMETERS  # bytes; fp32 and Adam take 16 a parameter on one rank, 4 on one of four


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


def model(width):
    return torch.nn.Sequential(*[Block(width) for _ in range(BLOCKS)])


def trained(strategy, collective, width):
    config = TrainConfig(epochs=1, max_grad_norm=1.0)
    opened = open_strategy(strategy, collective, config)
    data = {name: torch.randn(16, width, generator=torch.Generator().manual_seed(1)) for name in ("x", "y")}
    result = fit(
        Task(
            model=functools.partial(model, width),
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
            loss=torch.nn.MSELoss(),
            inputs=["x"],
            labels=["y"],
        ),
        TensorSource(data, global_batch_rows=8, world=World(rank=opened.data_rank, size=opened.data_size)),
        collective=collective,
        config=config,
        strategy=opened,
    )
    state = opened.state_dict()  # all of it on the leader, within the limit, too
    weights = result.model.state_dict() if state else {}
    return {
        "losses": result.history.column("loss"),
        "tensors": len(state["optimizer"]["state"]) if state else 0,
        "sums": [float(tensor.double().abs().sum()) for tensor in weights.values()],
    }


TABLES, TABLE_ROWS, TABLE_WIDTH = 8, 100_000, 64
TABLE_LIMIT = int(0.85 * TABLES * TABLE_ROWS * TABLE_WIDTH * 4)  # bytes; of two servers, each holds a half


class Words(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.tables = torch.nn.ModuleList(
            torch.nn.Embedding(rows, TABLE_WIDTH, sparse=True, padding_idx=0) for _ in range(TABLES)
        )
        self.out = torch.nn.Linear(TABLE_WIDTH, 1)

    def forward(self, words):
        return self.out(sum(table(words[:, place]) for place, table in enumerate(self.tables)))


def trained_words(strategy, collective, rows):
    config = TrainConfig(epochs=1)
    opened = open_strategy(strategy, collective, config)
    generator = torch.Generator().manual_seed(1)
    data = {
        "words": torch.randint(0, rows, (64, TABLES), generator=generator),
        "y": torch.rand(64, generator=generator),
    }
    result = fit(
        Task(
            model=functools.partial(Words, rows),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            loss=torch.nn.MSELoss(),
            inputs=["words"],
            labels=["y"],
        ),
        TensorSource(data, global_batch_rows=16, world=collective.world),
        collective=collective,
        config=config,
        strategy=opened,
    )
    state = opened.state_dict()
    weights = result.model.state_dict() if state else {}
    return {
        "losses": result.history.column("loss"),
        "sums": [sum(float(rows.double().abs().sum()) for rows in tensor.split(1000)) for tensor in weights.values()],
    }


def limited(strategy, world, *, train=trained, small=8, size=WIDTH, limit=LIMIT):
    """Train while the process may hold ``limit`` bytes more than before; files that it maps are not counted."""
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch" if world.size > 1 else "solo")
    train(strategy, collective, small)  # loads what a first training loads
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + limit, hard))
    try:
        return train(strategy, collective, size)
    except (RuntimeError, MemoryError) as error:
        if world.size > 1:
            traceback.print_exc()
            os._exit(1)  # the other ranks would wait for this one
        return f"{error}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
        collective.close(failed=True)


@pytest.fixture
def fresh_ranks(monkeypatch):
    """Ranks whose allocator gives back at once what is freed, so that the limit is one of what is in use."""
    from rank_pool import Ranks

    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "524288")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "524288")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    pool = Ranks()
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    return trained("all_reduce", open_collective(SOLO, backend="solo"), WIDTH)


def test_one_rank_runs_out_of_memory(fresh_ranks):
    (refusal,) = fresh_ranks.run(functools.partial(limited, "all_reduce"), 1, seconds=900.0)
    assert "can't allocate memory" in refusal


@pytest.mark.parametrize(
    "strategy", ["fsdp", "tensor", "pipeline(micro_batches=2)", "mesh(shard=2, pipeline=2, micro_batches=2)"]
)
def test_four_ranks_train_it(fresh_ranks, alone, strategy):
    values = fresh_ranks.run_at_store([], functools.partial(limited, strategy), 4, seconds=900.0)
    for rank in values:
        assert isinstance(rank, dict), rank
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert values[0]["sums"] == pytest.approx(alone["sums"], rel=1e-3)
    assert values[0]["tensors"] == 4 * BLOCKS


WORDS = {"train": trained_words, "small": 2000, "size": TABLE_ROWS, "limit": TABLE_LIMIT}


def test_two_servers_train_tables_that_one_rank_runs_out_of_memory_with(fresh_ranks):
    torch.set_num_threads(1)
    wanted = trained_words("all_reduce", open_collective(SOLO, backend="solo"), TABLE_ROWS)
    (refusal,) = fresh_ranks.run(functools.partial(limited, "all_reduce", **WORDS), 1, seconds=900.0)
    assert "can't allocate memory" in refusal
    job = functools.partial(limited, "parameter_server(servers=2)", **WORDS)
    leader, other = fresh_ranks.run_at_store([], job, 2, seconds=900.0)
    assert leader["losses"] == other["losses"] == pytest.approx(wanted["losses"], rel=1e-4)
    assert leader["sums"] == pytest.approx(wanted["sums"], rel=1e-5)
