"""Normalisation over the global batch: layers of every kind keep on three ranks the statistics that one rank keeps."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from functools import partial

import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import SyncConfig
from sparkdl.errors import ConfigError
from sparkdl.world import SOLO

ROWS = (7, 2, 12, 4)  # over three ranks: 3, 3, 1 rows, then 1, 1, 0, then 4 each, then 2, 2, 0


class Doubling(torch.nn.BatchNorm1d):
    """A class of the user's own with a forward of its own."""

    def forward(self, rows):
        return super().forward(rows) * 2


def frozen(layer):
    """A layer whose weights are not trained, and one in evaluation mode while the model trains."""
    for param in layer.parameters():
        param.requires_grad_(False)
    return layer


LAYERS = {
    "1d": (lambda: torch.nn.BatchNorm1d(6), ()),
    "1d of sequences": (lambda: torch.nn.BatchNorm1d(6), (5,)),
    "2d": (lambda: torch.nn.BatchNorm2d(6), (3, 2)),
    "3d": (lambda: torch.nn.BatchNorm3d(6), (2, 2, 2)),
    "cumulative": (lambda: torch.nn.BatchNorm1d(6, momentum=None), ()),
    "not affine": (lambda: torch.nn.BatchNorm1d(6, affine=False), ()),
    "no running statistics": (lambda: torch.nn.BatchNorm1d(6, track_running_stats=False), ()),
    "evaluating": (lambda: torch.nn.BatchNorm1d(6).eval(), ()),
    "evaluating without statistics": (lambda: torch.nn.BatchNorm1d(6, track_running_stats=False).eval(), ()),
    "frozen": (lambda: frozen(torch.nn.BatchNorm1d(6)), ()),
    "lazy": (lambda: torch.nn.LazyBatchNorm1d(), ()),
    "torch's synchronised": (lambda: torch.nn.SyncBatchNorm(6), (3,)),
    "instance": (lambda: torch.nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (4,)),
}


class Net(torch.nn.Module):
    def __init__(self, make, extra):
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.norm = make()
        self.last = torch.nn.Linear(6, 1)
        self.extra = extra

    def forward(self, rows):
        hidden = self.first(rows).view(*rows.shape[:1], 6, *[1] * len(self.extra))
        ramp = torch.linspace(-1, 1, max(1, torch.Size(self.extra).numel()), dtype=rows.dtype).view(self.extra)
        hidden = self.norm(hidden * (1 + ramp) + hidden.square() * ramp)
        return self.last(torch.tanh(hidden).flatten(2).mean(2) if self.extra else torch.tanh(hidden))


def train(collective, kind, *, config=None):
    torch.manual_seed(11)
    make, extra = LAYERS[kind]
    model = Net(make, extra).double()
    trains = model.norm.training
    if kind == "lazy":
        model(torch.randn(3, 4, dtype=torch.float64))
        model.norm.reset_running_stats()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)
    sync = collective.wrap(model, optimizer, config)
    generator = torch.Generator().manual_seed(5)
    rank, size = collective.world.rank, collective.world.size
    for rows in ROWS * 2:
        x = torch.randn(rows, 4, generator=generator, dtype=torch.float64) + 3
        y = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
        each = -(-rows // size)
        part = slice(rank * each, (rank + 1) * each)
        optimizer.zero_grad()
        if len(x[part]):
            ((model(x[part]) - y[part]).square().sum() * size / rows).backward()
        elif sync.forward_is_collective:
            with sync.weighted(0.0):
                stood_in = model(torch.full((1, 4), float("nan"), dtype=torch.float64)).sum()
            torch.autograd.grad(stood_in, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        sync.synchronize()
        optimizer.step()
    assert model.norm.training == trains
    sync.share_buffers()
    sync.close()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def every_kind(collective, kinds):
    return {kind: train(collective, kind) for kind in kinds}


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), "horovod"])
def test_every_kind_of_layer_equals_one_rank(run_collective, backend):
    kinds = list(LAYERS) if backend == "torch" else ["2d", "instance"]
    for found in run_collective(partial(every_kind, kinds=kinds), 3, backend, timeout=60.0):
        for kind in kinds:
            expected = train(open_collective(SOLO), kind)
            assert found[kind].keys() == expected.keys()
            for name, tensor in expected.items():
                message = f"{kind}: {name}"
                torch.testing.assert_close(
                    found[kind][name], tensor, rtol=1e-9, atol=1e-11, msg=lambda text, what=message: f"{what}: {text}"
                )


