"""What is refused before any rank starts: by the shards' statistics, and by two made-up rows.

Enters: manifests of the training and validation shards, roles of the columns, the task, what the model returned for
two rows. Leaves: nothing, or a ``DataError`` or ``ConfigError`` with the numbers and the remedy. Nothing is read again:
the writer counted while it wrote.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyspark.sql import DataFrame

from sparkdl.columns.statistics import ColumnStats
from sparkdl.errors import ConfigError, DataError, SchemaError, SparkdlError
from sparkdl.estimator.fit.rank import FitJob, made_losses, opened
from sparkdl.estimator.inputs.column_plan import Roles
from sparkdl.estimator.inputs.faults import making, place_of_fault
from sparkdl.estimator.inputs.probe import Output, Probe
from sparkdl.estimator.params.params import CheckedParams, value_of
from sparkdl.shards.manifest import Manifest
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.resume import check_start
from sparkdl.train.model_selection import monitor_of
from sparkdl.train.objective.labels import label_kind
from sparkdl.train.objective.loss import Objective
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.task import Task, check_optimizer
from sparkdl.worker import RankJob, run_identity

__all__ = [
    "built",
    "check_classes",
    "check_frame",
    "check_loss",
    "check_losses",
    "check_metrics",
    "check_resume",
    "check_rows",
    "check_shards",
    "check_steps",
    "check_task",
    "check_values",
]


def check_frame(what: str, given: Any) -> None:
    """Refuse what is no DataFrame of Spark.

    Raises:
        SchemaError: names the type, and the remedy for pandas.
    """
    if not isinstance(given, DataFrame):
        kind = f"{type(given).__module__}.{type(given).__qualname__}"
        raise SchemaError(f"{what} takes a Spark DataFrame, not a {kind}: make one with spark.createDataFrame(...)")


def check_shards(
    params: CheckedParams, train: Manifest, validation: Manifest | None, roles: Roles, num_proc: int
) -> None:
    """Refuse rows that cannot be dealt to the ranks or trained on, and more steps than they give.

    Raises:
        DataError: too few rows, or values that are no numbers.
        ConfigError: more steps than there are.
    """
    get = params.getOrDefault
    check_rows(train, validation, num_proc=num_proc, wanted=value_of(params, "validation"))
    for manifest in filter(None, (train, validation)):
        check_values(manifest, roles)
    rows = get("batch_size")
    check_steps("train_steps_per_epoch", get("train_steps_per_epoch"), train, rows * num_proc)
    held_out = (get("val_batch_size") or rows) * num_proc
    check_steps("validation_steps_per_epoch", get("validation_steps_per_epoch"), validation, held_out)


def check_rows(train: Manifest, validation: Manifest | None, *, num_proc: int, wanted: Any) -> None:
    """Refuse sets that cannot be dealt to the ranks.

    Args:
        train: shards to train on.
        validation: shards to validate on; None if none were asked for.
        num_proc: number of ranks.
        wanted: the value of ``validation``, for the message.

    Raises:
        DataError: no rows, fewer rows than ranks, or an empty validation split.
    """
    if train.rows == 0:
        raise DataError("the training data has 0 rows: check the filters and the validation column")
    if train.rows < num_proc:
        raise DataError(f"{train.rows} training rows cannot be dealt to {num_proc} ranks: lower num_proc or add rows")
    if validation is not None and validation.rows == 0:
        raise DataError(f"validation={wanted!r} leaves 0 rows to validate on beside {train.rows}: choose more, or None")


def check_steps(name: str, wanted: int | None, manifest: Manifest | None, rows_per_step: int) -> None:
    """Refuse more steps than the rows give.

    Raises:
        ConfigError: names both numbers.
    """
    there = 0 if manifest is None else -(-manifest.rows // rows_per_step)
    if wanted is not None and wanted > there:
        held = 0 if manifest is None else manifest.rows
        raise ConfigError(f"{name}={wanted} exceeds the {there} steps of {held} rows, {rows_per_step} a step: lower it")


def check_values(manifest: Manifest, roles: Roles) -> None:
    """Refuse NaN and infinity in features, labels and weights, weights below 0, and labels that differ in length.

    Raises:
        DataError: names the column and how many there are.
    """
    for spec in manifest.tensors:
        if spec.ragged and spec.name in roles.labels:
            stats = manifest.statistics.get(spec.name, ColumnStats())
            raise DataError(
                f"label {spec.name!r} has rows of {stats.min_length} to {stats.max_length} elements, and a loss "
                "compares rows of one length: pad them before, for instance with the loss's ignore_index"
            )
    weight = (roles.weight,) if roles.weight else ()
    for name in dict.fromkeys((*roles.features, *roles.labels, *weight)):
        stats = manifest.statistics.get(name, ColumnStats())
        if stats.nan_count or stats.inf_count:
            raise DataError(
                f"column {name!r} holds {stats.nan_count} NaN and {stats.inf_count} infinite values in "
                f"{manifest.rows} rows: fill or filter them first"
            )
    if roles.weight:
        stats = manifest.statistics.get(roles.weight, ColumnStats())
        if stats.min is not None and (stats.min < 0 or stats.max == 0):
            raise DataError(
                f"sample weights {roles.weight!r} lie in {stats.min}..{stats.max}: give 0 and more, not all 0"
            )


def built(given: Any) -> torch.nn.Module:
    """The module itself, made if a function was given.

    Raises:
        ConfigError: it is none, its class wants arguments, or its function fails.
    """
    if not isinstance(given, torch.nn.Module):
        try:
            inspect.signature(given).bind()
        except TypeError as error:
            name = getattr(given, "__name__", type(given).__name__)
            raise ConfigError(
                f"model={name} cannot be made without arguments ({error}): give the module itself, {name}(...), or "
                f"functools.partial({name}, ...)"
            ) from error
    with making("model"):
        model = given if isinstance(given, torch.nn.Module) else given()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module, or a function that makes one")
    return model


def check_task(task: Task, model: torch.nn.Module, job: Callable[..., RankJob]) -> None:
    """Refuse a model with nothing to train, an optimizer that is not its own, a monitor that no epoch will have.

    Args:
        task: of the driver's copy of the user's objects.
        model: its model, made.
        job: what the ranks will run.

    Raises:
        ConfigError: names what is wrong.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise ConfigError(f"0 of the model's {count} parameters require a gradient: unfreeze what shall be trained")
    if isinstance(task.optimizer, torch.optim.Optimizer):
        check_optimizer(task.optimizer, model, closures=task.manual_step is not None)
    metrics = MetricSet(task.metrics, task.labels, torch.device("cpu"))
    whole = job(task=task)
    monitor_of(whole.train, metrics, task, validates=whole.validation_uri is not None)


