"""Layers that are split over real ranks compute, learn and send what the unsplit ones and the formula say."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparkdl.collective import open_collective
from sparkdl.errors import ConfigError
from sparkdl.strategies.tensor import bytes_per_step, computing, split
from sparkdl.strategies.tensor_plan import find_plan

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Block(nn.Module):
    """As in a GPT: an attention of one's own, with a norm of each head, a learned scale, a mask or none."""

    def __init__(self, attention, heads):
        super().__init__()
        self.attention, self.heads = attention, heads
        self.norm1, self.norm2, self.head_norm = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16 // heads)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(6, 6).tril() == 0)

    def forward(self, x):
        rows, positions, features = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(rows, positions, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q = self.head_norm(q)
        if self.attention == "manual":
            scores = (q @ k.transpose(-2, -1) / 2).masked_fill(self.mask[:positions, :positions], -torch.inf)
            y = F.dropout(scores.softmax(-1), 0.2, self.training) @ v
        elif self.attention == "mask":
            y = F.scaled_dot_product_attention(q, k, v, ~self.mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        x = x + self.o(y.transpose(1, 2).contiguous().view(rows, positions, features))
        return x + self.dropout(self.fc2(F.dropout(F.gelu(self.fc1(self.norm2(x))), 0.1, self.training)))


class Gpt(nn.Module):
    def __init__(self, attention, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block(attention, heads) for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Nano(nn.Module):
    """As in nanoGPT: query, key and value by one layer."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.heads, self.features = attention, 4, 16
        self.embedding = nn.Embedding(11, 16)
        self.c_attn, self.c_proj, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 1)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(8, 8).tril().view(1, 1, 8, 8))

    def forward(self, tokens):
        x = self.embedding(tokens)
        rows, positions, features = x.size()
        if self.attention == "viewed":
            shape = (rows, positions, 3, self.heads, features // self.heads)
            q, k, v = self.c_attn(x).view(*shape).permute(2, 0, 3, 1, 4)
        else:
            parts = self.c_attn(x).split(self.features, dim=2) if self.attention == "flash" else None
            q, k, v = self.c_attn(x).chunk(dim=-1, chunks=3) if parts is None else parts
            q = q.view(rows, positions, self.heads, features // self.heads).transpose(1, 2)
            k = k.view(rows, positions, self.heads, features // self.heads).transpose(1, 2)
            v = v.view(rows, positions, self.heads, features // self.heads).transpose(1, 2)
        if self.attention == "chunks":
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.mask[:, :, :positions, :positions] == 0, -math.inf)
            y = self.dropout(F.softmax(scores, dim=-1)) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(rows, positions, features)
        return self.head(x + self.dropout(self.c_proj(y)))


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 1)

    def forward(self, x, padding):
        return self.head(self.encoder(x, src_key_padding_mask=padding))


class Attention(nn.Module):
    """All that ``nn.MultiheadAttention`` takes and gives."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(16, 4, dropout=0.1, bias=False)
        self.second = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x, mask):
        y, weights = self.first(x, x, x, attn_mask=mask)
        z, heads = self.second(y, x, x, average_attn_weights=False)
        alone, _ = self.second(x[0], x[1], x[1], key_padding_mask=mask[0, 0] < 0)
        return z.sum(-1) + weights.square().mean() + heads.square().mean() + alone.mean()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


GIVEN = {"blocks.*.[qkv]": "column", "blocks.*.o": "row", "*.fc1": "column", "*.fc2": "row"}


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


PADDING = torch.arange(6)[None, :] >= torch.tensor([6, 4, 3, 1, 6])[:, None]
CASES = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 8), nn.LayerNorm(8), Gated()),
        lambda: (rows(5, 8),),
        None,
    ),
    "encoder": (lambda: Encoder(), lambda: (rows(5, 6, 16), PADDING), None),
    "encoder with norm first, no dropout": (
        lambda: Encoder(dropout=0.0, norm_first=True, activation="gelu"),
        lambda: (rows(5, 6, 16), PADDING),
        None,
    ),
    "attention": (Attention, lambda: (rows(6, 6, 16), rows(24, 6, 6)), None),
    **{
        f"gpt, {kind}": (lambda kind=kind: Gpt(kind), lambda: (torch.arange(30).reshape(5, 6) % 11,), GIVEN)
        for kind in ("manual", "mask", "causal")
    },
    "gpt of two heads": (lambda: Gpt("manual", 2), lambda: (torch.arange(30).reshape(5, 6) % 11,), None),
    **{
        f"nano, {kind}": (lambda kind=kind: Nano(kind), lambda: (torch.arange(30).reshape(5, 6) % 11,), plan)
        for kind, plan in (
            ("flash", {"c_attn": "qkv", "c_proj": "row", "embedding": "row"}),
            ("chunks", None),
            ("viewed", {"c_attn": "qkv", "c_proj": "row", "embedding": "column"}),
        )
    },
}
# Of a GPT with four heads each of four ranks has one, as each of two has of one with two.
ON_FOUR_RANKS = (
    *("encoder", "encoder with norm first, no dropout", "gpt, manual", "gpt, mask", "gpt, causal"),
    *("nano, flash", "nano, chunks", "nano, viewed"),
)
OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
}


