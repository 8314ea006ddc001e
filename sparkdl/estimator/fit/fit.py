"""One fit on the driver: shards, checks, launch, and the trained model.

Enters: the estimator's parameters and its shards. Leaves: ``Trained``. What can be refused is refused before a rank
starts: the model is called on two made-up rows here, and the shards' statistics tell the rest.
"""

from __future__ import annotations

import functools
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.compat.torch_compiler import eager
from sparkdl.config import LaunchConfig
from sparkdl.documents.payload import Parcel
from sparkdl.errors import ClusterError, ConfigError, PreflightError, SparkdlError
from sparkdl.estimator.fit import settings
from sparkdl.estimator.fit.checks import check_classes, check_loss, check_rows, check_steps, check_values
from sparkdl.estimator.fit.data import Prepared
from sparkdl.estimator.fit.probe import Probe, probe
from sparkdl.estimator.fit.rank import is_transient, open_and_train
from sparkdl.estimator.fit.shipping import missing_modules, pack
from sparkdl.estimator.fit.slots import application_of, gate_of
from sparkdl.estimator.fit.views import Views, attach_views, detach_views
from sparkdl.estimator.horovod.adapters import MinibatchStep, adapted_loss, adapted_metrics
from sparkdl.estimator.params.params import CheckedParams, value_of
from sparkdl.launch.driver import barrier
from sparkdl.observe import logger, span
from sparkdl.progress import Progress
from sparkdl.runner import run
from sparkdl.train.model_selection import settled_monitor
from sparkdl.train.objective.loss import Objective
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.task import Task, check_optimizer, takes_no_arguments
from sparkdl.worker import RankJob, RankReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Trained", "UserParts", "slots_of", "train", "user_parts"]

_REPLACEMENT_SECONDS = 10.0
"""How long a cluster has for a new executor before a fit goes on with fewer ranks."""


@dataclass
class UserParts:
    """What the user gave as objects; one pickle carries them all, so references among them survive."""

    model: Any
    optimizer: Any
    losses: list[Any]
    metrics: Any = None
    callbacks: list[Any] = field(default_factory=list)
    scheduler: Any = None
    step: Any = None


@dataclass
class Trained:
    """What a fit made.

    Attributes:
        model: a copy of the user's, with the trained weights, in evaluation mode.
        optimizer: bound to it, with its state after the last step; None where its function fails on the driver.
        probe: how it is called and what it returns.
        report: of rank 0.
        num_proc: ranks of the last attempt.
        run_id: name of the run.
        seconds: wall-clock seconds by span, of driver and rank 0.
    """

    model: torch.nn.Module
    optimizer: Any
    probe: Probe
    report: RankReport
    num_proc: int
    run_id: str
    seconds: dict[str, float]


def user_parts(params: CheckedParams) -> UserParts:
    """Collect the objects among the parameters.

    Raises:
        ConfigError: model, optimizer or loss is missing, or there are more or fewer losses than labels.
    """
    get = params.getOrDefault
    for name in ("model", "optimizer"):
        if get(name) is None:
            raise ConfigError(f"{name} is not given: set it before fit")
    labels = value_of(params, "label_cols")
    losses = get("loss_constructors") or get("loss")
    if losses is None:
        raise ConfigError("loss is not given: set loss, or loss_constructors")
    losses = list(losses) if isinstance(losses, Sequence) else [losses] * len(labels)
    if len(losses) == 1:
        losses = losses * len(labels)
    if len(losses) != len(labels):
        raise ConfigError(f"loss has {len(losses)} entries for {len(labels)} labels: give one, or one a label")
    return UserParts(
        model=get("model"),
        optimizer=get("optimizer"),
        losses=losses,
        metrics=get("metrics"),
        callbacks=list(get("callbacks") or ()),
        scheduler=get("lr_scheduler"),
        step=get("train_minibatch_fn"),
    )


def slots_of(spark: SparkSession) -> int:
    """How many ranks the cluster can run at once."""
    return barrier.slots(spark, LaunchConfig())


def train(params: CheckedParams, prepared: Prepared, parcel: Parcel, spark: SparkSession) -> Trained:
    """Train on shards that are written.

    Args:
        params: the estimator's parameters.
        prepared: the shards.
        parcel: the user's parts, pickled.
        spark: the session that runs the ranks.

    Raises:
        ConfigError: model, inputs, loss and settings do not fit each other.
        DataError: the rows do not fit them.
        RankFailedError: a rank failed more often than max_failures allows.
        SparkdlError: what a rank refused, as what it is: a loss that is not finite, a damaged shard.
    """
    seconds = dict(prepared.seconds)
    num_proc = settings.ranks_wanted(params) or slots_of(spark)
    with span("check", seconds):
        check_rows(prepared.train, prepared.validation, num_proc=num_proc, wanted=value_of(params, "validation"))
        for manifest in filter(None, (prepared.train, prepared.validation)):
            check_values(manifest, prepared.plan.roles)
        _check_steps(params, prepared, num_proc)
        parts: UserParts = parcel.open()
        model = _built(parts.model)
        found = _shared_probe(params.getOrDefault("model"), model, prepared)
        _check_importable(parcel, spark)
    job, run_id = _job(params, prepared, parts, found)
    sent = pack(job, like=parcel)
    _check_parts(job, model)  # after packing: it makes what only the ranks shall make
    with span("launch", seconds):
        reports, ranks = _launch(params, sent, spark, num_proc, run_id)
    leader = reports[0]
    if isinstance(job.task.model, torch.nn.Module):
        detach_views(job.task.model)
    model.load_state_dict(leader.weights or {})
    model.eval()
    return Trained(
        model, _stepped(parts.optimizer, model, leader), found, leader, ranks, run_id, seconds | leader.seconds
    )


