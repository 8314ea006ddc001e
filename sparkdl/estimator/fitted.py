"""From a fit to its model, with what is worth knowing about how it came about.

Enters: the estimator, the shards it was fitted to, what the ranks reported. Leaves: a ``TorchModel``. Where it comes
from (parameters, table and version, shards, software) is noted here, so that whoever publishes it need not say it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.documents.typed import as_json
from sparkdl.errors import ConfigError
from sparkdl.estimator.inputs.signature import signature_of
from sparkdl.estimator.model import TorchModel
from sparkdl.estimator.params.params import CheckedParams
from sparkdl.estimator.summary import TrainingSummary
from sparkdl.estimator.training import COLUMNS, plain_epochs

if TYPE_CHECKING:
    from sparkdl.estimator.fit.data import Prepared
    from sparkdl.estimator.fit.fit import Trained

__all__ = ["model_of"]

_PASSED_ON = (*COLUMNS, "input_shapes", "transform_batch_size")
_SOFTWARE = ("sparkdl", "pyspark", "pyarrow", "numpy")
_UNWORTHY = {"model", "store", "run_id", "callbacks", "verbose", "timeout"}
"""Parameters that say nothing of the weights; the module itself is in the bundle."""


def model_of(estimator: CheckedParams, prepared: Prepared, trained: Trained) -> TorchModel:
    """Make the transformer of a fit."""
    get = estimator.getOrDefault
    result = trained.report.result
    summary = TrainingSummary(
        run_id=trained.run_id,
        num_proc=trained.num_proc,
        backend=trained.report.backend,
        epochs=result.epochs,
        steps=result.steps,
        rows=result.rows,
        training_rows=prepared.train.rows,
        validation_rows=prepared.validation.rows if prepared.validation else 0,
        best_epoch=result.best_epoch,
        metrics=dict(result.metrics),
        stopped_early=result.stop_reason if result.stopped_early else None,
        seconds=trained.seconds,
        warnings=trained.warnings,
    )
    plain = {name: get(name) for name in _PASSED_ON if estimator.isSet(name)}
    model = TorchModel(
        model=trained.model,
        history=result.history.epochs,
        optimizer=trained.optimizer,
        loss=get("loss"),
        loss_constructors=get("loss_constructors"),
        summary=summary,
        signature=signature_of(trained.probe, prepared.train),
        feature_columns=list(prepared.plan.roles.features),
        label_columns=list(prepared.plan.roles.labels),
        run_id=trained.run_id,
        **plain,
    )
    origin = {
        "parameters": _parameters(estimator, summary, trained.optimizer),
        "lineage": _lineage(prepared),
        "metrics": plain_epochs([result.metrics])[0],
        "columns": dict(prepared.plan.types),
    }
    model.set_origin(trained.meanings, origin)
    model._home = None if prepared.store.temporary else prepared.store.root
    return model


def _parameters(estimator: CheckedParams, summary: TrainingSummary, optimizer: Any) -> dict[str, Any]:
    """What the fit was given, as JSON values; what is no such value by its name."""
    given = {param.name: value for param, value in estimator._paramMap.items() if param.name not in _UNWORTHY}
    found = {name: _plain(value) for name, value in sorted(given.items())}
    if isinstance(optimizer, torch.optim.Optimizer):
        plain = {name: value for name, value in optimizer.defaults.items() if isinstance(value, int | float | str)}
        found["optimizer"] = {"name": type(optimizer).__name__, **plain}
    return {**found, "num_proc": summary.num_proc, "backend": summary.backend, "epochs_trained": summary.epochs}


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # of a file's name that is no UTF-8 Python keeps the bytes as halves of characters
        return value.encode(errors="backslashreplace").decode()
    try:
        return as_json("", {"value": value}, ConfigError)["value"]
    except ConfigError:
        if isinstance(value, list | tuple):
            return [_plain(one) for one in value]
        if isinstance(value, Mapping):
            return {_plain(str(name)): _plain(one) for name, one in value.items()}
        return getattr(value, "__qualname__", None) or (
            str(value) if isinstance(value, torch.dtype) else type(value).__name__
        )


def _lineage(prepared: Prepared) -> dict[str, Any]:
    """Which table at which version, if it is known, the key of the shards, and the software."""
    source = prepared.train.source
    version = None if source is None or not source.version.isdigit() else int(source.version)
    software = {}
    for name in _SOFTWARE:
        try:
            software[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # used from its sources
            continue
    return {
        "source_table": None if source is None else source.uri,
        "source_version": version,
        "shard_key": prepared.train.content_key or None,
        "versions": software,
    }
