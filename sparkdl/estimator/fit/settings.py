"""From the estimator's parameters to the settings of each stage.

Enters: a ``CheckedParams`` with the estimator's parameters. Leaves: roles of columns, and the config dataclasses of
shards, batches, training and launch. Each parameter is read in one place, here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkdl.config import CheckpointConfig, LaunchConfig, LoaderConfig, ShardConfig, SyncConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.estimator.fit.column_plan import Roles
from sparkdl.estimator.params.params import CheckedParams, value_of
from sparkdl.estimator.store import Store
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import Storage

__all__ = [
    "SparkBackend",
    "check_used",
    "checkpoint_config",
    "launch_settings",
    "loader_configs",
    "ranks_wanted",
    "roles_of",
    "seed_of",
    "shard_config",
    "train_config",
]

DEFAULT_TIMEOUT = 600.0


class SparkBackend:
    """Where an estimator runs, in the manner of Horovod's ``SparkBackend``; the rendezvous is chosen automatically.

    Args:
        num_proc: number of ranks; None takes every slot of the cluster.
        env: variables for the ranks.
        start_timeout: until all ranks have started, seconds.
        stdout: of the ranks; only ``sys.stdout``, where the driver prints their lines, is taken.
        stderr: of the ranks; only ``sys.stderr`` is taken.
        options: other options of ``horovod.spark.run``.

    Raises:
        ConfigError: an option has no counterpart.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str] | None = None,
        *,
        start_timeout: float | None = None,
        stdout: Any = None,
        stderr: Any = None,
        **options: Any,
    ) -> None:
        if stdout not in (None, sys.stdout) or stderr not in (None, sys.stderr):
            raise ConfigError("stdout and stderr of a SparkBackend can only be those of the driver: leave them out")
        refused = [name for name, value in options.items() if value]
        if refused:
            raise ConfigError(
                f"SparkBackend takes no {refused[0]}: ranks need no network or log settings, leave it out"
            )
        self._num_proc = num_proc
        self.env = dict(env or {})
        self.start_timeout = start_timeout

    def num_processes(self) -> int | None:
        """Return the number of ranks; None for every slot."""
        return self._num_proc


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


def seed_of(params: CheckedParams) -> int:
    """The seed of everything random."""
    return int(params.getOrDefault("random_seed") or 0)


def shard_config(params: CheckedParams, num_proc: int) -> ShardConfig:
    """How intermediate shards are written."""
    partitions = params.getOrDefault("partitions_per_process")
    return ShardConfig(
        compression="zstd" if params.getOrDefault("compress_sparse_cols") else None,
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
    return training, validation, bool(get("shuffle")) and buffer != 0


def train_config(params: CheckedParams, store: Store, run_id: str) -> TrainConfig:
    """How the model is trained.

    Raises:
        ConfigError: a value that the training loop refuses.
    """
    get = params.getOrDefault
    compression = get("gradient_compression")
    logs = store.get_logs_path(run_id)
    writes_logs = store.saving_runs() and Storage.of(logs).local_path() is not None
    return TrainConfig(
        epochs=get("epochs"),
        steps_per_epoch=get("train_steps_per_epoch"),
        validation_steps=get("validation_steps_per_epoch"),
        seed=seed_of(params),
        precision=get("precision"),
        max_grad_norm=get("max_grad_norm"),
        accumulate_steps=get("backward_passes_per_step"),
        scale_lr=get("scale_lr"),
        monitor=get("monitor"),
        early_stopping_patience=get("early_stopping_patience"),
        compile=get("compile"),
        tensorboard_dir=logs if writes_logs and importlib.util.find_spec("tensorboard") else None,
        sync=SyncConfig(compression=None if compression == "none" else compression),
    )


def checkpoint_config(params: CheckedParams, store: Store, run_id: str) -> CheckpointConfig | None:
    """Where and when checkpoints are written; None without a store, unless something else asks for them."""
    get = params.getOrDefault
    if not (store.saving_runs() or get("checkpoint_every") or get("max_failures")):
        return None
    return CheckpointConfig(
        uri=store.get_checkpoint_path(run_id),
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
    if get("shuffle_buffer_size") and not get("shuffle"):
        raise ConfigError(
            f"shuffle_buffer_size={get('shuffle_buffer_size')} and shuffle=False contradict each other: drop one"
        )
    started = None if isinstance(get("backend"), str) else getattr(get("backend"), "start_timeout", None)
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
    backend, env = get("backend"), {}
    timeout = get("timeout") or DEFAULT_TIMEOUT
    if not isinstance(backend, str):
        env, timeout = dict(backend.env), backend.start_timeout or timeout
        if get("num_proc") is not None and backend.num_processes() is not None:
            raise ConfigError(
                f"num_proc={get('num_proc')} and a backend of {backend.num_processes()} processes: give one of them"
            )
        backend = "auto"
    config = LaunchConfig(start_timeout_seconds=timeout, log_to_driver=get("verbose") >= 2)
    return {"backend": backend, "env": env, "use_gpu": None if get("use_gpu") else False, "config": config}


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
