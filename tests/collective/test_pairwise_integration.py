"""Messages between all ranks give what torch's own collectives give, to the bit where nothing is added up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sparkdl.collective.pairwise import all_gather, all_to_all, give_to_all, reduce_scatter

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def numbers(rank, length, dtype):
    made = torch.arange(length) * 7 + rank * 1000
    return (made % 100 - 50).to(dtype)


def gathered(collective):
    rank, size, group = collective.world.rank, collective.world.size, dist.group.WORLD
    same = []
    for dtype in DTYPES:
        for length in (1, 5, 300_000):
            part = numbers(rank, length, dtype)
            ours, theirs = torch.empty(size * length, dtype=dtype), torch.empty(size * length, dtype=dtype)
            all_gather(ours, part, group)
            dist.all_gather_single(theirs, part)
            in_place = torch.zeros(size * length, dtype=dtype)
            in_place.view(size, -1)[rank] = part
            all_gather(in_place, in_place.view(size, -1)[rank], group)
            same.append(torch.equal(ours, theirs) and torch.equal(in_place, theirs))
    return same


def scattered(collective):
    rank, size, group = collective.world.rank, collective.world.size, dist.group.WORLD
    same = []
    for dtype in DTYPES:
        for length in (1, 5, 300_000):
            whole = numbers(rank, size * length, dtype)
            before, ours = whole.clone(), torch.empty(length, dtype=dtype)
            reduce_scatter(ours, whole, group)
            parts = [numbers(other, size * length, torch.float64).view(size, -1)[rank] for other in range(size)]
            same.append(torch.equal(ours.double(), sum(parts)) and torch.equal(whole, before))
    return same


def exchanged(collective):
    """Rank r sends (r + to) % 3 rows to each: some pairs exchange nothing, or one way alone."""
    rank, size, group = collective.world.rank, collective.world.size, dist.group.WORLD
    sent, received = [(rank + other) % 3 for other in range(size)], [(other + rank) % 3 for other in range(size)]
    rows = torch.tensor([[100.0 * rank + other, 0.5] for other in range(size) for _ in range(sent[other])])
    rows = rows.view(sum(sent), 2)
    ours = torch.empty(sum(received), 2)
    all_to_all(ours, rows, received, sent, group)
    expected = [[100.0 * other + rank, 0.5] for other in range(size) for _ in range(received[other])]
    return ours.tolist() == expected


def in_groups(collective):
    """Two groups of two, which exchange at the same time."""
    rank = collective.world.rank
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    output = torch.empty(2)
    all_gather(output, torch.tensor([float(rank)]), groups[rank % 2])
    total = torch.empty(1)
    reduce_scatter(total, torch.tensor([float(rank), 10.0 * rank]), groups[rank % 2])
    return output.tolist(), total.item()


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("job", [gathered, scattered])
def test_pairs_give_what_torch_gives(run_collective, job, size):
    for same in run_collective(job, size, "torch"):
        assert all(same)
        assert len(same) == 9


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_go_to_their_ranks(run_collective, size):
    assert run_collective(exchanged, size, "torch") == [True] * size


def test_pairs_are_of_a_group(run_collective):
    assert run_collective(in_groups, 4, "torch") == [
        ([0.0, 2.0], 2.0), ([1.0, 3.0], 4.0), ([0.0, 2.0], 20.0), ([1.0, 3.0], 40.0),
    ]  # fmt: skip


def given(collective):
    """Parts of uneven lengths, of which one is empty, and of several dtypes."""
    rank, size, group = collective.world.rank, collective.world.size, dist.group.WORLD
    wanted = [numbers(other, 5 * other, DTYPES[other % 3]) for other in range(size)]
    parts = [part.clone() if other == rank else torch.empty_like(part) for other, part in enumerate(wanted)]
    give_to_all(parts, group)
    return all(torch.equal(part, other) for part, other in zip(parts, wanted, strict=True))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gets_the_parts_of_all(run_collective, size):
    assert run_collective(given, size, "torch") == [True] * size
