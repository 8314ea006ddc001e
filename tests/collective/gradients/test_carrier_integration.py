"""Who names a backend gets its all-reduce: seen in Horovod's own timeline and in torch's profiler, not in our words."""

from __future__ import annotations

import json

import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import SyncConfig
from sparkdl.errors import ConfigError
from sparkdl.world import SOLO

STEPS = 5
ROWS = 7  # of a global batch: no two of three ranks have as many


def train(collective, config=None):
    """Return the weights, what carried the gradients, and torch's own all-reduces, of one layer of 24 elements."""
    torch.manual_seed(3)
    model = torch.nn.Linear(23, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = collective.wrap(model, optimizer, config)
    rank, size = collective.world.rank, collective.world.size
    each = -(-ROWS // size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            rows = torch.randn(ROWS, 23, dtype=torch.float64)[rank * each : (rank + 1) * each]
            optimizer.zero_grad()
            (model(rows).square().sum() * size / ROWS).backward()
            sync.synchronize()
            optimizer.step()
    carried_by = sync.carried_by
    sync.close()
    reduced = sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")
    return torch.cat([p.detach().flatten() for p in model.parameters()]), carried_by, reduced


def reduced_by_horovod(path):
    """All-reduces of gradients that Horovod itself wrote down."""
    text = path.read_text().strip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {event["pid"]: event["args"].get("name", "") for event in events if event.get("name") == "process_name"}
    return sum(event.get("name") == "ALLREDUCE" and "bucket" in names[event["pid"]] for event in events)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("backend", "carried_by", "by_torch", "by_horovod"),
    [
        ("torch", "torch", STEPS, 0),
        ("horovod", "horovod", 0, STEPS),
        ("auto", "torch, gradients in shared memory", 0, 0),
    ],
)
def test_gradients_travel_as_logs_say(run_collective, tmp_path, size, backend, carried_by, by_torch, by_horovod):
    pytest.importorskip("horovod.torch")
    timeline = tmp_path / "timeline.json"
    found = run_collective(train, size, backend, environment={"HOROVOD_TIMELINE": str(timeline)})
    expected, alone, _ = train(open_collective(SOLO))
    assert alone == "solo"
    for weights, said, reduced in found:
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
        assert said == carried_by
        assert reduced == by_torch
    assert (reduced_by_horovod(timeline) if timeline.exists() else 0) == by_horovod


def demanded(collective):
    train(collective, SyncConfig(shared_memory=True, compression="fp16"))


def test_shared_memory_that_cannot_be_had_is_refused_where_it_was_demanded(run_collective):
    for error in run_collective(demanded, 2, "torch", raw=True):
        assert isinstance(error, ConfigError)
        assert "shared_memory=True, but" in str(error)
