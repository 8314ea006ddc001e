"""Tensors in files of the safetensors format, which holds data alone, and errors of one type."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from sparkdl.errors import IntegrityError

TensorFacts = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name to shape and type of element."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""What the format calls each type of element."""


def tensor_facts(path: Path) -> TensorFacts:
    """What the header of a file says of its tensors.

    Raises:
        IntegrityError: it is no such file.
    """
    facts: TensorFacts = {}
    with _errors(path), safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            part = file.get_slice(name)
            facts[name] = (tuple(part.get_shape()), _DTYPES[part.get_dtype()])
    return facts


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped: no second copy in memory, and processes of one host share its pages.

    Raises:
        IntegrityError: it is no such file.
    """
    with _errors(path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def load_tensors(data: bytes, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a file's bytes; ``name`` is for the message.

    Raises:
        IntegrityError: they are no such file.
    """
    with _errors(name):
        return load(data)


@contextlib.contextmanager
def _errors(name: str | Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as cause:
        raise IntegrityError(
            f"{name} cannot be read as safetensors ({cause}): it was altered or cut short, write it again"
        ) from cause