DTYPES = (torch.float64, torch.float32)
EVERY = [(case, dtype, optimizer) for case in CASES for dtype in DTYPES for optimizer in OPTIMIZERS]
RUNS = {
    2: [
        *((case, torch.float64, "adamw") for case in CASES),
        *(("mlp", torch.float64, "sgd"), ("nano, flash", torch.float32, "sgd")),
        *(("encoder", torch.float32, "adamw"), ("gpt, manual", torch.float32, "adamw")),
    ],
    4: [(case, torch.float64, "adamw") for case in ON_FOUR_RANKS],
}
RUNS["2, slow"] = [run for run in EVERY if run not in RUNS[2]]


class Sent(TorchDispatchMode):
    """Counts the bytes of what is summed over all ranks."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind is DTensor for kind in types):
            return NotImplemented
        if "c10d_functional" in str(func) and "wait" not in str(func) and "_wrap_tensor" not in str(func):
            self.calls.add(str(func))
            self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def inputs_of(case, dtype):
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in CASES[case][1]())


def whole(tensor, like):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()).reshape(like.shape)


def run(case, dtype, optimizer, mesh):
    """Outputs, gradients of the first step, weights behind four, and outputs in eval mode, which is the slow path's."""
    torch.manual_seed(5)
    net = CASES[case][0]().to(dtype)
    shapes = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    if mesh is not None:
        split(net, mesh, find_plan(net, mesh.size(), CASES[case][2]))
    optimizer = OPTIMIZERS[optimizer](net)
    inputs = inputs_of(case, dtype)
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()
    torch.manual_seed(6)  # of dropout
    found = {}
    for step in range(4):
        optimizer.zero_grad()
        with computing():
            output = net(*inputs)
            output.square().mean().backward()
        if step == 0:
            found["output"] = output.detach()
            found["input"] = inputs[0].grad
            found["gradients"] = {n: whole(p.grad, shapes[n]) for n, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
    found["weights"] = {name: whole(parameter, shapes[name]) for name, parameter in net.named_parameters()}
    found["random"] = torch.get_rng_state()
    # cloudpickle would take this module along, which cannot be pickled, if it were named by attributes
    fast_path = importlib.import_module("torch.backends.mha")
    fast_path.set_fastpath_enabled(mesh is not None)
    with torch.inference_mode(), computing():
        found["eval"] = net.eval()(*inputs)
    fast_path.set_fastpath_enabled(True)
    return found


def sent(mesh, case):
    net = CASES[case][0]()
    plan = find_plan(net, mesh.size(), CASES[case][2])
    told = bytes_per_step(net, plan, mesh.size(), 30)
    split(net, mesh, plan)
    inputs = inputs_of(case, torch.float32)
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()
    with computing(), Sent() as counter:
        net(*inputs).square().mean().backward()
    with torch.inference_mode(), computing(), Sent() as evaluated:
        net.eval()(*inputs)
    ring = 2 * (mesh.size() - 1) / mesh.size()
    return told, counter.bytes * ring, evaluated.bytes * ring, counter.calls | evaluated.calls


def autocast(mesh):
    """Losses of a few steps in bfloat16, split and whole."""
    losses = []
    for part in (None, mesh):
        torch.manual_seed(5)
        net = Encoder(dropout=0.0)
        if part is not None:
            split(net, part, find_plan(net, part.size()))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            with computing(), torch.autocast("cpu", torch.bfloat16):
                output = net(*inputs_of("encoder", torch.float32))
                loss = (output.float() - 1).square().mean()
            with computing():
                loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
    return losses


def leaving(mesh):
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x).roll(1, 0), self.c(self.b(x))

    net = Leaves()
    split(net, mesh, {"a": "column", "b": "column", "c": "row"})
    try:
        with computing():
            net(torch.ones(3, 4))
    except ConfigError as error:
        return str(error)
    return "nothing"


