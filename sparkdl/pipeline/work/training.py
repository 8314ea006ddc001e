"""Training: shard sets to a model in a bundle, by the estimator.

The run is known by the key of the step, so that one that was killed goes on from its last checkpoint, exactly.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.errors import BundleError, ConfigError, ConflictError
from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.estimator.store import Store
from sparkdl.estimator.summary import plain_epochs
from sparkdl.launch.driver.slots import slots_of
from sparkdl.models.adjusted import adjusted
from sparkdl.models.bundle import load_bundle, read_bundle
from sparkdl.models.preprocessing import COLUMN_TYPES
from sparkdl.nn import PoissonLoss, QuantileLoss
from sparkdl.pipeline.code import imported, split_target
from sparkdl.pipeline.recipe import accuracy_column, calibrates, recipe_of, settled_train, smoothing_of
from sparkdl.pipeline.spec import PipelineSpec, Train
from sparkdl.pipeline.spec.data import LOSSES
from sparkdl.pipeline.state.receipts import content_key
from sparkdl.pipeline.state.results import Trained
from sparkdl.pipeline.trials import factory_of, metrics_of_trials
from sparkdl.pipeline.work.calibration import adjustments_of
from sparkdl.pipeline.work.labels import FittedLabel, Labels
from sparkdl.pipeline.work.network import described, make_network
from sparkdl.pipeline.work.optimizer import Schedule, make_optimizer
from sparkdl.pipeline.work.prepare import Prepared
from sparkdl.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOSSES: Mapping[str, Callable[[], nn.Module]] = {
    "mse": nn.MSELoss,
    "mae": nn.L1Loss,
    "huber": nn.HuberLoss,
}
_MAKING = threading.Lock()
"""Held while a network is made, here or by a bundle: torch has one generator, and trials train side by side."""


def _network(spec: PipelineSpec, start: str | None, description: dict[str, Any]) -> nn.Module:
    """The network that a training starts from: made by its factory, with the champion's weights where it starts there.

    Raises:
        ConfigError: the factory fails, or the champion's weights do not fit what it makes.
    """
    with _MAKING:
        network = make_network(spec.model, description, spec.train.random_seed or 0)
    if start is not None:
        published_hash = start.rpartition("/")[2]  # a registry's folder of a bundle is called so
        with _MAKING:
            champion = load_bundle(start, expected_hash=published_hash, trusted=_trusted(spec)).model
        try:
            network.load_state_dict(adjusted(champion, ()).state_dict())
        except RuntimeError as error:
            raise ConfigError(
                f"train.start=champion: the champion's weights ({start}) do not fit the model of this file ("
                f"{str(error).splitlines()[-1].strip()}): train it from scratch once"
            ) from error
    return network


def look_key(key: str, epochs: int) -> str:
    """The key of what a trial, that may go on, has come to after so many epochs."""
    return content_key("trial", [key, epochs])


def train(
    spark: SparkSession,
    spec: PipelineSpec,
    prepared: Prepared,
    key: str,
    *,
    epochs: int | None = None,
) -> Trained:
    """Train a new network on shard sets.

    Args:
        spark: the session.
        spec: the pipeline.
        prepared: shards, the features and labels that they were cut with, and the bundle to start from, if any.
        key: of this training: another one has another key.
        epochs: after which a search looks at this training, which may go on later, from its checkpoint; None trains
            all of them.

    Raises:
        ConfigError: factory, optimizer, loss and settings do not fit each other, or the champion's weights the network.
        DataError: the rows do not fit them.
        ClusterError: ranks could not be started, or one failed.
        TrainingError: the training went wrong.
    """
    features, labels = prepared.features, prepared.labels
    description = described(features, labels, spec.label)
    settings = settled_train(spec, prepared.shards.train_rows, slots_of(spark))
    parameters = settings.parameters()
    accuracy = accuracy_column(spec)
    if accuracy is not None and settings.monitor == accuracy:
        parameters["metrics"] = list(metrics_of_trials(spec))
    if epochs is not None:  # its learning rates are those of all epochs
        parameters["epochs"] = epochs
    estimator = TorchEstimator(
        model=_network(spec, prepared.start, description),
        optimizer=_optimizer(settings),
        loss=[_loss(spec, label) for label in labels],
        feature_cols=[feature.name for feature in features.inputs],
        label_cols=list(labels.names),
        store=Store(prefix_path=f"{spec.places.runs}/training", keep_shards="never"),
        run_id=key,
        **_optional(spec, settings, prepared.shards.train_rows, labels),
        **parameters,
    )
    model = estimator.fit_on_shards(prepared.shards.train, prepared.shards.validate)
    folder = f"{spec.places.runs}/models/{key if epochs is None else look_key(key, epochs)}"
    adjustments = adjustments_of(model, spec, labels, prepared.shards.validate)
    fitted_labels = [vars(label) for label in labels]
    try:
        with _MAKING:
            try:
                bundle = model.setFeatures(features).save_bundle(
                    folder,
                    factory=factory_of(spec.model),
                    arguments={"features": description, **spec.model.arguments},
                    preprocessing={COLUMN_TYPES: dict(prepared.types), "labels": fitted_labels},
                    adjustments=adjustments,
                )
            except ConflictError:  # an earlier run was killed between this and its result
                bundle = read_bundle(folder)
            load_bundle(folder, trusted=_trusted(spec))  # what cannot be loaded again is not published
    except BundleError as error:
        raise ConfigError(
            f"model.factory={factory_of(spec.model)} made a model that cannot be loaded again, so it is not "
            f"published: {error}"
        ) from error
    if epochs is None:
        checkpoints_of(spec, key).delete(recursive=True)
    calibrated = [adjustment for adjustment in adjustments if calibrates(spec, adjustment.output)]
    summary = model.summary
    kept_epoch = summary.best_epoch if settings.early_stopping_patience else None  # else the last one's weights stay
    return Trained(
        bundle=folder,
        content_hash=bundle.content_hash,
        history=tuple(plain_epochs(model.history.to_dict("records"))),
        metrics={name: float(value) for name, value in summary.metrics.items() if math.isfinite(value)},
        epochs=summary.epochs,
        best_epoch=summary.best_epoch,
        kept_epoch=summary.epochs - 1 if kept_epoch is None else kept_epoch,
        steps=summary.steps,
        rows=summary.rows,
        ranks=summary.num_proc,
        backend=summary.backend,
        seconds=dict(summary.seconds),
        origin=model.origin,
        warnings=tuple(summary.warnings),
        temperatures={adjustment.output: adjustment.temperature for adjustment in calibrated},
        recipe=recipe_of(spec.train, settings),
    )


def _trusted(spec: PipelineSpec) -> list[str]:
    """The module of the file's own factory, which whoever runs the file trusts."""
    return [split_target(factory_of(spec.model))[0]] if spec.model.factory else []


