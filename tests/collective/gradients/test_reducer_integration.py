"""Gradient synchronisation in real ranks: N ranks train the weights that one rank trains."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import SyncConfig
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.world import SOLO

BOTH = pytest.mark.parametrize("backend", ["torch", "horovod"])
ROWS = (7, 12, 1, 5)  # rows of the global batches: none divides by 2 and 3, and one leaves ranks without any


def mine(batch, world):
    """This rank's rows of a global batch, and what its mean loss must be weighted by."""
    each = -(-len(batch[0]) // world.size)
    rows = [tensor[world.rank * each : (world.rank + 1) * each] for tensor in batch]
    return rows, len(rows[0]) * world.size / len(batch[0])


def one():
    return open_collective(SOLO)


class Mixed(torch.nn.Module):
    """Embedding, convolution in channels_last, tied weights, a layer nobody uses, optionally batch norm."""

    def __init__(self, *, sparse=False, norm=False):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8, sparse=sparse)
        self.conv = torch.nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4) if norm else torch.nn.Identity()
        self.first = torch.nn.Linear(16, 16)
        self.second = torch.nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(24, 1)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, ids, image):
        picture = self.norm(self.conv(image)).relu().mean(3).flatten(1)
        return self.head(torch.cat([self.embed(ids), self.second(torch.tanh(self.first(picture)))], 1))[:, 0]


def train(collective, *, dtype, config=None, sparse=False, norm=False, adam=False):
    torch.manual_seed(7)
    model = Mixed(sparse=sparse, norm=norm).to(dtype)
    generator = torch.Generator().manual_seed(3)
    if collective.world.rank:
        with torch.no_grad():
            model.head.weight.zero_()  # wrap() must bring it back
    if sparse:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elif adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = collective.wrap(model, optimizer, config)
    for rows in ROWS * 2:
        ids = torch.randint(0, 11, (rows,), generator=generator)
        image = torch.randn(rows, 2, 4, 4, generator=generator).to(dtype)
        target = torch.randn(rows, generator=generator).to(dtype)
        (ids, image, target), weight = mine((ids, image, target), collective.world)
        optimizer.zero_grad()
        if weight or sync.forward_is_collective:
            out = sync.model(ids, image)
            loss = (out - target).square().mean() * weight if weight else out.sum() * 0
            loss.backward()
        sync.synchronize()
        if not sparse:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    sync.close()
    return {name: tensor.detach().double() for name, tensor in model.state_dict().items()}


def assert_same(values, expected, tolerance):
    for value in values:
        for name, tensor in expected.items():
            largest = tensor.abs().max().clamp(min=1e-3)
            worst = ((value[name] - tensor).abs().max() / largest).item()
            assert worst <= tolerance, f"{name} differs by {worst:.1e}"


@BOTH
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "sockets"])
@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"),
    [
        pytest.param(2, torch.float64, 1e-10, id="2-f64"),
        pytest.param(3, torch.float64, 1e-10, id="3-f64"),
        pytest.param(2, torch.float32, 1e-5, id="2-f32", marks=pytest.mark.slow),
        pytest.param(3, torch.float32, 1e-5, id="3-f32"),
    ],
)
def test_n_ranks_equal_one_rank(run_collective, backend, size, shared, dtype, tolerance):
    job = partial(train, dtype=dtype, config=SyncConfig(shared_memory=shared, bucket_mib=0.001))
    assert_same(run_collective(job, size, backend), train(one(), dtype=dtype), tolerance)


@BOTH
def test_adam_too(run_collective, backend):
    job = partial(train, dtype=torch.float64, adam=True)
    assert_same(run_collective(job, 2, backend), job(one()), 1e-10)


@BOTH
def test_synchronised_batch_norm_equals_one_rank(run_collective, backend):
    job = partial(train, dtype=torch.float64, norm=True, config=SyncConfig(sync_batch_norm=True))
    expected = job(one())
    assert_same(run_collective(job, 3, backend), expected, 1e-10)
    own = partial(train, dtype=torch.float64, norm=True, config=SyncConfig(sync_batch_norm=False))
    without = run_collective(own, 2, backend)
    assert (without[0]["norm.running_mean"] - expected["norm.running_mean"]).abs().max() > 1e-3


@BOTH
def test_sparse_embedding_gradients(run_collective, backend):
    job = partial(train, dtype=torch.float64, sparse=True)
    assert_same(run_collective(job, 3, backend), job(one()), 1e-10)