def _check_parts(job: RankJob, model: torch.nn.Module) -> None:
    """Refuse a model with nothing to train, an optimizer that is not its own, a monitor that no epoch will have."""
    task = job.task
    if not any(parameter.requires_grad for parameter in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise ConfigError(f"0 of the model's {count} parameters require a gradient: unfreeze what shall be trained")
    if isinstance(task.optimizer, torch.optim.Optimizer):
        check_optimizer(task.optimizer, model)
    metrics = MetricSet(task.metrics, task.labels, torch.device("cpu"))
    settled_monitor(job.train, metrics, task, validates=job.validation_uri is not None)


def _stepped(given: Any, model: torch.nn.Module, leader: RankReport) -> torch.optim.Optimizer | None:
    """The optimizer as the leader's last step left it, bound to ``model``."""
    try:
        with eager():
            optimizer = given if isinstance(given, torch.optim.Optimizer) else given(model)
            optimizer.load_state_dict(leader.optimizer or {})
    except Exception as error:  # a function that needs what only ranks have; the fit itself is whole
        logger.warning("getOptimizer() of the fitted model is None: the optimizer cannot be made here (%s)", error)
        return None
    return optimizer


def _check_steps(params: CheckedParams, prepared: Prepared, num_proc: int) -> None:
    get = params.getOrDefault
    rows = get("batch_size")
    check_steps("train_steps_per_epoch", get("train_steps_per_epoch"), prepared.train, rows * num_proc)
    held_out = (get("val_batch_size") or rows) * num_proc
    check_steps("validation_steps_per_epoch", get("validation_steps_per_epoch"), prepared.validation, held_out)


def _built(given: Any) -> torch.nn.Module:
    model = given if isinstance(given, torch.nn.Module) else given()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module, or a function that makes one")
    return model


def _shared_probe(given: Any, model: torch.nn.Module, prepared: Prepared) -> Probe:
    """Probe ``model``, a copy of ``given``, once for all fits that share model and shards."""
    if not isinstance(given, torch.nn.Module):
        return _probe(model, prepared)
    if id(given) not in prepared.probes:
        prepared.probes[id(given)] = given, _probe(model, prepared)
    return prepared.probes[id(given)][1]


def _probe(model: torch.nn.Module, prepared: Prepared) -> Probe:
    inputs = prepared.plan.views(prepared.train)
    by_column = prepared.plan.views(prepared.train, by_column=True)
    return probe(model, inputs, by_column, prepared.train, prepared.plan.roles.labels)


def _job(params: CheckedParams, prepared: Prepared, parts: UserParts, found: Probe) -> tuple[RankJob, str]:
    """Make what the ranks receive, and check its loss on the two rows of the probe."""
    run_id = params.getOrDefault("run_id") or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    task = _task(params, prepared, parts, found)
    made = [loss() if takes_no_arguments(loss) else loss for loss in parts.losses]
    for manifest in filter(None, (prepared.train, prepared.validation)):
        check_classes(manifest, found.outputs, made)
    if task.train_step is None:
        objective = Objective(task, torch.device("cpu"), 1, lambda tensor: tensor)
        check_loss(lambda: objective(found.returned, found.batch))
    train_loader, validation_loader, shuffle = settings.loader_configs(params, prepared.train)
    backend = settings.launch_settings(params)["backend"]
    job = RankJob(
        task=task,
        train_uri=prepared.train.uri,
        validation_uri=prepared.validation.uri if prepared.validation else None,
        batch_size=params.getOrDefault("batch_size"),
        validation_batch_size=params.getOrDefault("val_batch_size"),
        shuffle=shuffle,
        seed=settings.seed_of(params),
        loader=train_loader,
        validation_loader=validation_loader,
        train=settings.train_config(params, prepared.store, run_id),
        checkpoints=settings.checkpoint_config(params, prepared.store, run_id),
        callbacks=tuple(parts.callbacks),
        backend=backend,
    )
    return job, run_id


def _task(params: CheckedParams, prepared: Prepared, parts: UserParts, found: Probe) -> Task:
    labels = prepared.plan.roles.labels
    losses = [adapted_loss(loss) for loss in parts.losses]
    # Horovod weighs several losses equally with a sum of 1 where no weights are given.
    weights = params.getOrDefault("loss_weights") or ([1 / len(labels)] * len(labels) if len(labels) > 1 else None)
    common: dict[str, Any] = {
        "optimizer": parts.optimizer,
        "labels": labels,
        "metrics": adapted_metrics(parts.metrics, labels),
        "scheduler": parts.scheduler,
        "scheduler_interval": "step" if getattr(parts.scheduler, "per_step", False) else "epoch",
    }
    if parts.step is not None:
        step = MinibatchStep(
            function=parts.step,
            views=found.views,
            labels=labels,
            losses=tuple(loss() if takes_no_arguments(loss) else loss for loss in losses),
            loss_weights=tuple(weights or (1.0,)),
            sample_weight=prepared.plan.roles.weight,
            passes=params.getOrDefault("backward_passes_per_step"),
        )
        return Task(model=parts.model, inputs=found.views.tensors, train_step=step, **common)
    return Task(
        model=_viewed(parts.model, found.views),
        inputs=found.views.tensors,
        loss=losses if len(losses) > 1 else losses[0],
        loss_weights=weights,
        sample_weight=prepared.plan.roles.weight,
        **common,
    )


def _viewed(model: Any, views: Views) -> Any:
    if isinstance(model, torch.nn.Module):
        attach_views(model, views)
        return model
    return functools.partial(_build_viewed, model, views)


def _build_viewed(factory: Any, views: Views) -> torch.nn.Module:
    model: torch.nn.Module = factory()
    attach_views(model, views)
    return model


def _check_importable(parcel: Parcel, spark: SparkSession) -> None:
    """Ask one worker whether it can import what the model needs; most models need nothing that has to be asked."""
    if not parcel.modules:
        return
    names = parcel.modules

    def ask(_: Any) -> Any:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"name": pa.array(missing_modules(names), pa.string())})

    lacking = [row["name"] for row in spark.range(0, 1, 1, 1).mapInArrow(ask, "name string").collect()]
    if lacking:
        raise ConfigError(
            f"the model, its optimizer or loss needs {lacking[0]!r}, which workers cannot import: install it there, "
            f"ship it with spark.addArtifacts, or call cloudpickle.register_pickle_by_value({lacking[0]})"
        )


