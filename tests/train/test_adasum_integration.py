"""Adasum on real ranks: each joins the mean gradient of its own rows, however few the last batch leaves it."""

from __future__ import annotations

import functools
import itertools
import sys

import cloudpickle
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from train_helpers import NEEDS_HOROVOD

from sparkdl.collective import open_collective
from sparkdl.config import SyncConfig, TrainConfig
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BATCH = 12
TAILS = [0, 1, 2, 3, 7]
"""Rows of the last batch, behind a whole one; 0 for none."""

SGD = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.5)


def table(count):
    """The first third of the weights is 0, and no label of the second half of the rows counts: whole ranks' rows."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, generator=generator, dtype=torch.float64)
    weights[: count // 3] = 0
    classes = torch.arange(count) % 3
    classes[count // 2 :] = -100
    return {"x": x, "y": x[:, :1] * 2 - x[:, 1:2], "w": weights, "k": classes}


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.common = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh())
        self.number, self.logits = torch.nn.Linear(8, 1), torch.nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        common = self.common(x)
        return self.number(common), self.logits(common)


class Number(TwoOutputs):
    def forward(self, x):
        return super().forward(x)[0]


class Logits(TwoOutputs):
    def forward(self, x):
        return super().forward(x)[1]


class Normed(Number):
    """Batch norm, whose statistics are those of the global batch."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8, dtype=torch.float64)

    def forward(self, x):
        return self.number(torch.tanh(self.norm(self.common[0](x))))


def mean(model, rows):
    return mse_loss(model(rows["x"]), rows["y"])


def weighted(model, rows):
    losses = (model(rows["x"]) - rows["y"]).square()[:, 0]
    return (losses * rows["w"]).sum() / (rows["w"].sum() or 1)


def ignoring(model, rows):
    return cross_entropy(model(rows["x"]), rows["k"], reduction="sum") / (int((rows["k"] >= 0).sum()) or 1)


def of_two(model, rows):
    number, logits = model(rows["x"])
    return mean(lambda _: number, rows) + 0.5 * ignoring(lambda _: logits, rows)


def own_step(model, optimizer, batch, loss):
    optimizer.zero_grad()
    value = mean(model, batch)
    value.backward()
    optimizer.step()
    return None, value


def own_step_with_the_tasks_loss(model, optimizer, batch, loss):
    optimizer.zero_grad()
    outputs = model(batch["x"])
    value = loss(outputs, batch)
    value.backward()
    optimizer.step()
    return outputs, value


MSE, LABEL = {"loss": torch.nn.MSELoss()}, {"labels": ["y"]}
TASKS = {
    "mean": (Number, mean, MSE | LABEL),
    "sample weights": (Number, weighted, MSE | LABEL | {"sample_weight": "w"}),
    "ignored labels": (Logits, ignoring, {"loss": torch.nn.CrossEntropyLoss(), "labels": ["k"]}),
    "two labels": (
        TwoOutputs,
        of_two,
        {"loss": [torch.nn.MSELoss(), torch.nn.CrossEntropyLoss()], "labels": ["y", "k"], "loss_weights": [1, 0.5]},
    ),
    "train_step": (Number, mean, {"train_step": mean}),
    "own step": (Number, mean, MSE | LABEL | {"manual_step": own_step}),
    "own step, sample weights": (
        Number,
        weighted,
        MSE | LABEL | {"sample_weight": "w", "manual_step": own_step_with_the_tasks_loss},
    ),
}
"""By name: the model, what a rank's rows lose by themselves, and the rest of the task."""

NORMED = (Normed, mean, MSE | LABEL)
NORMED_TAILS = [0, 3, 7]


class EndsEarly(TensorSource):
    """Gives a batch less than it says."""

    def __iter__(self):
        return itertools.islice(super().__iter__(), len(self) - 1)


def trained(name, rows, collective, *, source=TensorSource, **settings):
    """The weights behind one epoch, and its loss."""
    model, _, options = NORMED if name == "batch norm" else TASKS[name]
    result = fit(
        Task(model=model, optimizer=SGD, inputs=["x"], **options),
        source(rows, global_batch_rows=BATCH, world=collective.world, shuffle=False),
        collective=collective,
        config=TrainConfig(sync=SyncConfig(compression="adasum"), **settings),
    )
    return [parameter.detach().clone() for parameter in result.model.parameters()], result.metrics["loss"]


