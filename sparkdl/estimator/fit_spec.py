"""The decisions of an estimator's parameters about a fit: ``resolve`` reads each once, into one ``FitSpec``."""

from __future__ import annotations

import importlib.util
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.config import CheckpointConfig, LaunchConfig, LoaderConfig, ShardConfig, SyncConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.estimator.column_plan import Roles
from sparkdl.estimator.model_call import floating_dtype
from sparkdl.estimator.outputs import meanings_of
from sparkdl.estimator.params.backend import Backend, SparkBackend, is_own
from sparkdl.estimator.params.params import CheckedParams, value_of
from sparkdl.estimator.rank import UserObjects, made_losses
from sparkdl.estimator.store import Store
from sparkdl.estimator.user_code import naming_errors
from sparkdl.runner import launch_config, start_timeout_of_environment
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import Storage
from sparkdl.strategies.choice import needs_torch_groups
from sparkdl.train.objective.labels import Meaning

DEFAULT_TIMEOUT = 600.0

_DATA_PARAMS = (
    *("continuous_cols", "categorical_cols", "input_shapes", "label_shapes", "feature_dtypes", "random_seed"),
    *("transformation_edit_fields", "transformation_removed_fields", "partitions_per_process", "compress_sparse_cols"),
    *("spread_rows", "shuffle", "shuffle_buffer_size"),
)


