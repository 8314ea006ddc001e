"""Real ranks: N of them train the model that one trains on the same global batches, for both backends.

Each group of ranks is started once and trains every case; the tests compare what came back. Global batches of 17 rows
cut 103 rows into six whole ones and one of a single row, so that ranks have uneven and empty parts.
"""

from __future__ import annotations

import functools
import sys

import cloudpickle
import pytest
import torch
from train_helpers import NEEDS_HOROVOD, Interrupted, RaiseAt, linear_data

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, SyncConfig, TrainConfig
from sparkdl.errors import SparkdlError
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOROVOD = pytest.param(("horovod", 2), marks=NEEDS_HOROVOD)
GROUPS = [
    pytest.param(("torch", 2), marks=pytest.mark.slow),
    pytest.param(("torch", 3), marks=pytest.mark.slow),
    HOROVOD,
]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def data(dtype=torch.float64):
    linear, generator = linear_data(torch.float64)
    x, y = linear["x"], linear["y"]
    tokens = torch.randint(0, 4, (103, 6), generator=generator)
    tokens[torch.rand(103, 6, generator=generator) < 0.3] = -100
    weight = torch.rand(103, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 20, (103, 3), generator=generator)
    k = (y > 0.5).long() + (y > 1.5).long()
    return {"x": x.to(dtype), "y": y.to(dtype), "k": k, "w": weight.to(dtype), "tokens": tokens, "ids": ids}


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.y, self.k = torch.nn.Linear(5, 8), torch.nn.Linear(8, 1), torch.nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.y(hidden), self.k(hidden)


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 24)

    def forward(self, x):
        return self.linear(x).reshape(-1, 4, 6)


class Ids(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.EmbeddingBag(20, 4, sparse=True, mode="sum"), torch.nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(self.table(ids))


def mlp(outputs=1):
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))


def normed():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def double(factory):
    return lambda: factory().double()


def mean_square_step(model, batch):
    outputs = model(batch["x"])
    return (outputs[:, 0] - batch["y"]).square().mean(), outputs


ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def cases():
    import torchmetrics
    from torchmetrics.classification import MulticlassAUROC

    class_weights = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
    square = {"model": double(mlp), "optimizer": ADAM, "loss": torch.nn.MSELoss(), "inputs": ["x"], "labels": ["y"]}
    classes = square | {"model": double(lambda: mlp(3)), "loss": torch.nn.CrossEntropyLoss(), "labels": ["k"]}
    metrics = {
        "mae": torchmetrics.MeanAbsoluteError(),
        "r2": torchmetrics.R2Score,
        "pearson": torchmetrics.PearsonCorrCoef(),
        "own": lambda output, label: (output - label).square().mean().sqrt(),
    }
    auroc = {"auroc": MulticlassAUROC(3), "acc": torchmetrics.Accuracy(task="multiclass", num_classes=3)}
    return {
        "plain": (square | {"metrics": metrics}, {}),
        "float32": (square | {"model": mlp}, {}),
        "accumulated": (square, {"accumulate_steps": 4}),
        "clipped": (square | {"optimizer": SGD}, {"max_grad_norm": 0.1}),
        "sample weights": (square | {"sample_weight": "w"}, {}),
        "weighted classes": (classes | {"loss": torch.nn.CrossEntropyLoss(weight=class_weights)}, {}),
        "ignored class": (classes | {"loss": torch.nn.CrossEntropyLoss(ignore_index=1), "sample_weight": "w"}, {}),
        "tokens": (classes | {"model": double(Tokens), "labels": ["tokens"]}, {}),
        "classes": (classes | {"metrics": auroc}, {}),
        "heads": (
            square
            | {
                "model": double(Heads),
                "loss": [torch.nn.MSELoss(), torch.nn.CrossEntropyLoss(weight=class_weights)],
                "labels": ["y", "k"],
                "loss_weights": [0.3, 2.0],
            },
            {},
        ),
        "sum": (square | {"loss": torch.nn.MSELoss(reduction="sum"), "optimizer": ADAM}, {}),
        "own step": ({k: v for k, v in square.items() if k != "loss"} | {"train_step": mean_square_step}, {}),
        "sparse": (square | {"model": double(Ids), "inputs": ["ids"], "optimizer": SGD}, {"max_grad_norm": 1.0}),
        "warm-up": (
            square
            | {"scheduler": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9), "scheduler_interval": "step"},
            {"warmup_steps": 5},
        ),
        # All batches but the last, whose single row one rank could not normalise.
        "batch norm": (
            square | {"model": double(normed), "optimizer": SGD},
            {"sync": SyncConfig(sync_batch_norm=True), "steps_per_epoch": 6},
        ),
        "early stop": (
            square | {"optimizer": functools.partial(torch.optim.SGD, lr=0.7)},
            {"early_stopping_patience": 1, "epochs": 8},
        ),
    }


