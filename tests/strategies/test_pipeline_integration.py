"""Pipelines of two and four real ranks: the weights, losses and outputs of the model that was not cut."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparkdl.batches.reading.batch import Batch
from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.nn import MixtureOfExperts
from sparkdl.spread_model import SpreadModel
from sparkdl.strategies import stage_balance
from sparkdl.strategies.base import open_strategy
from sparkdl.strategies.pipeline import Pipeline
from sparkdl.strategies.stages import release, split
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.objective.batch_loss import BatchLoss
from sparkdl.train.objective.loss import Objective
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EXACT = {"rtol": 1e-10, "atol": 1e-12}
CPU = torch.device("cpu")
ROWS = (13, 13, 2, 0, 13)
"""Of the batches of a run: a ragged tail, shorter than there are micro-batches, then one that is empty."""


class Skip(nn.Module):
    """Two inputs, a skip connection over two cuts, a number that travels, two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 8)
        self.third, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x, scale):
        hidden = self.first(x)
        width = hidden.shape[1]
        deep = self.third(self.act(self.second(torch.tanh(hidden))))
        return {"y": self.last(deep * scale[:, None] + hidden), "k": (deep + hidden).reshape(-1, width)[:, :3]}


class Sentence(nn.Module):
    """Embedded words, with a parameter of the model's own, through a recurrent layer and torch's encoder."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(4, 8))
        self.reading = nn.GRU(8, 8, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.last = nn.Linear(8, 3)

    def forward(self, words):
        read, _ = self.reading(self.words(words) + self.positions)
        return self.last(self.encoder(read).mean(1))


def mlp():
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    )


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


ignoring = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), ignore_index=2)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
softer = functools.partial(adamw, eps=1e-3)  # the bias of an attention's keys has no gradient but rounding
MLP = {"model": mlp, "inputs": ["x"], "labels": ["y"], "loss": nn.MSELoss()}
TWO = {"model": Skip, "inputs": ["x", "scale"], "labels": ["y", "k"]}

CASES = {
    "mlp": MLP,
    "summed": MLP | {"loss": nn.MSELoss(reduction="sum")},
    "weighted": MLP | {"sample_weight": "w", "optimizer": adamw},
    "frozen begin": MLP | {"model": frozen},
    "keyword": TWO | {"input_style": "keyword", "loss": {"y": nn.L1Loss(), "k": nn.CrossEntropyLoss()}},
    "two outputs": TWO | {"loss": [nn.MSELoss(), ignoring], "loss_weights": [2.0, 0.5], "optimizer": adamw},
    "sentences": {"model": Sentence, "inputs": ["words"], "labels": ["k"], "loss": ignoring, "optimizer": softer},
}
CUTS = {
    (mlp, 2): ("3",),
    (mlp, 4): ("2", "4", "6"),
    (frozen, 2): ("2",),
    (Skip, 2): ("second",),
    (Skip, 4): ("second", "third", "last"),
    (Sentence, 2): ("encoder.layers.1",),
    (Sentence, 4): ("encoder.layers.0", "encoder.layers.2", "encoder.layers.3"),
}


def task(case):
    return Task(**({"optimizer": sgd} | CASES[case]))


def made(case):
    torch.manual_seed(3)
    return CASES[case]["model"]().double()


def batches():
    """Batches of one reader of two, whose other reader has as many rows less one."""
    generator = torch.Generator().manual_seed(7)
    for step, rows in enumerate(ROWS):
        x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
        tensors = {
            "x": x,
            "scale": torch.rand(rows, generator=generator, dtype=torch.float64),
            "words": torch.randint(11, (rows, 4), generator=generator),
            "w": torch.rand(rows, generator=generator, dtype=torch.float64),
            "y": x.sum(1),
            "k": torch.randint(3, (rows,), generator=generator),
        }
        total = max(2 * rows - 1, 1)
        yield Batch(tensors, step=step, rows=rows, global_rows=total, weight=rows * 2 / total)


def loss_of(case, reduce):
    """A loss whose divisors are those of two readers of equal rows, whatever else the ranks do."""
    objective = Objective(task(case), CPU, 2, lambda divisors: 2 * reduce(divisors))
    loss = BatchLoss(task(case), objective, "fp32", CPU)
    loss.share = 0.5  # as where gradients are accumulated
    return loss


def unsplit(case):
    model = made(case)
    optimizer = task(case).optimizer(model.parameters())
    loss, history = loss_of(case, lambda divisors: divisors), []
    for batch in batches():
        value, outputs = torch.zeros(()), None
        if batch.rows:
            value, outputs = loss(model, batch)
            loss.scaled(value).backward()
        history.append((value.detach(), outputs))
        if batch.step != 1:  # two batches for the second step
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            history.append(loss.evaluate(model, batch) if batch.rows else None)
        model.train()
    return {"weights": model.state_dict(), "history": history}


def piped(case, micro_batches, schedule, collective):
    ranks = collective.world.size
    model = made(case)
    parts = split(
        model, CUTS[CASES[case]["model"], ranks], inputs=task(case).inputs, input_style=task(case).input_style
    )
    stage = parts[collective.world.rank]
    names = [name for name, _ in model.named_parameters()]
    optimizer = task(case).optimizer([p for n, p in model.named_parameters() if n in stage.parameters])
    release(model, stage)
    assert [name for name, _ in model.named_parameters()] == names
    pipeline = Pipeline(stage, dist.group.WORLD, CPU, micro_batches=micro_batches, schedule=schedule, data_size=2)
    loss, history = loss_of(case, functools.partial(collective.all_reduce, op="sum")), []
    for batch in batches():
        history.append(pipeline.step(batch, loss))
        if batch.step != 1:
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            history.append(pipeline.evaluate(batch, loss))
        model.train()
    held = {name: value for name, value in model.state_dict().items() if not value.is_meta}
    return {"weights": held, "history": history, "plans": len(pipeline._plans)}


RUNS = [
    *((case, micro, schedule) for case in CASES for micro in (1, 3, 8) for schedule in ("1f1b", "gpipe")),
    ("mlp", 8, "naive"),
]
LONG = [(case, micro, schedule) for case, micro, schedule in RUNS if case != "frozen begin" and micro in (1, 8)]
QUICK = [run for run in RUNS if run[1:] in ((3, "1f1b"), (8, "gpipe"), (8, "naive")) or run[0] == "keyword"]
QUICK_LONG = [run for run in LONG if run[1:] == (8, "1f1b") or run == ("keyword", 8, "gpipe")]


def marked(runs, quick):
    return [pytest.param(run, id=str(run), marks=() if run in quick else pytest.mark.slow) for run in runs]


class Scaled(nn.Module):
    """A layer that changes no number, and one that returns none a row."""

    def __init__(self, *, adds_up=False):
        super().__init__()
        self.scale, self.adds_up = nn.Parameter(torch.ones((), dtype=torch.float64)), adds_up

    def forward(self, x):
        return (x * self.scale).sum() if self.adds_up else x * self.scale


def two_stages(model, cut, rank, **options):
    stage = split(model, (cut,), inputs=["x"])[rank]
    return Pipeline(stage, dist.group.WORLD, CPU, **({"micro_batches": 2} | options))


def of_ones(**parts):
    options = {"model": mlp, "optimizer": sgd, "inputs": ["x"], "labels": ["x"], "loss": nn.MSELoss()} | parts
    loss = BatchLoss(Task(**options), Objective(Task(**options), CPU, 1, lambda divisors: divisors), "fp32", CPU)
    return Batch({"x": torch.ones(100, 50, dtype=torch.float64)}), loss


def dropped(rank):
    """Outputs of two layers of dropout in two stages, and the next number of the stream that the ranks share."""
    torch.manual_seed(5)
    model = nn.Sequential(Scaled(), nn.Dropout(0.5), Scaled(), nn.Dropout(0.5))
    _, outputs = two_stages(model, "2", rank).step(*of_ones())
    return outputs, torch.rand(())


def refusals(rank):
    messages = {}
    attempts = {
        "scalar": nn.Sequential(Scaled(), Scaled(adds_up=True)),
        "buffer": nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(50, 50)).double(), Scaled()),
    }
    for name, model in attempts.items():
        try:
            two_stages(model, "1", rank).step(*of_ones())
        except ConfigError as error:
            messages[name] = str(error)
    for name, options in {"schedule": {"schedule": "zigzag"}, "number": {"micro_batches": 0}}.items():
        try:
            two_stages(mlp(), "2", rank, **options)
        except ConfigError as error:
            messages[name] = str(error)
    try:
        Pipeline(split(mlp(), ("2", "4"), inputs=["x"])[rank], dist.group.WORLD, CPU, micro_batches=2)
    except ConfigError as error:
        messages["ranks"] = str(error)
    return messages


def goes_on(folder, collective):
    """Where a run was cut that measured, where it is cut when it goes on, and what a third one says of its model."""
    generator = torch.Generator().manual_seed(1)
    data = {"x": torch.randn(64, 5, generator=generator), "y": torch.randn(64, 1, generator=generator)}
    parts = {"model": mlp, "optimizer": sgd, "loss": nn.MSELoss(), "inputs": ["x"], "labels": ["y"]}

    def trained(epochs, **options):
        config = TrainConfig(epochs=epochs)
        strategy = open_strategy("pipeline", collective, config)
        source = TensorSource(data, global_batch_rows=16, world=replace(collective.world, rank=0, size=1))
        checkpoints = Checkpointer(CheckpointConfig(uri=str(folder)))
        fit(Task(**parts | options), source, collective=collective, config=config, checkpoints=checkpoints,
            strategy=strategy)  # fmt: skip
        return strategy.cuts

    with patch.object(stage_balance, "measure", lambda *_, **__: ("2",)):
        measured = trained(1)
    with patch.object(stage_balance, "measure", lambda *_, **__: ("6",)):  # as on a machine of other speeds
        again = trained(2)
    model = mlp()
    trained(3, model=model)
    with pytest.raises(ConfigError) as refused:
        trained(4, model=model)
    return measured, again, str(refused.value)


def on_a_rank(runs, folder, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    results = {run: piped(*run, collective) for run in runs}
    if folder is not None:
        results |= {"dropped": [dropped(world.rank) for _ in range(2)], "refusals": refusals(world.rank)}
        results["goes on"] = goes_on(folder, collective)
    collective.close()
    return results


@pytest.fixture(scope="module")
def two(ranks, tmp_path_factory):
    return ranks.together(functools.partial(on_a_rank, QUICK, tmp_path_factory.mktemp("run")), 2, "torch")


@pytest.fixture(scope="module")
def of_ranks(ranks, two):
    """A function that gives each rank's results of runs, among which is the one that is asked for."""

    @functools.cache
    def ran(size, quick):
        if size == 2 and quick:
            return two
        runs = [run for run in (RUNS if size == 2 else LONG) if (run in (QUICK if size == 2 else QUICK_LONG)) == quick]
        return ranks.together(functools.partial(on_a_rank, runs, None), size, "torch")

    return lambda size, run: ran(size, run in (QUICK if size == 2 else QUICK_LONG))


