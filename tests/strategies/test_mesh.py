"""What a mesh says, where its ranks stand, and what it refuses."""

from __future__ import annotations

import functools

import pytest
import torch

from sparkdl import Mesh
from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.nn import MixtureOfExperts
from sparkdl.strategies.all_reduce import AllReduce
from sparkdl.strategies.base import TaskView, open_strategy
from sparkdl.strategies.choice import choice_of
from sparkdl.strategies.mesh_strategy import check_layers, check_model, check_training
from sparkdl.strategies.sharded import blocks_of
from sparkdl.world import SOLO


@pytest.mark.parametrize(
    ("text", "ranks", "sizes"),  # pipeline, data, shard, expert, tensor
    [
        ("fsdp", 4, (1, 1, 4, 1, 1)),
        ("zero2", 2, (1, 1, 2, 1, 1)),
        ("tensor", 2, (1, 1, 1, 1, 2)),
        ("pipeline(micro_batches=8)", 3, (3, 1, 1, 1, 1)),
        ("expert", 2, (1, 1, 1, 2, 1)),
        ("expert(data=2)", 6, (1, 2, 1, 3, 1)),
        ("mesh(data=2, pipeline=2)", 4, (2, 2, 1, 1, 1)),
        ("mesh(data=None, tensor=2)", 8, (1, 4, 1, 1, 2)),
    ],
)
def test_a_text_names_a_mesh(text, ranks, sizes):
    mesh = choice_of(text)
    assert str(mesh) == text
    assert mesh.filled(ranks).sizes() == sizes


def test_a_mesh_in_code_has_a_text_that_gives_it():
    mesh = Mesh(data=2, tensor=2, plan={"*.fc1": "column", "*.fc2": "row"})
    assert choice_of(str(mesh)) == mesh


def test_ranks_of_a_tensor_group_are_neighbours_and_read_the_same_rows():
    mesh = Mesh(data=2, tensor=2).filled(4)
    places = [mesh.place(number) for number in range(4)]
    assert [place.tensor for place in places] == [0, 1, 0, 1]
    assert [place.reader for place in places] == [0, 0, 1, 1]
    assert [place.counts for place in places] == [True, False, True, False]


def test_the_last_stage_of_each_pipeline_counts_its_rows():
    mesh = Mesh(data=2, pipeline=2).filled(4)
    places = [mesh.place(number) for number in range(4)]
    assert [(place.pipeline, place.reader, place.counts) for place in places] == [
        (0, 0, False),
        (0, 1, False),
        (1, 0, True),
        (1, 1, True),
    ]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: choice_of("fsdp9"), "strategy='fsdp9' is unknown: choose one of"),
        (lambda: choice_of("mesh(2)"), "is unknown: choose one of"),
        (lambda: choice_of("mesh(data=open('x'))"), "is unknown: choose one of"),
        (lambda: choice_of("mesh(dat=2)"), "'dat' is no option of mesh: choose of"),
        (lambda: Mesh(data=0), "data=0 is no number of ranks"),
        (lambda: Mesh(data=None, shard=None), "data and shard are None"),
        (lambda: Mesh(data=2, micro_batches=3), "micro_batches= has nothing to act on with pipeline=1"),
        *(
            (functools.partial(choice_of, f"pipeline(micro_batches={parts})"), f"micro_batches={parts} is no number of")
            for parts in (0, 2.5, True)
        ),
        (lambda: Mesh(pipeline=2, schedule="zb"), "schedule='zb' is unknown: choose one of 1f1b, gpipe, naive"),
        (lambda: Mesh(pipeline=2, schedule="naive", micro_batches=2), "and micro_batches=2: drop one"),
        (lambda: Mesh(pipeline=2, activation_checkpointing=True), "pipeline=2 cuts them: drop one"),
        (lambda: Mesh(data=2, pipeline=2).filled(6), "6 ranks do not fill the mesh pipeline=2 x data=2: run 4 of them"),
        (lambda: choice_of("expert(data=2)").filled(3), "3 ranks do not fill the mesh data=2: run a multiple of 2"),
    ],
)
def test_what_cannot_be_is_one_sentence(make, sentence):
    with pytest.raises(ConfigError) as refused:
        make()
    assert sentence in str(refused.value)


def sequential(*layers):
    return torch.nn.Sequential(*layers)


def mixture(**settings):
    return sequential(torch.nn.Linear(2, 4), MixtureOfExperts(4, 8, 4, **settings), torch.nn.Linear(4, 1))


class Penalty(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.auxiliary_loss = None


def blocks():
    return sequential(*(sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)) for _ in range(2)))


def scaled():
    model = torch.nn.Linear(2, 1)
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    return model


