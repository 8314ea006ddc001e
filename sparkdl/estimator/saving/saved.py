"""Named objects in a folder: as JSON and safetensors where that is possible, in a pickle where it is not.

Enters: what an estimator or a fitted model holds besides its plain parameters. Leaves: files, a hash for each, and the
names of what only the pickle holds; from these the objects, those in the pickle only for a caller who allows it.

    objects.json, state.safetensors     objects as JSON (objects.py) and their tensors
    code.pkl, tensors.safetensors       the others (artifacts.py); only there if there are any
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from sparkdl.documents.typed import Source, convert, encode, parse
from sparkdl.errors import BundleError
from sparkdl.estimator.fit.shipping import loose_by_value
from sparkdl.estimator.saving.artifacts import (
    Artifacts,
    check_file,
    read_objects,
    read_tensors,
    write_file,
    write_objects,
    write_tensors,
)
from sparkdl.estimator.saving.objects import Decoder, Encoder, NotPlain
from sparkdl.models.folder import FileFacts
from sparkdl.models.trust import REMEDY
from sparkdl.storage import Storage

__all__ = ["Saved", "Withheld", "load_named", "save_named"]

_PLAIN, _STATE = "objects.json", "state.safetensors"
MAX_BYTES = 256 << 20
"""Of ``objects.json``, which holds histories."""


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
    """
    encoder, plain, pickled = Encoder(known), {}, {}
    for name, value in values.items():
        try:
            plain[name] = encoder.encode(value, name)
        except NotPlain:
            pickled[name] = value
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
    found = {name: decoder.decode(one) for name, one in convert(text, dict[str, Any], source).items()}
    if allowed:
        return found | (read_objects(folder, files, known) if files else {})
    for name, fact in files.items():
        check_file(folder.child(name), fact)
    return found | {name: Withheld(name, folder.uri) for name in section.pickled}
