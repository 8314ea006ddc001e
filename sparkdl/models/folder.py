"""A bundle's folder without its model: what it says about itself, its hashes, its files; no torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec

from sparkdl.documents.typed import Source, convert, parse
from sparkdl.errors import BundleError, ConflictError, IntegrityError
from sparkdl.models.signature import Signature
from sparkdl.storage import Storage, sha256_hex, storage_errors

FORMAT = 1
DOCUMENT, WEIGHTS, PICKLE = "bundle.json", "weights.safetensors", "model.pkl"
MAX_WEIGHTS_BYTES = 1 << 40
"""The most bytes of a bundle's largest file; nothing larger is copied, hashed or mapped."""

MAX_BYTES = 64 << 20
"""The most bytes of ``bundle.json``, whose preprocessing may hold vocabularies."""

_REMEDY = "it was altered or cut short, publish it again"
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """What is recorded of a file.

    Attributes:
        bytes: its size.
        sha256: its hash, 64 hexadecimal digits.
    """

    bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHTS_BYTES)]
    sha256: _Sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFacts:
    """What the weights' file does not say.

    Attributes:
        aliases: names of tensors that are others, and the names of these.
        channels_last: whether images lie in memory channels last.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    channels_last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Parametrization:
    """How a tensor is computed of others, as ``torch.nn.utils.parametrizations`` has it.

    Attributes:
        tensor: its name in the model.
        kind: the function that registers it.
        dim: over which the norm is not taken; -1 of ``weight_norm`` takes it over all.
        eps: of ``spectral_norm``.
        n_power_iterations: of ``spectral_norm``, at each call in training.
    """

    tensor: str
    kind: Literal["weight_norm", "spectral_norm"]
    dim: Annotated[int, msgspec.Meta(ge=-1, le=64)]
    eps: float = 1e-12
    n_power_iterations: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Adjustment:
    """What is made of an output after the network.

    Attributes:
        output: its name.
        temperature: that logits are divided by (Guo et al. 2017, section 4.2).
        ascending: whether its numbers are sorted, so that quantiles do not cross (Chernozhukov et al. 2010).
        mean: of amounts whose logarithm over it the network says, see ``sparkdl.nn.PoissonLoss``; else None.
        ceiling: that such an amount never exceeds; None sets none.
    """

    output: str
    temperature: Annotated[float, msgspec.Meta(gt=0, lt=1e6)] = 1.0
    ascending: bool = False
    mean: Annotated[float, msgspec.Meta(gt=0)] | None = None
    ceiling: Annotated[float, msgspec.Meta(gt=0)] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a model is rebuilt.

    Attributes:
        kind: ``"structure"`` of torch.nn's own layers, ``"import"`` of a class or function, or ``"pickle"``.
        tree: of a structure.
        target: the import path, ``"package.module:Name"``.
        arguments: that the target is called with, JSON values.
        parametrizations: those that are registered afterwards, in their order.
        weights: about the file of weights.
        adjustments: of its outputs, one each; none leaves them as they are.
    """

    kind: Literal["structure", "import", "pickle"]
    tree: dict[str, Any] | None = None
    target: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    parametrizations: tuple[Parametrization, ...] = ()
    weights: WeightFacts = field(default_factory=WeightFacts)
    adjustments: tuple[Adjustment, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain JSON values, without what this kind has not."""
        return {name: value for name, value in msgspec.to_builtins(self).items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    """What ``bundle.json`` holds."""

    format: int
    model: dict[str, Any]
    signature: Signature | None
    preprocessing: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileFacts]
    content_hash: _Sha256


@dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """What a bundle says about itself, without its model.

    Attributes:
        folder: where it lies.
        content_hash: SHA-256 over everything it holds; equal for equal models.
        model: how it is rebuilt.
        signature: how it is fed; None if it was saved without.
        preprocessing: facts that its features were made with (statistics, category maps), JSON values.
        versions: of the software that saved it.
        files: by name, what is recorded of each.
    """

    folder: Storage
    content_hash: str
    model: Mapping[str, Any]
    signature: Signature | None
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileFacts] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        """The address of its folder."""
        return self.folder.uri

    @property
    def bytes(self) -> int:
        """Size of the files besides ``bundle.json``."""
        return sum(facts.bytes for facts in self.files.values())

    @property
    def recipe(self) -> Recipe:
        """How its model is rebuilt.

        Raises:
            IntegrityError: ``model`` holds something else.
        """
        return convert(self.model, Recipe, Source(f"{self.uri}/{DOCUMENT}", _REMEDY), "$.model")


def read_bundle(uri: str | Storage) -> BundleInfo:
    """Read what a bundle says about itself.

    No torch is loaded for it, so that a registry is listed in a moment.

    Raises:
        BundleError: there is none, or it has a newer format.
        IntegrityError: ``bundle.json`` was altered.
    """
    folder = Storage.of(uri)
    source = folder.child(DOCUMENT)
    if not source.exists():
        raise BundleError(f"{folder.uri} holds no {DOCUMENT}: give the folder that save_bundle wrote")
    return info_of(folder, source.read_bytes(at_most=MAX_BYTES))


def info_of(folder: Storage, text: bytes) -> BundleInfo:
    """What the text of a ``bundle.json`` says of the bundle in ``folder``.

    Raises:
        BundleError: it has another format.
        IntegrityError: it does not match its own hash, or holds what no bundle does.
    """
    source = Source(folder.child(DOCUMENT).uri, _REMEDY)
    fields = parse(text, source, MAX_BYTES)
    format_number = fields.get("format") if isinstance(fields, dict) else None
    if not isinstance(format_number, int):
        raise source.error("it says no format")
    if format_number != FORMAT:
        raise BundleError(
            f"{folder.uri} has the bundle format {format_number}, this sparkdl reads {FORMAT}: load it with its sparkdl"
        )
    actual = content_hash_of(fields)
    if actual != fields.get("content_hash"):
        raise source.error(f"its hash is {actual}, another was recorded")
    document = convert(fields, _Document, source)
    info = BundleInfo(
        folder=folder,
        content_hash=document.content_hash,
        model=document.model,
        signature=document.signature,
        preprocessing=document.preprocessing,
        versions=document.versions,
        files=document.files,
    )
    needed = {PICKLE if info.recipe.kind == "pickle" else WEIGHTS}
    if set(info.files) != needed:
        raise source.error(
            f"it names {sorted(info.files)[:3]}, a bundle of this kind holds {sorted(needed)}", "$.files"
        )
    return info


@contextmanager
def work_folder(target: Storage) -> Iterator[Path]:
    """A folder on this machine, on the target's own disk where that is local; gone afterwards unless renamed."""
    local = target.local_path()
    parent = local.parent if local is not None else Path(tempfile.gettempdir())
    work = parent / f".sparkdl-bundle-{uuid.uuid4().hex}"
    with storage_errors(target.uri, "write"):
        # On the target's disk it becomes the bundle; where it only waits to be sent, it is nobody else's to read.
        work.mkdir(mode=0o777 if local is not None else 0o700, parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def content_hash_of(document: Mapping[str, Any]) -> str:
    """SHA-256 over everything that ``bundle.json`` says, the hashes of the files included."""
    hashed_fields = {key: value for key, value in document.items() if key != "content_hash"}
    return sha256_hex(json.dumps(hashed_fields, sort_keys=True, separators=(",", ":")).encode())


def check_files(folder: Storage, info: BundleInfo) -> None:
    """Compare every file with what was recorded of it.

    Raises:
        IntegrityError: one is missing, is no regular file, lies elsewhere, or differs in size or hash.
    """
    for name, facts in info.files.items():
        check_file(folder.child(name), facts)


def check_file(file: Storage, facts: FileFacts) -> None:
    """Compare a file with what was recorded of it.

    Raises:
        IntegrityError: it is missing, is no regular file, lies elsewhere, or differs in size or hash.
    """
    check_size(file, facts)
    with file.open_input() as source:
        check_hash(file, hashlib.file_digest(cast(Any, source), "sha256").hexdigest(), facts)


def check_hash(file: Storage, actual: str, facts: FileFacts) -> None:
    """Compare a file's hash with the one that was recorded.

    Raises:
        IntegrityError: it differs.
    """
    if actual != facts.sha256:
        raise IntegrityError(f"{file.uri} has the hash {actual}, {facts.sha256} was recorded: publish the model again")


def check_size(file: Storage, facts: FileFacts) -> None:
    """Compare a file's size with the one that was recorded.

    Raises:
        IntegrityError: it differs, or there is no file.
    """
    if not file.exists():
        raise IntegrityError(f"{file.uri} is missing from its bundle: publish the model again")
    size = file.size()
    if size != facts.bytes:
        raise IntegrityError(f"{file.uri} has {size} bytes, {facts.bytes} were recorded: publish it again")


def file_hash(path: Path) -> str:
    """SHA-256 of a file, read once."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_folder(work: Path, target: Storage, text: bytes) -> None:
    """Make the finished folder visible under its name: one rename, or the document as the last object."""
    local = target.local_path()
    if local is not None:
        Storage.of(work / DOCUMENT).write_atomic(text)
        with storage_errors(str(local), "write"):
            try:
                os.rename(work, local)  # fails on a folder that holds anything
            except OSError as cause:
                if local.exists():
                    raise ConflictError(f"{local} exists already: choose another folder, or delete that one") from cause
                raise
        return
    for path in sorted(work.iterdir()):
        target.child(path.name).write_copy(path)
    target.child(DOCUMENT).write_if_absent(text)
