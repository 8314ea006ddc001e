"""Compressed gradients: nothing is lost for ever, all ranks step alike, and a resumed run is an undisturbed one."""

from __future__ import annotations

import functools
import sys

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, Compression, SyncConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies.base import open_strategy
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 6
LOSSY = ["powersgd(rank=2)", "topk(keep=0.1)"]


class TwoWays(torch.nn.Module):
    """One of whose layers is not always used."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(12, 9), torch.nn.Linear(12, 9)


def exchanged(compression, gradients_of, world, collective, weight=1.0):
    """What each step's gradients became, by parameter, and what was not sent in the end.

    Args:
        gradients_of: of a rank and a step: a gradient, or None, for each parameter.
        weight: what each of them is multiplied by.
    """
    model = TwoWays().double()
    sync = collective.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), SyncConfig(compression=compression))
    became = []
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), gradients_of(world.rank, step), strict=True):
            parameter.grad = None if gradient is None else gradient * weight
        sync.synchronize(weight)
        became.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    residuals = sync.rank_state().get("residuals", {})
    residuals = [
        residuals[i].clone() if i in residuals else torch.zeros_like(p) for i, p in enumerate(model.parameters())
    ]
    sync.close()
    return became, residuals


def noise(rank, step, *, without=()):
    """Of every parameter in turn; the layer that is not always used is left out in the steps ``without``."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    shapes = [(9, 12), (9,), (9, 12), (9,)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return values[:2] + ([None, None] if step in without else values[2:])


def alike(rank, step):
    """Of rank 1 on every rank."""
    left = torch.arange(1.0, 10.0, dtype=torch.float64).outer(torch.arange(12.0, dtype=torch.float64) - 5)
    bias = torch.ones(9, dtype=torch.float64)
    return [left, bias, -left, bias]


def across(rank, step):
    """Each rank has numbers where the others have none."""
    part = torch.zeros(9, 12, dtype=torch.float64)
    part[rank] = rank + 1.0
    return [part, part[:, 0], part, part[:, 0]]


def on_a_rank(folder, backend, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend=backend)
    run = functools.partial(exchanged, world=world, collective=collective)
    results = {(text, "noise"): run(text, noise) for text in (*LOSSY, "adasum", "topk(keep=1)", None)}
    results |= {(text, "gaps"): run(text, functools.partial(noise, without=(1, 4, 5))) for text in LOSSY}
    results |= {(text, "alike"): run(text, alike) for text in ("powersgd(rank=1)", "adasum")}
    results["adasum", "across"] = run("adasum", across)
    results["adasum", "weights"] = run("adasum", noise, weight=4.0 if world.rank else 0.0)
    if folder:
        for text in LOSSY:
            trained(text, world, collective, f"{folder}/{text}", max_steps=10)
            results["resumed", text] = trained(text, world, collective, f"{folder}/{text}")
            results["undisturbed", text] = trained(text, world, collective)
    collective.close()
    return results


def layers():
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def trained(compression, world, collective, folder=None, **settings):
    """103 rows in batches of 17: the last has one, so that a rank has none."""
    config = TrainConfig(epochs=3, sync=SyncConfig(compression=compression), **settings)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(103, 12, generator=generator, dtype=torch.float64)
    source = TensorSource({"x": x, "y": x[:, 0] * 2 - x[:, 1]}, global_batch_rows=17, world=world)
    result = fit(
        Task(
            model=lambda: torch.nn.Sequential(
                torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
            ).double(),
            optimizer=functools.partial(torch.optim.Adam, lr=0.02),
            loss=torch.nn.MSELoss(),
            inputs=["x"],
            labels=["y"],
        ),
        source,
        collective=collective,
        config=config,
        checkpoints=Checkpointer(CheckpointConfig(uri=str(folder), every_steps=4)) if folder else None,
        strategy=open_strategy("all_reduce", collective, config),
    )
    weights = [parameter.detach().clone() for parameter in result.model.parameters()]
    return weights, result.history.column("loss")


@pytest.fixture(scope="module")
def together(ranks, tmp_path_factory):
    @functools.lru_cache
    def run(size, backend="torch"):
        folder = tmp_path_factory.mktemp("runs") if (size, backend) == (2, "torch") else None
        return ranks.together(functools.partial(on_a_rank, folder, backend), size, backend)

    return run


WORLDS = [(2, "torch"), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(3, "torch"), (2, "horovod")])]


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_all_ranks_step_alike(together, size, backend):
    first, *others = together(size, backend)
    for other in others:
        for case in first:
            if case[0] not in ("resumed", "undisturbed"):
                for mine, theirs in zip(first[case][0], other[case][0], strict=True):
                    assert all(
                        (a is None and b is None) or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
                    )


