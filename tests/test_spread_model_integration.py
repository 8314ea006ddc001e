"""A training loop of one's own over a model that is spread: the weights of a plain loop of torch's."""

from __future__ import annotations

import functools
import sys
import time

import cloudpickle
import pytest
import torch

from sparkdl import Mesh, SpreadModel
from sparkdl.errors import ConfigError
from sparkdl.runner import run_on_dataframe
from sparkdl.train.in_memory import TensorSource
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STRATEGIES = [
    "all_reduce",
    "zero1",
    "fsdp",
    "tensor",
    Mesh(pipeline=2, micro_batches=3, cuts=("2",)),
    "parameter_server",
]
COLUMNS = {"a": "sin(id)", "b": "cos(id)", "c": "id % 3", "y": "id % 5"}
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))


def double_network():
    return network().double()


def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x.square().sum(1, keepdim=True)}


momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
steepest = functools.partial(torch.optim.SGD, lr=0.05)


def by_hand():
    """Two epochs of six batches, the last of five rows, of which two make a step; then the loss of all rows."""
    torch.manual_seed(0)
    net = double_network()
    optimizer, tensors = momentum(net.parameters()), data()
    losses = []
    batches = [batch for epoch in range(2) for batch in rows_of(epoch)]
    for number, batch in enumerate(batches):
        loss = torch.nn.functional.mse_loss(net(batch["x"]), batch["y"])
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    evaluated = torch.nn.functional.mse_loss(net(tensors["x"]), tensors["y"]).item()
    return losses, evaluated, net.state_dict()


def rows_of(epoch, **options):
    source = TensorSource(data(), global_batch_rows=7, **options)
    source.set_epoch(epoch)
    return list(source)


def by_strategy(strategy, world):
    """The same; the second epoch by another model, which takes the state over, with plain dicts as batches."""
    torch.set_num_threads(1)
    losses, state = [], None
    for epoch, name in enumerate((strategy, "all_reduce")):
        with SpreadModel(name, backend="torch") as model:
            model.build(double_network, momentum, torch.nn.MSELoss(), inputs=["x"], labels=["y"])
            if epoch:
                model.load_state_dict(state)
            for number, batch in enumerate(rows_of(epoch, world=model.reader)):
                rows = dict(batch) if epoch else batch
                losses.append(model.backward(rows, share=0.5, last=bool(number % 2)).item())
                if number % 2:
                    model.clip(0.5)
                    model.optimizer.step()
                    model.optimizer.zero_grad()
            evaluated = model.evaluate(rows_of(0, world=model.reader, shuffle=False))
            state, plain = model.state_dict(), model.gather_model()
    return losses, evaluated, state, None if plain is None else plain.state_dict()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_loop_of_ones_own_trains_what_a_plain_one_does(ranks, strategy):
    losses, evaluated, weights = by_hand()
    leader, other = ranks.together(functools.partial(by_strategy, strategy), 2, "torch")
    for rank in (leader, other):
        assert rank[0] == pytest.approx(losses, rel=1e-9)
        assert rank[1] == pytest.approx(evaluated, rel=1e-9)
    torch.testing.assert_close(leader[3], weights, **EXACT)
    torch.testing.assert_close(leader[2]["model"], weights, **EXACT)
    assert other[2] is other[3] is None


def by_local_steps(world):
    """Six steps of plain SGD, each rank by itself; the models are averaged behind each."""
    torch.set_num_threads(1)
    with SpreadModel("local_sgd(every=1)", backend="torch") as model:
        model.build(double_network, steepest, torch.nn.MSELoss(), inputs=["x"], labels=["y"])
        losses = [model.step(batch).item() for batch in rows_of(0, world=model.reader)]
        return losses, model.evaluate(rows_of(0, world=model.reader, shuffle=False)), model.state_dict()


