"""Python objects as files: what holds numbers in safetensors, what holds code in a pickle, a hash for each.

Enters: objects that hold models, optimizers, functions. Leaves: ``tensors.safetensors`` and ``code.pkl`` in a folder,
and their sizes and SHA-256 hashes for the metadata; from these, the objects, with every reference among them as it was.
Nothing is read before its hash was compared.

Tensors leave the pickle by its ``persistent_id``, so that no limit of pickle or JSON applies to them, and an optimizer
still shares its parameters with its model when both come back. A pickle can run code when it is read: load only what
you would also import.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from sparkdl.compat.parametrized import Pickler
from sparkdl.documents.tensors import load_tensors, map_tensors
from sparkdl.errors import BundleError, IntegrityError
from sparkdl.models.folder import file_hash
from sparkdl.storage import Storage, storage_errors

__all__ = [
    "Artifacts",
    "check_file",
    "is_plain_tensor",
    "read_objects",
    "read_tensors",
    "write_file",
    "write_objects",
    "write_tensors",
]

TENSORS, CODE = "tensors.safetensors", "code.pkl"

Artifacts = dict[str, dict[str, Any]]
"""File name to ``{"bytes": int, "sha256": str}``."""


def write_objects(value: Any, folder: Storage, known: Mapping[int, str] | None = None) -> Artifacts:
    """Write ``value`` into ``folder``.

    Args:
        value: anything that cloudpickle takes.
        folder: where the files go.
        known: by ``id``, tensors that the reader will have from elsewhere, and their names.

    Raises:
        StorageError: they cannot be written.
    """
    pickler = _Pickler(dict(known or {}))
    pickler.dump(value)
    facts: Artifacts = {CODE: write_file(folder.child(CODE), pickler.buffer.getvalue())}
    if pickler.tensors:
        facts[TENSORS] = write_tensors(folder.child(TENSORS), pickler.tensors)
    return facts


def write_file(file: Storage, data: bytes) -> dict[str, Any]:
    """Write a file; return its size and hash."""
    file.write_atomic(data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_tensors(file: Storage, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write tensors as safetensors, out of the memory where they lie; return the file's size and hash.

    Raises:
        StorageError: it cannot be written.
    """
    local = file.local_path()
    with storage_errors(file.uri, "write"):
        if local is not None:
            local.parent.mkdir(parents=True, exist_ok=True)
            return _saved(tensors, local)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / TENSORS
            fact = _saved(tensors, path)
            with path.open("rb") as source, file.open_output() as sink:
                shutil.copyfileobj(source, sink, 4 << 20)
            return fact


def _saved(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
    taken: set[int] = set()
    save_file({name: _alone(tensor, taken) for name, tensor in tensors.items()}, path)
    return {"bytes": path.stat().st_size, "sha256": file_hash(path)}


def _alone(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The tensor on the CPU, contiguous, in memory that no other one has: safetensors refuses what overlaps."""
    tensor = tensor.detach().cpu().contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in taken:
        return tensor.clone()
    taken.add(storage.data_ptr())
    return tensor


def read_tensors(file: Storage, fact: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read tensors, mapped into memory where the file is local.

    Raises:
        IntegrityError: the file is missing, is no regular file, differs, or holds something else.
    """
    path = file.local_path()
    if path is None:
        return load_tensors(check_file(file, fact), file.uri)
    if not file.exists():
        raise _missing(file)
    with file.open_input() as source:
        digest = hashlib.file_digest(cast(Any, source), "sha256").hexdigest()
    _compare(file, file.size(), digest, fact)
    return map_tensors(path)


def read_objects(folder: Storage, facts: Artifacts, known: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Read what ``write_objects`` wrote.

    Args:
        folder: where the files are.
        facts: their sizes and hashes, as they were recorded.
        known: the tensors that were known when it was written, by name.

    Raises:
        IntegrityError: a file is missing, or differs from its hash.
        BundleError: a module that the objects need is missing here.
    """
    code = check_file(folder.child(CODE), facts[CODE])
    tensors = read_tensors(folder.child(TENSORS), facts[TENSORS]) if TENSORS in facts else {}
    try:
        return _Unpickler(code, tensors, known or {}).load()
    except ImportError as cause:
        raise BundleError(f"{folder.uri} needs a module that is missing here ({cause}): install it") from cause


def check_file(file: Storage, fact: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file whose size and hash were recorded.

    Raises:
        IntegrityError: it is missing, or differs.
    """
    if not file.exists():
        raise _missing(file)
    data = file.read_bytes(at_most=fact["bytes"])
    _compare(file, len(data), hashlib.sha256(data).hexdigest(), fact)
    return data


def _missing(file: Storage) -> IntegrityError:
    return IntegrityError(f"{file.uri} is missing beside its metadata: save the model again")


def _compare(file: Storage, size: int, digest: str, fact: Mapping[str, Any]) -> None:
    if size != fact["bytes"] or digest != fact["sha256"]:
        raise IntegrityError(
            f"{file.uri} has {size} bytes and SHA-256 {digest[:16]}..., {fact['bytes']} bytes and "
            f"{fact['sha256'][:16]}... were recorded: it was altered, save the model again"
        )


class _Pickler(Pickler):
    def __init__(self, known: dict[int, str]) -> None:
        self.buffer = io.BytesIO()
        self.tensors: dict[str, torch.Tensor] = {}
        self._known = known
        self._seen: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        super().__init__(self.buffer)

    def persistent_id(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not is_plain_tensor(value):
            return None
        if id(value) in self._known:
            return ("known", self._known[id(value)])
        if id(value) not in self._seen:
            name = str(len(self.tensors))
            self.tensors[name] = value.detach()
            kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
            # The value itself is kept, too: an id is only unique while its object lives.
            self._seen[id(value)] = (value, (kind, name, bool(value.requires_grad)))
        return self._seen[id(value)][1]


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether safetensors can hold it: dense, real, a leaf, without attributes of its own."""
    dense = tensor.layout == torch.strided and not tensor.is_quantized and tensor.is_leaf
    return dense and not vars(tensor) and not tensor.is_complex() and tensor.device.type != "meta"


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors, self._known = tensors, known
        self._made: dict[str, torch.Tensor] = {}

    def persistent_load(self, pid: tuple[Any, ...]) -> torch.Tensor:
        if pid[0] == "known":
            if pid[1] not in self._known:
                raise IntegrityError(f"the saved objects refer to the tensor {pid[1]!r}, which the saved model lacks")
            return self._known[pid[1]]
        kind, name, grad = pid
        if name not in self._made:
            tensor = self._tensors[name]
            self._made[name] = torch.nn.Parameter(tensor, grad) if kind == "parameter" else tensor.requires_grad_(grad)
        return self._made[name]