def outcome(case, world, collective, **options):
    parts, settings = case
    dtype = torch.float32 if parts["model"] is mlp else torch.float64
    tensors = data(dtype)
    train = TensorSource(tensors, global_batch_rows=17, world=world)
    held_out = TensorSource({k: v[:50] for k, v in tensors.items()}, global_batch_rows=17, world=world, shuffle=False)
    config = TrainConfig(**({"epochs": 2} | settings | options.pop("config", {})))
    result = fit(Task(**parts), train, held_out, collective=collective, config=config, **options)
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "rows")} for row in result.history.epochs]
    weights = {name: tensor.detach().clone() for name, tensor in result.model.state_dict().items()}
    return {
        "weights": weights,
        "epochs": rows,
        "steps": list(result.history.steps["loss"]),
        "reason": result.stop_reason,
    }


class StopOn(Callback):
    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def on_step_end(self, run):
        if run.world.rank == self.rank and run.step == self.step:
            run.request_stop(f"rank {self.rank} has seen enough")


class Calls(Callback):
    leader_only = True

    def __init__(self):
        self.epochs = []

    def on_epoch_end(self, run, metrics):
        self.epochs.append(run.epoch)


class Counting:
    """A collective that also counts what it is asked for."""

    def __init__(self, inner):
        self.inner, self.counts = inner, {}

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        if name not in ("all_reduce", "all_gather_object", "broadcast", "broadcast_object"):
            return value

        def counted(*args, **kwargs):
            self.counts[name] = self.counts.get(name, 0) + 1
            return value(*args, **kwargs)

        return counted


def every_case(backend, folder):
    def rank(world):
        torch.set_num_threads(1)
        collective = open_collective(world, backend=backend)
        found = {name: outcome(case, world, collective) for name, case in cases().items()}
        plain = cases()["plain"]
        found["stopped"] = outcome(
            plain, world, collective, callbacks=[StopOn(world.size - 1, 4)], config={"window_steps": 3}
        )
        calls = Calls()
        counting = Counting(collective)
        outcome(plain, world, counting, callbacks=[calls], config={"window_steps": 1000})
        found["calls"], found["counts"] = calls.epochs, counting.counts
        found["nan"] = not_finite(world, collective)
        found["misfit"] = misfit(world, collective, folder)
        found |= interrupted(world, collective, folder)
        collective.close()
        return found

    return rank


def not_finite(world, collective):
    tensors = data()
    tensors["x"][33] = float("nan")  # the last row of the second global batch: the last rank's
    task = Task(**cases()["plain"][0])
    source = TensorSource(tensors, global_batch_rows=17, world=world, shuffle=False)
    try:
        fit(task, source, collective=collective, config=TrainConfig())
    except SparkdlError as error:
        return f"{type(error).__name__}: {error}"


def misfit(world, collective, folder):
    """A checkpoint of another model: every rank must say so."""
    plain, own = cases()["plain"], cases()["sparse"]
    outcome(plain, world, collective, checkpoints=Checkpointer(CheckpointConfig(uri=f"{folder}/misfit")))
    try:
        outcome(own, world, collective, checkpoints=Checkpointer(CheckpointConfig(uri=f"{folder}/misfit")))
    except SparkdlError as error:
        return f"{type(error).__name__}: {error}"


def dropped():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).double()


def resumable(dropout):
    import torchmetrics

    parts = dict(cases()["warm-up"][0]) | {"metrics": {"mae": torchmetrics.MeanAbsoluteError()}}
    # Over sockets, in four buckets: there three ranks round by the layout of the buckets.
    sync = SyncConfig(shared_memory=False, bucket_mib=1e-4)
    return (parts | ({"model": dropped} if dropout else {}), {"epochs": 3, "warmup_steps": 5, "sync": sync})


