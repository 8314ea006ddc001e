"""A bundle's folder without its model: what it says about itself, its hashes, copies of it.

Enters: the address of a bundle. Leaves: a ``BundleInfo``, a checked copy, a folder made visible whole or not at all. No
torch, so that a registry is listed in a moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdl.errors import BundleError, ConflictError, IntegrityError, StorageError
from sparkdl.models.signature import Signature
from sparkdl.storage import Storage, sha256_hex, storage_errors

__all__ = [
    "DOCUMENT",
    "FORMAT",
    "BundleInfo",
    "check_file",
    "content_hash_of",
    "copy_bundle",
    "file_hash",
    "info_of",
    "local_copy",
    "publish_folder",
    "read_bundle",
    "work_folder",
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


def read_bundle(uri: str | Storage) -> BundleInfo:
    """Read what a bundle says about itself.

    Raises:
        BundleError: there is none, or it has a newer format.
        IntegrityError: ``bundle.json`` was altered.
    """
    folder = Storage.of(uri)
    source = folder.child(DOCUMENT)
    if not source.exists():
        raise BundleError(f"{folder.uri} holds no {DOCUMENT}: give the folder that save_bundle wrote")
    try:
        document = json.loads(source.read_bytes())
    except ValueError as cause:
        raise IntegrityError(
            f"{source.uri} is not JSON ({cause}): it was altered or cut short, publish it again"
        ) from cause
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise BundleError(f"{folder.uri} has the bundle format {found}, this sparkdl reads {FORMAT}: update sparkdl")
    _check_document(source.uri, document)
    return info_of(folder.uri, document)


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
    with work_folder(target) as work:
        for name in info.files:
            shutil.copyfile(folder / name, work / name)
        with suppress(ConflictError):  # another publisher of the same content was faster
            publish_folder(work, target, text)


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
def work_folder(target: Storage) -> Iterator[Path]:
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


def content_hash_of(document: Mapping[str, Any]) -> str:
    """SHA-256 over everything that ``bundle.json`` says, the hashes of the files included."""
    rest = {key: value for key, value in document.items() if key != "content_hash"}
    return sha256_hex(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def _check_document(uri: str, document: Mapping[str, Any]) -> None:
    actual = content_hash_of(document)
    if actual != document.get("content_hash"):
        raise IntegrityError(
            f"{uri} was altered: its hash is {actual}, {document.get('content_hash')} was recorded; publish it again"
        )


def check_file(path: Path, facts: Mapping[str, Any]) -> None:
    """Compare a file with what was recorded of it.

    Raises:
        IntegrityError: it is missing, or differs in size or hash.
    """
    if not path.exists():
        raise IntegrityError(f"{path} is missing from its bundle: publish the model again")
    if path.stat().st_size != facts["bytes"]:
        raise IntegrityError(
            f"{path} has {path.stat().st_size} bytes, {facts['bytes']} were recorded: publish it again"
        )
    actual = file_hash(path)
    if actual != facts["sha256"]:
        raise IntegrityError(f"{path} has the hash {actual}, {facts['sha256']} was recorded: publish the model again")


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
        with path.open("rb") as source, target.child(path.name).open_output() as sink:
            shutil.copyfileobj(source, sink, 4 << 20)
    target.child(DOCUMENT).write_if_absent(text)


def info_of(uri: str, document: Mapping[str, Any]) -> BundleInfo:
    """What a document says of the bundle at ``uri``."""
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
