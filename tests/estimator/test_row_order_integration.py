"""In which order rows reach the ranks: with ``shuffle=False`` in the frame's, where it has one."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from sparkdl.estimator import TorchEstimator

ROWS, BATCH = 6000, 500


def rows_by_step(frame, folder, **params):
    """The feature of the rows of each step: of one rank in their order, of several one rank after the other."""

    def noting(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights, passes, batch_idx):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        np.save(f"{folder}/{batch_idx:05d}-{rank}.npy", inputs[0].numpy().ravel())
        loss = loss_fn(model(*inputs), labels, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return None, loss

    folder.mkdir()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    given = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": BATCH, "epochs": 1, "verbose": 0}
    given |= {"shuffle": False, "backend": "torch", "train_minibatch_fn": noting}
    TorchEstimator(model=model, optimizer=optimizer, loss=nn.MSELoss(), **{**given, **params}).fit(frame)
    parts = sorted(folder.glob("*.npy"))
    steps = {part.name[:5]: [] for part in parts}
    for part in parts:
        steps[part.name[:5]].append(np.load(part))
    return [np.concatenate(of_ranks) for of_ranks in steps.values()]


@pytest.fixture(scope="module")
def frame(spark):
    x = np.random.default_rng(0).permutation(ROWS).astype("float32")
    return spark.createDataFrame(pd.DataFrame({"x": x, "y": np.zeros_like(x)})).repartition(5)


def test_without_shuffle_one_rank_reads_the_rows_in_the_frames_order(frame, tmp_path):
    steps = rows_by_step(frame.orderBy("x"), tmp_path / "one", num_proc=1)
    assert np.array_equal(np.concatenate(steps), np.arange(ROWS))


def test_without_shuffle_each_step_of_several_ranks_takes_the_next_rows_of_the_frame(frame, tmp_path):
    ordered = frame.withColumn("held_out", frame.x % 5 == 0).orderBy("x")
    steps = rows_by_step(ordered, tmp_path / "two", num_proc=2, validation="held_out")
    found = np.concatenate([np.sort(step) for step in steps])
    assert [len(step) for step in steps[:-1]] == [2 * BATCH] * (len(steps) - 1)
    assert np.array_equal(found, [x for x in range(ROWS) if x % 5])
