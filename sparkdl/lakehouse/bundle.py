"""A published model as a folder: weights, how to rebuild the model, how to feed it, and a hash of every file.

Enters: a ``torch.nn.Module`` and what training knows about it. Leaves: ``bundle.json`` and ``weights.safetensors``;
from these, the model again, in a process that never saw it. Nothing in a bundle is code: a model is rebuilt from the
structure of torch.nn's own layers, or by calling an installed class. Pickle is possible, behind an explicit opt-in on
both sides. No Spark.

    bundle.json           format, model, signature, preprocessing, versions, files, content_hash
    weights.safetensors   every distinct tensor of the state once
    model.pkl             only with allow_pickle=True, instead of the weights
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import safetensors
import torch
from torch import nn

from sparkdl.errors import BundleError, ConflictError, IntegrityError, StorageError
from sparkdl.lakehouse.recipe import PICKLE, WEIGHTS, as_json, prove, rebuilt, recipe_of
from sparkdl.lakehouse.signature import Signature, TensorField
from sparkdl.lakehouse.weights import save_weights
from sparkdl.storage import Storage, sha256_hex, storage_errors

__all__ = [
    "Bundle",
    "copy_bundle",
    "BundleInfo",
    "Signature",
    "TensorField",
    "load_bundle",
    "local_copy",
    "read_bundle",
    "save_bundle",
]

FORMAT = 1
DOCUMENT = "bundle.json"


@dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """What a bundle says about itself, without its model.

    Attributes:
        uri: where it lies.
        content_hash: SHA-256 over everything it holds; equal for equal models.
        model: how it is rebuilt.
        signature: how it is fed; None if it was saved without.
        preprocessing: facts that its features were made with (statistics, category maps), JSON values.
        versions: of the software that saved it.
        files: name to size in bytes and SHA-256.
    """

    uri: str
    content_hash: str
    model: Mapping[str, Any]
    signature: Signature | None
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of the files besides ``bundle.json``."""
        return sum(int(facts["bytes"]) for facts in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A loaded bundle.

    Attributes:
        model: on the CPU, in evaluation mode, its weights mapped from the file.
        info: what the bundle says about itself.
    """

    model: nn.Module
    info: BundleInfo

    @property
    def signature(self) -> Signature | None:
        """How the model is fed."""
        return self.info.signature


def save_bundle(
    model: nn.Module,
    uri: str,
    *,
    signature: Signature | None = None,
    factory: str | Callable[..., nn.Module] | None = None,
    arguments: Mapping[str, Any] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    example: Any = None,
    allow_pickle: bool = False,
) -> BundleInfo:
    """Write ``model`` as a bundle, after proving that it can be rebuilt from it.

    How it will be rebuilt is chosen in this order: ``factory(**arguments)``; the model's own ``bundle_arguments()``
    (a method that returns its constructor's arguments); the structure of torch.nn's own layers; its class with
    arguments read from attributes of the same names, which needs ``example``; a pickle, if allowed.

    Args:
        model: any module; its state is saved whole, in the types it has.
        uri: a folder that does not exist yet.
        signature: how scoring feeds the model.
        factory: a class, a function annotated to return a module, or ``"package.module:Name"``.
        arguments: JSON values, passed to ``factory`` by keyword.
        preprocessing: JSON values that travel with the model.
        example: one input (tensor, tuple of tensors, or dict); the rebuilt model must answer it bit for bit.
        allow_pickle: fall back on a pickle if nothing else works; loading it then needs the same opt-in.

    Raises:
        BundleError: the model cannot be rebuilt safely.
        ConflictError: something is at ``uri`` already.
        StorageError: it cannot be written there.
    """
    target = Storage.of(uri)
    if target.child(DOCUMENT).exists():
        raise ConflictError(f"{uri} holds a bundle already: choose another folder, or delete that one")
    with _work_folder(target) as work:
        plan = _write_model(model, work, factory, arguments, example, allow_pickle)
        document = _document(plan, work, signature, preprocessing)
        _publish(work, target, json.dumps(document, indent=1, sort_keys=True).encode())
    return _info(uri, document)


def read_bundle(uri: str) -> BundleInfo:
    """Read what a bundle says about itself.

    Raises:
        BundleError: there is none, or it has a newer format.
        IntegrityError: ``bundle.json`` was altered.
    """
    source = Storage.of(uri).child(DOCUMENT)
    if not source.exists():
        raise BundleError(f"{uri} holds no {DOCUMENT}: give the folder that save_bundle wrote")
    try:
        document = json.loads(source.read_bytes())
    except ValueError as cause:
        raise IntegrityError(
            f"{source.uri} is not JSON ({cause}): it was altered or cut short, publish it again"
        ) from cause
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise BundleError(f"{uri} has the bundle format {found}, this sparkdl reads {FORMAT}: update sparkdl")
    _check_document(source.uri, document)
    return _info(uri, document)


def load_bundle(
    uri: str,
    *,
    device: str | torch.device = "cpu",
    expected_hash: str | None = None,
    allow_pickle: bool = False,
    trusted: Sequence[str] = (),
) -> Bundle:
    """Rebuild the model of a bundle, in evaluation mode.

    Every file is compared with its recorded hash before anything is made of it.

    Args:
        uri: the bundle's folder.
        device: where the model shall compute.
        expected_hash: the content hash that somebody else recorded, such as a registry.
        allow_pickle: accept a bundle that holds a pickle, which can run any code.
        trusted: modules whose functions may rebuild a model without an annotation.

    Raises:
        IntegrityError: a file differs from its hash, or the bundle from ``expected_hash``.
        BundleError: it cannot be rebuilt here; the message names the module that is missing, or the opt-in.
    """
    info = read_bundle(uri)
    if expected_hash is not None and info.content_hash != expected_hash:
        raise IntegrityError(
            f"the bundle {uri} has the content hash {info.content_hash}, {expected_hash} was expected: publish it again"
        )
    if info.model["kind"] == "pickle" and not allow_pickle:
        raise BundleError(f"the bundle {uri} holds a pickle, which can run any code: load it with allow_pickle=True")
    folder = local_copy(info)
    for name, facts in info.files.items():
        check_file(folder / name, facts)
    model = rebuilt(info.model, folder, trusted)
    model.eval()
    if torch.device(device).type != "cpu":
        model.to(device)
    return Bundle(model=model, info=info)


def copy_bundle(info: BundleInfo, uri: str) -> None:
    """Copy a bundle to ``uri``, checked against its hashes, so that it appears there whole or not at all.

    Where the same bundle is already, it is left, with its age renewed.

    Raises:
        IntegrityError: a file differs from its hash.
        StorageError: it cannot be written there.
    """
    target = Storage.of(uri)
    folder = local_copy(info)
    for name, facts in info.files.items():
        check_file(folder / name, facts)
    text = Storage.of(info.uri).child(DOCUMENT).read_bytes()
    document = target.child(DOCUMENT)
    if document.exists() and read_bundle(uri).content_hash == info.content_hash:
        document.write_atomic(text)  # a sweep spares what is young
        return
    with _work_folder(target) as work:
        for name in info.files:
            shutil.copyfile(folder / name, work / name)
        with suppress(ConflictError):  # another publisher of the same content was faster
            _publish(work, target, text)


def local_copy(info: BundleInfo) -> Path:
    """The bundle's folder on this machine: itself, or a copy shared by the processes of this user."""
    local = Storage.of(info.uri).local_path()
    if local is not None:
        return local
    cache = Path(tempfile.gettempdir()) / f"sparkdl-{os.getuid()}" / "bundles"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    final = cache / info.content_hash
    if not final.exists():
        work = Path(tempfile.mkdtemp(dir=cache))
        try:
            for name in info.files:
                with Storage.of(info.uri).child(name).open_input() as source, (work / name).open("wb") as sink:
                    shutil.copyfileobj(source, sink, 4 << 20)
            os.rename(work, final)
        except OSError as cause:
            shutil.rmtree(work, ignore_errors=True)
            if not final.exists():  # not merely another process that was faster
                raise StorageError(
                    f"cannot copy the bundle {info.uri} to {cache}: {cause}; free space there"
                ) from cause
    return final


@contextmanager
def _work_folder(target: Storage) -> Iterator[Path]:
    """A folder on this machine, on the target's own disk where that is local; gone afterwards unless renamed."""
    local = target.local_path()
    parent = local.parent if local is not None else Path(tempfile.gettempdir())
    work = parent / f".sparkdl-bundle-{uuid.uuid4().hex}"
    with storage_errors(target.uri, "write"):
        work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_model(
    model: nn.Module,
    work: Path,
    factory: str | Callable[..., nn.Module] | None,
    arguments: Mapping[str, Any] | None,
    example: Any,
    allow_pickle: bool,
) -> dict[str, Any]:
    """Put the model's files into ``work`` and return the plan of rebuilding it, proved by doing so."""
    was_training = model.training
    model.eval()
    try:
        facts = save_weights(model, work / WEIGHTS)
        plan = {**recipe_of(model, factory, arguments, example), "weights": facts}
        prove(model, plan, work, example)
        return plan
    except BundleError:
        if not allow_pickle or factory is not None:
            raise
        (work / WEIGHTS).unlink(missing_ok=True)
        with (work / PICKLE).open("wb") as file:
            cloudpickle.dump(model, file)
        return {"kind": "pickle"}
    finally:
        model.train(was_training)


def _document(
    plan: Mapping[str, Any], work: Path, signature: Signature | None, preprocessing: Mapping[str, Any] | None
) -> dict[str, Any]:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _file_hash(path)} for path in sorted(work.iterdir())}
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "safetensors": str(safetensors.__version__),
    }
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": dict(plan),
        "signature": signature.to_json() if signature else None,
        "preprocessing": as_json(preprocessing or {}),
        "versions": versions,
        "files": files,
    }
    return {**document, "content_hash": _content_hash(document)}


