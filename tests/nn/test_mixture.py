"""The mixture of experts in one process: what it computes, what it drops, what it refuses."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import sparkdl
from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError, DataError
from sparkdl.nn.mixture import MixtureOfExperts, stand_in, take_dropped
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def layer(**settings):
    torch.manual_seed(1)
    return MixtureOfExperts(**({"features": 5, "hidden": 7, "experts": 4, "dtype": torch.float64} | settings))


def tokens(*shape):
    return torch.randn(*shape, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def by_hand(mixture, x, taken):
    """The sum over a token's choices, one at a time; ``taken(token, expert)`` says which are."""
    output = x.new_zeros(len(x), mixture.out_features)
    for token, row in enumerate(x):
        logits = mixture.gate.weight @ row
        chosen = logits.argsort(descending=True)[: mixture.k].tolist()
        weights = torch.softmax(logits[chosen], 0) if mixture.k > 1 else torch.softmax(logits, 0)[chosen]
        for expert, weight in zip(chosen, weights, strict=True):
            if taken(token, expert):
                inner = mixture.activation(row @ mixture.weight_in[expert] + mixture.bias_in[expert])
                output[token] += weight * (inner @ mixture.weight_out[expert] + mixture.bias_out[expert])
    return output


@pytest.mark.parametrize("k", [1, 2, 4])
def test_each_token_gets_the_weighted_outputs_of_its_experts(k):
    mixture, x = layer(k=k, out_features=3).eval(), tokens(6)
    torch.testing.assert_close(mixture(x), by_hand(mixture, x, lambda token, expert: True), **EXACT)
    torch.testing.assert_close(mixture(x.view(2, 3, 5)).view(6, 3), mixture(x), **EXACT)
    torch.testing.assert_close(mixture(x[2]), mixture(x)[2], **EXACT)  # no other row, no other answer


@pytest.mark.parametrize("k", [1, 2])
def test_an_expert_takes_the_tokens_with_the_best_odds_up_to_its_capacity(k):
    mixture, x = layer(k=k, capacity_factor=0.5), tokens(21)
    probabilities = mixture.gate(x).softmax(-1).detach()
    chosen = probabilities.topk(k).indices
    capacity = math.ceil(0.5 * k * 21 / 4)
    best = {}
    for expert in range(4):
        takers = [token for token in range(21) if expert in chosen[token]]
        best[expert] = sorted(takers, key=lambda token: -float(probabilities[token, expert]))[:capacity]
    torch.testing.assert_close(mixture(x), by_hand(mixture, x, lambda token, expert: token in best[expert]), **EXACT)
    dropped = 21 * k - sum(len(taken) for taken in best.values())
    assert dropped > 0
    assert take_dropped(torch.nn.Sequential(mixture)) == (dropped, 21 * k)
    assert take_dropped(mixture) == (0, 0)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(mixture(x[order]), mixture(x)[order], **EXACT)  # where a token stands decides nothing


def test_equal_tokens_share_their_fate_and_no_limit_and_no_evaluation_drops_any():
    mixture, x = layer(capacity_factor=0.5), tokens(1).expand(12, 5)
    output = mixture(x)
    torch.testing.assert_close(output, output[:1].expand(12, 5), **EXACT)
    assert take_dropped(mixture) == (0, 24)
    unlimited, x = layer(capacity_factor=None), tokens(30)
    assert torch.equal(unlimited(x), layer(capacity_factor=0.1).eval()(x))
    assert take_dropped(unlimited) == (0, 60)


def test_the_gate_of_certain_tokens_still_tells_them_apart():
    """Probabilities that round to 1 would be equal, and an expert to which the gate collapsed have no limit."""
    mixture = layer(k=1, capacity_factor=1.0, dtype=torch.float32)
    with torch.no_grad():
        mixture.gate.weight.zero_()[0, 0] = 100
    mixture((torch.arange(8.0)[:, None] + 1) * torch.ones(5))
    assert take_dropped(mixture) == (6, 8)


@pytest.mark.parametrize("k", [1, 2])
def test_the_balance_loss_is_that_of_the_paper(k):
    mixture, x = layer(k=k, balance_weight=0.3, capacity_factor=0.5), tokens(17)
    mixture(x)
    probabilities = mixture.gate(x).softmax(-1)
    shares = torch.zeros(17, 4, dtype=torch.float64).scatter(1, probabilities.topk(k).indices, 1.0).mean(0) / k
    wanted = 0.3 * 4 * (shares * probabilities.mean(0)).sum()
    torch.testing.assert_close(mixture.auxiliary_loss, wanted, **EXACT)
    (gradient,) = torch.autograd.grad(mixture.auxiliary_loss, mixture.gate.weight)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, mixture.gate.weight)[0], **EXACT)
    with torch.no_grad():
        mixture.gate.weight.zero_()  # nothing is preferred: the mean probability of each expert is 1 / experts
    mixture(x)
    assert mixture.auxiliary_loss.item() == pytest.approx(0.3)