def check_resume(
    fit: FitJob, job: RankJob, model: torch.nn.Module, train: Manifest, validation: Manifest | None
) -> None:
    """Refuse to go on from the checkpoints that are there, where rank 0 would; their tensors are not read.

    Args:
        fit: what the ranks will run.
        job: the same with the driver's copies.
        model: its model, made.
        train: shards to train on.
        validation: shards to validate on.

    Raises:
        ConfigError: the run is another one, is not to resume, or has nothing to start from.
        CheckpointError: no checkpoint can be read, or the weights do not fit the model.
    """
    if job.checkpoints is None:
        return
    checkpoints = Checkpointer(job.checkpoints)
    if checkpoints.steps():  # of new copies, since the driver's were called already
        checkpoints.identity = run_identity(opened(fit), train, validation)
    check_start(checkpoints, model, job.train.epochs)


def check_losses(
    task: Task,
    losses: Sequence[Any],
    probed: Probe,
    train: Manifest,
    validation: Manifest | None,
    *,
    written: bool = True,
) -> None:
    """Refuse labels that a loss does not take, and a loss that does not take the model's outputs.

    Args:
        task: of the driver's copy of the user's objects.
        losses: as the user gave them.
        probed: what the model returned for two rows.
        train: shards to train on.
        validation: shards to validate on.
        written: whether both were written for this fit, so that the shapes in them are the caller's to choose.

    Raises:
        DataError: labels lie outside of the range that a loss takes.
        ConfigError: it cannot be computed from output and label.
    """
    for manifest in filter(None, (train, validation)):
        check_classes(manifest, probed.outputs, made_losses(list(losses)))
    if task.train_step is None:
        objective = Objective(task, torch.device("cpu"), 1, lambda tensor: tensor)
        check_loss(lambda: objective(probed.returned, probed.batch), probed.outputs, written=written)


