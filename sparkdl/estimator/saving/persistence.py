"""Writers and readers of the estimator and its model, alone and inside Spark's pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyspark.ml.util import DefaultParamsWriter, MLReader, MLWritable, MLWriter

from sparkdl.documents.atomic_folder import atomic_replace
from sparkdl.documents.typed import Source, convert, parse
from sparkdl.errors import BundleError, ConfigError, ConflictError, IntegrityError, StorageError
from sparkdl.estimator.params.params import CheckedParams
from sparkdl.estimator.saving.artifacts import Saved, Withheld, load_named, save_named
from sparkdl.estimator.user_code import loose_by_value
from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.models.calling import Arguments, formed
from sparkdl.models.folder import read_bundle
from sparkdl.models.preprocessing import features_of, preprocessing_of
from sparkdl.models.signature import Signature
from sparkdl.models.trust import REMEDY, allowed_imports, pickle_allowed
from sparkdl.storage import Storage

_SECTION = "sparkdl"
_METADATA_BYTES = 64 << 20
_FORMAT = 2
"""The format of what lies beside Spark's metadata."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """What Spark's metadata records of ours: the hash of the bundle, sizes and hashes of the other files."""

    format: int
    objects: Saved
    stage: str = ""
    bundle: str | None = None
    training: bool = False


class StageWriter(MLWriter):
    """Refuses or replaces what is there, without a JVM: it works on Spark Connect, too.

    Beside Spark's ``metadata`` folder with the plain parameters lie the artifacts as files: weights in safetensors, the
    rest as JSON, a hash of each in the metadata. On loading nothing is read before its hash was compared. What only a
    pickle can hold (a class of a notebook, a lambda) goes into one, and that is loaded for callers who allow it alone
    (``models/trust.py``).

        path/metadata/         Spark's own: class, uid, plain parameters, sizes and hashes of the artifacts
        path/bundle/           the model as a bundle (models/bundle.py)
        path/objects/          optimizer, loss, history, callbacks, ... (artifacts.py)
    """

    _stage = ""

    def save(self, path: str) -> None:
        """Save below ``path``; what ``overwrite()`` replaces stays until all of its successor is written.

        Raises:
            ConflictError: something is there, and ``overwrite()`` was not called.
            StorageError: it cannot be written.
            BundleError: a part of it was left in a pickle when it was loaded, so that nothing can be saved of it.
        """
        self._check()  # before anything is written
        root = Storage.of(path)
        if root.exists() and not self.shouldOverwrite:
            raise ConflictError(f"{root.uri} exists already: save elsewhere, or call write().overwrite().save(path)")
        with atomic_replace(root) as work:
            self._write(work)

    def saveImpl(self, path: str) -> None:
        """Write all parts below ``path``, metadata last."""
        self._write(Storage.of(path))

    def _write(self, root: Storage) -> None:
        """Write all parts, metadata last."""
        raise NotImplementedError

    def _check(self) -> None:
        """Refuse what cannot be saved."""

    def _metadata(self, instance: CheckedParams, root: Storage, extra: Mapping[str, Any]) -> None:
        """Write what Spark's own reader of pipelines looks for, as the other parts are written: to the same place."""
        values = {param.name: value for param, value in instance._paramMap.items()}
        plain = {spec.name for spec in instance.SPECS if spec.json}
        text = DefaultParamsWriter._get_metadata_to_save(
            instance,
            self.sparkSession,
            extraMetadata={_SECTION: {"stage": self._stage, "format": _FORMAT, **extra}},
            paramMap={name: value for name, value in values.items() if name in plain},
        )
        root.child("metadata/part-00000").write_atomic(f"{text}\n".encode())
        root.child("metadata/_SUCCESS").write_atomic(b"")