def tied():
    model = sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("mesh", "model", "sentence"),
    [
        (Mesh(tensor=2), sequential(torch.nn.Linear(3, 1)), "tensor=2 finds nothing to split in Sequential"),
        (Mesh(tensor=2), sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4)), "layer '1', a BatchNorm1d"),
        (Mesh(pipeline=3), sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), "layers to cut between"),
        (Mesh(pipeline=2), sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4)), "BatchNorm1d"),
        (Mesh(pipeline=2, cuts=("1",)), tied(), "0.weight"),
        (Mesh(pipeline=2, cuts=("7",)), sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), "'7'"),
        (Mesh(pipeline=2, tensor=2, cuts=("0.2",)), blocks(), "cuts names '0.2', which a tensor group splits together"),
        (Mesh(pipeline=3, tensor=2), blocks(), "the model has 2 layers to cut between, and the pipeline 3 stages"),
        (Mesh(expert=2), sequential(torch.nn.Linear(3, 1)), "no sparkdl.nn.MixtureOfExperts"),
        (Mesh(expert=2, shard=4), mixture(), "4 experts of layer '1' do not divide by 8 ranks"),
        (Mesh(expert=2, pipeline=2), mixture(), "limits each expert by capacity_factor=1.25"),
        (Mesh(pipeline=2), mixture(capacity_factor=None), "schedule='1f1b' goes back with some before it went forward"),
        (Mesh(pipeline=2), sequential(Penalty(), torch.nn.Linear(2, 1)), "layer '0', a Penalty, adds to the loss"),
        (
            Mesh(shard=2, activation_checkpointing=True),
            sequential(torch.nn.BatchNorm1d(4)),
            "running statistics",
        ),
        (Mesh(shard=2), sequential(torch.nn.Embedding(4, 2, sparse=True)), "sparse=False"),
        (
            Mesh(shard=2),
            sequential(sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, dtype=torch.bfloat16))),
            "'0.0.weight' is of torch.float32 and '0.1.weight' of torch.bfloat16",
        ),
        (Mesh(shard=2), scaled(), "parameter 'scale' is a single number without a dimension"),
    ],
)
def test_a_model_that_cannot_be_spread_is_refused_without_ranks(mesh, model, sentence):
    with pytest.raises(ConfigError) as refused:
        check_model(mesh, model, TaskView(("x",)))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("mesh", "model", "sentence"),
    [
        (Mesh(pipeline=3), sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), "layers to cut between"),
        (Mesh(pipeline=2), tied(), "0.weight would lie in the stages 0 and 1"),
        (Mesh(pipeline=2, cuts=("7",)), sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), "'7'"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_anybody_knows_the_inputs(mesh, model, sentence):
    with pytest.raises(ConfigError) as refused:
        check_layers(mesh, model)
    assert sentence in str(refused.value)


def test_a_model_with_arguments_that_may_be_left_out_is_checked_once_the_inputs_are_known():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x, mask=None):
            return self.first(x) if mask is None else self.second(self.first(x) * mask)

    check_layers(Mesh(pipeline=2), Masked())
    check_model(Mesh(pipeline=2), Masked(), TaskView(("x", "mask")))
    with pytest.raises(ConfigError, match="the model has 1 layers to cut between"):
        check_model(Mesh(pipeline=2), Masked(), TaskView(("x",)))


def test_a_pipeline_refuses_a_function_that_calls_the_model():
    model = sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    with pytest.raises(ConfigError, match="a function of yours calls it as a whole"):
        check_model(Mesh(pipeline=2), model, TaskView(("x",), by_user=True))


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(expert=2, pipeline=2, schedule="naive"),
        Mesh(pipeline=2, micro_batches=1),
        Mesh(expert=2, shard=2),
        Mesh(expert=4, data=2),
    ],
)
def test_meshes_that_take_a_mixture_as_it_is(mesh):
    check_model(mesh, mixture(), TaskView(("x",)))


@pytest.mark.parametrize("config", [{"precision": "fp16"}, {"compile": True}])
def test_settings_that_no_mesh_takes_are_refused(config):
    with pytest.raises(ConfigError):
        open_strategy(Mesh(activation_checkpointing=True), open_collective(SOLO, backend="solo"), TrainConfig(**config))


def test_one_rank_trains_as_ever_whatever_the_mesh():
    collective = open_collective(SOLO, backend="solo")
    options = "zero2", "fsdp(offload=True)", "pipeline(micro_batches=8)", "tensor(plan={'*': 'column'})"
    for name in ("fsdp", "tensor", "pipeline", "expert", *options):
        assert isinstance(open_strategy(name, collective, TrainConfig()), AllReduce)


def test_blocks_hold_their_parameters_alone():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(5, 4)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
            self.head = torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False), torch.nn.ReLU())
            self.head[0].weight = self.embedding.weight

    model = Tied()
    assert blocks_of(model) == list(model.blocks)


def test_a_mesh_refuses_horovod():
    class Horovod:
        name, world = "horovod", SOLO

    opened = functools.partial(open_strategy, Mesh(activation_checkpointing=True), Horovod(), TrainConfig())
    with pytest.raises(ConfigError, match="backend='horovod' opens none"):
        opened()


def test_offloading_is_refused_where_ranks_compute_on_cpus():
    with pytest.raises(ConfigError, match="offload=True moves parameters off a GPU, and the ranks compute on CPUs"):
        check_training(Mesh(shard=2, offload=True), TrainConfig(), "cpu")