@pytest.mark.parametrize(("size", "backend"), WORLDS)
@pytest.mark.parametrize("gaps", [(), (1, 4, 5)])
@pytest.mark.parametrize("text", LOSSY)
def test_what_was_sent_and_what_is_left_are_all_gradients(together, text, gaps, size, backend):
    """Also of a layer that no rank used in some steps, the last among them."""
    case = "gaps" if gaps else "noise"
    results = [rank[text, case] for rank in together(size, backend)]
    for index in range(4):
        gradients = [noise(rank, step, without=gaps)[index] for rank in range(size) for step in range(STEPS)]
        whole = sum(gradient for gradient in gradients if gradient is not None) / size
        sent = sum(step[index] for step in results[0][0] if step[index] is not None)
        left = sum(residuals[index] for _, residuals in results) / size
        torch.testing.assert_close(sent + left, whole, rtol=1e-9, atol=1e-9)
        if index in (0, 2):
            assert not torch.allclose(sent, whole)  # so that there was something left


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_all_numbers_are_the_mean(together, size, backend):
    for rank in together(size, backend):
        for got, wanted in zip(rank["topk(keep=1)", "noise"][0], rank[None, "noise"][0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_matrix_of_rank_one_travels_whole_in_one_vector(together):
    for rank in together(2):
        became, residuals = rank["powersgd(rank=1)", "alike"]
        for step in became:
            torch.testing.assert_close(step, alike(0, 0), rtol=1e-9, atol=1e-9)
        assert all(residual.abs().max() < 1e-9 for residual in residuals)


@pytest.mark.parametrize("size", [2, 3])
def test_adasum_averages_what_agrees_and_adds_what_is_orthogonal(together, size):
    for rank in together(size):
        torch.testing.assert_close(rank["adasum", "alike"][0][0], alike(0, 0), rtol=1e-12, atol=1e-12)
        wanted = [sum(parts) for parts in zip(*(across(other, 0) for other in range(size)), strict=True)]
        torch.testing.assert_close(rank["adasum", "across"][0][0], wanted, rtol=1e-12, atol=1e-12)


def adasum(first, second):
    """Of two ranks (Maleki et al., MLSys 2021)."""
    dot, squares = torch.sum(first * second), (torch.sum(first * first), torch.sum(second * second))
    return (1 - dot / (2 * squares[0])) * first + (1 - dot / (2 * squares[1])) * second


def test_adasum_of_ranks_of_equal_weight_is_its_formula_bit_for_bit(together):
    for rank in together(2):
        for step, became in enumerate(rank["adasum", "noise"][0]):
            wanted = map(adasum, noise(0, step), noise(1, step))
            assert all(torch.equal(a, b) for a, b in zip(became, wanted, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_adasum_divides_by_weights_and_leaves_out_ranks_of_weight_zero(together, size):
    """Each rank's gradient is 4 times its own, as its weight says, but that of the first, which has no rows."""
    for rank in together(size):
        for step, became in enumerate(rank["adasum", "weights"][0]):
            own = [noise(other, step) for other in range(1, size)]
            wanted = own[0] if size == 2 else map(adasum, *own)
            assert all(torch.equal(a, b) for a, b in zip(became, wanted, strict=True))


@pytest.mark.parametrize("text", LOSSY)
def test_a_resumed_run_sends_what_was_left(together, text):
    for rank in together(2):
        resumed, undisturbed = rank["resumed", text], rank["undisturbed", text]
        assert all(torch.equal(a, b) for a, b in zip(resumed[0], undisturbed[0], strict=True))
        assert resumed[1] == undisturbed[1]
        assert undisturbed[1][-1] < undisturbed[1][0] / 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("int8", "kind='int8' is not one of 'fp16', 'bf16', 'powersgd', 'topk', 'adasum'"),
        ("powersgd(rank=0)", "rank=0 is no number of vectors: give 1 or more"),
        ("topk(keep=0)", "keep=0 is no share of the gradients"),
        ("topk(keep=1.5)", "keep=1.5 is no share of the gradients"),
        ("fp16(rank=2)", "rank=2 has nothing to act on with fp16: it is an option of powersgd"),
        ("topk(k=3)", "['k'] is no option of a compression: choose of rank, keep"),
    ],
)
def test_a_compression_that_cannot_be_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        SyncConfig(compression=text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("text", [*LOSSY, "adasum"])
def test_steps_that_may_overflow_are_not_compressed_with_a_memory(text):
    with pytest.raises(ConfigError, match="choose precision='bf16'"):
        TrainConfig(precision="fp16", sync=SyncConfig(compression=text))


def test_a_compression_has_a_text_that_gives_it():
    for text in ("bf16", "powersgd(rank=2)", "topk(keep=0.5)", "adasum"):
        assert str(Compression.of_text(text)) == text