def save_atomically(stage: MLWritable, path: str, *, overwrite: bool = False) -> None:
    """Save any stage of Spark, such as a ``PipelineModel``, so that a failure leaves the target as it was.

    ``stage.write().overwrite().save(path)`` of Spark's own classes deletes the old one before it writes the new one.
    What is saved either way is the same, and Spark's ``load`` reads it.

    A stage of ours is replaced whole or stays. Spark's own writers of pipelines and searches write stage by stage, and
    what fails in between leaves the stages before it. No stage has a say in that, so this saves them beside the target
    and moves them there.

    Args:
        stage: a ``Pipeline``, ``PipelineModel``, ``CrossValidatorModel`` or the like.
        path: a path or URI that both Spark and sparkdl reach.
        overwrite: replace what is there.

    Raises:
        ConflictError: something is there, and ``overwrite`` is off.
        StorageError: it cannot be written.

    Example:
        >>> save_atomically(pipeline.fit(df), "/models/rides", overwrite=True)
    """
    writer = _AnyWriter(stage)
    (writer.overwrite() if overwrite else writer).save(path)


class _AnyWriter(StageWriter):
    """Lets a stage's own writer write beside what is there."""

    def __init__(self, stage: MLWritable) -> None:
        super().__init__()
        self._instance = stage

    def _write(self, root: Storage) -> None:
        self._instance.write().save(root.spark_uri)


class EstimatorWriter(StageWriter):
    """Writes an estimator."""

    _stage = "TorchEstimator"

    def __init__(self, instance: CheckedParams) -> None:
        super().__init__()
        self._instance = instance

    def _write(self, root: Storage) -> None:
        values = {param.name: value for param, value in self._instance._paramMap.items()}
        names = [spec.name for spec in self._instance.SPECS if not spec.json]
        objects = {name: values[name] for name in names if name in values}
        section: dict[str, Any] = {}
        tensor_names: dict[int, str] = {}
        model = objects.get("model")
        if isinstance(model, torch.nn.Module):
            with contextlib.suppress(BundleError):  # then it goes into the pickle, and its optimizer with it
                section["bundle"] = save_bundle(model, root.child("bundle")).content_hash
                section["training"] = model.training
                tensor_names = {id(tensor): name for name, tensor in _tensors(objects.pop("model")).items()}
        section["objects"] = save_named(objects, root.child("objects"), tensor_names)
        self._metadata(self._instance, root, section)


class EstimatorReader(MLReader[Any]):
    """Reads an estimator."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Read it from below ``path``.

        Raises:
            IntegrityError: a file was altered.
            StorageError: there is nothing.
            ConfigError: something else was saved there.
            BundleError: a part of it is a pickle, and the caller has not allowed any.
        """
        root, metadata, section = _read_metadata(path, "TorchEstimator")
        pickled, objects = section.objects.pickled, {}
        allowed, trusted = pickle_allowed(self.sparkSession), allowed_imports(self.sparkSession)
        if pickled and not allowed:
            raise BundleError(
                f"{', '.join(pickled)} of {root.uri} are saved as a pickle, which can run any code: {REMEDY}"
            )
        if section.bundle is not None:
            model = load_bundle(root.child("bundle"), expected_hash=section.bundle, trusted=trusted).model
            objects["model"] = model.train(section.training)
        tensors = _tensors(objects["model"]) if objects else None
        objects |= load_named(root.child("objects"), section.objects, tensors, allowed=allowed, trusted=trusted)
        return _restored(self._kind(), metadata, root, objects)


class ModelWriter(StageWriter):
    """Writes a fitted model."""

    _stage = "TorchModel"

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def _check(self) -> None:
        _ = self._instance.getModel(), self._instance.signature
        for value in self._instance._objects().values():
            if isinstance(value, Withheld):
                raise value.refusal()

    def _write(self, root: Storage) -> None:
        model, signature = self._instance.getModel(), self._instance.signature
        with loose_by_value(model):
            info = save_bundle(
                model,
                root.child("bundle"),
                signature=signature,
                preprocessing=preprocessing_of(self._instance.getFeatures()),
                example=example_of(signature),
                allow_pickle=True,
            )
        tensor_names = {id(tensor): name for name, tensor in _tensors(model).items()}
        facts = save_named(self._instance._objects(), root.child("objects"), tensor_names)
        self._metadata(self._instance, root, {"bundle": info.content_hash, "objects": facts})