def checkpoints_of(spec: PipelineSpec, key: str) -> Storage:
    """The folder of the checkpoints of the training with that key."""
    return Storage.of(f"{spec.places.runs}/training/runs/{key}")


def _steps(settings: Train, rows: int) -> int:
    """Steps of a whole training on so many rows."""
    assert settings.epochs is not None
    assert settings.batch_size is not None
    assert settings.num_proc is not None
    steps_per_epoch = settings.train_steps_per_epoch or math.ceil(rows / (settings.batch_size * settings.num_proc))
    return settings.epochs * steps_per_epoch


def _optional(spec: PipelineSpec, settings: Train, rows: int, labels: Labels) -> dict[str, Any]:
    """Parameters of the estimator that are given only where the file asks for them."""
    options: dict[str, Any] = {}
    if len(labels.names) == 1:  # as Spark's own models call them
        (label,) = labels
        options["predictionCol"] = "prediction"
        if label.type != "regression" and not spec.label[label.name].loss:
            options["probabilityCol"] = "probability"
    if settings.warmup_steps or settings.decay != "none":
        options["lr_scheduler"] = Schedule(settings.warmup_steps or 0, settings.decay or "none", _steps(settings, rows))
    if spec.weight is not None:
        options["sample_weight_col"] = spec.weight
    weights = [spec.label[name].weight for name in labels.names]
    if any(weight is not None for weight in weights):
        options["loss_weights"] = [1.0 if weight is None else weight for weight in weights]
    return options


def _optimizer(settings: Train) -> Callable[[nn.Module], torch.optim.Optimizer]:
    if ":" in settings.optimizer:
        factory: Callable[[nn.Module], torch.optim.Optimizer] = imported(settings.optimizer, "train.optimizer")
        return factory
    assert settings.learning_rate is not None
    arguments = {"lr": settings.learning_rate}
    if settings.weight_decay is not None:
        arguments["weight_decay"] = settings.weight_decay
    return functools.partial(make_optimizer, name=settings.optimizer, arguments=arguments)


def _loss(spec: PipelineSpec, fitted: FittedLabel) -> Any:
    label = spec.label[fitted.name]
    loss = label.loss or LOSSES[label.type][0]
    if ":" in loss:
        return imported(loss, f"label.{fitted.name}.loss")
    if loss == "pinball":
        return QuantileLoss(label.quantiles)
    if loss == "poisson":
        return PoissonLoss(fitted.mean, fitted.ceiling)
    if label.type == "binary":
        return nn.BCEWithLogitsLoss()
    if label.type == "multiclass":
        return nn.CrossEntropyLoss(label_smoothing=smoothing_of(spec, fitted.name))
    return _LOSSES[loss]()
