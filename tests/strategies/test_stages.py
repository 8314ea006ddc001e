"""How models are cut: what each stage computes and holds, what travels, and what is refused on the driver."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.strategies.stage_balance import measure, profile
from sparkdl.strategies.stages import release, split


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.fc, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + nn.functional.dropout(torch.tanh(self.norm(self.fc(x))), 0.5, self.training)


class Branching(Block):
    """A forward that asks for values, which no trace can tell."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else self.fc(x)


class Dropping(Block):
    """Draws whether it is left out."""

    def forward(self, x):
        return x if self.training and random.random() < 0.5 else super().forward(x)


class Constant(Block):
    """Computes without gradients, which a trace would lose."""

    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Remembering(Block):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.begin, self.blocks, self.end = nn.Linear(6, 6), nn.Sequential(*blocks), nn.Linear(6, 2)
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x, mask=None):
        if mask is not None:
            x = x * mask
        return self.end(self.blocks(self.begin(x) * self.scale) * self.scale + torch.arange(6))


def computed(stages, *, training, **tensors):
    values = ()
    for stage in stages:
        part = stage.training if training else stage.evaluation
        values = part.module(*[tensors[name] for name in part.inputs], *values)
    return values


def blocks(count=3):
    return Model(*[Block() for _ in range(count)])


def refusal(model, cuts=("b",), inputs=("x",), **options):
    with pytest.raises(ConfigError) as caught:
        split(model, cuts, inputs=inputs, **options)
    return str(caught.value)


def test_the_stages_one_after_the_other_compute_what_the_model_does():
    model, x = blocks(), torch.randn(4, 6)
    stages = split(model, ("blocks.1", "end"), inputs=["x"])
    for training in (True, False):
        model.train(training)
        torch.manual_seed(0)
        outputs = computed(stages, training=training, x=x)
        torch.manual_seed(0)
        assert torch.equal(outputs, model(x))
    assert not [name for name in vars(model) if "constant" in name]


def test_a_stage_holds_the_users_own_parameters_under_their_names():
    model = blocks()
    stages = split(model, ("blocks.1", "end"), inputs=["x"])
    names = [name for name, _ in model.named_parameters()]
    assert [names.index(next(n for n in names if n in stage.parameters)) for stage in stages] == [0, 6, 14]
    assert set().union(*(stage.parameters for stage in stages)) == set(names)
    own = dict(model.named_parameters())
    for stage in stages:
        for name, parameter in stage.training.module.named_parameters():
            assert parameter is own[name]
    assert stages[0].begins == ""
    assert stages[2].begins == "end"
    assert stages[0].buffers == stages[1].buffers == {"scale"}  # what comes before a module is of the stage before
    assert stages[2].buffers == set()


def test_inputs_that_later_stages_take_are_read_by_them():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, features):
            return self.b(self.a(features["x"])) * features["mask"]

    first, second = split(Masked(), ("b",), inputs=["x", "mask"], input_style="dict")
    assert first.training.inputs == ("x",)
    assert second.training.inputs == ("mask",)


@pytest.mark.parametrize("kind", [Branching, Dropping, Constant, Remembering])
def test_a_module_that_a_trace_would_change_stays_whole(kind):
    model, x = Model(Block(), kind(), Block()), torch.randn(4, 6)
    stages = split(model, ("blocks.1", "blocks.2"), inputs=["x"])
    assert [str(node.target) for node in stages[1].training.module.graph.nodes if node.op == "call_module"] == [
        "blocks.1"
    ]
    for seed in range(5):
        random.seed(seed)
        torch.manual_seed(seed)
        outputs = computed(stages, training=True, x=x)
        random.seed(seed)
        torch.manual_seed(seed)
        assert torch.equal(outputs, model(x))
    message = refusal(model, ("blocks.1.norm",))
    assert "'blocks.1.norm', which lies inside of 'blocks.1', a module that stays whole (" in message


def test_tracing_leaves_modes_and_random_numbers_as_they_were():
    model = blocks()
    model.blocks.eval()
    torch_state, state = torch.get_rng_state(), random.getstate()
    attributes = set(vars(model))
    measure(model, 2, inputs=["x"], example={"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))})
    split(model, ("end",), inputs=["x"])
    assert model.training
    assert not model.blocks.training
    assert torch.equal(torch_state, torch.get_rng_state())
    assert state == random.getstate()
    assert set(vars(model)) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_stages_are_balanced_by_parameters_where_there_is_no_example():
    def layers(*widths):
        return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)])

    assert measure(layers(8, 8, 8, 8, 8), 2, inputs=["x"]) == ("2",)
    assert measure(layers(8, 8, 8, 8, 8), 4, inputs=["x"]) == ("1", "2", "3")
    assert measure(layers(64, 64, 2, 2, 2, 2), 2, inputs=["x"]) == ("1",)
    assert measure(blocks(3), 2, inputs=["x"]) == ("blocks.1",)


