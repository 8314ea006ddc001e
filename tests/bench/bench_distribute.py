"""Three models under every strategy, on 1, 2 and 4 ranks: rows a second, bytes, memory, and steps to a loss.

A transformer that learns which token follows which, a network over ids with a large embedding, and a convolutional one.
All strategies see the same global batches. The loss to reach is what one rank has after three quarters of its steps; a
strategy that is exact needs as many. Bytes are what the kernel sent for a rank's TCP connections in a step, memory is
what parameters, gradients and optimizer state take on a rank before it steps; both of the rank with most. Ranks talk
over the loopback interface, through gloo. One JSON line a model, strategy and number of ranks, of which ``pages.py``
makes tables.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn import functional

from sparkdl.collective import open_collective
from sparkdl.config import SyncConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies.base import open_strategy
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import World

sys.path.insert(0, str(Path(__file__).parent))  # for the other benches
from bench_memory import held
from bench_strategies import Meter

for module in (held.__module__, Meter.__module__, __name__):
    cloudpickle.register_pickle_by_value(sys.modules[module])

ROWS, STEPS, SKIPPED, SMOOTHED = 128, 40, 8, 4
WIDTH, HEADS, POSITIONS, TOKENS = 64, 4, 16, 64
IDS, FEATURES = 50_000, 32
ADAMW = partial(torch.optim.AdamW, lr=3e-3)
COMPRESSIONS = ("bf16", "powersgd(rank=4)", "topk(keep=0.01)")
STRATEGIES = {
    1: ["all_reduce"],
    2: ["all_reduce", "zero1", "zero2", "fsdp", "tensor", "pipeline(micro_batches=4)",
        "parameter_server(servers=2)", "local_sgd(every=8)", "diloco(every=8)"],
    4: ["all_reduce", "zero1", "zero2", "fsdp", "tensor", "pipeline(micro_batches=4)", "mesh(data=2, tensor=2)",
        "parameter_server(servers=2)", "local_sgd(every=8)", "diloco(every=8)"],
}  # fmt: skip


# --- the models, and what they learn ------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.randn(POSITIONS, WIDTH) / 8)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        normed = self.before_attention(x)
        shape = (*normed.shape[:-1], HEADS, WIDTH // HEADS)
        q, k, v = (layer(normed).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        by_head = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(by_head.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


def transformer():
    blocks = [Block() for _ in range(4)]
    return nn.Sequential(Tokens(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS))


def token_loss(logits, following):
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def sequences(rows, generator):
    """Each token follows from the one before, but for one in ten."""
    tokens = torch.randint(TOKENS, (rows, POSITIONS + 1), generator=generator)
    chance = torch.rand(rows, POSITIONS, generator=generator) < 0.1
    for position in range(POSITIONS):
        following = (5 * tokens[:, position] + 3) % TOKENS
        tokens[:, position + 1] = torch.where(chance[:, position], tokens[:, position + 1], following)
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


def embedding():
    table = nn.Embedding(IDS, FEATURES)
    return nn.Sequential(table, nn.Flatten(), nn.Linear(8 * FEATURES, 128), nn.ReLU(), nn.Linear(128, 1))


def clicks(rows, generator):
    """Eight ids a row, few of them common; the label counts how many of the eight are even."""
    ids = (IDS * torch.rand(rows, 8, generator=generator) ** 8).long()
    return {"x": ids, "y": (ids % 2).float().mean(1, keepdim=True)}


def convolutional():
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))


def pictures(rows, generator):
    """Ten patterns of 16 x 16, with noise."""
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    kinds = torch.randint(10, (rows,), generator=generator)
    return {"x": patterns[kinds] + 2 * torch.randn(rows, 1, 16, 16, generator=generator), "y": kinds}


MODELS = {
    "transformer": (transformer, token_loss, sequences),
    "embedding": (embedding, nn.MSELoss(), clicks),
    "convolutional": (convolutional, nn.CrossEntropyLoss(), pictures),
}


# --- what is measured ---------------------------------------------------------------------------------------------


def dense_parts(gradient):
    """A gradient as the tensors that it lies in: of one of some rows alone, their numbers and values."""
    if gradient.layout == torch.strided:
        return [gradient]
    joined = gradient.coalesce()
    return [joined.indices(), joined.values()]


class Watch(Meter):
    """Also this rank's losses, and the bytes of its parameters, gradients and optimizer state before the last step."""

    def __init__(self, strategy):
        super().__init__(STEPS, SKIPPED)
        self.strategy, self.losses, self.states = strategy, [], 0

    def on_fit_start(self, run):
        step = run.optimizer.step

        def counted(*args, **kwargs):
            if len(self.losses) == STEPS - 1:
                parameters = {id(p): p for group in run.optimizer.param_groups for p in group["params"]}
                parameters |= {id(p): p for p in run.model.parameters()}
                optimizers = [run.optimizer]
                server = getattr(self.strategy, "_server", None)  # of parameters, beside the worker of this rank
                if server is not None:
                    parameters |= {id(p): p for group in server.optimizer.param_groups for p in group["params"]}
                    optimizers.append(server.optimizer)
                gradients = [p.grad for p in parameters.values() if p.grad is not None]
                gradients = [part for gradient in gradients for part in dense_parts(gradient)]
                states = [state for optimizer in optimizers for state in optimizer.state.values()]
                state = [value for state in states for value in state.values() if torch.is_tensor(value)]
                self.states = held([*parameters.values(), *gradients, *state])
            return step(*args, **kwargs)

        run.optimizer.step = counted

    def on_step_end(self, run):
        super().on_step_end(run)
        self.losses.append(run.loss)