@dataclass(frozen=True, kw_only=True)
class Transformation:
    """A function of a pandas DataFrame that makes one, applied while shards are written.

    Attributes:
        function: the user's; None without.
        edit_fields: (name, numpy dtype, shape, nullable) of each column that it adds or changes.
        removed_fields: columns that it removes.
    """

    function: Callable[[Any], Any] | None = None
    edit_fields: Sequence[tuple[Any, ...]] = ()
    removed_fields: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class FitSpec:
    """One fit, as its parameters decide it.

    Attributes:
        objects: what the user gave as objects.
        meanings: by label, what its output means, by its loss.
        loss_weights: one a label; None without.
        backward_passes: batches whose mean gradient makes one optimizer step.
        roles: which column plays which part.
        validation: share of the rows to validate on, or the column that marks them; None without.
        transformation: of the rows, before they are written.
        data_key: what the shards depend on besides their source, transformation and dtype.
        shards: how they are written.
        shuffle: whether training rows come in a new order each epoch.
        shuffle_buffer_rows: rows that are shuffled among each other at a time; None for 64 MiB of them.
        seed: of everything random.
        batch_size: rows a rank and training step.
        validation_batch_size: rows a rank and validation step; None takes ``batch_size``.
        loader: how training shards are read.
        validation_loader: how validation shards are read.
        train: epochs, precision, stopping and the like.
        checkpoints: where and how often to save; None keeps nothing.
        num_proc: ranks of the first attempt.
        min_num_proc: least number of ranks of a later one.
        max_failures: failed attempts that another one follows.
        backend: name of the collective.
        strategy: how the model is spread over the ranks.
        own_backend: what runs the ranks instead of Spark; None without.
        use_gpu: False keeps ranks on the CPU; None takes what Spark assigns.
        launch: how ranks are launched.
        launch_verbose: how much the launcher says.
        verbose: how much the fit says.
        store: where shards, checkpoints and logs lie.
        run_id: name of the run.
    """

    objects: UserObjects
    meanings: Mapping[str, Meaning]
    loss_weights: tuple[float, ...] | None
    backward_passes: int
    roles: Roles
    validation: float | str | None
    transformation: Transformation
    data_key: tuple[Any, ...]
    shards: ShardConfig
    shuffle: bool
    shuffle_buffer_rows: int | None
    seed: int
    batch_size: int
    validation_batch_size: int | None
    loader: LoaderConfig
    validation_loader: LoaderConfig
    train: TrainConfig
    checkpoints: CheckpointConfig | None
    num_proc: int
    min_num_proc: int
    max_failures: int
    backend: str
    strategy: str
    own_backend: Backend | None
    use_gpu: bool | None
    launch: LaunchConfig
    launch_verbose: int
    verbose: int
    store: Store
    run_id: str

    def loaders(self, train: Manifest) -> tuple[LoaderConfig, LoaderConfig]:
        """How these training shards, and the validation shards beside them, are read."""
        if not self.shuffle_buffer_rows:
            return self.loader, self.validation_loader
        pool_bytes = max(1, self.shuffle_buffer_rows * max(1, train.bytes // max(1, train.rows)))
        return replace(self.loader, pool_bytes=pool_bytes), replace(self.validation_loader, pool_bytes=pool_bytes)

    def places(self) -> dict[str, Storage]:
        """The places that the fit will write to, by what the user calls them; nothing for a temporary store."""
        if self.store.temporary:
            return {}
        places = {"store": self.store.root.child("shards")}
        if self.checkpoints is not None:
            places["checkpoints"] = self.store.checkpoints(self.run_id)
        if self.train.tensorboard_dir is not None:
            places["logs"] = self.store.logs(self.run_id)
        return places


def resolve(params: CheckedParams, *, store: Store, num_proc: int) -> FitSpec:
    """Read the parameters of a fit, which ``checks.check_parameters`` has let pass.

    Args:
        params: of the estimator.
        store: the opened one.
        num_proc: ranks of the first attempt.

    Raises:
        ConfigError: a value that a stage refuses, or the user's function that makes a loss fails.
    """
    get = params.getOrDefault
    labels: list[str] = value_of(params, "label_cols")
    objects = UserObjects(
        model=get("model"),
        optimizer=get("optimizer"),
        losses=losses_of(params),
        metrics=get("metrics"),
        callbacks=list(get("callbacks") or ()),
        scheduler=get("lr_scheduler"),
        step=get("train_minibatch_fn"),
    )
    with naming_errors("loss_constructors" if params.isSet("loss_constructors") else "loss"):
        meanings = meanings_of(labels, made_losses(objects.losses))
    # Horovod weighs several losses equally with a sum of 1 where no weights are given.
    loss_weights = get("loss_weights") or ([1 / len(labels)] * len(labels) if len(labels) > 1 else None)

    seed = int(get("random_seed") or 0)
    shuffle = shuffles(params)
    partitions = get("partitions_per_process")
    shards = ShardConfig(
        compression="zstd" if get("compress_sparse_cols") else None,
        spread_rows=get("spread_rows") and shuffle,
        seed=seed,
        repartition=partitions * num_proc if partitions else None,
    )

    run_id = get("run_id") or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    logs = store.logs(run_id).local_path() if store.saving_runs() else None  # event files need a disk of this machine
    compression = get("gradient_compression")
    train = TrainConfig(
        epochs=get("epochs"),
        steps_per_epoch=get("train_steps_per_epoch"),
        validation_steps=get("validation_steps_per_epoch"),
        seed=seed,
        precision=get("precision"),
        max_grad_norm=get("max_grad_norm"),
        accumulate_steps=1 if get("train_minibatch_fn") else get("backward_passes_per_step"),
        scale_lr=get("scale_lr"),
        monitor=get("monitor"),
        monitor_mode=get("monitor_mode"),
        early_stopping_patience=get("early_stopping_patience"),
        compile=get("compile"),
        tensorboard_dir=str(logs) if logs and importlib.util.find_spec("tensorboard") else None,
        sync=SyncConfig(
            compression=None if compression == "none" else compression, sync_batch_norm=get("sync_batch_norm")
        ),
    )
    checkpoints = None
    if store.saving_runs() or get("checkpoint_every") or get("max_failures"):
        checkpoints = CheckpointConfig(
            uri=store.checkpoints(run_id),
            resume=get("resume"),
            fit_id=uuid.uuid4().hex,
            every_steps=get("checkpoint_every"),
            keep_last=get("keep_checkpoints"),
        )

    backend, strategy = get("backend"), get("strategy")
    launch = LaunchConfig(
        start_timeout_seconds=get("timeout") or start_timeout_of_environment() or DEFAULT_TIMEOUT,
        log_to_driver=get("verbose") >= 2,
    )
    if isinstance(backend, SparkBackend):
        launch = launch_config(launch, env=backend.env, **backend.options)
    collective = backend if isinstance(backend, str) else "auto"
    if collective == "auto" and num_proc > 1 and needs_torch_groups(strategy):
        collective = "torch"  # the only one with groups that can hold a model together
    return FitSpec(
        objects=objects,
        meanings=meanings,
        loss_weights=None if loss_weights is None else tuple(loss_weights),
        backward_passes=get("backward_passes_per_step"),
        roles=roles_of(params),
        validation=value_of(params, "validation"),
        transformation=Transformation(
            function=get("transformation_fn"),
            edit_fields=get("transformation_edit_fields") or (),
            removed_fields=get("transformation_removed_fields") or (),
        ),
        data_key=data_key(params, num_proc),
        shards=shards,
        shuffle=shuffle,
        shuffle_buffer_rows=get("shuffle_buffer_size"),
        seed=seed,
        batch_size=get("batch_size"),
        validation_batch_size=get("val_batch_size"),
        loader=replace(LoaderConfig(), threads=get("train_reader_num_workers")),
        validation_loader=replace(LoaderConfig(), threads=get("val_reader_num_workers")),
        train=train,
        checkpoints=checkpoints,
        num_proc=num_proc,
        min_num_proc=get("min_num_proc") or num_proc,
        max_failures=get("max_failures"),
        backend=collective,
        strategy=strategy,
        own_backend=backend if is_own(backend) else None,
        use_gpu=None if get("use_gpu") else False,
        launch=launch,
        launch_verbose=backend.options.get("verbose", 0) if isinstance(backend, SparkBackend) else 0,
        verbose=get("verbose"),
        store=store,
        run_id=run_id,
    )


def losses_of(params: CheckedParams) -> list[Any]:
    """The losses, or what makes them, one a label.

    Raises:
        ConfigError: there is none, or there are more or fewer than labels.
    """
    labels = value_of(params, "label_cols")
    name = "loss_constructors" if params.getOrDefault("loss_constructors") else "loss"
    losses = params.getOrDefault(name)
    if losses is None:
        raise ConfigError("loss is not given: set loss, or loss_constructors")
    losses = list(losses) if isinstance(losses, Sequence) else [losses]
    if len(losses) == 1:
        losses = losses * len(labels)
    if len(losses) != len(labels):
        raise ConfigError(f"{name} has {len(losses)} entries for {len(labels)} labels: give one, or one a label")
    return losses


def roles_of(params: CheckedParams) -> Roles:
    """Which column plays which part.

    Raises:
        ConfigError: the column parameters do not fit each other.
    """
    get = params.getOrDefault
    continuous, categorical = get("continuous_cols") or [], get("categorical_cols") or []
    features = value_of(params, "feature_cols")
    if not params.isSet("feature_cols") and (continuous or categorical):
        features = [*continuous, *categorical]
    validation = value_of(params, "validation")
    input_shapes, label_shapes = get("input_shapes"), get("label_shapes")
    return Roles(
        features=tuple(features),
        labels=tuple(value_of(params, "label_cols")),
        weight=value_of(params, "sample_weight_col"),
        validation=validation if isinstance(validation, str) else None,
        continuous=tuple(continuous),
        categorical=tuple(categorical),
        shapes=None if input_shapes is None else tuple(map(tuple, input_shapes)),
        label_shapes=None if label_shapes is None else tuple(map(tuple, label_shapes)),
        dtypes=get("feature_dtypes") or {},
        float_dtype=float_dtype_of(params),
    )


def float_dtype_of(params: CheckedParams) -> str:
    """The floating dtype of the model, which its features take."""
    model = params.getOrDefault("model")
    return floating_dtype(model) if isinstance(model, torch.nn.Module) else "float32"


def ranks_wanted(params: CheckedParams) -> int | None:
    """The number of ranks asked for; None for every slot."""
    backend, num_proc = params.getOrDefault("backend"), params.getOrDefault("num_proc")
    if num_proc is None and not isinstance(backend, str):
        num_proc = backend.num_processes()
    return None if num_proc is None else int(num_proc)


def shuffles(params: CheckedParams) -> bool:
    """Whether the order of training rows is random."""
    return bool(params.getOrDefault("shuffle")) and params.getOrDefault("shuffle_buffer_size") != 0


def data_key(params: CheckedParams, num_proc: int) -> tuple[Any, ...]:
    """What shards depend on besides their source, the transformation of its rows, and the model's dtype."""
    get = params.getOrDefault
    columns = [value_of(params, name) for name in ("feature_cols", "label_cols", "sample_weight_col", "validation")]
    ranks = num_proc if get("partitions_per_process") else 0
    return (repr(columns), *(repr(get(name)) for name in _DATA_PARAMS), ranks)


def sharing_key(params: CheckedParams) -> tuple[Any, ...]:
    """What the shards of an estimator depend on besides frame and transformation: fits with equal ones share them."""
    return (*data_key(params, ranks_wanted(params) or 0), float_dtype_of(params), repr(params.getOrDefault("store")))
