"""One contract, three implementations, in real processes of 1, 2 and 3 ranks."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
import torch

from sparkdl.config import SyncConfig
from sparkdl.errors import ConfigError

CASES = [("solo", 1), *[(backend, size) for backend in ("torch", "horovod") for size in (1, 2, 3)]]
every_case = pytest.mark.parametrize(("backend", "size"), CASES, ids=lambda value: str(value))


def refusal(reduce):
    """What a reduction refuses; its number where it does not."""
    try:
        return reduce().item()
    except ConfigError as error:
        return str(error)


def exchange(collective):
    """Everything but gradients."""
    world = collective.world
    rank, size = world.rank, world.size
    seen = {"name": collective.name, "rank": rank, "size": size}
    tensors = [torch.full((2, 3), float(rank + 1)), torch.tensor(rank), torch.tensor([rank > 0] * 3), torch.empty(0)]
    tensors.append(torch.full((3, 2), float(rank)).t())
    root = size - 1
    collective.broadcast(tensors, root=root)
    seen["broadcast"] = [tensor.tolist() for tensor in tensors]
    seen["object"] = collective.broadcast_object({"from": rank, "long": "x" * 100_000}, root=root)["from"]
    seen["gathered"] = collective.all_gather_object(("rank", rank, "y" * rank))
    mine = torch.tensor([[1.0, rank]], dtype=torch.float64)
    for op in ("sum", "mean", "min", "max"):
        seen[op] = collective.all_reduce(mine, op).tolist()
    seen["kept"] = mine.tolist()
    seen["integers"] = collective.all_reduce(torch.tensor([2**53 + 1 + rank]), "max").item()
    seen["int dtype"] = str(collective.all_reduce(torch.tensor([1], dtype=torch.int16)).dtype)
    seen["small sum"] = refusal(lambda: collective.all_reduce(torch.tensor([100], dtype=torch.int8)))
    seen["unsigned"] = refusal(lambda: collective.all_reduce(torch.tensor([2**63 + rank], dtype=torch.uint64), "max"))
    seen["half"] = collective.all_reduce(torch.ones(3, dtype=torch.bfloat16)).tolist()
    seen["mean of ints"] = collective.all_reduce(torch.tensor([rank]), "mean").item()
    seen["weighted"] = collective.all_reduce(torch.tensor([float(rank)]), "mean", weight=float(rank + 1)).item()
    time.sleep(0.05 if rank == root else 0.0)
    seen["entered"] = time.monotonic()  # one clock for all processes of a host
    collective.barrier()
    seen["left"] = time.monotonic()
    return seen


@every_case
def test_every_operation_agrees(run_collective, backend, size):
    values = run_collective(exchange, size, backend)
    assert min(seen["left"] for seen in values) >= max(seen["entered"] for seen in values), (
        "nobody leaves a barrier early"
    )
    for rank, seen in enumerate(values):
        last, everyone = size - 1, range(size)
        assert seen["name"] == backend
        assert (seen["rank"], seen["size"]) == (rank, size)
        assert seen["broadcast"] == [
            [[float(size)] * 3] * 2, last, [last > 0] * 3, [], [[float(last)] * 3] * 2,
        ]  # fmt: skip
        assert seen["object"] == last
        assert seen["gathered"] == [("rank", other, "y" * other) for other in everyone]
        assert seen["sum"] == [[size, sum(everyone)]]
        assert seen["mean"] == [[1.0, sum(everyone) / size]]
        assert seen["min"] == [[1.0, 0.0]]
        assert seen["max"] == [[1.0, float(last)]]
        assert seen["kept"] == [[1.0, rank]]
        assert seen["integers"] == 2**53 + 1 + last
        assert seen["int dtype"] == "torch.int16"
        too_large = f"a sum over the ranks lies in {100 * size}..{100 * size}, and torch.int8 holds -128..127: reduce a"
        assert seen["small sum"] == (100 if size == 1 else f"{too_large} tensor of torch.int64")
        assert seen["unsigned"].startswith("op='max' of torch.uint64 is not supported")
        assert seen["half"] == [float(size)] * 3
        assert seen["mean of ints"] == sum(everyone) / size
        weights = sum(other + 1 for other in everyone)
        assert seen["weighted"] == pytest.approx(sum(other * (other + 1) for other in everyone) / weights)


def few_numbers(collective):
    """Sums of 1 and of 4,096 numbers that no order adds up exactly, while a long message is under way."""
    generator = torch.Generator().manual_seed(collective.world.rank)
    mine = torch.randn(4096, generator=generator) * 10 ** torch.randint(-6, 6, (4096,), generator=generator)
    long = torch.ones(1 << 20)
    under_way = collective.start_all_reduce(long, "sum", "long")
    together = collective.all_reduce(mine)
    alone = [collective.all_reduce(mine[place : place + 1]).item() for place in range(0, 4096, 500)]
    under_way.wait()
    return mine.double(), together, alone, long[:3].tolist()


@pytest.mark.parametrize(("backend", "size"), [("torch", 2), ("torch", 3), ("torch", 4), ("horovod", 3)])
def test_a_sum_of_few_is_the_same_on_all_ranks_whatever_travels_beside(run_collective, backend, size):
    results = run_collective(few_numbers, size, backend)
    exact = sum(mine for mine, *_ in results)
    spread = sum(mine.abs() for mine, *_ in results)
    for _, together, alone, long in results:
        assert torch.equal(together, results[0][1])
        assert ((together.double() - exact).abs() <= 1e-6 * spread).all()
        assert alone == together[::500].tolist()
        assert long == [float(size)] * 3


def gradients(collective, *, empty_rank):
    """A parameter all ranks use, one that rank 0 alone uses, one that nobody uses."""
    torch.manual_seed(collective.world.rank)
    rank = collective.world.rank
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, bias=False) for name in ("all", "first", "none")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = collective.wrap(model, optimizer)
    start = [p.detach().clone() for p in model.parameters()]
    steps = []
    for step in range(4):
        optimizer.zero_grad()
        row = torch.full((1, 2), float(rank + 1 + step))
        if rank != empty_rank:
            with sync.accumulate():
                sync.model["all"](row).sum().backward()
            loss = sync.model["all"](row).sum()
            if rank == 0:
                loss = loss + sync.model["first"](row).sum()
            loss.backward()
        sync.synchronize()
        steps.append([None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()])
    state = json.loads(json.dumps(sync.state_dict()))
    sync.close()
    again = collective.wrap(model, optimizer)
    again.load_state_dict(state)
    kept = again.state_dict() == state
    again.close()
    return [p.tolist() for p in start], steps, kept


@every_case
@pytest.mark.parametrize("empty_rank", [None, 0, 1])
def test_gradients_are_the_mean_of_what_ranks_have(run_collective, backend, size, empty_rank):
    values = run_collective(partial(gradients, empty_rank=empty_rank), size, backend)
    starts = [start for start, _, _ in values]
    assert all(start == starts[0] for start in starts), "wrap() starts every rank from rank 0's weights"
    for _, steps, kept in values:
        assert kept, "what was learned of the order of gradients is kept"
        for step, (everywhere, first, nobody) in enumerate(steps):
            inputs = [rank + 1 + step for rank in range(size) if rank != empty_rank]
            if inputs:
                assert everywhere == pytest.approx([2 * sum(inputs) / size] * 2)
            else:
                assert everywhere is None
            assert first == (None if empty_rank == 0 else pytest.approx([(1 + step) / size] * 2))
            assert nobody is None


def overlapping(collective):
    """Two parameters whose gradients autograd makes views of one tensor: in one bucket, in one each, over a wire."""
    settings = SyncConfig(), SyncConfig(bucket_mib=1e-5), SyncConfig(shared_memory=False)
    return [overlapping_steps(collective, config) for config in settings]


def overlapping_steps(collective, config):
    rank = collective.world.rank
    one, two = (torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)) for _ in range(2))
    model = torch.nn.ParameterList([one, two])
    sync = collective.wrap(model, torch.optim.SGD([one, two], lr=1.0), config)
    steps, factors = [], torch.arange(1.0, 5.0, dtype=torch.float64) * (rank + 1)

    def backward():
        ((one.view(-1) + two.view(-1)) * factors).sum().backward()

    shared = []
    for passes in (2, 1, 1):
        one.grad = two.grad = None
        for _ in range(passes - 1):
            with sync.accumulate():
                backward()
                shared.append(one.grad.data_ptr() == two.grad.data_ptr())
        backward()
        sync.synchronize()
        for param in (one, two):
            param.grad.mul_(2.0)  # as clipping does
        steps.append([param.grad.flatten().tolist() for param in (one, two)])
    sync.close()
    return shared, steps


@every_case
def test_gradients_in_the_same_memory_count_once(run_collective, backend, size):
    mean = sum(rank + 1 for rank in range(size)) / size
    for ways in run_collective(overlapping, size, backend):
        for shared, steps in ways:
            assert shared == [True], "torch no longer gives these two the same memory: find another pair"
            for passes, grads in zip((2, 1, 1), steps, strict=True):
                assert grads == [pytest.approx([2 * passes * mean * factor for factor in (1, 2, 3, 4)])] * 2