def trained(name, strategy, compression, collective):
    """Seconds, processor seconds and sent bytes of a step, losses and bytes held on this rank; why, if it cannot be."""
    make_model, loss, make_data = MODELS[name]
    config = TrainConfig(epochs=1, sync=SyncConfig(compression=compression))
    try:
        opened = open_strategy(strategy, collective, config)
    except ConfigError as refusal:
        return str(refusal)
    watch = Watch(opened)
    try:
        fit(
            Task(
                model=make_model, optimizer=partial(torch.optim.AdamW, lr=3e-3), loss=loss, inputs=["x"], labels=["y"]
            ),
            TensorSource(
                make_data(ROWS * STEPS, torch.Generator().manual_seed(1)),
                global_batch_rows=ROWS,
                world=World(rank=opened.data_rank, size=opened.data_size),
                shuffle=False,
            ),
            collective=collective,
            config=config,
            callbacks=[watch],
            strategy=opened,
        )
    except ConfigError as refusal:
        return str(refusal)
    steps = [end - begin for begin, end in zip(watch.ends[SKIPPED - 1 :], watch.ends[SKIPPED:], strict=False)]
    _, processor, sent, _ = watch.result()
    return statistics.median(steps), processor / (STEPS - SKIPPED), sent, watch.losses, watch.states


def ways(size):
    """Strategies and compressions of so many ranks."""
    for strategy in STRATEGIES[size]:
        yield strategy, None
    if size > 1:
        yield from (("all_reduce", compression) for compression in COMPRESSIONS)


def on_a_rank(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch" if world.size > 1 else "solo")
    results = []
    for name in MODELS:
        trained(name, "all_reduce", None, collective)  # loads what a first training loads
        for strategy, compression in ways(world.size):
            collective.barrier()
            results.append((name, strategy, compression, trained(name, strategy, compression, collective)))
    collective.close()
    return results


def smooth(losses):
    """The mean of each few steps that follow each other."""
    return [statistics.fmean(losses[end - SMOOTHED : end]) for end in range(SMOOTHED, len(losses) + 1)]


def steps_to(target, losses):
    """How many steps bring the smoothed loss to ``target``; None if all do not."""
    return next((number + SMOOTHED for number, loss in enumerate(smooth(losses)) if loss <= target), None)


def measure(sizes=(1, 2, 4)):
    from rank_pool import Ranks

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    targets = {}
    for size in sizes:
        pool = Ranks()
        try:
            results = pool.run_at_store([], on_a_rank, size, seconds=900.0)
        finally:
            pool.end()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        for of_ranks in zip(*results, strict=True):
            name, strategy, compression, result = of_ranks[0]
            line = {"workload": "distribute", "model": name, "strategy": strategy, "ranks": size}
            line["compression"] = compression
            line["parameters"] = sum(parameter.numel() for parameter in MODELS[name][0]().parameters())
            if isinstance(result, str):
                line["refused"] = result
            else:
                seconds, processor, sent, losses, states = zip(*(values for *_, values in of_ranks), strict=True)
                # A rank's loss is its share of the global batch's: their mean is that.
                global_losses = [statistics.fmean(of_step) for of_step in zip(*losses, strict=True)]
                assert all(map(math.isfinite, global_losses))
                if size == 1:
                    three_quarters = smooth(global_losses)[3 * len(smooth(global_losses)) // 4]
                    targets[name] = math.ceil(100 * three_quarters) / 100  # rounding is not to decide who reaches it
                line["rows_per_second"] = round(ROWS / max(seconds))
                line["processor_milliseconds_per_step"] = round(1000 * sum(processor), 1)
                line["sent_bytes_per_step"] = round(max(sent))
                line["state_bytes"] = max(states)
                line |= {"target": targets[name], "steps_to_target": steps_to(targets[name], global_losses)}
                line["last_loss"] = round(smooth(global_losses)[-1], 4)
            line |= {"git": commit, "torch": torch.__version__, "python": platform.python_version()}
            print(json.dumps(line | {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}), flush=True)


@pytest.mark.bench
def test_distribute():
    measure()
