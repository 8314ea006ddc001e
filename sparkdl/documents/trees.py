"""Nested values as JSON plus tensors, without pickle, and back: the one encoder of trees."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkdl.documents.tensors import DTYPE_NAMES
from sparkdl.errors import CheckpointError, IntegrityError, SparkdlError

_PLAIN = frozenset({type(None), bool, str, int})
_METADATA = "__metadata__"  # what safetensors takes for no tensor


class Encoder:
    """Takes values apart, and collects their tensors.

    It takes what ``state_dict`` methods return: dicts, lists, tuples, numbers, strings, bytes, tensors, NumPy arrays; a
    subclass adds kinds of its own. In the JSON tree a tensor is a name. What JSON does not know stands in an object of
    one key: ``{"$tensor": name}``, ``$array``, ``$tuple``, ``$map`` (pairs, where keys are not all texts), ``$bytes``
    (base64), ``$float`` (NaN and infinities).

    Attributes:
        tensors: by name, those that were met, not copied; equal views are one entry.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[Any, str] = {}

    def encode(self, value: Any, path: str = "") -> Any:
        """Return the JSON-able tree of ``value``.

        Args:
            value: what to encode.
            path: where it stands, which names its tensors.

        Raises:
            CheckpointError: something in it is neither data nor a tensor.
        """
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            try:
                return {"$array": self._add(torch.from_numpy(np.array(value)), path)}
            except (TypeError, ValueError) as cause:  # of texts, objects, times, or bytes in another order
                raise CheckpointError(
                    f"the state {path.lstrip('.')!r} is an array of {value.dtype}, which no checkpoint can hold: use "
                    "numbers in this machine's byte order"
                ) from cause
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, int | np.integer):
            return int(value)
        if isinstance(value, float | np.floating):
            number = float(value)
            return number if math.isfinite(number) else {"$float": repr(number)}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, tuple):
            return {"$tuple": self._sequence(value, path)}
        if isinstance(value, list):
            return self._sequence(value, path)
        raise CheckpointError(
            f"the state {path.lstrip('.')!r} is a {type(value).__name__}, which a checkpoint cannot hold without "
            "pickle: keep numbers, strings, tensors, lists and dicts in state_dict()"
        )

    def _sequence(self, value: Sequence[Any], path: str) -> list[Any]:
        # Most of a state is plain, and training waits: no call and no path for what needs none.
        return [part if type(part) in _PLAIN else self.encode(part, f"{path}.{i}") for i, part in enumerate(value)]

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        encoded = {}
        for key, part in value.items():
            if not isinstance(key, str) or key[:1] == "$":
                return self._pairs(value, path)
            kind = type(part)
            if kind in _PLAIN or (kind is float and math.isfinite(part)):
                encoded[key] = part
            else:
                encoded[key] = self.encode(part, f"{path}.{key}")
        return encoded

    def _pairs(self, value: Mapping[Any, Any], path: str) -> dict[str, Any]:
        pairs = [[self.encode(key, path), self.encode(part, f"{path}.{key}")] for key, part in value.items()]
        return {"$map": pairs}

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        return {"$tensor": self._add(tensor.detach(), path)}

    def _add(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"the tensor {path.lstrip('.')!r} is {tensor.layout} of {tensor.dtype}, which no checkpoint can hold: "
                "use a dense tensor of a plain dtype"
            )
        same_memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        # Views that conjugate or negate change numbers and leave them where they are.
        identity = (*same_memory, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and identity in self._seen:
            return self._seen[identity]
        name = path.lstrip(".")
        while name in self.tensors or name == _METADATA:  # keys that contain dots may spell the same path
            name += "+"
        self.tensors[name] = tensor
        self._seen[identity] = name
        return name


class Decoder:
    """Puts together what an ``Encoder`` took apart.

    Args:
        tensors: those that the encoder collected.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def decode(self, tree: Any) -> Any:
        """Return the value that the tree stands for.

        Raises:
            IntegrityError: the tree names a tensor that is not there, is damaged, or was written by a later version.
        """
        try:
            return self._any(tree)
        except SparkdlError:
            raise
        except Exception as cause:  # whatever the constructors of saved kinds make of damaged arguments
            raise IntegrityError(
                f"a saved value cannot be read ({type(cause).__name__}: {cause}): it was altered, use another one"
            ) from cause

    def _any(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self._any(part) for part in tree]
        if not isinstance(tree, dict):
            return tree
        if len(tree) != 1 or not next(iter(tree)).startswith("$"):
            return {key: self._any(part) for key, part in tree.items()}
        ((mark, content),) = tree.items()
        return self._made(mark[1:], content)

    def _made(self, mark: str, content: Any) -> Any:
        """The value of a mark; subclasses know more of them."""
        if mark == "tuple":
            return tuple(self._any(part) for part in content)
        if mark == "map":
            return {self._any(key): self._any(part) for key, part in content}
        if mark == "bytes":
            return base64.b64decode(content)
        if mark == "float":
            return float(content)
        if mark in ("tensor", "array"):
            if content not in self._tensors:
                raise IntegrityError(f"the tensor {str(content)[:100]!r} is named and not there: use another one")
            return self._tensors[content] if mark == "tensor" else self._tensors[content].numpy()
        raise IntegrityError(f"a saved value holds {mark[:100]!r}, which this sparkdl does not know: update sparkdl")


@dataclass(slots=True)
class Layout:
    """A safetensors file in memory, ready to be filled again and again with tensors of the same shapes.

    The file format is that of safetensors (8 bytes length, JSON header, raw bytes), laid out in one buffer whose parts
    are tensors, so that a snapshot is one copy and writing it needs none. The safetensors library reads it.

    Attributes:
        signature: names, dtypes and shapes that it fits.
        buffer: the whole file as bytes.
        views: by name, the part of ``buffer`` that holds the tensor.
    """

    signature: tuple[Any, ...]
    buffer: torch.Tensor
    views: dict[str, torch.Tensor]

    @staticmethod
    def signature_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """What decides whether a layout fits ``tensors``."""
        return tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())

    @classmethod
    def for_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Make an empty file for ``tensors``; its memory is pinned where tensors come from a GPU."""
        # Wide elements first: every part then starts at a multiple of its element size, without gaps.
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        header: dict[str, Any] = {}
        end = 0
        for name, tensor in ordered:
            start, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 16)
        base = 8 + len(text)
        padding = -base % 16  # so that views are aligned in memory; the file begins after it
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        padded_buffer = torch.empty(padding + base + end, dtype=torch.uint8, pin_memory=pinned)
        buffer = padded_buffer[padding:]
        buffer[:8] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little")), dtype=torch.uint8)
        buffer[8:base] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        views = {}
        for name, tensor in ordered:
            start, stop = (base + offset for offset in header[name]["data_offsets"])
            views[name] = buffer[start:stop].view(tensor.dtype).view(tensor.shape)
        return cls(cls.signature_of(tensors), buffer, views)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy ``tensors`` in; copies from a GPU are under way when it returns, in order with the device's work."""
        targets = [self.views[name] for name in tensors]
        with torch.no_grad():
            for target, tensor in zip(targets, tensors.values(), strict=True):
                target.copy_(tensor, non_blocking=True)

    @property
    def data(self) -> memoryview:
        """The bytes of the file."""
        return memoryview(self.buffer.numpy())  # type: ignore[arg-type]
