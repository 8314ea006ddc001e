"""What travels to a rank, and what the rank makes of it: the one pickle of the user's objects becomes a task.

Enters: a ``FitJob``: the user's model, optimizer, loss, metrics, callbacks and scheduler, packed once, and plain values
that say how they go together. Leaves: the rank's report, packed. It imports no Spark, so that a rank loads it at no
cost; the driver makes the same task of its own copy, to refuse what cannot work.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sparkdl.compat.environment import environment
from sparkdl.documents.payload import Payload
from sparkdl.errors import WorldSizeError
from sparkdl.estimator.horovod.adapters import MinibatchStep, adapted_loss, adapted_metrics
from sparkdl.estimator.inputs.views import Views, attach_views
from sparkdl.train.task import Task, takes_no_arguments
from sparkdl.worker import RankJob, RankReport, run_rank
from sparkdl.world import World

__all__ = ["FitJob", "TaskPlan", "UserParts", "made_losses", "opened", "task_of", "train_in_backend", "train_on_rank"]


@dataclass
class UserParts:
    """What the user gave as objects; one pickle carries them all, so references among them survive."""

    model: Any
    optimizer: Any
    losses: list[Any] = field(metadata={"parameter": "loss"})
    metrics: Any = None
    callbacks: list[Any] = field(default_factory=list)
    scheduler: Any = field(default=None, metadata={"parameter": "lr_scheduler"})
    step: Any = field(default=None, metadata={"parameter": "train_minibatch_fn"})


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """How the user's objects go together.

    Attributes:
        views: from the tensors of a batch to the model's inputs.
        labels: names of the label tensors.
        loss_weights: one a label; None without.
        sample_weight: name of the weights' tensor; None without.
        passes: backward_passes_per_step.
        order: of the inputs that train_minibatch_fn gets by position and the model takes by name.
    """

    views: Views
    labels: tuple[str, ...]
    loss_weights: tuple[float, ...] | None
    sample_weight: str | None
    passes: int
    order: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FitJob:
    """What every rank receives.

    Attributes:
        parts: the packed ``UserParts``.
        plan: how they go together.
        job: makes the ``RankJob`` of a task and callbacks.
    """

    parts: Payload
    plan: TaskPlan
    job: Callable[..., RankJob]


def train_on_rank(fit: FitJob) -> Payload:
    """Train as the rank that the environment names; return its packed ``RankReport``.

    Raises:
        ModuleNotFoundError: the user's objects need a module that this worker lacks.
        SparkdlError: whatever the stages refuse.
    """
    report: RankReport = run_rank(World.from_env(os.environ), opened(fit))
    return Payload.of(report)


def train_in_backend(fit: FitJob, num_proc: int, secret: str) -> Payload:
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
        return Payload.of(run_rank(world, opened(fit)))


def opened(fit: FitJob) -> RankJob:
    """The job of one rank, with objects of its own.

    Raises:
        ModuleNotFoundError: the user's objects need a module that this process lacks.
    """
    parts: UserParts = fit.parts.open(share=True)
    task = task_of(parts, fit.plan)
    if task.manual_step is None:
        task = replace(task, model=_viewed(parts.model, fit.plan.views))
    return fit.job(task=task, callbacks=tuple(parts.callbacks))


def task_of(parts: UserParts, plan: TaskPlan) -> Task:
    """The task of the user's objects; its model takes what the views make of a batch."""
    labels = plan.labels
    losses = [adapted_loss(loss) for loss in parts.losses]
    task = Task(
        model=parts.model,
        optimizer=parts.optimizer,
        loss=losses if len(losses) > 1 else losses[0],
        inputs=plan.views.tensors,
        labels=labels,
        loss_weights=plan.loss_weights,
        sample_weight=plan.sample_weight,
        metrics=adapted_metrics(parts.metrics, labels, made_losses(parts.losses)),
        scheduler=parts.scheduler,
        scheduler_interval="step" if getattr(parts.scheduler, "per_step", False) else "epoch",
    )
    if parts.step is None:
        return task
    step = MinibatchStep(parts.step, plan.views, labels, plan.sample_weight, plan.passes, plan.order)
    return replace(task, manual_step=step, forward=step.forward)


def made_losses(losses: list[Any]) -> list[Any]:
    """The losses themselves, where functions or classes that make them were given."""
    return [loss() if takes_no_arguments(loss) else loss for loss in losses]


def _viewed(model: Any, views: Views) -> Any:
    if isinstance(model, torch.nn.Module):
        attach_views(model, views)
        return model
    return functools.partial(_build_viewed, model, views)


def _build_viewed(factory: Any, views: Views) -> torch.nn.Module:
    model: torch.nn.Module = factory()
    attach_views(model, views)
    return model
