"""The driver's side of training: a Spark ML estimator and the model it fits.

A DataFrame and a PyTorch model enter; ``TorchModel``, a fitted Spark ML transformer, leaves. Read ``estimator.py``,
then ``fit.py``, which tells a fit from top to bottom: ``fit_spec.py`` has what its parameters decide, ``data.py`` and
``column_plan.py`` the shards, ``model_call.py`` how a model is called, ``checks.py`` what is refused, ``rank.py`` what
travels to the ranks and runs there. ``model.py``, ``outputs.py`` and ``transform.py`` make predictions. ``params/``
holds the parameters, ``saving/`` writes and reads, ``horovod/`` has other libraries' names, ``store.py`` the places.
Public names are loaded when they are first used, since ranks open modules of this package without Spark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.estimator.data import prepare_data
    from sparkdl.estimator.estimator import TorchEstimator
    from sparkdl.estimator.model import TorchModel
    from sparkdl.estimator.params.backend import SparkBackend
    from sparkdl.estimator.saving.persistence import save_atomically
    from sparkdl.estimator.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store
    from sparkdl.estimator.tuning import CrossValidator

__all__ = [
    "CrossValidator",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "SparkBackend",
    "Store",
    "TorchEstimator",
    "TorchModel",
    "prepare_data",
    "save_atomically",
]

_HOMES = {
    "CrossValidator": "tuning",
    "DBFSLocalStore": "store",
    "FilesystemStore": "store",
    "HDFSStore": "store",
    "LocalStore": "store",
    "SparkBackend": "params.backend",
    "Store": "store",
    "TorchEstimator": "estimator",
    "TorchModel": "model",
    "prepare_data": "data",
    "save_atomically": "saving.persistence",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
