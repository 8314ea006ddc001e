"""A published model as a folder: weights, the way to rebuild and feed the model, a hash of every file."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch
from torch import nn

from sparkdl.compat.pickles import Pickler
from sparkdl.documents.typed import as_json
from sparkdl.errors import BundleError, ConflictError, IntegrityError
from sparkdl.models.adjusted import AdjustedModel
from sparkdl.models.copies import copy_bundle, local_copy
from sparkdl.models.folder import (
    DOCUMENT,
    FORMAT,
    MAX_BYTES,
    PICKLE,
    WEIGHTS,
    BundleInfo,
    FileFacts,
    Recipe,
    content_hash_of,
    file_hash,
    info_of,
    publish_folder,
    read_bundle,
    work_folder,
)
from sparkdl.models.recipe import prove, rebuilt, recipe_of
from sparkdl.models.signature import Signature, TensorField
from sparkdl.models.structure import parametrizations_of
from sparkdl.models.trust import allowed_imports, checked_packages
from sparkdl.models.weights import save_weights
from sparkdl.nn.modes import mode_of
from sparkdl.storage import Storage

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
    uri: str | Storage,
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

    Nothing in a bundle is code: a model is rebuilt from the structure of torch.nn's own layers, or by calling an
    installed class of a package that the reader names, in a process that never saw it. Pickle is possible, behind an
    explicit opt-in on both sides. No Spark.

        bundle.json           format, model, signature, preprocessing, versions, files, content_hash
        weights.safetensors   every distinct tensor of the state once
        model.pkl             only with allow_pickle=True, instead of the weights

    Args:
        model: any module; its state is saved whole, in the types it has.
        uri: a folder that does not exist yet.
        signature: how scoring feeds the model.
        factory: a class, a function annotated to return a module, or ``"package.module:Name"``.
        arguments: JSON values, passed to ``factory`` by keyword.
        preprocessing: JSON values that travel with the model.
        example: one input (tensor, tuple of tensors, dict, or ``Arguments``); the rebuilt model must answer it alike,
            up to rounding.
        allow_pickle: fall back on a pickle if nothing else works; loading it then needs the same opt-in.

    Raises:
        BundleError: the model cannot be rebuilt safely.
        ConflictError: something is at ``uri`` already.
        StorageError: it cannot be written there.
    """
    target = Storage.of(uri)
    if target.child(DOCUMENT).exists():
        raise ConflictError(f"{target.uri} holds a bundle already: choose another folder, or delete that one")
    with work_folder(target) as work:
        recipe = _write_model(model, work, factory, arguments, example, allow_pickle)
        text = json.dumps(_document(recipe, work, signature, preprocessing), indent=1, sort_keys=True).encode()
        info = info_of(target, text)  # what cannot be read is not written
        publish_folder(work, target, text)
    return info


def load_bundle(
    uri: str | Storage,
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
        trusted: packages that may be imported to rebuild it, such as your own, besides those that ``allow_imports``
            names; without, a bundle can make nothing but torch's own layers. The bundle itself has no say in this.

    Raises:
        IntegrityError: a file differs from its hash, or the bundle from ``expected_hash``.
        BundleError: it cannot be rebuilt here; the message names the module that is missing, or the opt-in.
        ConfigError: ``trusted`` names what can never be allowed.
    """
    info = read_bundle(uri)
    if expected_hash is not None and info.content_hash != expected_hash:
        raise IntegrityError(
            f"the bundle {info.uri} has the content hash {info.content_hash}, {expected_hash} was expected: "
            "publish it again"
        )
    if info.recipe.kind == "pickle" and not allow_pickle:
        raise BundleError(
            f"the bundle {info.uri} holds a pickle, which can run any code: load it with allow_pickle=True"
        )
    folder = local_copy(info)
    model = rebuilt(info.recipe, folder, (*checked_packages(trusted), *allowed_imports()))
    model.eval()
    if torch.device(device).type != "cpu":
        model.to(device)
    return Bundle(model=model, info=info)


def _write_model(
    model: nn.Module,
    work: Path,
    factory: str | Callable[..., nn.Module] | None,
    arguments: Mapping[str, Any] | None,
    example: Any,
    allow_pickle: bool,
) -> Recipe:
    """Put the model's files into ``work`` and return the recipe of rebuilding it, proved by doing so."""
    with mode_of(model, training=False):
        try:
            plain = model.model if isinstance(model, AdjustedModel) else model
            facts = save_weights(plain, work / WEIGHTS)
            recipe = recipe_of(plain, factory, arguments, example)
            recipe = replace(
                recipe,
                weights=facts,
                parametrizations=parametrizations_of(plain),
                adjustments=model.adjustments if isinstance(model, AdjustedModel) else (),
            )
            prove(model, recipe, Storage.of(work), example)
            return recipe
        except BundleError:
            if not allow_pickle or factory is not None:
                raise
            (work / WEIGHTS).unlink(missing_ok=True)
            with (work / PICKLE).open("wb") as file:
                Pickler(file).dump(model)
            return Recipe(kind="pickle")


def _document(
    recipe: Recipe, work: Path, signature: Signature | None, preprocessing: Mapping[str, Any] | None
) -> dict[str, Any]:
    files = {path.name: FileFacts(bytes=path.stat().st_size, sha256=file_hash(path)) for path in work.iterdir()}
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "safetensors": str(safetensors.__version__),
    }
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": recipe.to_json(),
        "signature": msgspec.to_builtins(signature),
        "preprocessing": as_json("preprocessing", preprocessing or {}, BundleError, MAX_BYTES),
        "versions": versions,
        "files": msgspec.to_builtins(files),
    }
    return {**document, "content_hash": content_hash_of(document)}
