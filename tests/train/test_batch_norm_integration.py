"""Batch norm through the loop, without a word in the settings: three ranks end with the weights and statistics of one.

Global batches of 17, 17 and 2 rows give ranks six, five, one and no rows. The models cannot take a batch of none.
"""

from __future__ import annotations

import functools
import sys

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 36


class Images(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(4)
        self.hidden = torch.nn.Linear(16, 6)
        self.last = torch.nn.BatchNorm1d(6, momentum=None)
        self.aside = torch.nn.BatchNorm1d(6)
        self.out = torch.nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        picture = torch.relu(self.norm(self.conv(x)))
        flat = torch.nn.functional.max_pool2d(picture, 2).view(x.shape[0], -1)
        hidden = self.hidden(flat)
        return self.out(torch.tanh(self.last(hidden) + self.aside(hidden).detach()))


def own_step(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["k"])


def own_optimizer_step(model, optimizer, batch, loss):
    optimizer.zero_grad()
    outputs = model(batch["x"])
    value = loss(outputs, batch)
    value.backward()
    optimizer.step()
    return outputs, value


def tensors():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 1, 4, 4, generator=generator, dtype=torch.float64) * 2 + 1
    k = (x.mean((1, 2, 3)) > 1).long() + (x.amax((1, 2, 3)) > 4).long()
    return {"x": x, "k": k, "w": torch.rand(ROWS, generator=generator, dtype=torch.float64)}


CLASSES = {"loss": torch.nn.CrossEntropyLoss()}
CASES = {
    "plain": (CLASSES, {}),
    "sample weights": (CLASSES | {"sample_weight": "w"}, {}),
    "own step": ({"train_step": own_step}, {}),
    "own optimizer step": (CLASSES | {"manual_step": own_optimizer_step}, {}),
    "accumulated": (CLASSES, {"accumulate_steps": 2}),
}


def trained(case, world, collective, folder=None):
    torch.manual_seed(0)
    parts, settings = CASES[case]
    task = Task(
        model=Images,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        inputs=["x"],
        labels=["k"],
        **parts,
    )
    data = tensors()
    held_out = {name: tensor[:10] for name, tensor in data.items()}
    keep = Checkpointer(CheckpointConfig(uri=folder)) if folder else None
    result = fit(
        task,
        TensorSource(data, global_batch_rows=17, world=world),
        TensorSource(held_out, global_batch_rows=17, world=world, shuffle=False),
        collective=collective,
        config=TrainConfig(epochs=3, **settings),
        checkpoints=keep,
    )
    kinds = {type(module).__name__ for module in result.model.modules()}
    left = [name for name, module in result.model.named_modules() if "forward" in vars(module)]
    epochs = [(row["loss"], row["val_loss"]) for row in result.history.epochs]
    return result.model.state_dict(), epochs, kinds, left


def every_case(folder):
    def rank(world):
        torch.set_num_threads(1)
        collective = open_collective(world, backend="torch")
        found = {case: trained(case, world, collective, f"{folder}/{case}") for case in CASES}
        collective.close()
        return found

    return rank


@pytest.fixture(scope="module")
def together(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("checkpoints")
    return ranks.together(every_case(folder), 3, "torch"), folder


@pytest.mark.parametrize("case", list(CASES))
def test_three_ranks_train_the_model_of_one(together, case):
    weights, epochs, _, _ = trained(case, SOLO, open_collective(SOLO))
    for rank in together[0]:
        found, columns, kinds, left = rank[case]
        assert found.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)
        assert columns == [pytest.approx(row, rel=1e-9) for row in epochs]
        assert {"BatchNorm1d", "BatchNorm2d"} <= kinds
        assert left == []


def test_a_checkpoint_loads_into_torchs_own_layers(together):
    stored = Checkpointer(CheckpointConfig(uri=f"{together[1]}/plain")).latest().state["model"]
    model = Images()
    model.load_state_dict(stored)
    for name, tensor in together[0][0]["plain"][0].items():
        assert torch.equal(model.state_dict()[name], tensor)