class ModelReader(MLReader[Any]):
    """Reads a fitted model."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Read it from below ``path``.

        A loss or optimizer that only a pickle holds is left out where the caller has not allowed any: the model scores
        without, and their getters say so.

        Raises:
            IntegrityError: a file was altered.
            StorageError: there is nothing.
            ConfigError: something else was saved there.
            BundleError: a module that the model needs is missing here, or the model is a pickle, and the caller has not
                allowed any.
        """
        root, metadata, section = _read_metadata(path, "TorchModel")
        folder = root.child("bundle")
        allowed, trusted = pickle_allowed(self.sparkSession), allowed_imports(self.sparkSession)
        if not allowed and read_bundle(folder).recipe.kind == "pickle":
            raise BundleError(f"the model of {root.uri} is saved as a pickle, which can run any code: {REMEDY}")
        bundle = load_bundle(folder, expected_hash=section.bundle or "", allow_pickle=allowed, trusted=trusted)
        tensors = _tensors(bundle.model)
        objects = load_named(root.child("objects"), section.objects, tensors, allowed=allowed, trusted=trusted)
        unknown = sorted(set(objects) - set(self._kind()._objects()))
        if unknown:
            raise IntegrityError(f"{root.uri} holds {unknown[0][:60]!r}, which no TorchModel has: save the model again")
        features = features_of(bundle.info, trusted)
        of_fit = [objects.pop(name, None) for name in ("meanings", "origin")]
        instance = self._kind(model=bundle.model, **objects).set_origin(*of_fit).setFeatures(features)
        return _restored(instance, metadata, root, {}).set_signature(bundle.signature)


def _read_metadata(path: str, stage: str) -> tuple[Storage, dict[str, Any], _Section]:
    root = Storage.of(path)
    folder = root.child("metadata")
    parts = [entry for entry in folder.list() if entry.name.startswith("part-") and entry.bytes]
    if not parts:
        raise StorageError(f"{root.uri} holds no saved {stage}: check the path, or save one there first")
    source = Source(f"the metadata of {root.uri}", "it was altered, or not saved by sparkdl")
    text = folder.child(parts[0].name).read_bytes(at_most=_METADATA_BYTES)
    metadata = convert(parse(text, source, _METADATA_BYTES, nan=True), dict[str, Any], source)
    section = metadata.get(_SECTION)
    if not isinstance(section, dict):
        raise source.error("it names no artifacts")
    saved_stage = section.get("stage", stage)
    if saved_stage != stage:
        raise ConfigError(f"{root.uri} holds a saved {saved_stage}, not a {stage}: call {saved_stage}.load(path)")
    version = section.get("format", 1)
    if version != _FORMAT:
        raise BundleError(
            f"{root.uri} was saved in format {version}, this sparkdl reads {_FORMAT}: load it with the sparkdl that "
            "saved it, or fit again"
        )
    return root, metadata, convert(section, _Section, source, f"$.{_SECTION}")


def _restored(instance: Any, metadata: Mapping[str, Any], root: Storage, objects: Mapping[str, Any]) -> Any:
    """The instance with its identity and parameters."""
    try:
        instance._resetUid(metadata["uid"])
        plain = {spec.name for spec in instance.SPECS if spec.json}
        unknown = sorted(set(metadata["paramMap"]) - plain)
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no plain parameter")
        instance._set(**metadata["paramMap"])
    except (LookupError, TypeError, ValueError, AttributeError) as cause:
        raise IntegrityError(f"the metadata of {root.uri} has unusable parameters ({cause}): save again") from cause
    instance._set(**objects)
    return instance


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def example_of(signature: Signature | None) -> Any:
    """Made-up rows that a model can be called with, in its own calling convention; None without a signature.

    Numbers from 0 up to 1, which tell models apart that have no bias; zeros where they may be ids.
    """
    if signature is None:
        return None
    values = {}
    for field in signature.inputs:
        owner = signature.owner(field) or field
        rows = torch.zeros((2, *(size or 1 for size in owner.shape)), dtype=getattr(torch, owner.dtype))
        if rows.is_floating_point():
            rows += (torch.arange(rows.numel()) / rows.numel()).reshape(rows.shape)
        values[field.name] = formed(field.form or ("mask" if owner is not field else ""), rows, None)
    return Arguments.of(signature.call, values, [field.name for field in signature.inputs if field.of])