def test_gradients_are_those_of_finite_differences():
    mixture, x = layer(capacity_factor=0.6), tokens(6).requires_grad_()
    names = [name for name, _ in mixture.named_parameters()]

    def outputs(x, *parameters):
        y = torch.func.functional_call(mixture, dict(zip(names, parameters, strict=True)), (x,))
        return y, mixture.auxiliary_loss

    assert torch.autograd.gradcheck(outputs, (x, *mixture.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_any_dtype_and_any_number_of_tokens_train(dtype, count):
    mixture = layer(dtype=dtype)
    x = tokens(count).to(dtype).requires_grad_()
    y = mixture(x)
    (y.square().sum() + mixture.auxiliary_loss).backward()
    assert y.dtype == dtype
    assert y.shape == (count, 5)
    assert all(parameter.grad.isfinite().all() for parameter in mixture.parameters())
    assert mixture.eval()(x).shape == (count, 5)


def test_the_gate_decides_in_float32_under_autocast():
    mixture, x = layer(dtype=torch.float32), tokens(40).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = mixture(x)
    assert y.dtype == torch.bfloat16
    balance, dropped = mixture.auxiliary_loss, take_dropped(mixture)
    torch.testing.assert_close(y.float(), mixture(x), rtol=0.05, atol=0.02)
    assert torch.equal(mixture.auxiliary_loss, balance)
    assert take_dropped(mixture) == dropped


def test_rows_that_stand_in_for_none_get_zero_and_count_nowhere():
    mixture = layer()
    with stand_in(mixture):
        y = mixture(tokens(3))
    assert not y.any()
    assert mixture.auxiliary_loss == 0
    assert take_dropped(mixture) == (0, 0)
    assert mixture(tokens(3)).any()


def test_a_copy_is_a_plain_layer_without_the_graph_of_the_newest_pass():
    mixture, x = layer(), tokens(4)
    wanted = mixture(x)
    mixture.gather_rows = lambda rows: [rows, rows]
    for twin in (copy.deepcopy(mixture), pickle.loads(pickle.dumps(mixture))):
        assert twin.auxiliary_loss is None
        assert torch.equal(twin(x), wanted)


def test_an_exported_graph_answers_as_the_layer_does():
    mixture, x = layer().eval(), tokens(4)
    program = torch.export.export(mixture, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    torch.testing.assert_close(program.module()(tokens(11)), mixture(tokens(11)), **EXACT)
    with pytest.raises(ConfigError, match=r"call model.eval\(\) first"):
        torch.export.export(mixture.train(), (x,))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"k": 5}, "k=5 exceeds the 4 experts"),
        ({"hidden": 0}, "hidden=0 .* is below 1"),
        ({"k": 0}, "k=0 .* is below 1"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0 is no positive number"),
        ({"capacity_factor": math.nan}, "capacity_factor=nan is no positive number"),
        ({"balance_weight": -1.0}, r"balance_weight=-1.0 is no weight"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        layer(**settings)


def test_tokens_of_another_width_or_kind_are_refused():
    with pytest.raises(DataError, match=r"over 5 features got torch.float64 of shape \(2, 4\)"):
        layer()(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(DataError, match=r"got torch.int64 of shape \(2, 5\)"):
        layer()(torch.zeros(2, 5, dtype=torch.int64))


def test_the_public_name_is_loaded_by_name():
    assert sparkdl.nn.MixtureOfExperts is MixtureOfExperts
    assert "nn" in dir(sparkdl)


class Penalty(torch.nn.Module):
    """A module of a user's own with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.auxiliary_loss = None

    def forward(self, x):
        self.auxiliary_loss = 0.1 * (x * self.scale).square().mean()
        return x * self.scale


def trained(model, **parts):
    torch.set_num_threads(1)
    x = tokens(40)
    return fit(
        Task(**({"model": model, "loss": torch.nn.MSELoss(), "inputs": ["x"], "labels": ["y"]} | parts)),
        TensorSource({"x": x, "y": x.flip(1)}, global_batch_rows=16, shuffle=False),
        TensorSource({"x": x, "y": x.flip(1)}, global_batch_rows=16, shuffle=False),
        collective=open_collective(SOLO, backend="solo"),
        config=TrainConfig(epochs=2),
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_penalty(model, batch):
    y = model(batch["x"])
    return torch.nn.functional.mse_loss(y, batch["y"]) + 0.1 * y.square().mean(), y


def manual_step(model, optimizer, batch, loss):
    optimizer.zero_grad()
    outputs = model(batch["x"])
    value = loss(outputs, batch)
    value.backward()
    optimizer.step()
    return outputs, value.detach()


def test_auxiliary_losses_are_added_in_training_and_not_in_validation():
    automatic, manual = trained(Penalty, optimizer=sgd), trained(Penalty, optimizer=sgd, manual_step=manual_step)
    own = trained(Penalty, optimizer=sgd, loss=None, train_step=with_penalty)
    torch.testing.assert_close(automatic.model.scale, own.model.scale, **EXACT)
    torch.testing.assert_close(manual.model.scale, own.model.scale, **EXACT)
    x, scale = tokens(40), automatic.model.scale.detach()
    assert automatic.history.epochs[-1]["loss"] == pytest.approx(own.history.epochs[-1]["loss"])
    assert automatic.history.epochs[-1]["val_loss"] == pytest.approx(float((x * scale - x.flip(1)).square().mean()))


class NotScalar(Penalty):
    def forward(self, x):
        y = super().forward(x)
        self.auxiliary_loss = y.sum(1)
        return y


def test_an_auxiliary_loss_that_is_no_scalar_is_refused():
    with pytest.raises(ConfigError, match=r"auxiliary_loss of module '0' is of shape \(16,\)"):
        trained(lambda: torch.nn.Sequential(NotScalar()), optimizer=sgd)
