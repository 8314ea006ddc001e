"""From the estimator's parameters to the settings of each stage.

Enters: a ``CheckedParams`` with the estimator's parameters. Leaves: the user's objects, roles of columns, and the
config dataclasses of shards, batches, training and launch. Each parameter is read in one place, here.
"""

from __future__ import annotations

import functools
import importlib.util
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparkdl.config import CheckpointConfig, LaunchConfig, LoaderConfig, ShardConfig, SyncConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.estimator.fit.rank import TaskPlan, UserParts
from sparkdl.estimator.horovod.adapters import inputs_by_position
from sparkdl.estimator.inputs.column_plan import Roles
from sparkdl.estimator.inputs.views import Views
from sparkdl.estimator.params.backend import SparkBackend, is_own
from sparkdl.estimator.params.params import CheckedParams, value_of
from sparkdl.estimator.store import Store
from sparkdl.runner import launch_config, start_timeout_of_environment
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import Storage
from sparkdl.worker import RankJob

__all__ = [
    "check_used",
    "checkpoint_config",
    "launch_settings",
    "loader_configs",
    "places",
    "rank_job",
    "ranks_wanted",
    "roles_of",
    "run_id_of",
    "seed_of",
    "shard_config",
    "task_plan",
    "train_config",
    "user_parts",
]

DEFAULT_TIMEOUT = 600.0


def roles_of(params: CheckedParams, float_dtype: str) -> Roles:
    """Return which column plays which part.

    Raises:
        ConfigError: the column parameters do not fit each other.
    """
    get = params.getOrDefault
    continuous, categorical = get("continuous_cols") or [], get("categorical_cols") or []
    features = value_of(params, "feature_cols")
    if not params.isSet("feature_cols") and (continuous or categorical):
        features = [*continuous, *categorical]
    labels = value_of(params, "label_cols")
    validation = value_of(params, "validation")
    if get("loss_weights") and len(get("loss_weights")) != len(labels):
        raise ConfigError(
            f"loss_weights has {len(get('loss_weights'))} entries for {len(labels)} labels: give one a label"
        )
    return Roles(
        features=tuple(features),
        labels=tuple(labels),
        weight=value_of(params, "sample_weight_col"),
        validation=validation if isinstance(validation, str) else None,
        continuous=tuple(continuous),
        categorical=tuple(categorical),
        shapes=_shapes(get("input_shapes")),
        label_shapes=_shapes(get("label_shapes")),
        dtypes=get("feature_dtypes") or {},
        float_dtype=float_dtype,
    )


