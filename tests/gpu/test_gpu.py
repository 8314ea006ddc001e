"""Training and scoring on a real GPU; skipped where there is none. Nothing here needs Spark."""

import functools

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, LoaderConfig, ScoreConfig, ShardConfig, TrainConfig
from sparkdl.models.networks import TabularEnsemble
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.rows import score_rows
from sparkdl.shards.files import write_table_shards
from sparkdl.train.callbacks import Callback
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.objective.named_metrics import named_metric
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.worker import RankJob, run_rank
from sparkdl.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
GPU, CPU = World(device="cuda:0"), World()
ROWS = 20_011  # the last step has an odd number of rows


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 8)).astype("f4")
    y = (np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=ROWS)).astype("f4")
    folder = str(tmp_path_factory.mktemp("shards"))
    table = pa.table({**{f"x{i}": x[:, i] for i in range(8)}, "label": y})
    write_table_shards(table, folder, labels=["label"], config=ShardConfig(block_rows=512))
    return folder


def net():
    return torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.0), torch.nn.Linear(64, 1)
    )


def job(shards, **settings):
    checkpoints = settings.pop("checkpoints", None)
    task = Task(
        model=net,
        optimizer=functools.partial(torch.optim.Adam, lr=5e-3),
        loss=torch.nn.MSELoss(),
        inputs=("features",),
    )
    return RankJob(
        task=task,
        train_uri=shards,
        validation_uri=shards,
        batch_size=512,
        loader=LoaderConfig(pin_memory=True),
        train=TrainConfig(**{"epochs": 3, "seed": 1, **settings}),
        checkpoints=checkpoints,
        backend="solo",
    )


def losses(report):
    return [epoch["val_loss"] for epoch in report.result.history.epochs]


def test_a_gpu_trains_what_a_cpu_trains(shards):
    on_gpu, on_cpu = run_rank(GPU, job(shards)), run_rank(CPU, job(shards))
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=5e-3)
    assert losses(on_gpu)[-1] < 0.7 * losses(on_gpu)[0]
    assert all(tensor.device.type == "cpu" for tensor in on_gpu.weights.values())
    for name, tensor in on_cpu.weights.items():
        if name not in ("0.bias", "1.running_mean"):  # batch norm takes the bias away again: its gradient is rounding
            assert torch.allclose(on_gpu.weights[name].float(), tensor.float(), atol=2e-2), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.5, "accumulate_steps": 2}], ids=["plain", "clipped"])
def test_low_precision_learns_as_much(shards, precision, settings):
    whole = losses(run_rank(GPU, job(shards, **settings)))
    low = losses(run_rank(GPU, job(shards, precision=precision, **settings)))
    assert np.isfinite(low).all()
    assert low[-1] == pytest.approx(whole[-1], rel=0.15)