def test_local_steps_that_are_averaged_at_once_are_those_of_a_plain_loop(ranks):
    torch.manual_seed(0)
    net = double_network()
    optimizer, losses = steepest(net.parameters()), []
    for batch in rows_of(0):
        loss = torch.nn.functional.mse_loss(net(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tensors = data()
    evaluated = torch.nn.functional.mse_loss(net(tensors["x"]), tensors["y"]).item()
    leader, other = ranks.together(by_local_steps, 2, "torch")
    means = [(first + second) / 2 for first, second in zip(leader[0], other[0], strict=True)]
    assert means == pytest.approx(losses, rel=1e-9)
    for rank in (leader, other):
        assert rank[1] == pytest.approx(evaluated, rel=1e-9)
    torch.testing.assert_close(leader[2]["model"], net.state_dict(), **EXACT)


def ahead_on_a_rank(strategy, sign, world):
    """Three steps, which rank 1 begins once rank 0 is through; whether it saw that, and its first loss."""
    torch.set_num_threads(1)
    with SpreadModel(strategy, backend="torch") as model:
        model.build(double_network, steepest, torch.nn.MSELoss(), inputs=["x"], labels=["y"])
        rows = {name: tensor[20 * world.rank :] for name, tensor in data().items()}
        deadline = time.monotonic() + 30
        while not world.is_leader and not sign.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        was_through = sign.exists()
        losses = [model.step(rows).item() for _ in range(3)]
        sign.touch()
        evaluated = model.evaluate([rows])
    return was_through, losses[0], evaluated


@pytest.mark.parametrize("strategy", ["local_sgd(every=4)", "parameter_server(staleness=None)"])
def test_a_rank_that_steps_by_itself_waits_for_nobody(ranks, tmp_path, strategy):
    leader, other = ranks.together(functools.partial(ahead_on_a_rank, strategy, tmp_path / "through"), 2, "torch")
    assert other[0]
    torch.manual_seed(0)
    tensors = data()
    assert leader[1] == pytest.approx(torch.nn.functional.mse_loss(double_network()(tensors["x"]), tensors["y"]).item())
    assert leader[2] == other[2]


def frozen_behind_an_evaluation(world):
    torch.set_num_threads(1)
    with SpreadModel("zero2", backend="torch") as model:
        model.build(double_network, steepest, torch.nn.MSELoss(), inputs=["x"], labels=["y"])
        batches = rows_of(0, world=model.reader)
        model.step(batches[0])
        model.evaluate(batches)
        model.module[0].requires_grad_(False)
        before = model.state_dict()
        model.step(batches[1])
        return before, model.state_dict()


def test_a_layer_that_is_frozen_behind_an_evaluation_stays_as_it_is(ranks):
    (before, after), _ = ranks.together(frozen_behind_an_evaluation, 2, "torch")
    assert torch.equal(before["model"]["0.weight"], after["model"]["0.weight"])
    assert not torch.equal(before["model"]["2.weight"], after["model"]["2.weight"])


class Attention(torch.nn.Module):
    """An odd vocabulary, and query, key and value by one layer."""

    def __init__(self):
        super().__init__()
        self.wte, self.c_attn = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 24)
        self.c_proj, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, tokens):
        x = self.wte(tokens)
        rows, positions, features = x.shape
        q, k, v = (part.view(rows, positions, 2, 4).transpose(1, 2) for part in self.c_attn(x).split(features, 2))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.c_proj(y.transpose(1, 2).reshape(rows, positions, features)).mean(1))


def attention_on_a_rank(world):
    """Three steps, and two more by another model that takes the state over."""
    torch.set_num_threads(1)
    tokens = torch.arange(40).reshape(8, 5) % 11
    batch, state = {"tokens": tokens, "y": torch.arange(8.0).unsqueeze(1).double()}, None
    plan = {"c_attn": "qkv", "c_proj": "row", "wte": "row"}
    for steps in (3, 2):
        with SpreadModel(Mesh(tensor=world.size, plan=plan) if world.size > 1 else "all_reduce") as model:
            model.build(
                lambda: Attention().double(), torch.optim.AdamW, torch.nn.MSELoss(), inputs=["tokens"], labels=["y"]
            )
            if state is not None or steps == 2:
                model.load_state_dict(state)
            for _ in range(steps):
                model.step(batch, max_norm=0.1)
            state = model.state_dict()
    return state


def test_packed_projections_and_vocabularies_are_gathered_whole_and_dealt_out_again(ranks):
    wanted = attention_on_a_rank(SOLO)
    leader, _ = ranks.together(attention_on_a_rank, 2, "torch")
    torch.testing.assert_close(leader["model"], wanted["model"], **EXACT)
    names = [name for name, _ in Attention().named_parameters()]
    keys = slice(8, 16)  # their bias has no gradient but for rounding
    for state in (leader, wanted):
        state["optimizer"]["state"][names.index("c_attn.bias")]["exp_avg"][keys] = 0
        state["optimizer"]["state"][names.index("c_attn.bias")]["exp_avg_sq"][keys] = 0
    torch.testing.assert_close(leader["optimizer"], wanted["optimizer"], **EXACT)


