"""The refusals of a fit before any rank starts, by parameters, shard statistics and two made-up rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pyspark.sql import DataFrame, SparkSession

from sparkdl.batches.order.plan import Steps
from sparkdl.columns.statistics import ColumnStats
from sparkdl.errors import ConfigError, DataError, SchemaError, SparkdlError
from sparkdl.estimator.column_plan import Roles
from sparkdl.estimator.fit_spec import FitSpec, losses_of, ranks_wanted, shuffles
from sparkdl.estimator.horovod.adapters import adapted_metrics
from sparkdl.estimator.model_call import Output, Probe, norm_of_single_values
from sparkdl.estimator.outputs import check_columns, meanings_of
from sparkdl.estimator.params.backend import SparkBackend, is_own
from sparkdl.estimator.params.params import CheckedParams, check_conflicts, value_of
from sparkdl.estimator.rank import FitMessage, UserObjects, made_losses
from sparkdl.estimator.user_code import built, naming_errors, place_of_error
from sparkdl.launch.driver import barrier
from sparkdl.observe import logger
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import check_places
from sparkdl.strategies import STRATEGIES
from sparkdl.strategies.base import TaskView
from sparkdl.strategies.choice import AUTO, Choice, choice_of, needs_torch_groups
from sparkdl.strategies.local_sgd import check_local_training
from sparkdl.strategies.local_steps import LocalSteps
from sparkdl.strategies.mesh import Mesh
from sparkdl.strategies.parameter_server import check_served_model
from sparkdl.strategies.server_options import ServerOptions
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.resume import check_start
from sparkdl.train.model_selection import monitor_of
from sparkdl.train.objective.labels import Meaning, label_kind
from sparkdl.train.objective.loss import Objective, loss_option
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.task import Task, check_optimizer
from sparkdl.worker import run_identity

_WRITING_PARAMS = (
    *("transformation_fn", "transformation_edit_fields", "transformation_removed_fields", "partitions_per_process"),
    *("continuous_cols", "categorical_cols", "feature_dtypes", "label_shapes", "compress_sparse_cols", "spread_rows"),
)


def check_frame(what: str, frame: Any) -> None:
    """Refuse what is no DataFrame of Spark.

    Raises:
        SchemaError: names the type, and the remedy for pandas.
    """
    if not isinstance(frame, DataFrame):
        kind = f"{type(frame).__module__}.{type(frame).__qualname__}"
        raise SchemaError(f"{what} takes a Spark DataFrame, not a {kind}: make one with spark.createDataFrame(...)")


def check_parameters(params: CheckedParams) -> None:
    """Refuse parameters that are missing, or do not fit each other, whatever the rows, store and cluster are.

    Raises:
        ConfigError: names them and says which to change.
    """
    check_conflicts(params)
    get, is_set = params.getOrDefault, params.isSet
    for name in ("model", "optimizer"):
        if get(name) is None:
            raise ConfigError(f"{name} is not given: set it before fit")
    losses, labels = losses_of(params), value_of(params, "label_cols")
    if get("loss_weights") and len(get("loss_weights")) != len(labels):
        raise ConfigError(
            f"loss_weights has {len(get('loss_weights'))} entries for {len(labels)} labels: give one a label"
        )
    with naming_errors("loss_constructors" if is_set("loss_constructors") else "loss"):
        losses = made_losses(losses)
    adapted_metrics(get("metrics"), labels, losses)  # which refuses names that do not fit the losses
    check_columns(params, meanings_of(labels, losses))
    if get("transformation_fn") is None and (get("transformation_edit_fields") or get("transformation_removed_fields")):
        raise ConfigError("transformation_edit_fields and _removed_fields describe a transformation_fn: give one, too")
    if get("shuffle_buffer_size") and not get("shuffle"):
        raise ConfigError(
            f"shuffle_buffer_size={get('shuffle_buffer_size')} and shuffle=False contradict each other: drop one"
        )
    if is_set("spread_rows") and get("spread_rows") and not shuffles(params):
        off = "shuffle=False" if not get("shuffle") else "shuffle_buffer_size=0"
        raise ConfigError(f"spread_rows=True and {off} contradict each other: drop one")
    if get("partitions_per_process") and not shuffles(params):
        raise ConfigError(
            f"partitions_per_process={get('partitions_per_process')} deals the rows out anew, and shuffle=False keeps "
            "them in the frame's order: drop one"
        )
    _check_ranks(params)


def _check_ranks(params: CheckedParams) -> None:
    """Refuse numbers of ranks, timeouts and attempts that contradict each other or the backend."""
    get, is_set = params.getOrDefault, params.isSet
    backend = get("backend")
    if not isinstance(backend, str) and get("num_proc") is not None and backend.num_processes() is not None:
        raise ConfigError(
            f"num_proc={get('num_proc')} and a backend of {backend.num_processes()} processes: give one of them"
        )
    strategy = get("strategy")
    if backend == "horovod" and needs_torch_groups(strategy):
        raise ConfigError(
            f"strategy={strategy!r} spreads the model by torch.distributed, and backend='horovod' opens no group of "
            "it: choose backend='torch', or strategy='all_reduce'"
        )
    ranks, least = ranks_wanted(params), get("min_num_proc")
    if ranks is not None and least is not None and least > ranks:
        raise ConfigError(f"min_num_proc={least} exceeds num_proc={ranks}: lower min_num_proc")
    if is_set("min_num_proc") and not get("max_failures"):
        raise ConfigError(
            f"min_num_proc={least} counts after a failure, and max_failures={get('max_failures')} allows none: raise "
            "max_failures, or drop min_num_proc"
        )
    for name in ("timeout", "min_num_proc"):
        if is_own(backend) and is_set(name):
            raise ConfigError(
                f"{name}={get(name)!r} has no effect on ranks that {type(backend).__name__}.run() starts: drop it"
            )
    started = backend.start_timeout if isinstance(backend, SparkBackend) else None
    if is_set("timeout") and started:
        raise ConfigError(
            f"timeout={get('timeout'):g} and start_timeout={started:g} of the backend name the same thing: drop one"
        )


def check_strategy(spec: FitSpec, objects: UserObjects) -> None:
    """Refuse a mesh that the ranks do not fill, or that does not go with the model, the batch or the training.

    Raises:
        ConfigError: names both and says which to change.
    """
    if spec.strategy == AUTO or spec.strategy in STRATEGIES:
        return
    mesh = choice_of(spec.strategy).filled(spec.num_proc)
    if mesh.is_data_parallel:
        return
    if objects.step is not None:
        raise ConfigError(
            f"strategy={spec.strategy!r} takes no step of a user's own, and train_minibatch_fn is one: drop one"
        )
    if isinstance(mesh, LocalSteps):
        check_local_training(mesh, spec.train)
        return
    if isinstance(mesh, ServerOptions):
        mesh.filled(spec.min_num_proc)
        check_local_training(mesh, spec.train)
        check_served_model(mesh, spec.train, built(objects.model), spec.num_proc)
        return
    if spec.min_num_proc != spec.num_proc:
        raise ConfigError(
            f"strategy={spec.strategy!r} is filled by {spec.num_proc} ranks, and min_num_proc={spec.min_num_proc} "
            "would leave fewer after a failure: drop min_num_proc"
        )
    from sparkdl.strategies.mesh_strategy import check_layers, check_training  # with DTensor and sympy

    check_training(mesh, spec.train, "cpu" if spec.use_gpu is False else None)
    if mesh.pipeline != 1 and spec.batch_size < mesh.parts_of_a_batch:
        raise ConfigError(
            f"batch_size={spec.batch_size} has fewer rows than the {mesh.parts_of_a_batch} micro-batches of "
            f"strategy={spec.strategy!r}: raise batch_size, or set micro_batches"
        )
    check_layers(mesh, built(objects.model))


def check_checkpoints_used(params: CheckedParams, spec: FitSpec) -> None:
    """Refuse what was set about checkpoints, where the store and the other parameters let none be written.

    Raises:
        ConfigError: names both and says which to change.
    """
    get, is_set = params.getOrDefault, params.isSet
    if is_set("keep_checkpoints") and spec.checkpoints is None:
        raise ConfigError(
            f"keep_checkpoints={get('keep_checkpoints')}, and none are written without store, checkpoint_every or "
            "max_failures: set one of them, or drop keep_checkpoints"
        )
    if is_set("resume") and (get("run_id") is None or spec.checkpoints is None):
        raise ConfigError(
            f"resume={get('resume')!r} is about the checkpoints of an earlier fit, which run_id names and store holds: "
            "set both, or drop resume"
        )


def check_cluster(spec: FitSpec, spark: SparkSession) -> None:
    """Refuse more ranks than the cluster can run, and places that it cannot write to.

    Raises:
        PreflightError: the cluster cannot run so many ranks.
        StorageError: store, checkpoints or logs cannot be reached or written.
    """
    if spec.own_backend is None:
        barrier.check(spark, spec.num_proc, spec.launch)
    check_places(spec.places(), spark)


def check_nothing_to_write(params: CheckedParams) -> None:
    """Refuse parameters that work while shards are written, where these exist already.

    Raises:
        ConfigError: names the parameter.
    """
    for name in _WRITING_PARAMS:
        if params.isSet(name):
            raise ConfigError(
                f"{name} works while shards are written, and these exist already: drop it, or use fit(df)"
            )
    if value_of(params, "validation") is not None:
        raise ConfigError("validation chooses rows of a DataFrame: give fit_on_shards a validation set instead")


def check_shards(spec: FitSpec, train: Manifest, validation: Manifest | None) -> None:
    """Refuse rows that cannot be dealt to the ranks or trained on, and more steps than they give.

    Raises:
        DataError: too few rows, or values that are no numbers.
        ConfigError: more steps than there are.
    """
    check_rows(train, validation, num_proc=spec.num_proc, wanted=spec.validation)
    for manifest in filter(None, (train, validation)):
        check_values(manifest, spec.roles)
    readers = _readers(spec)
    step_rows = spec.batch_size * readers
    check_steps("train_steps_per_epoch", spec.train.steps_per_epoch, train, step_rows)
    step_rows = (spec.validation_batch_size or spec.batch_size) * readers
    check_steps("validation_steps_per_epoch", spec.train.validation_steps, validation, step_rows)


def _readers(spec: FitSpec) -> int:
    """How many batches make up a step: ranks of one tensor group or pipeline read the same."""
    choice = _choice(spec)
    return choice.readers if isinstance(choice, Mesh) else spec.num_proc


def _choice(spec: FitSpec) -> Choice | None:
    """The options of the strategy on so many ranks; None of one without."""
    named = spec.strategy == AUTO or spec.strategy in STRATEGIES
    return None if named else choice_of(spec.strategy).filled(spec.num_proc)


def check_single_rows(spec: FitSpec, model: torch.nn.Module, probed: Probe, train: Manifest) -> None:
    """Refuse a step that has a single row for a batch norm layer: the last one would fail at the end of an epoch.

    Args:
        spec: of the fit.
        model: the driver's copy.
        probed: what it returned for two rows.
        train: shards to train on.

    Raises:
        ConfigError: names the layer, the rows and the batch size.
    """
    readers = _readers(spec)
    steps = Steps(rows=train.rows, global_batch=spec.batch_size * readers, world_size=readers)
    by_itself = spec.train.sync.sync_batch_norm is False or isinstance(_choice(spec), LocalSteps)

    def has_single_row(step: int) -> bool:
        shares = [steps.share(step, rank) for rank in range(readers)] if by_itself else [(0, steps.global_rows(step))]
        return any(high - low == 1 for low, high in shares)

    last = min(spec.train.steps_per_epoch or steps.count, steps.count) - 1
    step = next(filter(has_single_row, (0, last)), None)
    if step is None or spec.objects.step is not None:  # what a user's own step does with such a row is its affair
        return
    name = norm_of_single_values(model, probed)
    if name is not None:
        raise ConfigError(
            f"layer {name!r} would get one value a channel in step {step + 1} of an epoch, where {train.rows} rows at "
            f"batch_size={spec.batch_size} leave {'a rank' if by_itself else 'all ranks together'} a single row, and "
            "one value has no variance: choose a batch size that leaves no step with a single row"
        )


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


def check_steps(name: str, steps_asked: int | None, manifest: Manifest | None, rows_per_step: int) -> None:
    """Refuse more steps than the rows give.

    Raises:
        ConfigError: names both numbers.
    """
    steps = 0 if manifest is None else -(-manifest.rows // rows_per_step)
    if steps_asked is not None and steps_asked > steps:
        rows = 0 if manifest is None else manifest.rows
        raise ConfigError(
            f"{name}={steps_asked} exceeds the {steps} steps of {rows} rows, {rows_per_step} a step: lower it"
        )


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
        if stats.max is not None and stats.max < torch.finfo(torch.float32).tiny:
            raise DataError(
                f"sample weights {roles.weight!r} are {stats.max} at most, which float32 takes for 0: multiply them by "
                "one number, which changes nothing else"
            )


def check_task(message: FitMessage, task: Task, model: torch.nn.Module, num_proc: int) -> None:
    """Refuse a model with nothing to train, an optimizer that is not its own, a monitor that no epoch will have.

    Args:
        message: to the ranks.
        task: of the driver's copy of the user's objects.
        model: its model, made.
        num_proc: number of ranks.

    Raises:
        ConfigError: names what is wrong.
    """
    named = message.strategy == AUTO or message.strategy in STRATEGIES
    mesh = None if named else choice_of(message.strategy).filled(num_proc)
    if isinstance(mesh, Mesh):
        by_user = task.forward is not None or task.train_step is not None
        from sparkdl.strategies.mesh_strategy import check_model

        check_model(mesh, model, TaskView(task.inputs, task.input_style, by_user))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise ConfigError(f"0 of the model's {count} parameters require a gradient: unfreeze what shall be trained")
    if isinstance(task.optimizer, torch.optim.Optimizer):
        check_optimizer(task.optimizer, model, closures=task.manual_step is not None)
    metrics = MetricSet(task.metrics, task.labels, torch.device("cpu"))
    monitor_of(message.train, metrics, task, validates=message.validation_uri is not None)


def check_resume(message: FitMessage, model: torch.nn.Module, train: Manifest, validation: Manifest | None) -> None:
    """Refuse to go on from the checkpoints that are there, where rank 0 would; their tensors are not read.

    Args:
        message: to the ranks.
        model: the driver's copy.
        train: shards to train on.
        validation: shards to validate on.

    Raises:
        ConfigError: the run is another one, is not to resume, or has nothing to start from.
        CheckpointError: no checkpoint can be read, or the weights do not fit the model.
    """
    if message.checkpoints is None:
        return
    checkpoints = Checkpointer(message.checkpoints)
    if checkpoints.steps():  # of new copies, since the driver's were called already
        checkpoints.identity = run_identity(message.job(), train, validation)
    check_start(checkpoints, model, message.train.epochs)


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
        metrics = MetricSet(task.metrics, task.labels, torch.device("cpu"))
        metrics.update(probed.returned, probed.batch)
        metrics.state()  # which looks at the labels
    except SparkdlError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{output.label!r} {(-1, *output.shape)} {output.dtype}" for output in probed.outputs)
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
        function = loss
        while isinstance(function, functools.partial):
            function = function.func
        name = getattr(function, "__name__", type(function).__name__)
        shape = manifest.tensor(output.label).shape
        if label_kind(loss) == "classes" and output.shape and shape in ((), (1,)):
            ignored = loss_option(loss, "ignore_index", -100)
            least, greatest = (0 if end == ignored else end for end in (stats.min, stats.max))
            if least < 0 or greatest >= output.shape[0]:
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
        message = f"{type(error).__name__}: {error}"
        shapes = ", ".join(f"{output.label!r} {(-1, *output.shape)} {output.dtype}" for output in outputs)
        fault = place_of_error(error)
        if fault is None:
            raise ConfigError(
                f"the loss cannot be computed from the outputs for {shapes} and their labels ({message}): make their "
                f"shapes and dtypes fit{', for instance by label_shapes' if written else ''}"
            ) from error
        raise ConfigError(
            f"the loss raised {message} at {fault}, called with the outputs for {shapes} and their labels: "
            "correct it there"
        ) from error


def warn_of_own_loss(params: CheckedParams, probed: Probe, meanings: Mapping[str, Meaning], train: Manifest) -> None:
    """Say in the log what predictionCol will hold, where it looks like a class and the loss does not make it one."""
    name, (output, *_) = params.getOrDefault("predictionCol"), probed.outputs
    label = train.tensor(output.label)
    looks = len(output.shape) == 1 and output.shape[0] > 1 and label.shape == () and label.dtype.startswith("int")
    if name and looks and meanings[output.label] == "value":
        logger.warning(
            "predictionCol=%r will hold the %d numbers of the output, no class, since the loss is none of torch's for "
            "classes: train with CrossEntropyLoss or a class derived from it, or take the greatest one's index",
            name,
            output.shape[0],
        )
