"""Saving and loading the estimator and its model, alone and inside Spark's pipelines.

Enters: a stage. Leaves: Spark's ``metadata`` folder with the plain parameters, and beside it the artifacts as files:
weights in safetensors, code in a pickle, a hash of each in the metadata. On loading nothing is read before its hash was
compared. A pickle can run code: load what you trust.

    path/metadata/         Spark's own: class, uid, plain parameters, sizes and hashes of the artifacts
    path/objects/          what no JSON holds: model, optimizer, loss, callbacks
    path/bundle/           of a fitted model: the model as a bundle (lakehouse/bundle.py)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from sparkdl.errors import ConflictError, IntegrityError
from sparkdl.estimator.artifacts import read_objects, write_objects
from sparkdl.estimator.params import CheckedParams
from sparkdl.estimator.shipping import loose_by_value
from sparkdl.lakehouse.bundle import load_bundle, save_bundle
from sparkdl.lakehouse.signature import Signature
from sparkdl.storage import Storage

if TYPE_CHECKING:
    from sparkdl.estimator.estimator import TorchEstimator
    from sparkdl.estimator.model import TorchModel

__all__ = ["EstimatorReader", "EstimatorWriter", "ModelReader", "ModelWriter"]

_SECTION = "sparkdl"


class _Writer(MLWriter):
    """Refuses or replaces what is there, without a JVM: it works on Spark Connect, too."""

    def save(self, path: str) -> None:
        """Save below ``path``.

        Raises:
            ConflictError: something is there, and ``overwrite()`` was not called.
            StorageError: it cannot be written.
        """
        where = qualified(self.sparkSession, path)
        root = Storage.of(where)
        if root.exists():
            if not self.shouldOverwrite:
                raise ConflictError(f"{where} exists already: save elsewhere, or call write().overwrite().save(path)")
            root.delete(recursive=True)
        self.saveImpl(where)

    def _metadata(self, instance: CheckedParams, path: str, extra: Mapping[str, Any]) -> None:
        given = {param.name: value for param, value in instance._paramMap.items()}
        plain = {spec.name for spec in instance.SPECS if spec.json}
        DefaultParamsWriter.saveMetadata(
            instance,
            path,
            self.sparkSession,
            extraMetadata={_SECTION: dict(extra)},
            paramMap={name: value for name, value in given.items() if name in plain},
        )


class EstimatorWriter(_Writer):
    """Writes an estimator."""

    def __init__(self, instance: TorchEstimator) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write objects first, metadata last."""
        given = {param.name: value for param, value in self._instance._paramMap.items()}
        objects = {spec.name: given[spec.name] for spec in self._instance.SPECS if not spec.json and spec.name in given}
        with loose_by_value(objects):
            facts = write_objects(objects, Storage.of(path).child("objects"))
        self._metadata(self._instance, path, {"objects": facts})


class EstimatorReader(MLReader["TorchEstimator"]):
    """Reads an estimator."""

    def __init__(self, kind: type[TorchEstimator]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> TorchEstimator:
        """Read it from below ``path``.

        Raises:
            IntegrityError: a file was altered.
            StorageError: there is nothing.
        """
        where, metadata = _read_metadata(self, path)
        instance = self._kind()
        instance._resetUid(metadata["uid"])
        instance._set(**metadata["paramMap"])
        instance._set(**read_objects(Storage.of(where).child("objects"), metadata[_SECTION]["objects"]))
        return instance


class ModelWriter(_Writer):
    """Writes a fitted model."""

    def __init__(self, instance: TorchModel) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write bundle and objects first, metadata last."""
        model, signature = self._instance.getModel(), self._instance._signature
        with loose_by_value(model):
            info = save_bundle(
                model,
                Storage.of(path).child("bundle").uri,
                signature=signature,
                example=example_of(signature),
                allow_pickle=True,
            )
        known = {id(tensor): name for name, tensor in _tensors(model).items()}
        objects = self._instance._objects()
        with loose_by_value(objects):
            facts = write_objects(objects, Storage.of(path).child("objects"), known)
        self._metadata(self._instance, path, {"bundle": info.content_hash, "objects": facts})


class ModelReader(MLReader["TorchModel"]):
    """Reads a fitted model."""

    def __init__(self, kind: type[TorchModel]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> TorchModel:
        """Read it from below ``path``.

        Raises:
            IntegrityError: a file was altered.
            BundleError: a module that the model needs is missing here.
        """
        where, metadata = _read_metadata(self, path)
        facts = metadata[_SECTION]
        bundle = load_bundle(Storage.of(where).child("bundle").uri, expected_hash=facts["bundle"], allow_pickle=True)
        objects = read_objects(Storage.of(where).child("objects"), facts["objects"], _tensors(bundle.model))
        instance = self._kind(model=bundle.model, signature=bundle.signature, **objects)
        instance._resetUid(metadata["uid"])
        instance._set(**metadata["paramMap"])
        return instance


def _read_metadata(reader: MLReader[Any], path: str) -> tuple[str, dict[str, Any]]:
    where = qualified(reader.sparkSession, path)
    metadata = DefaultParamsReader.loadMetadata(where, reader.sparkSession)
    if _SECTION not in metadata:
        raise IntegrityError(f"the metadata of {where} names no artifacts: it was altered, or not saved by sparkdl")
    return where, metadata


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def example_of(signature: Signature | None) -> Any:
    """Made-up rows that a model can be called with, in its own manner; None without a signature."""
    if signature is None:
        return None
    values = {
        field.name: torch.zeros((2, *(size or 1 for size in field.shape)), dtype=getattr(torch, field.dtype))
        for field in signature.inputs
    }
    return values if signature.call != "positional" else tuple(values.values())


def qualified(spark: Any, path: str) -> str:
    """Return ``path`` with the filesystem that Spark would take for it, so that metadata and artifacts lie together."""
    text = os.fspath(path)
    if "://" in text or text.startswith("file:"):
        return text.replace("file:///", "/").replace("file:/", "/")
    default = str(spark.conf.get("spark.hadoop.fs.defaultFS", "file:///"))
    return os.path.abspath(text) if default.startswith("file:") else default.rstrip("/") + "/" + text.lstrip("/")
