"""Other people's training loops over our loader, in a process that cannot import Spark."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.shards.files import write_table_shards

SCRIPT = """
import sys, warnings
sys.modules["pyspark"] = None  # as if it were not installed
warnings.simplefilter("ignore")
import torch
from torch.nn.functional import mse_loss
from accelerate import Accelerator
import pytorch_lightning
from sparkdl import ShardedDataset

def fresh():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1), ShardedDataset(sys.argv[1]).loader(batch_size=64, seed=5)

def loss_of(model, batch):
    return mse_loss(model(batch["features"])[:, 0], batch["label"])

class Module(pytorch_lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model, self.firsts = model, []
    def training_step(self, batch, index):
        if index == 0:
            self.firsts.append(batch["label"].tolist())
        return loss_of(self.model, batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def plain():
    model, loader = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model.weight.tolist()

def accelerated():
    model, loader = fresh()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
    return model.weight.tolist()

def lightning():
    model, loader = fresh()
    module = Module(model)
    trainer = pytorch_lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, loader)
    assert trainer.global_step == 2 * len(loader), (trainer.global_step, len(loader))
    assert module.firsts[0] != module.firsts[1], "both epochs have one order"
    return model.weight.tolist()

weights = plain()
assert accelerated() == weights, "accelerate"
assert lightning() == weights, "lightning"
print("equal", len(weights[0]))
"""


@pytest.mark.slow
def test_lightning_and_accelerate_train_as_a_plain_loop_does_without_spark(tmp_path):
    random = np.random.default_rng(0)
    columns = {name: random.random(1000, dtype=np.float32) for name in ("a", "b", "c", "label")}
    write_table_shards(pa.table(columns), str(tmp_path / "shards"), labels=["label"])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "shards")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "equal 3"