def sparse_gradient(collective):
    """One table of which few rows are touched, one of which most are, one that rank 1 alone uses."""
    rank = collective.world.rank
    tables = torch.nn.ModuleList([torch.nn.Embedding(rows, 2, sparse=True) for rows in (1000, 3, 5)])
    sync = collective.wrap(tables, torch.optim.SparseAdam(tables.parameters()))
    loss = tables[0](torch.tensor([rank, 500])).sum() + tables[1](torch.tensor([0, 1, 2, rank])).sum()
    if rank == 1:
        loss = loss + tables[2](torch.tensor([4])).sum()
    loss.backward()
    sync.synchronize()
    grads = [table.weight.grad for table in tables]
    dense = [grad.to_dense()[:, 0] for grad in grads]
    rows = [sorted(grad.coalesce().indices()[0].tolist()) for grad in grads]
    return dense[0][[0, 1, 2, 500]].tolist(), dense[1].tolist(), dense[2].tolist(), rows


@BOTH
def test_sparse_gradients_stay_sparse(run_collective, backend):
    for few, most, lone, rows in run_collective(sparse_gradient, 2, backend):
        assert few == [0.5, 0.5, 0.0, 1.0]
        assert most == [1.5, 1.5, 1.0]
        assert lone == [0.0, 0.0, 0.0, 0.0, 0.5]
        assert rows == [[0, 1, 500], [0, 1, 2], [4]]


