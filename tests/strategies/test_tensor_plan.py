"""Which modules a plan splits, and which plans are refused: without ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.strategies.tensor import bytes_per_step
from sparkdl.strategies.tensor_plan import find_plan


class Own(nn.Module):
    """Gated pair ``w1, w3 -> w2``; ``a -> b`` with a hidden output that is used twice; ``c -> d`` across a norm."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c, self.norm, self.d = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.w2(F.silu(self.w1(x)) * self.w3(x))
        hidden = self.a(x)
        x = self.b(hidden) + hidden
        return x + self.d(self.norm(self.c(x)))


class Branches(nn.Module):
    """Its own flow cannot be traced; that of its child can."""

    def __init__(self):
        super().__init__()
        self.own = Own()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.second(self.first(x)) if x.sum() > 0 else self.second(x)
        return self.own(x)


def mlp(*between, hidden=12):
    return nn.Sequential(nn.Linear(8, hidden), *between, nn.Linear(hidden, 8))


def test_pairs_are_found_where_only_elementwise_functions_stand_between():
    assert find_plan(mlp(nn.ReLU(), nn.Dropout(0.1)), 2) == {"0": "column", "3": "row"}
    gated = {"w1": "column", "w3": "column", "w2": "row"}
    assert find_plan(Own(), 4) == gated
    assert find_plan(Branches(), 4) == {f"own.{name}": how for name, how in gated.items()}


def test_a_layer_takes_part_in_one_pair():
    chain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    assert find_plan(chain, 2) == {"0": "column", "1": "row", "2": "column", "3": "row"}


def test_transformer_layers_are_split_by_features_and_heads():
    layer = nn.TransformerEncoderLayer(16, 4, 30)
    assert find_plan(layer, 2) == {"linear1": "column", "linear2": "row", "self_attn": "heads"}
    assert find_plan(layer, 4) == {"self_attn": "heads"}  # 30 features stay whole


@pytest.mark.parametrize(
    ("model", "size", "why"),
    [
        (mlp(nn.BatchNorm1d(12)), 2, "no two linear layers between which it shows nothing but"),
        (mlp(nn.Softmax(-1)), 2, "no two linear layers between which"),
        (mlp(nn.ReLU()), 5, "0 has 12 output features, no multiple of 5"),
        (nn.MultiheadAttention(16, 4), 3, "has 4 heads, no multiple of 3"),
        (nn.MultiheadAttention(16, 4, kdim=8), 2, "kdim or vdim, which are not split"),
    ],
)
def test_a_model_with_nothing_to_split_is_refused(model, size, why):
    with pytest.raises(ConfigError, match=f"tensor={size} finds nothing to split .*{why}"):
        find_plan(model, size)


class Attention(nn.Module):
    """Projections to heads, to fewer of key and value, and what may make a plan of them impossible."""

    def __init__(self, kind="", heads=4):
        super().__init__()
        self.kind, self.heads = kind, heads
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        rows, positions, features = x.shape
        states = self.q(x)
        q = self.norm(states) if self.kind == "norm of all features" else states
        q = q.view(rows, positions, self.heads, -1).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.heads // 2, features // self.heads)).transpose(1, 2)
        v = self.v(x).reshape(rows, positions, self.heads // 2, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        if self.kind == "mixed heads":
            y = y.cumsum(1)
        y = self.o(y.transpose(1, 2).flatten(2))
        return y + states if self.kind == "used twice" else y


def test_projections_of_an_attention_are_found():
    assert find_plan(Attention(), 2) == {"q": "column", "k": "column", "v": "column", "o": "row"}


@pytest.mark.parametrize("kind", ["norm of all features", "mixed heads", "used twice"])
def test_an_attention_that_does_more_than_attend_stays_whole(kind):
    with pytest.raises(
        ConfigError, match=r"no attention whose projections a trace shows.*name the modules, as in plan="
    ):
        find_plan(Attention(kind), 2)


def test_heads_that_do_not_divide_are_named():
    with pytest.raises(ConfigError, match=r"[kv] gives 2 heads, no multiple of 4"):
        find_plan(Attention(), 4)


@pytest.mark.parametrize(
    ("layer", "how", "why"),
    [
        (nn.Embedding(10, 7), "column", "has 7 features, no multiple of 2"),
        (nn.Embedding(10, 8, padding_idx=0), "row", "has padding_idx, which a split vocabulary does not know"),
        (nn.Embedding(10, 8, max_norm=1.0), "column", "has max_norm, scale_grad_by_freq or sparse"),
        (nn.Linear(8, 8), "qkv", "has 8 output features, and those of query, key and value would be a multiple of 3"),
        (nn.Linear(8, 9), "qkv", "has 9 output features, no multiple of 6"),
    ],
)
def test_layers_that_cannot_be_split_so_are_refused(layer, how, why):
    with pytest.raises(ConfigError, match=why):
        find_plan(nn.Sequential(layer), 2, {"0": how})


def test_an_embedding_needs_no_layer_on_the_other_side():
    assert find_plan(nn.Sequential(nn.Embedding(11, 8)), 2, {"0": "row"}) == {"0": "row"}


def test_tied_parameters_stay_whole():
    model = mlp(nn.ReLU(), hidden=8)
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"shares a parameter with"):
        find_plan(model, 2)


def test_a_given_plan_is_matched_by_patterns():
    plan = find_plan(Own(), 2, {"w[13]": "column", "w2": "row"})
    assert plan == {"w1": "column", "w3": "column", "w2": "row"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"fc*": "column"}, "matches no module of Own"),
        ({"w1": "columns"}, "choose 'column', 'row', 'heads' or 'qkv'"),
        ({"norm": "column"}, "norm is LayerNorm, and only a plain nn.Linear"),
        ({"w1": "heads"}, "w1 is Linear, and only nn.MultiheadAttention"),
        ({"w1": "column", "w?": "row"}, "plan splits w1 by column and by row"),
        ({"w*": "column"}, "nothing by row"),
        ({"w1": "column", "w3": "column", "b": "row"}, "w2, which reads it, not by row"),
        ({"a": "column", "d": "row", "w2": "column"}, "which reads it, not by row"),
    ],
)
def test_a_given_plan_that_cannot_be_is_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        find_plan(Own(), 2, given)


def test_bytes_are_those_of_rings():
    # 8 features forward and backward, of 30 rows, in 4 bytes, of which a ring of 4 sends 2 * 3/4
    assert bytes_per_step(mlp(nn.ReLU()), {"0": "column", "2": "row"}, 4, 30) == (8 + 8) * 30 * 4 * 3 // 2


def test_finding_a_plan_changes_nothing():
    model = Own()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_plan(model, 2)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