def _launch(
    params: CheckedParams, parcel: Parcel, spark: SparkSession, num_proc: int, run_id: str
) -> tuple[list[RankReport], int]:
    """Run the ranks; after a failure again, from the last checkpoint, with fewer ranks if slots are gone."""
    options = settings.launch_settings(params)
    failures, least = params.getOrDefault("max_failures"), params.getOrDefault("min_num_proc") or num_proc
    if options["backend"] == "auto" and num_proc == 1:
        options["backend"] = "torch"  # the cheapest meeting place where there is nobody to meet
    ranks = num_proc
    for attempt in range(failures + 1):
        try:
            with _seats(spark, ranks, options["config"].start_timeout_seconds), _progress(params, run_id) as progress:
                made = run(open_and_train, (parcel,), num_proc=ranks, spark=spark, on_event=progress, **options)
            return [report.open(share=True) for report in made], ranks
        except SparkdlError as error:
            if attempt == failures or not is_transient(error):
                raise
            headline = str(error).splitlines()[0]
            logger.warning("attempt %d of %d failed (%s): trying again", attempt + 1, failures + 1, headline)
            ranks = _ranks_left(spark, num_proc, least, options["config"].start_timeout_seconds)
    raise ClusterError("unreachable: the last attempt returns or raises")


def _progress(params: CheckedParams, run_id: str) -> Progress:
    if not params.getOrDefault("verbose"):
        return Progress("off")
    if threading.current_thread() is threading.main_thread():
        return Progress()
    return Progress("lines", name=run_id)  # fits side by side, as of a CrossValidator, would draw over each other's bar


def _ranks_left(spark: SparkSession, wanted: int, least: int, timeout: float) -> int:
    """How many ranks the next attempt can have; an executor that was lost gets a while to come back."""
    began = time.monotonic()
    while (slots := slots_of(spark)) < wanted and not str(spark.conf.get("spark.master", "")).startswith("local["):
        waited = time.monotonic() - began
        if waited > timeout or (slots >= least and waited > _REPLACEMENT_SECONDS):
            break
        time.sleep(0.5)
    if slots < least:
        raise PreflightError(f"{slots} slots are left for at least {least} ranks: add workers or lower min_num_proc")
    return min(wanted, slots)


def _seats(spark: SparkSession, ranks: int, timeout: float) -> Any:
    try:
        total = slots_of(spark)
    except PreflightError:  # Spark Connect does not always tell: then one fit at a time
        total = ranks
    return gate_of(application_of(spark)).hold(ranks, total=total, timeout=timeout)