def test_stages_are_balanced_by_the_time_of_their_passes():
    class Costly(nn.Linear):
        def forward(self, x):
            for _ in range(200):
                x = x + 1e-9 * super().forward(x)
            return x

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)], Costly(8, 8), nn.Linear(8, 8))
    assert measure(model, 2, inputs=["x"], example={"x": torch.randn(4, 8)}) == ("6",)


def test_of_cuts_that_are_as_fast_those_that_send_least_are_taken():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    def wide(count):
        return nn.Sequential(*[Wide() for _ in range(count)])

    example = {"x": torch.randn(256, 32)}
    measured = profile(wide(8), inputs=["x"], example=example)
    assert set(measure(wide(8), 4, inputs=["x"], example=example)) < set(measured.begins)
    # A busy machine measures anything. Of these seconds the slowest stage has 4.05 where the first cut lies in a block.
    seconds = (1.35, 1.35, 1.35, 0.15, *[0.975] * 4, *[1.0] * 8)
    known = dataclasses.replace(measured, seconds=seconds)
    assert [measured.begins[first] for first in known.cuts(4)] == ["2", "4", "6"]
    free = dataclasses.replace(known, sent=(0.0,) * 16)
    assert [measured.begins[first] for first in free.cuts(4)] == ["1.down", "4", "6"]
    assert measure(wide(8), 4, inputs=["x"]) == ("2", "4", "6")
    assert measure(wide(1), 2, inputs=["x"], example=example) == ("0.down",)  # in a block, where there is no choice


def test_what_a_stage_does_not_hold_becomes_meta_and_keeps_its_name_and_its_place_in_an_optimizer():
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names, objects = zip(*model.named_parameters(), strict=True)
    stage = split(model, ("blocks.1",), inputs=["x"])[1]
    release(model, stage)
    assert [name for name, _ in model.named_parameters()] == list(names)
    assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert {name for name, one in model.named_parameters() if not one.is_meta} == stage.parameters
    assert not model.scale.is_meta


def test_cuts_that_the_model_has_not_are_refused():
    model = blocks()
    model.spare = nn.Linear(6, 6)
    assert "cuts names 'b', which is no module of Model: give names that are" in refusal(model)
    assert "names 'end' before 'blocks.1', and the model calls 'blocks.1' no later" in refusal(
        model, ("end", "blocks.1")
    )
    assert "cuts names 'spare', which the model's forward does not call" in refusal(model, ("spare",))
    assert "cuts names 'begin', which the model begins with" in refusal(model, ("begin",))
    assert "cuts='end' names no modules" in refusal(model, "end")
    assert "the stage from 3 to the end has no parameters" in refusal(
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()), ("3",)
    )


def test_models_that_a_pipeline_would_change_are_refused():
    tied = blocks()
    tied.blocks[1].fc.weight = tied.begin.weight
    assert "begin.weight would lie in the stages 0 and 1" in refusal(tied, ("blocks.1",))
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert "1 is a BatchNorm1d, and a pipeline computes micro-batches (statistics of a micro-batch" in refusal(
        normed, ("2",)
    )
    with pytest.raises(ConfigError, match="1 is a BatchNorm1d"):
        measure(normed, 2, inputs=["x"])


def test_models_that_cannot_be_traced_or_called_are_refused():
    message = refusal(Branching(), ("norm",))
    assert message.startswith("Branching cannot be cut into stages, since its forward cannot be traced (symbolically")
    assert message.endswith("move that into a submodule of its own, or give an nn.Sequential")
    assert "switches gradients or autocast" in refusal(Constant(), ("norm",))
    assert "draws random numbers" in refusal(Dropping(), ("norm",))
    assert "sets attributes of its own" in refusal(Remembering(), ("norm",))
    message = refusal(blocks(), ("end",), inputs=["x", "mask", "z"])
    assert message.startswith("Model.forward(x, mask=None) cannot be called with the inputs ['x', 'mask', 'z'] by")


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match="the model has 2 layers to cut between, and the pipeline 3 stages"):
        measure(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 3, inputs=["x"])
    with pytest.raises(ConfigError, match=r"or let the forward of 'blocks.0', which stays whole \(symbolically traced"):
        measure(Model(Branching()), 4, inputs=["x"])
    with pytest.raises(ConfigError, match="a pipeline of 1 stages is none"):
        measure(blocks(), 1, inputs=["x"])