def refused(collective, kind, wanted):
    train(collective, kind, config=SyncConfig(sync_batch_norm=wanted))


def test_a_synchronised_layer_and_sync_batch_norm_false_contradict_each_other(run_collective):
    for error in run_collective(partial(refused, kind="torch's synchronised", wanted=False), 2, "torch", raw=True):
        assert isinstance(error, ConfigError)
        assert "layer 'norm' is a SyncBatchNorm" in str(error)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())


def warned(collective, make, wanted):
    """What a wrap of a model with this layer, and two epochs, say."""
    lines = Lines()
    logger = logging.getLogger("sparkdl")
    logger.addHandler(lines)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = collective.wrap(model, optimizer, SyncConfig(sync_batch_norm=wanted))
        collective_forward = sync.forward_is_collective
        for _ in range(2):
            torch.manual_seed(collective.world.rank)
            model(torch.randn(5, 3)).sum().backward()
            sync.synchronize()
            sync.share_buffers()
        sync.close()
        buffers = [buffer.clone() for buffer in model.buffers()]
    finally:
        logger.removeHandler(lines)
    return lines.lines, collective_forward, buffers


class Remembering(torch.nn.Module):
    """Keeps a mean of what it saw, as codebooks and centres of clusters do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("fixed", torch.ones(4))

    def forward(self, rows):
        self.seen.lerp_(rows.detach().mean(0), 0.1)
        return rows - self.seen


def spectral():
    return torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("make", "wanted", "said"),
    [
        (lambda: torch.nn.BatchNorm1d(4), None, ""),
        (lambda: torch.nn.BatchNorm1d(4), False, "sync_batch_norm=False: layer '1'"),
        (lambda: Doubling(4), None, "layer '1', a Doubling, has a forward of its own"),
        (Remembering, None, "buffer '1.seen' differs between ranks"),
        (spectral, None, ""),
        (torch.nn.Dropout, None, ""),
    ],
    ids=["batch norm", "switched off", "own forward", "own buffer", "spectral norm", "dropout"],
)
def test_what_ranks_do_not_share_is_said_once_and_rank_0s_is_kept(run_collective, make, wanted, said):
    first, second = run_collective(partial(warned, make=make, wanted=wanted), 2, "torch")
    assert len(first[0]) == bool(said)
    assert said in "".join(first[0])
    assert second[0] == []
    assert first[1] == (not said and make().__class__ is torch.nn.BatchNorm1d)
    for mine, other in zip(first[2], second[2], strict=True):
        assert torch.equal(mine, other)


def test_a_layer_with_a_forward_of_its_own_is_refused_where_synchronisation_is_demanded(run_collective):
    for error in run_collective(partial(warned, make=lambda: Doubling(4), wanted=True), 2, "torch", raw=True):
        assert isinstance(error, ConfigError)
        assert "layer '1', a Doubling, has a forward of its own" in str(error)


def one_row(collective):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    sync = collective.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if collective.world.rank == 0:
        model(torch.randn(1, 3))
    else:
        with sync.weighted(0.0):
            model(torch.randn(1, 3))


def test_a_global_batch_of_one_row_is_refused_on_every_rank(run_collective):
    for error in run_collective(one_row, 2, "torch", raw=True):
        assert isinstance(error, ConfigError)
        assert "layer '1' got one value a channel" in str(error)


def copies(collective):
    """A copy and a pickle made while the layer is synchronised: of torch's own class, and never asking other ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    sync = collective.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    stored = pickle.dumps(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    found = []
    if collective.world.rank == 0:  # alone
        for twin in (copy.deepcopy(model), pickle.loads(stored)):
            found.append((type(twin[1]).__name__, twin.train()(torch.randn(5, 3)).shape))
    sync.close()
    return found, b"sparkdl" in stored or b"sparkdl" in saved.getvalue()


def test_copies_and_pickles_made_during_training_hold_torchs_own_layer(run_collective):
    first, second = run_collective(copies, 2, "torch")
    assert first[0] == [("BatchNorm1d", torch.Size([5, 4]))] * 2
    assert not first[1]
    assert not second[1]
