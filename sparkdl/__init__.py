"""sparkdl: from a Spark DataFrame to a trained PyTorch model and back to the lakehouse."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl import nn
    from sparkdl.batches.reading.loader import ShardedDataset
    from sparkdl.estimator.elastic import run_elastic
    from sparkdl.estimator.estimator import TorchEstimator
    from sparkdl.estimator.horovod.runners import HorovodRunner, TorchDistributor, log_to_driver
    from sparkdl.estimator.model import TorchModel
    from sparkdl.estimator.registered import ModelRegistry, load_model
    from sparkdl.estimator.score_table import score_table
    from sparkdl.estimator.space import Range
    from sparkdl.estimator.store import Store
    from sparkdl.estimator.tune import tune
    from sparkdl.models.trust import allow_imports, allow_pickle
    from sparkdl.pipeline.pipeline import Pipeline
    from sparkdl.runner import run, run_on_dataframe
    from sparkdl.shards.write import write_shards
    from sparkdl.spread_model import SpreadModel
    from sparkdl.strategies.mesh import Mesh

__all__ = [
    "HorovodRunner",
    "Mesh",
    "ModelRegistry",
    "Pipeline",
    "Range",
    "ShardedDataset",
    "SpreadModel",
    "Store",
    "TorchDistributor",
    "TorchEstimator",
    "TorchModel",
    "allow_imports",
    "allow_pickle",
    "load_model",
    "log_to_driver",
    "nn",
    "run",
    "run_elastic",
    "run_on_dataframe",
    "score_table",
    "tune",
    "write_shards",
]

_HOMES = {
    "HorovodRunner": "estimator.horovod.runners",
    "Mesh": "strategies.mesh",
    "ModelRegistry": "estimator.registered",
    "Pipeline": "pipeline.pipeline",
    "Range": "estimator.space",
    "ShardedDataset": "batches.reading.loader",
    "SpreadModel": "spread_model",
    "Store": "estimator.store",
    "TorchDistributor": "estimator.horovod.runners",
    "TorchEstimator": "estimator.estimator",
    "TorchModel": "estimator.model",
    "allow_imports": "models.trust",
    "allow_pickle": "models.trust",
    "load_model": "estimator.registered",
    "log_to_driver": "estimator.horovod.runners",
    "run": "runner",
    "run_elastic": "estimator.elastic",
    "run_on_dataframe": "runner",
    "score_table": "estimator.score_table",
    "tune": "estimator.tune",
    "write_shards": "shards.write",
}


# Each public name is loaded when it is first used, so that a machine without Spark reads shards and trains, and a
# driver that only writes shards does not load torch.
def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("sparkdl.nn")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