def check(of_ranks, run):
    torch.set_num_threads(1)
    wanted = unsplit(run[0])
    weights = {}
    for rank in of_ranks:
        assert not weights.keys() & rank[run]["weights"].keys()
        weights |= rank[run]["weights"]
    torch.testing.assert_close(weights, dict(wanted["weights"]), **EXACT)
    torch.testing.assert_close(of_ranks[-1][run]["history"], wanted["history"], check_dtype=False, **EXACT)
    for rank in of_ranks[:-1]:
        assert rank[run]["history"] == [(torch.zeros(()), None), None] * len(ROWS)


@pytest.mark.parametrize("run", marked(RUNS, QUICK))
def test_two_stages_train_as_the_whole_model_does(of_ranks, run):
    check(of_ranks(2, run), run)


@pytest.mark.slow
@pytest.mark.parametrize("run", marked(LONG, QUICK_LONG))
def test_four_stages_train_as_the_whole_model_does(of_ranks, run):
    check(of_ranks(4, run), run)


def test_stages_drop_by_streams_of_their_own_that_a_seed_repeats(two):
    (first, number), (again, _) = two[1]["dropped"]
    assert torch.equal(first, again)
    assert 0.2 < (first == 4).double().mean() < 0.3  # a half of a half: had both dropped alike, it were a half
    assert [rank["dropped"][0][1] for rank in two] == [number, number]