def joined(gradients):
    """Adasum's formula over a tree of ranks (Maleki et al., MLSys 2021)."""
    if len(gradients) == 1:
        return gradients[0]
    level = []
    for a, b in zip(gradients[::2], gradients[1::2], strict=False):
        dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
        level.append((1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b)
    return joined(level + gradients[len(gradients) // 2 * 2 :])


def parts_of(rows, size):
    """The rows of each rank in one global batch."""
    count = len(rows["x"])
    cuts = [(count * rank // size, count * (rank + 1) // size) for rank in range(size)]
    return [{name: tensor[first:last] for name, tensor in rows.items()} for first, last in cuts]


def by_hand(name, steps):
    """The weights behind steps of these rows by rank; a rank without any takes no part."""
    make_model, loss, _ = TASKS[name]
    model = make_model()
    optimizer = SGD(model.parameters())
    for parts in steps:
        by_rank = [
            torch.autograd.grad(loss(model, part), model.parameters(), allow_unused=True, materialize_grads=True)
            for part in parts
            if len(part["x"])
        ]
        for parameter, *gradients in zip(model.parameters(), *by_rank, strict=True):
            parameter.grad = joined(gradients)
        optimizer.step()
    return list(model.parameters())


def batches_of(rows):
    return [dict(zip(rows, parts, strict=True)) for parts in zip(*(t.split(BATCH) for t in rows.values()), strict=True)]


def on_a_rank(backend, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend=backend)
    results = {(name, tail): trained(name, table(BATCH + tail), collective) for name in TASKS for tail in TAILS}
    results |= {("first", name): trained(name, table(BATCH), collective) for name in TASKS}
    for tail in NORMED_TAILS:
        results["batch norm", tail] = trained("batch norm", table(BATCH + tail), collective)
    for tail in TAILS:
        results["accumulated", tail] = trained("mean", table(BATCH + tail), collective, accumulate_steps=2)
    results["ends early"] = trained("mean", table(2 * BATCH + 1), collective, accumulate_steps=3, source=EndsEarly)
    results["one row", 1] = trained("mean", table(1), collective)
    collective.close()
    return results


WORLDS = [
    (3, "torch"),
    pytest.param((4, "torch"), marks=pytest.mark.slow),
    pytest.param((2, "horovod"), marks=[NEEDS_HOROVOD, pytest.mark.slow]),
]


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def world(request):
    return request.param


@pytest.fixture(scope="module")
def together(ranks, world):
    size, backend = world
    return ranks.together(functools.partial(on_a_rank, backend), size, backend)


def assert_all_ranks(together, case, wanted):
    for results in together:
        torch.testing.assert_close(results[case][0], [p.detach() for p in wanted], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", TASKS)
def test_a_batch_of_k_rows_is_a_step_of_the_ranks_that_have_some(together, world, name, tail):
    steps = [parts_of(batch, world[0]) for batch in batches_of(table(BATCH + tail))]
    assert_all_ranks(together, (name, tail), by_hand(name, steps))


def normed_by_hand(batches, size):
    """The weights where each rank gives what its own rows add to the gradient of the global mean, by their share."""
    model = Normed()
    optimizer = SGD(model.parameters())
    for batch in batches:
        parts = [part for part in parts_of(batch, size) if len(part["x"])]
        copies = [{name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()} for _ in parts]
        hidden = [
            part["x"] @ own["common.0.weight"].T + own["common.0.bias"] for part, own in zip(parts, copies, strict=True)
        ]
        everybody = torch.cat(hidden)
        deviation = (everybody.var(0, correction=0) + model.norm.eps).sqrt()
        loss = torch.zeros(())
        for part, own, rows in zip(parts, copies, hidden, strict=True):
            scaled = (rows - everybody.mean(0)) / deviation * own["norm.weight"] + own["norm.bias"]
            outputs = torch.tanh(scaled) @ own["number.weight"].T + own["number.bias"]
            loss = loss + (outputs - part["y"]).square().sum() / len(everybody)
        loss.backward()
        for name, parameter in model.named_parameters():
            shares = [len(part["x"]) / len(everybody) for part in parts]
            by_rank = [
                torch.zeros_like(parameter) if own[name].grad is None else own[name].grad / share
                for own, share in zip(copies, shares, strict=True)
            ]
            parameter.grad = joined(by_rank)
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("tail", NORMED_TAILS)
def test_statistics_of_the_global_batch_reach_back_to_the_rows_of_each_rank(together, world, tail):
    assert_all_ranks(together, ("batch norm", tail), normed_by_hand(batches_of(table(BATCH + tail)), world[0]))


def test_a_single_row_is_a_step_of_plain_sgd(together):
    assert_all_ranks(together, ("one row", 1), by_hand("mean", [[table(1)]]))


def of_one_step(batches, size):
    """The rows of each rank in all of these global batches."""
    by_rank = zip(*(parts_of(batch, size) for batch in batches), strict=True)
    return [{name: torch.cat([part[name] for part in parts]) for name in parts[0]} for parts in by_rank]


@pytest.mark.parametrize("tail", TAILS)
def test_accumulated_batches_are_one_of_all_the_rows_of_a_rank(together, world, tail):
    step = of_one_step(batches_of(table(BATCH + tail)), world[0])
    assert_all_ranks(together, ("accumulated", tail), by_hand("mean", [step]))


def test_a_step_of_fewer_batches_than_expected_is_of_the_rows_it_has(together, world):
    whole = batches_of(table(2 * BATCH + 1))[:2]
    assert_all_ranks(together, "ends early", by_hand("mean", [of_one_step(whole, world[0])]))


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_that_is_told_is_that_of_the_global_batch(together, name):
    make_model, loss, _ = TASKS[name]
    assert together[0]["first", name][1] == pytest.approx(loss(make_model(), table(BATCH)).item(), rel=1e-12)
