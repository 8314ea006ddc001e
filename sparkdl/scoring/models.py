"""The model of a scoring worker, and the device and threads that it runs on; no Spark."""

from __future__ import annotations

import copy
import itertools
import os
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import torch
from torch import nn

from sparkdl.compat.garbage import freeze
from sparkdl.config import ScoreConfig
from sparkdl.errors import BundleError, ConfigError, first_line
from sparkdl.features.fitted import Features
from sparkdl.models.bundle import load_bundle
from sparkdl.models.calling import check_batch_norm
from sparkdl.models.folder import BundleInfo
from sparkdl.storage import Configuration, Storage

_KEPT_MODELS = 4
_models: OrderedDict[tuple[str, str], nn.Module] = OrderedDict()
_models_lock = threading.Lock()


class ModelSource(Protocol):
    """The source that a worker gets the model from."""

    @property
    def key(self) -> str | None:
        """Equal for equal models, across processes; None of a model that may change, which nobody is to keep."""

    def load(self, device: str) -> nn.Module:
        """The model on ``device``, in evaluation mode unless it is a ``HeldModule``'s."""


@dataclass(frozen=True)
class BundleSource:
    """A bundle that every worker can read.

    Attributes:
        folder: where it lies.
        key: its content hash.
        allow_pickle: as for ``load_bundle``.
        trusted: as for ``load_bundle``.
        storage: how the driver reaches the folder.
    """

    folder: Storage
    key: str
    allow_pickle: bool = False
    trusted: tuple[str, ...] = ()
    storage: Configuration = field(default_factory=Configuration)

    def load(self, device: str) -> nn.Module:
        """Load it, checked against the hash that the driver saw."""
        with self.storage.applied():
            return load_bundle(
                self.folder,
                device=device,
                expected_hash=self.key,
                allow_pickle=self.allow_pickle,
                trusted=self.trusted,
            ).model


@dataclass(frozen=True)
class WithFeatures:
    """A model and the features that make its inputs of raw columns, instead of those that a bundle brings.

    Attributes:
        model: a module, or a bundle.
        features: as it was trained with.
    """

    model: str | BundleInfo | nn.Module
    features: Features


@dataclass(frozen=True)
class ModuleSource:
    """A model that travels with the task, pickled by this very driver.

    Attributes:
        payload: cloudpickle's bytes.
        key: their hash.
    """

    payload: bytes
    key: str

    def load(self, device: str) -> nn.Module:
        """Unpickle it."""
        try:
            model = cloudpickle.loads(self.payload)
        except ImportError as cause:
            raise BundleError(f"the model needs {cause.name}, not installed here: install it on workers") from cause
        return model.eval().to(device)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class HeldModule:
    """A model of this very process, which scores where it lies without being copied.

    Attributes:
        model: whose mode is for whoever scores with it to choose.
    """

    model: nn.Module

    @property
    def key(self) -> None:
        """None: it may be trained further between two calls."""

    def load(self, device: str) -> nn.Module:
        """Return it, or a copy on ``device`` where it lies elsewhere: whoever made it finds it where it was."""
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        if all(tensor.device == torch.device(device) for tensor in tensors):
            return self.model
        return copy.deepcopy(self.model).to(device)


def loaded(source: ModelSource, device: str) -> nn.Module:
    """The model, from this process's memory if an earlier task left it there.

    It is in evaluation mode on the task's device, loaded once a process and kept between tasks.
    """
    if source.key is None:
        model = source.load(device)
        check_batch_norm(model)
        return model
    where = (source.key, device)
    with _models_lock:
        if where not in _models:
            model = source.load(device)
            check_batch_norm(model)
            _models[where] = model
            if _task() is not None:
                freeze()
            while len(_models) > _KEPT_MODELS:
                _models.popitem(last=False)
        _models.move_to_end(where)
        return _models[where]


def _task() -> Any:
    """Spark's context of the running task, None outside of one."""
    # no import of pyspark: where there is a task, Spark's worker has imported it already
    module = sys.modules.get("pyspark.taskcontext")
    return module.TaskContext.get() if module else None


def place(config: ScoreConfig) -> tuple[str, int]:
    """The device and the number of threads of this task: what Spark granted it, and never more.

    Returns:
        torch's name of the device, intra-op threads.

    Raises:
        ConfigError: ``config.device`` names none that is here.
    """
    task = _task()
    cpus = task.cpus() if task else torch.get_num_threads()
    device = config.device
    if device == "auto":
        device = "cpu"
        if torch.cuda.is_available():
            addresses = task.resources()["gpu"].addresses if task and "gpu" in task.resources() else ["0"]
            device = f"cuda:{_index(addresses[0]) % torch.cuda.device_count()}"
    else:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as cause:  # the latter of a torch without CUDA
            raise ConfigError(
                f"device={device!r} cannot be used here ({first_line(cause)}): give 'auto', 'cpu', or the name of a "
                "device that each worker has"
            ) from cause
    return device, config.threads or cpus


def _index(address: str) -> int:
    """Spark's address of a GPU as torch counts it, where CUDA_VISIBLE_DEVICES hides some."""
    visible = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    return visible.index(address) if address in visible else int(address)
