"""Named objects in a folder: ``objects.json`` and safetensors where possible, a pickle where not."""

from __future__ import annotations

import hashlib
import io
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
from safetensors.torch import save_file

from sparkdl.compat.pickles import Pickler
from sparkdl.documents.tensors import load_tensors, map_tensors
from sparkdl.documents.typed import Source, check_characters, convert, encode, parse
from sparkdl.errors import BundleError, IntegrityError
from sparkdl.estimator.saving.objects import Decoder, Encoder, NotPlain, is_plain_tensor
from sparkdl.estimator.user_code import loose_by_value
from sparkdl.models.folder import FileFacts, file_hash
from sparkdl.models.trust import REMEDY
from sparkdl.storage import Storage, storage_errors

_PLAIN, _STATE = "objects.json", "state.safetensors"
MAX_BYTES = 256 << 20
"""The most bytes of ``objects.json``, which holds histories."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What the metadata records of the saved objects.

    Attributes:
        files: by name, sizes and hashes.
        pickled: names of the objects that only the pickle holds.
    """

    files: dict[Literal["objects.json", "state.safetensors", "code.pkl", "tensors.safetensors"], FileFacts]
    pickled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if _PLAIN not in self.files or ("code.pkl" in self.files) != bool(self.pickled):
            raise ValueError(f"the files {sorted(self.files)} are not those of {len(self.pickled)} pickled objects")


class Withheld:
    """Stands where an object would be that only the pickle holds, and the caller has allowed none.

    Attributes:
        name: of the object.
        where: it was saved.
    """

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where

    def refusal(self) -> BundleError:
        """The error for whoever asks for the object, or would save it again."""
        setter = "set" + "".join(part.capitalize() for part in self.name.split("_"))
        return BundleError(
            f"{self.name} of {self.where} is saved as a pickle, which can run any code: {REMEDY}; or drop it with "
            f"{setter}(None)"
        )


def save_named(values: Mapping[str, Any], folder: Storage, known: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Write objects by name.

    Args:
        values: the objects.
        folder: where the files go.
        known: by ``id``, tensors that the reader will have from elsewhere, and their names.

    Returns:
        What the metadata shall record of them, as plain values of a ``Saved``.

    Raises:
        StorageError: they cannot be written.
        BundleError: one holds a text that nobody could read again.
    """
    encoder, plain, pickled = Encoder(known), {}, {}
    for name, value in values.items():
        try:
            plain[name] = encoder.encode(value, name)
        except NotPlain:
            pickled[name] = value
        else:
            check_characters(encode(plain[name]), BundleError, name)
    files = {_PLAIN: write_file(folder.child(_PLAIN), encode(plain))}
    if encoder.tensors:
        files[_STATE] = write_tensors(folder.child(_STATE), encoder.tensors)
    if pickled:
        with loose_by_value(pickled):
            files |= write_objects(pickled, folder, known)
    return {"files": files, "pickled": sorted(pickled)}


def load_named(
    folder: Storage,
    section: Saved,
    known: Mapping[str, torch.Tensor] | None = None,
    *,
    allowed: bool,
    trusted: Sequence[str] = (),
) -> dict[str, Any]:
    """Read what ``save_named`` wrote.

    Every file has a hash in the metadata, and nothing is read before its hash was compared. A pickle can run code when
    it is read: it is loaded for a caller who allows it alone.

    Args:
        folder: where the files are.
        section: what the metadata records.
        known: the tensors that were known when it was written, by name.
        allowed: whether the pickle may be loaded; ``Withheld`` stands for each of its objects otherwise. A saved
            environment of ranks needs the same word.
        trusted: packages whose functions and classes may be imported.

    Raises:
        IntegrityError: a file is missing, or differs from its hash; also one that is not needed.
        BundleError: a module that the objects need is missing here, or they would set variables of the ranks'
            environment, and the caller has not allowed that.
    """
    files: Artifacts = msgspec.to_builtins(section.files)
    plain, state = files.pop(_PLAIN), files.pop(_STATE, None)
    tensors = read_tensors(folder.child(_STATE), state) if state else {}
    decoder = Decoder(tensors, known, trusted, allowed=allowed)
    source = Source(folder.child(_PLAIN).uri, "it was altered, save the model again")
    text = parse(check_file(folder.child(_PLAIN), plain), source, MAX_BYTES)
    objects = {name: decoder.decode(encoded) for name, encoded in convert(text, dict[str, Any], source).items()}
    if allowed:
        return objects | (read_objects(folder, files, known) if files else {})
    for name, fact in files.items():
        check_file(folder.child(name), fact)
    return objects | {name: Withheld(name, folder.uri) for name in section.pickled}


TENSORS, CODE = "tensors.safetensors", "code.pkl"

Artifacts = dict[str, dict[str, Any]]
"""File name to ``{"bytes": int, "sha256": str}``."""


def write_objects(value: Any, folder: Storage, known: Mapping[int, str] | None = None) -> Artifacts:
    """Write ``value`` into ``folder``.

    Tensors leave the pickle by its ``persistent_id``, so that an optimizer still shares its parameters with its model
    when both come back.

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
            file.write_copy(path)
            return fact


def _saved(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
    addresses: set[int] = set()
    save_file({name: _alone(tensor, addresses) for name, tensor in tensors.items()}, path)
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
