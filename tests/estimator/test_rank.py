"""What the driver sends to the ranks arrives in the job of a rank."""

from dataclasses import fields

import torch

from sparkdl.config import CheckpointConfig, LoaderConfig, TrainConfig
from sparkdl.estimator.model_call import ModelCall, ModelInput
from sparkdl.estimator.rank import FitMessage, UserObjects
from sparkdl.estimator.user_code import pack
from sparkdl.train.callbacks import Callback
from sparkdl.worker import RankJob

DECIDED_BY_THE_ESTIMATOR = {"tail", "decode"}  # as RankJob has them


def message(model, call):
    objects = UserObjects(
        model=model, optimizer=torch.optim.SGD, losses=[torch.nn.MSELoss()], metrics=["rmse"], callbacks=[Callback()]
    )
    return FitMessage(
        objects=pack(objects),
        call=call,
        labels=("y",),
        loss_weights=(2.0,),
        sample_weight="w",
        train_uri="/train",
        validation_uri="/validation",
        batch_size=3,
        validation_batch_size=4,
        shuffle=False,
        seed=5,
        loader=LoaderConfig(threads=2),
        validation_loader=LoaderConfig(threads=3),
        train=TrainConfig(epochs=6),
        checkpoints=CheckpointConfig(uri="/checkpoints"),
        backend="torch",
        strategy="zero1",
    )


def test_every_field_of_a_ranks_job_comes_from_the_message():
    sent = message(torch.nn.Linear(2, 1), ModelCall((ModelInput("features", "features"),)))
    job = sent.job()
    for field in fields(RankJob):
        if field.name in DECIDED_BY_THE_ESTIMATOR:
            continue
        if hasattr(sent, field.name) and field.name != "task":
            assert getattr(job, field.name) == getattr(sent, field.name) != field.default, field.name
    named = {field.name for field in fields(RankJob)} - {field.name for field in fields(FitMessage)}
    assert named == {"task", "callbacks"} | DECIDED_BY_THE_ESTIMATOR
    assert [type(callback) for callback in job.callbacks] == [Callback]
    assert (job.task.inputs, job.task.labels, job.task.sample_weight) == (("features",), ("y",), "w")
    assert job.task.loss_weights == (2.0,)
    assert list(job.task.metrics) == ["rmse"]


def test_the_model_of_a_rank_takes_the_tensors_of_a_batch_whether_it_is_given_or_made():
    class Difference(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, b, a):
            return (b - a) * self.weight

    call = ModelCall((ModelInput("a", "features", index=0), ModelInput("b", "features", index=1)), "keywords")
    rows = torch.tensor([[1.0, 5.0]])
    assert message(Difference(), call).job().task.model(rows) == 4
    assert message(Difference, call).job().task.model()(rows) == 4