def test_a_run_that_goes_on_is_cut_as_it_was_and_a_model_that_was_cut_is_refused(two):
    for rank in two:
        measured, again, refused = rank["goes on"]
        assert measured == again == ("2",)
        assert refused.startswith("a training before has spread this Sequential over its ranks")


def test_what_does_not_go_through_a_pipeline_is_refused_on_every_rank(two):
    for rank in two:
        messages = rank["refusals"]
        assert messages["scalar"].startswith("the model returns shape () for 50 rows: return one entry a row")
        assert "parametrizations.weight.0._" in messages["buffer"]
        assert "changes in a forward pass, and a pipeline does several for one batch" in messages["buffer"]
        assert messages["schedule"] == "schedule='zigzag' is unknown: choose one of ['1f1b', 'gpipe', 'naive']"
        assert messages["number"] == "micro_batches=0 is below 1: give at least 1"
        assert messages["ranks"].startswith("the pipeline has 2 ranks for 3 stages")


class Mean(nn.Module):
    def forward(self, words):
        return words.mean(1)


def words_to_number(*, mixes):
    mixture = MixtureOfExperts(6, 8, 2, capacity_factor=None, k=1, balance_weight=0.0)
    middle = mixture if mixes else nn.Linear(6, 6)
    return nn.Sequential(nn.Embedding(11, 6), Mean(), middle, nn.Linear(6, 1), nn.Flatten(0)).double()


