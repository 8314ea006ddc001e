"""Gradients of copies: means over ranks, sent while the backward pass goes on, whatever a rank lacks."""

from __future__ import annotations

import contextlib
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from sparkdl.collective import open_collective
from sparkdl.errors import ConfigError
from sparkdl.strategies.copies import CopiesAverage

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def layers():
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(4))  # two buckets of a MiB or so


def rows(rank):
    return torch.randn(3, 300, generator=torch.Generator().manual_seed(rank))


def loss_of(model, used, x):
    for number in used:
        x = torch.tanh(model[number](x))
    return x.sum()


# By case, the layers that each rank's pass goes through.
USED = {
    "all": ((0, 1, 2, 3), (0, 1, 2, 3)),
    "none has the last": ((0, 1, 2), (0, 1, 2)),
    "one lacks some": ((0, 1, 2), (1,)),
    "one has no rows": ((0, 1, 2), ()),
}


def averaged(case, world):
    model, used = layers(), USED[case][world.rank]
    average = CopiesAverage(
        {p: p for p in model.parameters()}, dist.group.WORLD, lambda doing: contextlib.nullcontext()
    )
    left = []
    launch = average._launch
    average._launch = lambda: (left.append("in the pass" if passing else "at the end"), launch())
    steps = []
    for _ in range(2):
        passing = True
        if used:
            loss_of(model, used, rows(world.rank)).backward()  # a pass before the last one: nothing leaves
            assert left == [] or steps
            average.begin()
            loss_of(model, used, rows(world.rank + 10)).backward()
        passing = False
        average.finish()
        steps.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for parameter in model.parameters():
            parameter.grad = None
    average.close()
    loss_of(model, (0,), rows(0)).backward()
    return steps, left


def expected(case):
    model = layers()
    for rank, used in enumerate(USED[case]):
        for seed in (rank, rank + 10) if used else ():
            loss_of(model, used, rows(seed)).backward()
    return [None if p.grad is None else p.grad / 2 for p in model.parameters()]


def frozen(world):
    """A layer that takes gradients from the second step on."""
    model = layers()
    model[1].requires_grad_(False)
    average = CopiesAverage(
        {p: p for p in model.parameters()}, dist.group.WORLD, lambda doing: contextlib.nullcontext()
    )
    steps = []
    for _ in range(2):
        average.begin()
        loss_of(model, (0, 1, 2), rows(world.rank)).backward()
        average.finish()
        steps.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        model[1].requires_grad_(True)
    return steps


def twice(world):
    model = layers()
    average = CopiesAverage(
        {p: p for p in model.parameters()}, dist.group.WORLD, lambda doing: contextlib.nullcontext()
    )
    average.begin()
    loss_of(model, (0, 1, 2, 3), rows(world.rank)).backward()
    try:
        loss_of(model, (0, 1, 2, 3), rows(world.rank)).backward()
    except ConfigError as error:
        average.finish()
        return str(error)
    return "sent a step's gradients, and lost what came after"


def on_a_rank(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    results = {case: averaged(case, world) for case in USED}
    results |= {"frozen": frozen(world), "twice": twice(world)}
    collective.close()
    return results


@pytest.fixture(scope="module")
def together(ranks):
    return ranks.together(on_a_rank, 2, "torch")


@pytest.mark.parametrize("case", USED)
def test_gradients_are_means_over_the_ranks_and_none_where_no_rank_has_one(together, case):
    for rank in together:
        for gradients in rank[case][0]:
            for gradient, wanted in zip(gradients, expected(case), strict=True):
                assert (gradient is None) == (wanted is None)
                if wanted is not None:
                    torch.testing.assert_close(gradient, wanted)


def test_buckets_leave_within_the_last_pass_of_a_step(together):
    for rank in together:
        assert len(rank["all"][1]) > 2
        assert set(rank["all"][1]) == {"in the pass"}
        assert set(rank["none has the last"][1]) == {"at the end"}  # it shares the first bucket, and the rest waits


def test_a_layer_that_is_thawed_is_averaged_from_then_on(together):
    for rank in together:
        first, second = rank["frozen"]
        assert [gradient is None for gradient in first] == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2
        assert [gradient is None for gradient in second] == [False] * 6 + [True] * 2
    torch.testing.assert_close(together[0]["frozen"], together[1]["frozen"])


def test_a_gradient_after_the_last_one_was_sent_is_refused(together):
    for rank in together:
        assert "got a gradient after the last one of the step was sent" in rank["twice"]
