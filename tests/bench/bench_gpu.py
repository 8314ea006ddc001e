"""What sparkdl costs on a GPU: ``fit`` and ``score_rows`` beside loops written by hand.

Both trainings read the same shards through the same loader, whose batches lie in page-locked memory, and copy them
without waiting; the loop by hand keeps no loss, counts nothing and checks nothing. "small" is a model of few numbers,
where the Python of a step decides, "mlp" one of 1.3 million, "ensemble" sparkdl's own for tables. Scoring starts and
ends with Arrow tables: by hand it is a matrix, a copy, the model, a copy back. The two take turns. One JSON line a
workload and precision; ``python tests/bench/bench_gpu.py``. Needs a GPU, and nothing of Spark.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from bench_loop import mlp, small

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.collective import open_collective
from sparkdl.config import LoaderConfig, ScoreConfig, ShardConfig, TrainConfig
from sparkdl.models.networks import TabularEnsemble
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.rows import score_rows
from sparkdl.shards.files import write_table_shards
from sparkdl.train.objective.batch_loss import autocast_of
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import World

GPU = torch.device("cuda:0")
ROWS, COLUMNS, PAIRS = 1_000_000, 40, 7


def ensemble():
    """The default model, for numbers alone."""
    knots = np.quantile(np.random.default_rng(0).normal(size=10_000), np.linspace(0, 1, 33)).tolist()
    label = {"name": "y", "type": "regression", "outputs": 1, "mean": 0.0, "deviation": 1.0, "loss": "mse"}
    inputs = [{"name": "features", "shape": [COLUMNS], "knots": [knots] * COLUMNS}]
    return Named(TabularEnsemble({"inputs": inputs, "labels": [label]}))


class Named(torch.nn.Module):
    """Calls a model that takes a dict with one tensor."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features):
        return self.model({"features": features})


MODELS = {"small": (small, 1024), "mlp": (mlp, 4096), "ensemble": (ensemble, 1024)}


def rows_of(count):
    random = np.random.default_rng(0)
    table = {f"x{i}": random.normal(size=count).astype("f4") for i in range(COLUMNS)}
    return pa.table({**table, "label": random.normal(size=count).astype("f4")})


def loader_of(folder, batch_rows):
    dataset = ShardedDataset(folder, config=LoaderConfig(pin_memory=True))
    return dataset.loader(batch_size=batch_rows)


def by_hand(make, loader, precision):
    """Seconds of an epoch."""
    model, loss_of = make().to(GPU), torch.nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    start = time.perf_counter()
    for batch in loader:
        x, y = (batch[name].to(GPU, non_blocking=True) for name in ("features", "label"))
        with autocast_of(precision, GPU):
            loss = loss_of(model(x), y.reshape(-1, 1))
            if isinstance(model, Named):
                loss = loss + model.model.auxiliary_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def by_fit(make, loader, precision):
    """Seconds of an epoch, as its row of the history has them."""
    result = fit(
        Task(
            model=make,
            optimizer=functools.partial(torch.optim.AdamW, fused=True),
            loss=torch.nn.MSELoss(),
            inputs=["features"],
            labels=["label"],
        ),
        loader,
        collective=open_collective(World(device=str(GPU)), backend="solo"),
        config=TrainConfig(epochs=1, precision=precision),
    )
    return result.history.column("seconds")[0]


def trained(folder, name, precision):
    make, batch_rows = MODELS[name]
    seconds = {by_hand: [], by_fit: []}
    for pair in range(PAIRS + 1):
        for run in (by_hand, by_fit) if pair % 2 else (by_fit, by_hand):
            seconds[run].append(run(make, loader_of(folder, batch_rows), precision))
    hand, ours = (seconds[run][1:] for run in (by_hand, by_fit))
    steps = -(-ROWS // batch_rows)
    return {
        "workload": f"gpu-{name}",
        "precision": precision,
        "ratio": round(statistics.median(a / b for a, b in zip(ours, hand, strict=True)), 3),
        "fit_us_per_step": round(1e6 * statistics.median(ours) / steps, 1),
        "hand_us_per_step": round(1e6 * statistics.median(hand) / steps, 1),
        "rows_per_second": round(ROWS / statistics.median(ours)),
    }


def scored(table, name, batch_rows):
    model, columns = MODELS[name][0]().eval(), [f"x{i}" for i in range(COLUMNS)]
    rows = table.select(columns).combine_chunks()
    signature = Signature(
        inputs=(TensorField(name="features", shape=(COLUMNS,), columns=tuple(columns)),),
        outputs=(TensorField(name="y"),),
    )
    on_gpu = MODELS[name][0]().to(GPU).eval()
    on_gpu.load_state_dict(model.state_dict())

    def hand():
        answers = []
        with torch.inference_mode():
            for batch in rows.to_batches(max_chunksize=batch_rows):
                matrix = np.column_stack([column.to_numpy() for column in batch.columns])
                answers.append(on_gpu(torch.from_numpy(matrix).to(GPU)).reshape(-1).cpu())
        return pa.table({"y": torch.cat(answers).numpy()})

    def ours():
        return score_rows(model, rows, signature=signature, config=ScoreConfig(device=str(GPU), batch_rows=batch_rows))

    assert np.allclose(hand()["y"], ours()["y"], atol=1e-3)
    seconds = {hand: [], ours: []}
    for pair in range(PAIRS):
        for run in (hand, ours) if pair % 2 else (ours, hand):
            start = time.perf_counter()
            run()
            seconds[run].append(time.perf_counter() - start)
    return {
        "workload": f"gpu-score-{name}",
        "batch_rows": batch_rows,
        "ratio": round(statistics.median(a / b for a, b in zip(seconds[ours], seconds[hand], strict=True)), 3),
        "rows_per_second": round(ROWS / statistics.median(seconds[ours])),
        "by_hand": round(ROWS / statistics.median(seconds[hand])),
    }


def measure(folder):
    """Yield a line a workload."""
    table = rows_of(ROWS)
    write_table_shards(table, folder, labels=["label"], config=ShardConfig())
    device = {"gpu": torch.cuda.get_device_name(GPU), "torch": torch.__version__}
    for name in MODELS:
        for precision in ("fp32", "bf16"):
            yield trained(folder, name, precision) | device
    for name, batch_rows in (("mlp", 4096), ("mlp", 65_536), ("ensemble", 16_384)):
        yield scored(table, name, batch_rows) | device


@pytest.mark.bench
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_gpu(tmp_path):
    for line in measure(str(tmp_path)):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for measured in measure(scratch):
            print(json.dumps(measured), flush=True)