def sparse_gradient_of_others(collective):
    """A table whose rows all ranks but the last touch."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    sync = collective.wrap(table, torch.optim.SGD(table.parameters(), lr=0.1))
    if collective.world.rank < collective.world.size - 1:
        table(torch.arange(4)).sum().backward()
    sync.synchronize()
    return table.weight.grad.to_dense().tolist()


@BOTH
def test_a_rank_may_touch_no_row_of_a_table_that_the_others_touch_all_of(run_collective, backend):
    for mean in run_collective(sparse_gradient_of_others, 3, backend):
        assert mean == [[pytest.approx(2 / 3)] * 2] * 4


def compressed(collective, *, kind):
    layer = torch.nn.Linear(1000, 1, bias=False)
    sync = collective.wrap(layer, torch.optim.SGD(layer.parameters(), lr=0.1), SyncConfig(compression=kind))
    row = torch.randn(1, 1000, generator=torch.Generator().manual_seed(collective.world.rank))
    sync.model(row).sum().backward()
    sync.synchronize()
    assert layer.weight.grad.dtype == torch.float32
    return row[0], layer.weight.grad[0]


@BOTH
@pytest.mark.parametrize(("kind", "bits"), [("fp16", 11), ("bf16", 8)])
def test_compression_sends_half_the_bits(run_collective, backend, kind, bits):
    values = run_collective(partial(compressed, kind=kind), 2, backend)
    mean = sum(row for row, _ in values) / 2
    size = sum(row.abs() for row, _ in values) / 2
    for _, grad in values:
        assert torch.equal(grad, values[0][1])
        error = ((grad - mean).abs() / size.clamp(min=0.01)).max().item()
        assert 2.0 ** -(bits + 3) < error < 2.0 ** -(bits - 3), "rounded, and to the precision of the format"


def twice(collective, *, shared):
    layer = torch.nn.Linear(4, 1)
    sync = collective.wrap(layer, torch.optim.SGD(layer.parameters(), lr=0.1), SyncConfig(shared_memory=shared))
    sync.model(torch.ones(1, 4)).sum().backward()
    sync.model(torch.ones(1, 4)).sum().backward()
    sync.synchronize()
    return layer.weight.grad[0].tolist()


def test_a_second_backward_pass_outside_accumulate_is_refused_where_the_first_was_sent(run_collective):
    with pytest.raises(ConfigError, match=r"accumulate\(\)"):
        run_collective(partial(twice, shared=False), 2, "torch")


@pytest.mark.parametrize("size", [2, 3])
def test_a_second_backward_pass_counts_where_nothing_was_sent(run_collective, size):
    for grad in run_collective(partial(twice, shared=True), size, "torch"):
        assert grad == [2.0] * 4


def accumulated(collective, *, set_to_none):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 1, bias=False).double()
    sync = collective.wrap(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    grads = []
    for step in range(3):
        layer.zero_grad(set_to_none=set_to_none)
        rows = torch.arange(16.0, dtype=torch.float64).view(4, 4) + 10 * collective.world.rank + step
        with sync.accumulate():
            for row in rows[:-1]:
                sync.model(row).sum().backward()
        local = layer.weight.grad.clone()
        sync.model(rows[-1]).sum().backward()
        sync.synchronize()
        grads.append((local, layer.weight.grad.clone(), rows.sum(0)))
    return grads


@BOTH
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_sends_once(run_collective, backend, set_to_none):
    values = run_collective(partial(accumulated, set_to_none=set_to_none), 2, backend)
    for first, second in zip(*values, strict=True):
        mean = (first[2] + second[2]) / 2
        for local, grad, everything in (first, second):
            assert not torch.allclose(local, mean)
            assert (local <= everything).all()
            torch.testing.assert_close(grad[0], mean)


def thaw(collective):
    """A backbone that is frozen for two steps, then trained; and a parameter that the optimizer alone knows."""
    torch.manual_seed(collective.world.rank)
    backbone, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    scale = torch.nn.Parameter(torch.tensor(1.0 + collective.world.rank))
    model = torch.nn.Sequential(backbone, head)
    backbone.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    sync = collective.wrap(model, optimizer)
    for step in range(5):
        if step == 2:
            backbone.requires_grad_(True)
        optimizer.zero_grad()
        (sync.model(torch.randn(4, 3)) * scale).sum().backward()
        sync.synchronize()
        optimizer.step()
    return [p.detach().clone() for p in [*model.parameters(), scale]]


@BOTH
def test_parameters_that_are_unfrozen_later_stay_equal(run_collective, backend):
    first, second = run_collective(thaw, 2, backend)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def states(collective):
    rank = collective.world.rank
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (rank + 1))
    for _ in range(rank + 1):
        optimizer.zero_grad()
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    before = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    collective.wrap(model, optimizer).close()
    buffers = [before, {name: buffer.tolist() for name, buffer in model.named_buffers()}]
    state = optimizer.state_dict()
    return (
        buffers,
        state["param_groups"][0]["lr"],
        [(s["step"].item(), s["exp_avg"].tolist()) for s in state["state"].values()],
    )


@BOTH
def test_buffers_and_optimizer_state_come_from_rank_0(run_collective, backend):
    (buffers, *first), (others, *second) = run_collective(states, 2, backend)
    assert others[0] != buffers[0]
    assert others[1] == buffers[1] == buffers[0]
    assert first[0] == 0.1
    assert first == second
    assert first[1][0][0] == 1


def different_shapes(collective):
    width = 4 if collective.world.rank < 2 else 5
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, width))
    collective.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


@BOTH
def test_mismatched_shapes_name_the_first_parameter(run_collective, backend):
    values = run_collective(different_shapes, 3, backend, raw=True)
    for value in values:
        assert isinstance(value, CheckpointError)
        assert str(value) == str(values[0])
        assert "1.weight is (4, 4)" in str(value)
        assert "rank 2 has 1.weight (5, 4)" in str(value)


def different_optimizers(collective):
    model = torch.nn.Linear(3, 4)
    params = list(model.parameters())
    groups = params if collective.world.rank == 0 else [{"params": params[:1]}, {"params": params[1:]}]
    collective.wrap(model, torch.optim.SGD(groups, lr=0.1))


def test_mismatched_optimizers_are_refused(run_collective):
    for value in run_collective(different_optimizers, 2, "torch", raw=True):
        assert isinstance(value, CheckpointError)
        assert "[2]" in str(value)
        assert "[1, 1]" in str(value)


def lazy(collective):
    model = torch.nn.LazyLinear(2)
    collective.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_lazy_model_is_refused(run_collective):
    for value in run_collective(lazy, 2, "torch", raw=True):
        assert isinstance(value, ConfigError)
        assert "run one batch" in str(value)


def closed(collective):
    """What is left on a model after close(): nothing; and a deep copy never talks to other ranks."""
    import copy

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    sync = collective.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), SyncConfig(sync_batch_norm=True))
    twin = copy.deepcopy(model)
    if collective.world.rank == 0:
        twin(torch.randn(3, 2))
    sync.close()
    if collective.world.rank == 0:
        model(torch.randn(3, 2)).sum().backward()
    return [list(module.__dict__.get("forward", ())) for module in model.modules()], model.state_dict().keys()


@BOTH
def test_close_leaves_the_model_as_it_was(run_collective, backend):
    for forwards, names in run_collective(closed, 2, backend):
        assert forwards == [[], [], []]
        assert list(names)[:2] == ["0.weight", "0.bias"]


def starts(collective, *, bucket_mib):
    """What begins, and what autograd reaches, in the second step, in order."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
    config = SyncConfig(bucket_mib=bucket_mib, shared_memory=False)
    sync = collective.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    seen = []
    begin = collective.start_all_reduce
    collective.start_all_reduce = lambda *args, **kwargs: seen.append("message") or begin(*args, **kwargs)
    for index, layer in enumerate(model):
        layer.weight.register_hook(lambda grad, index=index: seen.append(index))
    for _ in range(2):
        seen.clear()
        sync.model(torch.ones(1, 64)).sum().backward()
        seen.append("end of backward")
        sync.synchronize()
    return seen


@BOTH
def test_buckets_leave_while_the_backward_pass_goes_on(run_collective, backend):
    for seen in run_collective(partial(starts, bucket_mib=2 * 64 * 64 * 4 / 2**20), 2, backend):
        assert seen == [3, 2, "message", 1, 0, "message", "end of backward"]
    for seen in run_collective(partial(starts, bucket_mib=1.0), 2, backend):
        assert seen == [3, 2, 1, 0, "message", "end of backward"]