def test_a_run_that_is_resumed_on_a_gpu_is_the_undisturbed_one(shards, tmp_path):
    def at(folder, epochs):
        checkpoints = CheckpointConfig(uri=str(tmp_path / folder), every_steps=7)
        return run_rank(GPU, job(shards, epochs=epochs, checkpoints=checkpoints))

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        whole = at("whole", 3)
        at("parts", 1)
        resumed = at("parts", 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses(resumed) == losses(whole)
    for name, tensor in whole.weights.items():
        assert torch.equal(resumed.weights[name], tensor), name


KNOTS = [[-4.0, -1.0, -0.3, 0.3, 1.0, 4.0], [], [-4.0, 0.0, 4.0]]


def table_of(kind):
    """Rows of numbers and ids with a label of that kind, and what the default model is told of them."""
    rng = np.random.default_rng(0)
    numbers, ids = rng.normal(size=(3001, 3)).astype("f4"), rng.integers(0, (5, 40), size=(3001, 2))
    score = np.sin(2 * numbers[:, 0]) + numbers[:, 1] * (ids[:, 0] > 2) + 0.1 * (ids[:, 1] % 3)
    label = {
        "regression": score.astype("f4"),
        "binary": (score > 0.3).astype("f4"),
        "multiclass": np.digitize(score, [-0.5, 0.5]),
    }[kind]
    outputs = 3 if kind == "multiclass" else 1
    loss = "mse" if kind == "regression" else "log_loss"
    inputs = [{"name": "numbers", "shape": [3], "knots": KNOTS}]
    inputs += [{"name": "categories", "shape": [2], "cardinalities": [5, 40]}]
    described = {"name": "y", "type": kind, "outputs": outputs, "mean": 0.0, "deviation": 1.0, "loss": loss}
    arrays = {"numbers": numbers, "categories": ids, "y": label}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, {"inputs": inputs, "labels": [described]}


LOSSES = {
    "regression": (torch.nn.MSELoss, ["rmse", "r2"]),
    "binary": (torch.nn.BCEWithLogitsLoss, ["auc", "accuracy"]),
    "multiclass": (functools.partial(torch.nn.CrossEntropyLoss, label_smoothing=0.1), ["accuracy"]),
}


def fitted(kind, world, callbacks=(), **settings):
    """The default model after three epochs on a table, as ``sparkdl run`` trains it."""
    tensors, features = table_of(kind)
    loss, metrics = LOSSES[kind]
    return fit(
        Task(
            model=functools.partial(TabularEnsemble, features, width=32),
            optimizer=functools.partial(torch.optim.AdamW, lr=5e-3),
            loss=loss(),
            inputs=["numbers", "categories"],
            labels=["y"],
            input_style="dict",
            metrics={name: named_metric(name, "y", loss()) for name in metrics},
        ),
        TensorSource(tensors, global_batch_rows=100),
        TensorSource(tensors, global_batch_rows=1000, shuffle=False),
        collective=open_collective(world, backend="solo"),
        config=TrainConfig(**{"epochs": 3, "warmup_steps": 5, "max_grad_norm": 1.0, **settings}),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("kind", LOSSES)
def test_the_default_model_is_the_same_on_a_gpu(kind):
    on_gpu, on_cpu = fitted(kind, GPU), fitted(kind, CPU)
    for name in on_cpu.history.epochs[0].keys() - {"seconds"}:
        assert on_gpu.history.column(name) == pytest.approx(on_cpu.history.column(name), rel=2e-2), name
    tensors, _ = table_of(kind)
    rows = {name: tensor[:500] for name, tensor in tensors.items()}
    with torch.inference_mode():
        answers = on_gpu.model.cpu().eval()(rows)
        assert (answers - on_cpu.model.eval()(rows)).abs().mean() < 0.05


def test_a_compiled_model_is_the_eager_one_on_a_gpu():
    eager, compiled = fitted("regression", GPU), fitted("regression", GPU, compile=True)
    assert compiled.history.column("val_loss") == pytest.approx(eager.history.column("val_loss"), rel=2e-2)


class NoWaiting(Callback):
    """Let everything raise that waits for the GPU in the steps between two looks at the losses."""

    def on_step_end(self, run):
        torch.cuda.set_sync_debug_mode("error" if 4 <= run.batch < 25 else "default")

    def on_validation_start(self, run):
        torch.cuda.set_sync_debug_mode("default")

    def on_fit_end(self, run):
        torch.cuda.set_sync_debug_mode("default")

    def on_error(self, run, error):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"accumulate_steps": 2}], ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_no_step_waits_for_the_gpu(kind, settings):
    calm = {"window_steps": 31, "progress_seconds": 1e9}
    result = fitted(kind, GPU, [NoWaiting()], **calm, **settings)
    assert np.isfinite(result.history.column("val_loss")).all()


def test_batches_are_gathered_into_page_locked_memory(shards):
    loader = ShardedDataset(shards, config=LoaderConfig(pin_memory=True)).loader(batch_size=1000)
    kept, seen = [], 0
    for batch in loader:
        assert batch["features"].is_pinned()
        kept.append((batch["features"].to("cuda:0", non_blocking=True), batch["features"].sum().item()))
        seen += len(batch["label"])
    torch.cuda.synchronize()
    assert seen == ROWS
    for on_gpu, total in kept:  # a buffer that was used again too soon would change what was copied
        assert on_gpu.sum().item() == pytest.approx(total, rel=1e-3, abs=1e-2)


def test_rows_scored_on_a_gpu_are_those_scored_on_a_cpu():
    torch.manual_seed(0)
    model = net().eval()
    numbers = np.random.default_rng(0).normal(size=(10_007, 8)).astype("f4")
    rows = pa.table({f"x{i}": numbers[:, i] for i in range(8)})
    signature = Signature(
        inputs=(TensorField(name="features", shape=(8,), columns=tuple(rows.column_names)),),
        outputs=(TensorField(name="y"),),
    )
    on_cpu, on_gpu, automatic = (
        score_rows(model, rows, signature=signature, config=ScoreConfig(device=device, batch_rows=3000))["y"].to_numpy()
        for device in ("cpu", "cuda:0", "auto")
    )
    assert np.abs(on_gpu - on_cpu).max() < 1e-4
    assert (automatic == on_gpu).all()
    assert all(parameter.is_cpu for parameter in model.parameters())


def test_tensors_of_both_kinds_have_their_collective():
    """The pair of backends that ranks on GPUs open, in a group of one: more ranks need more GPUs."""
    import torch.distributed as dist

    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        tensor = torch.arange(1000.0, device="cuda:0")
        dist.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), torch.arange(1000.0))
        host = torch.arange(10.0)
        dist.all_reduce(host)
        assert torch.equal(host, torch.arange(10.0))
    finally:
        dist.destroy_process_group()