def _shapes(given: list[list[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    return None if given is None else tuple(tuple(shape) for shape in given)


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
    name = "loss_constructors" if get("loss_constructors") else "loss"
    losses = get(name)
    if losses is None:
        raise ConfigError("loss is not given: set loss, or loss_constructors")
    losses = list(losses) if isinstance(losses, Sequence) else [losses] * len(labels)
    if len(losses) == 1:
        losses = losses * len(labels)
    if len(losses) != len(labels):
        raise ConfigError(f"{name} has {len(losses)} entries for {len(labels)} labels: give one, or one a label")
    return UserParts(
        model=get("model"),
        optimizer=get("optimizer"),
        losses=losses,
        metrics=get("metrics"),
        callbacks=list(get("callbacks") or ()),
        scheduler=get("lr_scheduler"),
        step=get("train_minibatch_fn"),
    )


def task_plan(params: CheckedParams, roles: Roles, views: Views, model: torch.nn.Module) -> TaskPlan:
    """How the user's objects go together, once it is known how the model is called.

    Raises:
        ConfigError: train_minibatch_fn cannot call the model as Horovod does.
    """
    get, labels = params.getOrDefault, roles.labels
    # Horovod weighs several losses equally with a sum of 1 where no weights are given.
    weights = get("loss_weights") or ([1 / len(labels)] * len(labels) if len(labels) > 1 else None)
    return TaskPlan(
        views=views,
        labels=labels,
        loss_weights=None if weights is None else tuple(weights),
        sample_weight=roles.weight,
        passes=get("backward_passes_per_step"),
        order=inputs_by_position(model, views) if get("train_minibatch_fn") else (),
    )


def run_id_of(params: CheckedParams) -> str:
    """The name of the run: the one that was given, or a new one."""
    return params.getOrDefault("run_id") or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


def rank_job(
    params: CheckedParams, train: Manifest, validation: Manifest | None, store: Store, run_id: str, fit_id: str = ""
) -> functools.partial[RankJob]:
    """Everything of a ``RankJob`` but its task and callbacks; ``fit_id`` names this fit among those of the run."""
    get = params.getOrDefault
    train_loader, validation_loader, shuffle = loader_configs(params, train)
    return functools.partial(
        RankJob,
        train_uri=train.folder or "",
        validation_uri=validation.folder if validation else None,
        batch_size=get("batch_size"),
        validation_batch_size=get("val_batch_size"),
        shuffle=shuffle,
        seed=seed_of(params),
        loader=train_loader,
        validation_loader=validation_loader,
        train=train_config(params, store, run_id),
        checkpoints=checkpoint_config(params, store, run_id, fit_id),
        backend=launch_settings(params)["backend"],
    )


def seed_of(params: CheckedParams) -> int:
    """The seed of everything random."""
    return int(params.getOrDefault("random_seed") or 0)


def shard_config(params: CheckedParams, num_proc: int) -> ShardConfig:
    """How intermediate shards are written."""
    partitions = params.getOrDefault("partitions_per_process")
    return ShardConfig(
        compression="zstd" if params.getOrDefault("compress_sparse_cols") else None,
        spread_rows=params.getOrDefault("spread_rows") and shuffles(params),
        seed=seed_of(params),
        repartition=partitions * num_proc if partitions else None,
    )


def loader_configs(params: CheckedParams, train: Manifest) -> tuple[LoaderConfig, LoaderConfig, bool]:
    """How shards are read for training and for validation, and whether training shuffles."""
    get = params.getOrDefault
    base = LoaderConfig()
    buffer = get("shuffle_buffer_size")
    if buffer:
        base = replace(base, pool_bytes=max(1, buffer * max(1, train.bytes // max(1, train.rows))))
    training = replace(base, threads=get("train_reader_num_workers"))
    validation = replace(base, threads=get("val_reader_num_workers"))
    return training, validation, shuffles(params)


def shuffles(params: CheckedParams) -> bool:
    """Whether the order of training rows is random."""
    return bool(params.getOrDefault("shuffle")) and params.getOrDefault("shuffle_buffer_size") != 0


def train_config(params: CheckedParams, store: Store, run_id: str) -> TrainConfig:
    """How the model is trained.

    Raises:
        ConfigError: a value that the training loop refuses.
    """
    get = params.getOrDefault
    compression = get("gradient_compression")
    logs = _log_folder(store, run_id)
    return TrainConfig(
        epochs=get("epochs"),
        steps_per_epoch=get("train_steps_per_epoch"),
        validation_steps=get("validation_steps_per_epoch"),
        seed=seed_of(params),
        precision=get("precision"),
        max_grad_norm=get("max_grad_norm"),
        accumulate_steps=1 if get("train_minibatch_fn") else get("backward_passes_per_step"),
        scale_lr=get("scale_lr"),
        monitor=get("monitor"),
        early_stopping_patience=get("early_stopping_patience"),
        compile=get("compile"),
        tensorboard_dir=str(logs) if logs and importlib.util.find_spec("tensorboard") else None,
        sync=SyncConfig(
            compression=None if compression == "none" else compression, sync_batch_norm=get("sync_batch_norm")
        ),
    )


def _log_folder(store: Store, run_id: str) -> Path | None:
    """Where event files go; None where they are not kept, or not on a disk of this machine."""
    return store.logs(run_id).local_path() if store.saving_runs() else None


def places(params: CheckedParams, store: Store) -> dict[str, Storage]:
    """Where a fit will write, by what the user calls it; nothing for a temporary store."""
    if store.temporary:
        return {}
    run_id = params.getOrDefault("run_id") or "run"
    found = {"store": store.root.child("shards")}
    if checkpoint_config(params, store, run_id) is not None:
        found["checkpoints"] = store.checkpoints(run_id)
    if _log_folder(store, run_id) is not None:
        found["logs"] = store.logs(run_id)
    return found


def checkpoint_config(params: CheckedParams, store: Store, run_id: str, fit_id: str = "") -> CheckpointConfig | None:
    """Where and when checkpoints are written; None without a store, unless something else asks for them."""
    get = params.getOrDefault
    if not (store.saving_runs() or get("checkpoint_every") or get("max_failures")):
        return None
    return CheckpointConfig(
        uri=store.checkpoints(run_id),
        resume=get("resume"),
        fit_id=fit_id,
        every_steps=get("checkpoint_every"),
        keep_last=get("keep_checkpoints"),
    )


def check_used(params: CheckedParams, store: Store) -> None:
    """Refuse parameters that were set and would have no effect, given the others.

    Raises:
        ConfigError: names both and says which to change.
    """
    get, given = params.getOrDefault, params.isSet
    if given("min_num_proc") and not get("max_failures"):
        raise ConfigError(
            f"min_num_proc={get('min_num_proc')} counts after a failure, and max_failures={get('max_failures')} allows "
            "none: raise max_failures, or drop min_num_proc"
        )
    if given("keep_checkpoints") and checkpoint_config(params, store, "run") is None:
        raise ConfigError(
            f"keep_checkpoints={get('keep_checkpoints')}, and none are written without store, checkpoint_every or "
            "max_failures: set one of them, or drop keep_checkpoints"
        )
    if given("resume") and (get("run_id") is None or checkpoint_config(params, store, "run") is None):
        raise ConfigError(
            f"resume={get('resume')!r} is about the checkpoints of an earlier fit, which run_id names and store holds: "
            "set both, or drop resume"
        )
    if get("shuffle_buffer_size") and not get("shuffle"):
        raise ConfigError(
            f"shuffle_buffer_size={get('shuffle_buffer_size')} and shuffle=False contradict each other: drop one"
        )
    if given("spread_rows") and get("spread_rows") and not shuffles(params):
        off = "shuffle=False" if not get("shuffle") else "shuffle_buffer_size=0"
        raise ConfigError(f"spread_rows=True and {off} contradict each other: drop one")
    for name in ("timeout", "min_num_proc"):
        if is_own(get("backend")) and given(name):
            kind = type(get("backend")).__name__
            raise ConfigError(f"{name}={get(name)!r} has no effect on ranks that {kind}.run() starts: drop it")
    started = get("backend").start_timeout if isinstance(get("backend"), SparkBackend) else None
    if get("partitions_per_process") and not shuffles(params):
        raise ConfigError(
            f"partitions_per_process={get('partitions_per_process')} deals the rows out anew, and shuffle=False keeps "
            "them in the frame's order: drop one"
        )
    if given("timeout") and started:
        raise ConfigError(
            f"timeout={get('timeout'):g} and start_timeout={started:g} of the backend name the same thing: drop one"
        )


def launch_settings(params: CheckedParams) -> dict[str, Any]:
    """Keywords of ``runner.run`` besides the function, its arguments and the number of ranks.

    Raises:
        ConfigError: ``backend`` and ``num_proc`` both name a number of ranks.
    """
    get = params.getOrDefault
    backend, verbose = get("backend"), 0
    config = LaunchConfig(
        start_timeout_seconds=get("timeout") or start_timeout_of_environment() or DEFAULT_TIMEOUT,
        log_to_driver=get("verbose") >= 2,
    )
    if not isinstance(backend, str):
        if get("num_proc") is not None and backend.num_processes() is not None:
            raise ConfigError(
                f"num_proc={get('num_proc')} and a backend of {backend.num_processes()} processes: give one of them"
            )
        if isinstance(backend, SparkBackend):
            verbose = backend.options.get("verbose", 0)
            config = launch_config(config, env=backend.env, **backend.options)
        backend = "auto"
    return {"backend": backend, "verbose": verbose, "use_gpu": None if get("use_gpu") else False, "config": config}


def ranks_wanted(params: CheckedParams) -> int | None:
    """The number of ranks asked for; None for every slot."""
    backend = params.getOrDefault("backend")
    asked = params.getOrDefault("num_proc")
    if asked is None and not isinstance(backend, str):
        asked = backend.num_processes()
    least = params.getOrDefault("min_num_proc")
    if asked is not None and least is not None and least > asked:
        raise ConfigError(f"min_num_proc={least} exceeds num_proc={asked}: lower min_num_proc")
    return None if asked is None else int(asked)
