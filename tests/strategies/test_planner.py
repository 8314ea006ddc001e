"""Estimates: what the formulas give, which strategy comes first, and what a measurement says of a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.nn import MixtureOfExperts
from sparkdl.strategies.mesh_strategy import check_layers
from sparkdl.strategies.planner import (
    NOT_RANKED,
    Link,
    MixtureCosts,
    ModelCosts,
    choose,
    measure_link,
    measure_model,
    rank_strategies,
    simulate_copies,
)
from sparkdl.strategies.stage_balance import Profile
from sparkdl.world import World

SOLO = World(rank=0, size=1)
FAST, SLOW = Link(bandwidth=1e12, latency=0.0), Link(bandwidth=1e6, latency=1e-3)
COSTS = ModelCosts(
    rows=64,
    passes={64: (1.0, 2.0), 32: (0.5, 1.0), 16: (0.25, 0.5), 8: (0.125, 0.25)},
    gradients=(3_000_000, 1_000_000),
    ready=(0.5, 1.0),
    parameter_bytes=4_000_000,
    optimizer_seconds=0.1,
    state_bytes=8_000_000,
    activation_bytes=1000.0,
    flops=1e6,
    blocks=(2_000_000, 2_000_000),
    layers=Profile(("", "1", "2", "3"), (1.0, 1.0, 1.0, 1.0), (0.0, 4000.0, 400.0, 4000.0), (1_000_000,) * 4),
    profile_rows=8,
    splits={2: (1.0, 500.0, 4), 4: "4 does not divide the heads"},
)


def by_name(link, ranks, costs=COSTS, **options):
    plan = rank_strategies(costs, link, ranks, **options)
    return {estimate.strategy: estimate for estimate in [*plan.fitting, *plan.too_large]}


def test_a_ring_sends_each_part_twice_but_for_one():
    link = Link(bandwidth=1e6, latency=0.01)
    assert link.all_reduce(1e6, 4) == pytest.approx(2 * 3 * (0.01 + 0.25))
    assert link.all_gather(1e6, 4) == pytest.approx(3 * (0.01 + 0.25))
    assert link.all_reduce(1e6, 1) == link.all_gather(1e6, 1) == 0.0


def test_copies_over_a_fast_link_take_their_part_of_the_passes():
    one, two = by_name(FAST, 1)["all_reduce"], by_name(FAST, 2)["all_reduce"]
    assert one.seconds == pytest.approx(3.1)
    assert one.efficiency == pytest.approx(1.0)
    assert two.seconds == pytest.approx(1.6, rel=1e-4)
    assert two.sent_bytes == 4_000_000


def test_gradients_are_sent_while_the_backward_pass_goes_on():
    costs = dataclasses.replace(COSTS, gradients=(30_000_000, 30_000_000))
    link = Link(bandwidth=60e6, latency=0.0)
    # 60 MB in buckets of 15: both are full behind their gradient, at half and at the end of a second.
    assert by_name(link, 2, costs)["all_reduce"].seconds == pytest.approx(0.5 + 0.5 + 0.5 + 0.5 + 0.1)


def test_what_ranks_do_not_divide_is_held_and_sent_as_if_they_did():
    costs = dataclasses.replace(COSTS, lengths=((2, 3_000_000), (4, 1_000_000)))
    assert costs.padding(2) == 1.0
    assert costs.padding(4) == 1.75
    plain, padded = (by_name(SLOW, 4, each)["zero2"] for each in (COSTS, costs))
    assert padded.sent_bytes == 1.75 * plain.sent_bytes
    assert padded.memory_bytes - plain.memory_bytes == 0.75 * (16e6 / 4 + 4e6)
    assert padded.seconds > plain.seconds


def test_what_ranks_hold_is_what_the_papers_say():
    wanted = {
        "all_reduce": 16e6,
        "zero1": 8e6 + 8e6 * 0.75,  # whole tensors are dealt, and one has three quarters
        "zero2": 4e6 + 16e6 / 2,
        "fsdp": 16e6 / 2 + 2 * 2e6,  # and the blocks that are gathered
        "tensor": 16e6 / 2,
        "pipeline": 16e6 / 2,
    }
    held = by_name(FAST, 2, dataclasses.replace(COSTS, activation_bytes=0.0))
    assert {name: held[name].memory_bytes for name in wanted} == wanted


def test_stages_of_a_pipeline_fill_and_empty():
    estimate = by_name(FAST, 2)["pipeline"]
    turn = 0.5 * (0.125 + 0.25)  # two equal stages, 8 micro-batches of 8 rows
    assert estimate.seconds == pytest.approx((8 + 1) * turn + 0.05, rel=1e-3)
    assert estimate.sent_bytes == pytest.approx(8 * 400)  # cut where least is sent
    middle = by_name(FAST, 4)["pipeline"]
    assert middle.sent_bytes == pytest.approx(16 * (4000 + 400) / 8 * 4)  # to the stage before and to the one behind


def test_micro_batches_that_take_less_than_steps_do_shorten_a_pipeline():
    costs = dataclasses.replace(COSTS, overheads={"pipeline": -0.1})
    turn = 0.5 * (0.125 + 0.25 - 0.1)
    assert by_name(FAST, 2, costs)["pipeline"].seconds == pytest.approx((8 + 1) * turn + 0.05, rel=1e-3)


def test_what_is_not_ranked_is_estimated_and_said():
    plan = rank_strategies(COSTS, SLOW, 2)
    others = {estimate.strategy: estimate for estimate in plan.others}
    assert others.keys() == NOT_RANKED.keys()
    assert not others.keys() & {estimate.strategy for estimate in [*plan.fitting, *plan.too_large]}
    assert others["diloco"].seconds == pytest.approx(1.6 + SLOW.all_reduce(4e6, 2) / 64)
    assert others["parameter_server"].seconds == pytest.approx(1.6 + 2 * SLOW.send(4e6))
    assert others["local_sgd"].sent_bytes == 4e6 / 16
    held = {"local_sgd": 16e6, "diloco": 24e6, "parameter_server": 16e6 + 4e6 + 3 * 4e6}
    assert {name: others[name].memory_bytes - 1000.0 * 32 for name in held} == held
    assert not rank_strategies(COSTS, SLOW, 1).others


def test_experts_are_ranked_where_a_model_has_some():
    assert "expert" not in by_name(FAST, 2)
    mixture = MixtureCosts(experts=4, expert_bytes=3_000_000, token_bytes=8000.0, choice_bytes=16.0)
    costs = dataclasses.replace(COSTS, mixtures=(mixture,), gradients=(4_000_000,), ready=(1.0,), activation_bytes=0.0)
    expert = by_name(SLOW, 2, costs)["expert"]
    tokens, choices = 8000.0 * 32 / 2, 16.0 * 32
    assert expert.sent_bytes == pytest.approx(tokens + choices + 1_000_000)
    exchange, average = (tokens + choices) / 1e6 + (5 + 2) * 1e-3, SLOW.all_reduce(1e6, 2)
    assert expert.seconds == pytest.approx(1.5 + 0.1 * 2.5 / 4 + exchange + average)
    assert expert.memory_bytes == pytest.approx(4 * 2.5e6)
    copied = by_name(SLOW, 4, costs)["mesh(data=2, expert=2)"]
    tokens, choices = 8000.0 * 16 / 2, 16.0 * 16 * 3
    assert copied.sent_bytes == pytest.approx(tokens + choices + 2 * 1e6 * 3 / 4 + 2 * 1.5e6 / 2)
    exchange = (tokens + choices) / 1e6 + (5 + 2 * 3) * 1e-3
    average = SLOW.all_reduce(1e6, 4) + SLOW.all_reduce(1.5e6, 2)
    assert copied.seconds == pytest.approx(0.75 + 0.1 * 2.5 / 4 + exchange + average)
    assert copied.memory_bytes == expert.memory_bytes
    assert rank_strategies(costs, FAST, 8).impossible["expert"] == "the 4 experts of a mixture do not divide by 8 ranks"


def test_a_message_delays_what_is_computed_beside_it():
    costs = dataclasses.replace(COSTS, gradients=(30_000_000, 30_000_000))
    # Half of the speed is lost while the first bucket travels, a quarter of a second; the second follows the pass.
    link = Link(bandwidth=120e6, latency=0.0, slowed=0.5)
    assert by_name(link, 2, costs)["all_reduce"].seconds == pytest.approx(0.5 + 1.0 + 0.125 + 0.25 + 0.1)


def test_copies_by_simulation_are_the_formula_where_ranks_are_alike():
    link = Link(bandwidth=1e7, latency=1e-3)
    for ranks in (1, 2, 8, 4096):
        exchange = 2 * (ranks - 1) * (1e-3 + 4e6 / ranks / 1e7) if ranks > 1 else 0.0
        costs = dataclasses.replace(COSTS, gradients=(4_000_000,), ready=(1.0,))  # nothing to hide behind
        assert simulate_copies(costs, link, ranks) == pytest.approx(3.1 + exchange)
    slow = dataclasses.replace(COSTS, jitter=0.02)
    seconds = [simulate_copies(slow, FAST, ranks) for ranks in (1, 2, 64, 4096)]
    assert seconds == sorted(seconds)
    assert simulate_copies(slow, FAST, 64, straggler=1.5) == pytest.approx(1.5 * 3.1, rel=0.01)


def test_the_link_decides():
    first = rank_strategies(COSTS, FAST, 2).fitting[0].strategy
    assert first in ("all_reduce", "zero1", "tensor")  # which compute as long
    assert rank_strategies(COSTS, SLOW, 2).fitting[0].strategy in ("tensor", "pipeline")  # which send little
    assert by_name(SLOW, 2)["pipeline"].seconds < by_name(SLOW, 2)["all_reduce"].seconds
    assert rank_strategies(COSTS, SLOW, 2, within_host=FAST, local_ranks=2).fitting[0].strategy == first


def test_memory_decides_and_the_plan_says_why():
    plan = rank_strategies(COSTS, FAST, 2, memory_bytes=13e6)
    assert {estimate.strategy for estimate in plan.too_large} >= {"all_reduce"}
    assert plan.fitting[0].memory_bytes <= 13e6
    assert "does not fit the memory" in plan.reason
    nothing = rank_strategies(COSTS, FAST, 2, memory_bytes=1e3)
    assert nothing.reason.startswith("no strategy of 2 ranks fits the memory of a rank; ")
    assert f"; {nothing.too_large[0].strategy} needs least: " in nothing.reason


def test_what_a_model_cannot_is_told_and_left_out():
    plan = rank_strategies(COSTS, FAST, 4)
    assert plan.impossible["tensor"] == "4 does not divide the heads"
    assert "mesh(data=2, tensor=2)" in {estimate.strategy for estimate in plan.fitting}
    many = rank_strategies(COSTS, FAST, 128)
    assert many.impossible["all_reduce"] == "64 rows a step cannot be dealt to 128 ranks: raise the batch"


@pytest.mark.parametrize("numbers", [{"bandwidth": 0.0, "latency": 0.0}, {"bandwidth": 1.0, "latency": -1.0}])
def test_a_link_that_is_none_is_refused(numbers):
    with pytest.raises(ConfigError, match="a link of"):
        Link(**numbers)


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


def measured(model, ranks=(2,), rows=32, **example):
    example = example or {"x": torch.randn(rows, 16)}
    return measure_model(model, lambda m: torch.optim.AdamW(m.parameters()), example, ranks=list(ranks))


def test_a_measurement_counts_what_there_is():
    costs = measured(nn.Sequential(*[Block() for _ in range(4)]))
    parameters = 4 * (16 * 64 + 64 + 64 * 16 + 16) * 4
    assert costs.parameter_bytes == costs.gradient_bytes == parameters
    assert costs.state_bytes == pytest.approx(2 * parameters, rel=0.01)
    assert costs.flops == pytest.approx(4 * 3 * 2 * 2 * 16 * 64, rel=0.1)  # the first layer's input needs no gradient
    assert list(costs.ready) == sorted(costs.ready)
    assert costs.ready[0] > 0
    assert costs.ready[-1] <= 1
    assert sorted(costs.passes) == [4, 16, 32]
    assert costs.overheads.keys() == {"zero2", "fsdp", "tensor", "pipeline"}
    assert all(costs.overheads[name] >= 0 for name in ("zero2", "fsdp", "tensor"))
    assert isinstance(costs.overheads["pipeline"], float)  # below 0 where a micro-batch takes less than a step
    assert costs.activation_bytes >= 4 * 64 * 4
    assert len(costs.blocks) == 4
    share, sent, messages = costs.splits[2]
    assert share == pytest.approx(1.0)
    assert sent == 4 * 2 * 16 * 4  # an all-reduce of the width, forth and back, of two ranks
    assert messages == 8


def test_a_model_is_measured_as_often_as_one_likes_and_leaves_no_process_group():
    for _ in range(2):
        costs = measured(nn.Sequential(*[Block() for _ in range(2)]), ranks=(2, 4))
        assert all(isinstance(seconds, float) for seconds in costs.overheads.values())
    assert not torch.distributed.is_initialized()


def test_tokens_of_experts_are_counted():
    costs = measured(nn.Sequential(nn.Linear(16, 16), MixtureOfExperts(16, 32, 4, k=2)))
    (mixture,) = costs.mixtures
    assert mixture == MixtureCosts(
        experts=4,
        expert_bytes=4 * (16 * 32 + 32 + 32 * 16 + 16) * 4,
        token_bytes=2 * 2 * (16 + 16) * 4,
        choice_bytes=2 * 8,
    )
    assert costs.overheads["expert"] >= 0
    few = measured(nn.Sequential(nn.Linear(16, 16), MixtureOfExperts(16, 32, 3, k=2, capacity_factor=0.5)))
    assert "expert" not in few.overheads
    assert few.mixtures[0].token_bytes == mixture.token_bytes / 2


def test_measuring_says_why_a_model_cannot_be_cut():
    costs = measured(nn.Sequential(nn.Linear(16, 3), nn.BatchNorm1d(3)))
    plan = rank_strategies(costs, FAST, 2)
    assert "BatchNorm1d" in plan.impossible["pipeline"]
    assert "splits" not in plan.impossible["tensor"]


def test_what_the_training_would_refuse_is_not_ranked():
    model = nn.Sequential(nn.Linear(16, 16), MixtureOfExperts(16, 32, 4, capacity_factor=1.25))
    costs = measured(model)
    assert "pipeline" in {estimate.strategy for estimate in rank_strategies(costs, FAST, 2).fitting}
    plan = rank_strategies(costs, FAST, 2, check=lambda mesh: check_layers(mesh, model))
    assert "capacity_factor=1.25" in plan.impossible["pipeline"]
    assert {"all_reduce", "zero1", "fsdp", "expert"} <= {estimate.strategy for estimate in plan.fitting}


def test_a_model_without_outputs_to_differentiate_is_refused():
    with pytest.raises(ConfigError, match="nothing that depends on a parameter which is trained"):
        measured(nn.Linear(16, 1).requires_grad_(False))


def test_seconds_lie_on_the_line_between_two_measurements():
    costs = dataclasses.replace(COSTS, passes={10: (1.0, 2.0), 20: (2.0, 4.0)})
    assert costs.seconds(15) == (1.5, 3.0)
    assert costs.seconds(30) == (3.0, 6.0)
    assert costs.seconds(5) == (0.5, 1.0)
    assert dataclasses.replace(COSTS, passes={10: (1.0, 2.0)}).seconds(5) == (1.0, 2.0)


def test_one_rank_has_no_link_and_one_choice():
    collective = open_collective(SOLO, backend="solo")
    assert measure_link(collective).latency == 0.0
    text, why = choose(
        collective,
        TrainConfig(),
        nn.Linear(16, 1),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        {"x": torch.randn(8, 16)},
        memory_bytes=1e9,
    )
    assert text == "all_reduce"
    assert why.startswith("all_reduce: a step takes")