def interrupted(world, collective, folder):
    """A run with dropout that ends by an error at step 11, in epoch 1, and goes on from the checkpoint of step 10."""

    def saving(name):
        return Checkpointer(CheckpointConfig(uri=f"{folder}/{name}", every_steps=5))

    found = {"undisturbed": outcome(resumable(True), world, collective)}
    try:
        outcome(resumable(True), world, collective, checkpoints=saving("cut"), callbacks=[RaiseAt(11)])
    except Interrupted:
        collective.barrier()  # rank 0 has closed its writer: what was saved is there
    found["resumed"] = outcome(resumable(True), world, collective, checkpoints=saving("cut"))
    try:
        outcome(resumable(False), world, collective, checkpoints=saving("moved"), callbacks=[RaiseAt(11)])
    except Interrupted:
        collective.barrier()
    return found


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    collective = open_collective(SOLO, backend="solo")
    return {name: outcome(case, SOLO, collective) for name, case in cases().items()}


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def together(request, tmp_path_factory, ranks):
    backend, size = request.param
    folder = tmp_path_factory.mktemp("checkpoints")
    return ranks.together(every_case(backend, folder), size, backend), folder


def assert_same(found, wanted, **tolerance):
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, **tolerance)


@pytest.mark.parametrize("case", list(cases()))
def test_n_ranks_train_the_model_of_one(together, alone, case):
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if case == "float32" else EXACT
    for rank in together[0]:
        assert_same(rank[case], alone[case], **tolerance)
        assert rank[case]["steps"] == pytest.approx(alone[case]["steps"], rel=1e-5 if case == "float32" else 1e-9)
        assert rank[case]["reason"] == alone[case]["reason"]
        assert (rank[case]["reason"] is not None) == (case == "early stop")
        assert len(rank[case]["epochs"]) == len(alone[case]["epochs"])
        for row, wanted in zip(rank[case]["epochs"], alone[case]["epochs"], strict=True):
            assert row == pytest.approx(wanted, rel=1e-5)  # torchmetrics keeps float32 sums


def test_a_wish_to_stop_of_one_rank_stops_all_at_the_same_step(together):
    stopped = [rank["stopped"] for rank in together[0]]
    assert {len(rank["steps"]) for rank in stopped} == {6}
    assert {rank["reason"] for rank in stopped} == {f"rank {len(stopped) - 1} has seen enough"}


def test_a_callback_for_the_leader_is_called_on_rank_0_alone(together):
    assert [rank["calls"] for rank in together[0]] == [[0, 1]] + [[]] * (len(together[0]) - 1)


def test_metrics_and_losses_travel_once_an_epoch_not_once_a_batch(together):
    """Two epochs of seven batches, four metrics on two data sets."""
    for rank in together[0]:
        counts = rank["counts"]
        assert counts["all_reduce"] <= 2 * 3  # step losses, validation loss, wishes
        assert counts["all_gather_object"] <= 2 * 2  # all metrics of a data set at once


def test_a_loss_that_is_not_finite_on_one_rank_stops_every_rank_with_one_sentence(together):
    messages = {rank["nan"] for rank in together[0]}
    last = len(together[0]) - 1
    assert len(messages) == 1
    assert f"NonFiniteLossError: the loss of rank {last} is nan at step 2 (epoch 0, batch 1" in messages.pop()


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(together):
    for rank in together[0]:
        assert "CheckpointError: 'table.weight' is no such tensor in the checkpoint of step 14" in rank["misfit"]


def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(together):
    for rank in together[0]:
        resumed, undisturbed = rank["resumed"], rank["undisturbed"]
        assert_same(resumed, undisturbed, rtol=0, atol=0)
        assert resumed["steps"] == undisturbed["steps"]
        assert resumed["epochs"] == undisturbed["epochs"]


def test_a_run_goes_on_at_another_world_size(together):
    collective = open_collective(SOLO, backend="solo")
    undisturbed = outcome(resumable(False), SOLO, collective)
    checkpoints = Checkpointer(CheckpointConfig(uri=str(together[1] / "moved")))
    moved = outcome(resumable(False), SOLO, collective, checkpoints=checkpoints)
    assert_same(moved, undisturbed, **EXACT)
    assert moved["steps"] == pytest.approx(undisturbed["steps"], rel=1e-9)