def check_metrics(task: Task, probed: Probe) -> None:
    """Refuse metrics that do not take the model's outputs; functions are called with all rows, so not here.

    Raises:
        ConfigError: shapes do not fit, as several answers a row do not fit a name that is of one.
        DataError: a label is no class of the metric.
    """
    try:
        MetricSet(task.metrics, task.labels, torch.device("cpu")).update(probed.returned, probed.batch)
    except SparkdlError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{one.label!r} {(-1, *one.shape)} {one.dtype}" for one in probed.outputs)
        raise ConfigError(
            f"metrics cannot be computed from the outputs for {shapes} and their labels "
            f"({type(error).__name__}: {error}): give metrics for outputs and labels of these shapes"
        ) from error


def check_classes(manifest: Manifest, outputs: Sequence[Output], losses: Sequence[Any]) -> None:
    """Refuse class labels beyond a classifier's outputs, and targets outside 0..1 for binary cross-entropy.

    Raises:
        DataError: names the label, its range and the range that the loss takes.
    """
    for output, loss in zip(outputs, losses, strict=True):
        stats = manifest.statistics.get(output.label)
        if stats is None or stats.min is None or stats.max is None:
            continue
        name = getattr(loss, "__name__", type(loss).__name__)
        shape = manifest.tensor(output.label).shape
        if label_kind(loss) == "classes" and output.shape and shape in ((), (1,)):
            ignored = getattr(loss, "ignore_index", -100)
            least = 0 if stats.min == ignored else stats.min
            if least < 0 or stats.max >= output.shape[0]:
                raise DataError(
                    f"label {output.label!r} holds classes {stats.min}..{stats.max}, and {name} over "
                    f"{output.shape[0]} outputs takes 0..{output.shape[0] - 1}: renumber the classes or widen the model"
                )
        binary = name in ("BCELoss", "BCEWithLogitsLoss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
        if binary and (stats.min < 0 or stats.max > 1):
            raise DataError(
                f"label {output.label!r} lies in {stats.min}..{stats.max}, and {name} takes 0..1: rescale it"
            )


def check_loss(compute: Callable[[], Any], outputs: Sequence[Output], *, written: bool = True) -> None:
    """Compute the loss of the two probe rows; ``compute`` takes nothing; ``written`` as for ``check_losses``.

    Raises:
        ConfigError: outputs and labels do not fit the loss, or it has a fault of its own.
    """
    try:
        with torch.no_grad():
            compute()
    except SparkdlError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        shapes = ", ".join(f"{one.label!r} {(-1, *one.shape)} {one.dtype}" for one in outputs)
        fault = place_of_fault(error)
        if fault is None:
            raise ConfigError(
                f"the loss cannot be computed from the outputs for {shapes} and their labels ({told}): make their "
                f"shapes and dtypes fit{', for instance by label_shapes' if written else ''}"
            ) from error
        raise ConfigError(
            f"the loss raised {told} at {fault}, called with the outputs for {shapes} and their labels: "
            "correct it there"
        ) from error