class Narrow(torch.nn.Module):
    """A layer in bfloat16 before one in double precision."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(3, 8, dtype=torch.bfloat16), torch.nn.Linear(8, 1, dtype=torch.double)]
        )

    def forward(self, x):
        first, last = self.layers
        return last(torch.tanh(first(x.bfloat16()).double()))


def clipped_on_a_rank(strategy, world):
    """What the gradients of this rank's part of the layer in double precision were multiplied by, and by what to be."""
    torch.set_num_threads(1)
    with SpreadModel(strategy) as model:
        model.build(Narrow, steepest, torch.nn.MSELoss(), inputs=["x"], labels=["y"])
        model.backward(rows_of(0, world=model.reader)[0])
        wide = [part.grad for part in model._strategy.parameters() if part.dtype == torch.double]
        before = [gradient.clone() for gradient in wide]
        norm = model.clip(0.01)
        factors = [(gradient / earlier).flatten() for gradient, earlier in zip(wide, before, strict=True)]
        return torch.cat(factors).tolist(), 0.01 / (norm.item() + 1e-6)


def test_gradients_of_all_dtypes_are_clipped_by_one_factor(ranks):
    (factors, wanted), _ = ranks.together(functools.partial(clipped_on_a_rank, "fsdp"), 2, "torch")
    assert factors == pytest.approx([wanted] * 9, rel=1e-12)  # a layer of one row, which lies on one rank


def test_one_process_alone_needs_no_launcher():
    with SpreadModel("fsdp") as model:
        model.build(double_network, torch.optim.Adam, torch.nn.MSELoss(), inputs=["x"], labels=["y"])
        first = model.step(rows_of(0)[0], max_norm=1.0)
        assert model.step(rows_of(0)[0]) < first


def test_a_batch_without_a_tensor_of_the_model_is_refused_by_its_names():
    with SpreadModel() as model:
        model.build(double_network, torch.optim.Adam, torch.nn.MSELoss(), labels=["y"])
        with pytest.raises(ConfigError, match=r"has the tensors \['x', 'y'\], .* built for \['features'\] besides"):
            model.step(rows_of(0)[0])


def train(loader, model, epochs):
    """Eight rows a step: the same global batches, whoever reads them."""
    model.build(network, torch.optim.Adam, torch.nn.MSELoss(), labels=["y"])
    ids = []
    for _ in range(epochs):
        for batch in loader:
            ids.append(batch["id"].tolist())
            model.step({"features": batch["features"], "y": batch["y"].unsqueeze(1)})
    state = model.state_dict()
    return ids, None if state is None else state["model"]


def test_run_on_dataframe_hands_out_an_open_model_and_the_rows_of_its_readers(spark):
    df = spark.range(60).selectExpr("id", *(f"cast({text} as float) as {name}" for name, text in COLUMNS.items()))
    run = functools.partial(
        run_on_dataframe, train, df, num_proc=2, columns=["a", "b", "c"], labels=["id", "y"], args=(2,)
    )
    (split_ids, split), (same_ids, nothing) = run(batch_size=8, strategy="tensor")
    (ids, cut), (other_ids, _) = run(batch_size=4, strategy="fsdp")
    assert split_ids == same_ids
    assert nothing is None
    assert [sorted([*mine, *others]) for mine, others in zip(ids, other_ids, strict=True)] == [*map(sorted, split_ids)]
    torch.testing.assert_close(cut, split, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"strategy": "fsdp9"}, "strategy='fsdp9' is unknown"),
        ({"strategy": 2}, "strategy=2 is a int: give a name"),
        ({"strategy": "mesh(data=2, tensor=2)"}, "2 ranks do not fill the mesh data=2 x tensor=2: run 4 of them"),
        ({"strategy": "zero1", "backend": "horovod"}, "opens no group of it: choose backend='torch'"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_before_a_row_is_written(spark, tmp_path, settings, sentence):
    with pytest.raises(ConfigError) as refused:
        run_on_dataframe(train, spark.range(10), num_proc=2, store=str(tmp_path), **settings)
    assert sentence in str(refused.value)
    assert not list(tmp_path.rglob("*"))


def test_half_precision_is_refused():
    with pytest.raises(ConfigError, match="precision='fp16' needs a scaler"):
        SpreadModel("fsdp", precision="fp16")
