"""The job that the driver sends to every rank of a fit, and the rank's part in it; no Spark."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sparkdl.compat.environment import environment
from sparkdl.config import CheckpointConfig, LoaderConfig, TrainConfig
from sparkdl.documents.payload import Payload
from sparkdl.errors import WorldSizeError
from sparkdl.estimator.horovod.adapters import MinibatchStep, adapted_loss, adapted_metrics
from sparkdl.estimator.model_call import ModelCall, attach_call
from sparkdl.storage import Storage
from sparkdl.train.task import Task, takes_no_arguments
from sparkdl.worker import RankJob, RankReport, run_rank
from sparkdl.world import World


@dataclass
class UserObjects:
    """What the user gave as objects; one pickle carries them all, so references among them survive."""

    model: Any
    optimizer: Any
    losses: list[Any] = field(metadata={"parameter": "loss"})
    metrics: Any = None
    callbacks: list[Any] = field(default_factory=list)
    scheduler: Any = field(default=None, metadata={"parameter": "lr_scheduler"})
    step: Any = field(default=None, metadata={"parameter": "train_minibatch_fn"})


@dataclass(frozen=True, kw_only=True)
class FitMessage:
    """What every rank of a fit receives.

    Attributes:
        objects: the user's, packed ``UserObjects``.
        call: how the model is called with the tensors of a batch.
        input_order: of the inputs that train_minibatch_fn gets by position and the model takes by name.
        labels: names of the label tensors.
        loss_weights: one a label; None without.
        sample_weight: name of the weights' tensor; None without.
        backward_passes: backward_passes_per_step.
        train_uri: shard set to train on; this and all that follows as ``RankJob`` has it.
        validation_uri: shard set to validate on.
        batch_size: rows a rank and training step.
        validation_batch_size: rows a rank and validation step.
        shuffle: whether training rows come in a new order each epoch.
        seed: of that order.
        loader: how training shards are read.
        validation_loader: how validation shards are read.
        train: epochs, precision, stopping and the like.
        checkpoints: where and how often to save.
        backend: of the collective.
        strategy: how the model is spread over the ranks.
    """

    objects: Payload
    call: ModelCall
    input_order: tuple[str, ...] = ()
    labels: tuple[str, ...]
    loss_weights: tuple[float, ...] | None = None
    sample_weight: str | None = None
    backward_passes: int = 1
    train_uri: str | Storage
    validation_uri: str | Storage | None = None
    batch_size: int
    validation_batch_size: int | None = None
    shuffle: bool = True
    seed: int = 0
    loader: LoaderConfig
    validation_loader: LoaderConfig
    train: TrainConfig
    checkpoints: CheckpointConfig | None = None
    backend: str = "auto"
    strategy: str = "all_reduce"

    def task(self, objects: UserObjects) -> Task:
        """What is to be trained; the model is called as it was given, with what ``call`` makes of a batch."""
        losses = [adapted_loss(loss) for loss in objects.losses]
        task = Task(
            model=objects.model,
            optimizer=objects.optimizer,
            loss=losses if len(losses) > 1 else losses[0],
            inputs=self.call.tensors,
            labels=self.labels,
            loss_weights=self.loss_weights,
            sample_weight=self.sample_weight,
            metrics=adapted_metrics(objects.metrics, self.labels, made_losses(objects.losses)),
            scheduler=objects.scheduler,
            scheduler_interval="step" if getattr(objects.scheduler, "per_step", False) else "epoch",
        )
        if objects.step is None:
            return task
        step = MinibatchStep(
            objects.step, self.call, self.labels, self.sample_weight, self.backward_passes, self.input_order
        )
        return replace(task, manual_step=step, forward=step.forward)

    def job(self) -> RankJob:
        """The job of one rank, with objects of its own, whose tensors lie in the memory of the message.

        Raises:
            ModuleNotFoundError: the user's objects need a module that this process lacks.
        """
        objects: UserObjects = self.objects.open(share=True)
        task = self.task(objects)
        if task.manual_step is None:
            task = replace(task, model=_taking_batches(objects.model, self.call))
        return RankJob(
            task=task,
            callbacks=tuple(objects.callbacks),
            train_uri=self.train_uri,
            validation_uri=self.validation_uri,
            batch_size=self.batch_size,
            validation_batch_size=self.validation_batch_size,
            shuffle=self.shuffle,
            seed=self.seed,
            loader=self.loader,
            validation_loader=self.validation_loader,
            train=self.train,
            checkpoints=self.checkpoints,
            backend=self.backend,
            strategy=self.strategy,
        )


def train_on_rank(message: FitMessage) -> Payload:
    """Train as the rank that the environment names; return its packed ``RankReport``.

    Raises:
        ModuleNotFoundError: the user's objects need a module that this worker lacks.
        SparkdlError: whatever the stages refuse.
    """
    report: RankReport = run_rank(World.from_env(os.environ), message.job())
    return Payload.of(report)


def train_in_backend(message: FitMessage, num_proc: int, secret: str) -> Payload:
    """Train as a rank that a user's own backend runs; by ``secret`` the ranks of this fit know each other's objects.

    Raises:
        WorldSizeError: the process finds itself among another number of ranks than the backend has said.
    """
    world = World.from_env(os.environ)
    if world.size != num_proc:
        raise WorldSizeError(
            f"num_processes() of the backend is {num_proc}, and the process that runs a rank finds itself one of "
            f"{world.size}: let run() set RANK and WORLD_SIZE, or HOROVOD_RANK and HOROVOD_SIZE, as launchers do"
        )
    with environment({"SPARKDL_SECRET": os.environ.get("SPARKDL_SECRET") or secret}):
        return Payload.of(run_rank(world, message.job()))


def made_losses(losses: list[Any]) -> list[Any]:
    """The losses themselves, where functions or classes that make them were given."""
    return [loss() if takes_no_arguments(loss) else loss for loss in losses]


def _taking_batches(model: Any, call: ModelCall) -> Any:
    """The model, or what makes it, so that it takes the tensors of a batch."""
    if not isinstance(model, torch.nn.Module):
        return functools.partial(_build, model, call)
    attach_call(model, call)
    return model


def _build(factory: Any, call: ModelCall) -> torch.nn.Module:
    model: torch.nn.Module = factory()
    attach_call(model, call)
    return model