LENGTHS = [(3, 3), (3, 5), *((4, length) for length in range(6, 14)), (3, 3), (4, 5)]
"""Words in a row of each of two readers: more shapes than a pipeline keeps schedules of, and early ones again."""


def rows_of_words(step, reader):
    generator = torch.Generator().manual_seed(10 * step + reader)
    return {"x": torch.randint(11, (4, LENGTHS[step][reader]), generator=generator), "y": torch.arange(4.0).double()}


def uneven_words(strategy, mixes, world):
    torch.set_num_threads(1)
    with SpreadModel(strategy, backend="torch") as model:
        loss = nn.MSELoss()
        model.build(functools.partial(words_to_number, mixes=mixes), sgd, loss, inputs=["x"], labels=["y"])
        return [model.step(rows_of_words(step, model.reader.rank)).item() for step in range(len(LENGTHS))]


@pytest.mark.parametrize(
    ("strategy", "mixes"),
    [
        ("mesh(shard=2, pipeline=2, micro_batches=2)", False),
        ("mesh(data=2, pipeline=2, micro_batches=2, schedule='gpipe')", True),
    ],
)
def test_readers_that_wait_for_each_other_may_have_batches_of_other_shapes(ranks, strategy, mixes):
    torch.manual_seed(0)
    model, losses = words_to_number(mixes=mixes), []
    optimizer = sgd(model.parameters())
    for step in range(len(LENGTHS)):
        parts = [rows_of_words(step, reader) for reader in range(2)]
        means = torch.cat([model[:2](part["x"]) for part in parts])
        loss = nn.functional.mse_loss(model[2:](means), torch.cat([part["y"] for part in parts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for rank in ranks.together(functools.partial(uneven_words, strategy, mixes), 4, "torch"):
        assert rank == pytest.approx(losses, rel=1e-9)