def _content_hash(document: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != "content_hash"}
    return sha256_hex(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def _check_document(uri: str, document: Mapping[str, Any]) -> None:
    actual = _content_hash(document)
    if actual != document.get("content_hash"):
        raise IntegrityError(
            f"{uri} was altered: its hash is {actual}, {document.get('content_hash')} was recorded; publish it again"
        )


def check_file(path: Path, facts: Mapping[str, Any]) -> None:
    if not path.exists():
        raise IntegrityError(f"{path} is missing from its bundle: publish the model again")
    if path.stat().st_size != facts["bytes"]:
        raise IntegrityError(
            f"{path} has {path.stat().st_size} bytes, {facts['bytes']} were recorded: publish it again"
        )
    actual = _file_hash(path)
    if actual != facts["sha256"]:
        raise IntegrityError(f"{path} has the hash {actual}, {facts['sha256']} was recorded: publish the model again")


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(work: Path, target: Storage, text: bytes) -> None:
    """Make the finished folder visible under its name: one rename, or the document as the last object."""
    local = target.local_path()
    if local is not None:
        Storage.of(str(work / DOCUMENT)).write_atomic(text)
        with storage_errors(str(local), "write"):
            try:
                os.rename(work, local)  # fails on a folder that holds anything
            except OSError as cause:
                if local.exists():
                    raise ConflictError(f"{local} exists already: choose another folder, or delete that one") from cause
                raise
        return
    for path in sorted(work.iterdir()):
        with path.open("rb") as source, target.child(path.name).open_output() as sink:
            shutil.copyfileobj(source, sink, 4 << 20)
    target.child(DOCUMENT).write_if_absent(text)


def _info(uri: str, document: Mapping[str, Any]) -> BundleInfo:
    signature = document["signature"]
    return BundleInfo(
        uri=uri,
        content_hash=document["content_hash"],
        model=document["model"],
        signature=Signature.from_json(signature) if signature else None,
        preprocessing=document["preprocessing"],
        versions=document["versions"],
        files=document["files"],
    )