class Scaled(nn.Module):
    """A scale between a column and a row, which begins frozen."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)

    def forward(self, x):
        return self.fc2(self.fc1(x) * self.scale)


def thawed(mesh):
    """The gradient of a whole parameter that is trained only after the layers around it were split."""
    torch.manual_seed(8)
    net = Scaled()
    if mesh is not None:
        split(net, mesh, {"fc1": "column", "fc2": "row"})
    with computing():
        net(torch.ones(4, 6)).sum().backward()
    frozen, net.scale.requires_grad = net.scale.grad, True
    with computing():
        net(torch.ones(4, 6)).sum().backward()
    return frozen, net.scale.grad


def on_a_rank(runs, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    mesh = init_device_mesh("cpu", (world.size,))
    found = {each: run(*each, mesh) for each in RUNS[runs]}
    found["sent"] = {
        case: sent(mesh, case)
        for case in CASES
        if (case in ON_FOUR_RANKS and case != "nano, viewed") or (world.size == 2 and "gpt" in case)
    }
    found["autocast"], found["leaving"], found["thawed"] = autocast(mesh), leaving(mesh), thawed(mesh)
    net = Encoder()
    split(net, mesh, find_plan(net, world.size))
    found["local"] = {name: tuple(getattr(p, "to_local", lambda p=p: p)().shape) for name, p in net.named_parameters()}
    copy.deepcopy(net)
    collective.close()
    return found


@pytest.fixture(scope="module")
def of_ranks(ranks):
    """A function of a name of ``RUNS`` that gives what came of them on each rank."""
    return functools.cache(
        lambda runs: ranks.together(functools.partial(on_a_rank, runs), 4 if runs == 4 else 2, "torch")
    )


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)])
def together(of_ranks, request):
    return request.param, of_ranks(request.param)


@pytest.mark.parametrize(
    ("runs", "case", "dtype", "optimizer"),
    [
        pytest.param(runs, *run, marks=() if runs == 2 else pytest.mark.slow, id=f"{runs}-{run[0]}-{run[1]}-{run[2]}")
        for runs in RUNS
        for run in RUNS[runs]
    ],
)
def test_split_layers_compute_and_learn_what_whole_ones_do(of_ranks, runs, case, dtype, optimizer):
    torch.set_num_threads(1)
    wanted = run(case, dtype, optimizer, None)
    bounds = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 2e-6}
    for rank in of_ranks(runs):
        found = rank[case, dtype, optimizer]
        assert found.keys() == wanted.keys()
        if (dtype, optimizer) == (torch.float32, "adamw"):
            _same_key_biases(found["weights"], wanted["weights"])
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], **bounds)


def _same_key_biases(found, wanted):
    """Compare the biases of keys by themselves, and give them the same values.

    A key's bias adds the same to all scores of a query, which softmax takes off again: its gradient is zero but for
    rounding (1e-18 in float64), whose sign depends on the order of a sum, and AdamW moves by up to its rate a step
    whatever the gradient's size. Two runs may part by twice that, those of one rank in float32 and float64 likewise.
    """
    for name, bias in wanted.items():
        packed = name.endswith(("in_proj_bias", "c_attn.bias"))
        if packed or ".k.bias" in name:
            keys = slice(16, 32) if packed else slice(None)
            torch.testing.assert_close(found[name][keys], bias[keys], rtol=0, atol=2 * 4 * 0.01)
            found[name] = torch.cat([found[name][:16], bias[keys], found[name][32:]]) if keys.start else bias


def test_ranks_send_the_bytes_that_the_formula_says(together):
    size, found = together
    for rank in found:
        for case, (told, counted, evaluated, calls) in rank["sent"].items():
            # weight and bias of the norm of a head in each of 2 blocks are whole, and their gradients are joined
            features = (8 if "two heads" in case else 4) if "gpt" in case else 0
            norms = 2 * 2 * features * 4 * 2 * (size - 1) / size
            assert counted == told + norms
            # by heads, by rows and by vocabulary, each as many as by columns, which send in the backward pass alone
            assert evaluated <= told * (2 / 3 if case == "nano, flash" else 1 / 2)
            assert all("all_reduce" in call for call in calls)


def test_each_rank_holds_its_part(together):
    size, found = together
    for rank in found:
        held = rank["local"]
        assert held["encoder.layers.0.self_attn.in_proj_weight"] == (3, 16 // size, 16)
        assert held["encoder.layers.0.self_attn.out_proj.weight"] == (16, 16 // size)
        assert held["encoder.layers.1.linear1.weight"] == (32 // size, 16)
        assert held["encoder.layers.1.linear2.weight"] == (16, 32 // size)
        assert held["encoder.layers.1.norm1.weight"] == (16,)


def test_autocast_gives_the_losses_of_whole_layers(together):
    for rank in together[1]:
        whole_losses, split_losses = rank["autocast"]
        assert split_losses == pytest.approx(whole_losses, rel=0.02)


def test_a_parameter_that_was_frozen_when_layers_were_split_gets_its_whole_gradient(together):
    frozen, gradient = thawed(None)
    assert frozen is None
    for rank in together[1]:
        frozen, of_rank = rank["thawed"]
        assert frozen is None
        assert type(of_rank) is torch.Tensor
        torch.testing.assert_close(of_rank, gradient)


def test_a_part_that_leaves_the_model_is_refused(together):
    for rank in together[1]:
        assert "no row joins what a column of ['a', 'b'] gives" in rank["leaving"]
