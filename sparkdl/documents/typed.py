"""The decoder of JSON documents into typed values, one for every document that sparkdl reads."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import inspect

from sparkdl.errors import IntegrityError, SparkdlError
from sparkdl.storage import Storage

T = TypeVar("T")

HALF_A_CHARACTER = "it holds half a character (a lone surrogate)"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

MAX_BYTES = 16 << 20
"""Size of a document whose reader states no other limit."""
MAX_DEPTH = 100
_MEMORY_OF_A_BYTE = 4
"""Bytes of memory that a document's values may take, for each byte that it may have."""
_PLAIN = "pass plain numbers, texts, lists and dicts"

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""Rows, bytes, steps, versions: never below 0, and sums of a few of them still fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a document, for messages.

    Attributes:
        name: its address, or what it is called.
        remedy: what whoever reads the message can do.
    """

    name: str
    remedy: str = "it was altered or cut short, write it again"

    def error(self, reason: object, field: str = "") -> IntegrityError:
        """The one error for whatever is wrong with it."""
        where = f"in {field}, " if field else ""
        return IntegrityError(f"{self.name} cannot be read: {where}{reason}: {self.remedy}")


def read(file: Storage, kind: type[T], remedy: str, limit: int = MAX_BYTES) -> T:
    """Read and decode a file.

    Raises:
        StorageError: it is not there, or cannot be read.
        IntegrityError: it is larger than ``limit`` bytes, or holds something else.
    """
    return decode(file.read_bytes(at_most=limit), kind, Source(file.uri, remedy), limit)


def decode(data: bytes, kind: type[T], source: Source, limit: int = MAX_BYTES) -> T:
    """Decode the bytes of a document into a value of ``kind``.

    A field's annotation (``Count``) says what it may hold, and so does ``__post_init__``, whose ``ValueError`` or
    ``TypeError`` is reported for the field that it came from. One error names file and field: for bad UTF-8, cut or
    malformed JSON, a key that is unknown or stands there twice, a field that is missing or of another type, a number
    out of its range, NaN where none may stand, and documents that are too large or too deep.

    Raises:
        IntegrityError: they hold something else.
    """
    return convert(parse(data, source, limit), kind, source)


def parse(data: bytes, source: Source, limit: int = MAX_BYTES, *, nan: bool = False) -> Any:
    """Parse JSON into plain values, within bounds.

    Args:
        data: the bytes.
        source: where they came from.
        limit: of their number.
        nan: accept NaN and infinities as Python writes them, where the document has fields that may hold them.

    Raises:
        IntegrityError: it is no JSON, repeats a key, is too large or too deep, or has so many small values that they
            would take several times its size in memory.
    """
    if len(data) > limit:
        raise _too_large(source, len(data), limit)
    # About what Python takes for one value more, and for an object beside that; signs inside of texts count, too.
    memory = 176 * data.count(b"{") + 8 * data.count(b"[") + 64 * data.count(b",")
    if memory > _MEMORY_OF_A_BYTE * limit:
        raise source.error(
            f"its values would take {memory >> 20:,} MiB of memory, and those of its kind take at most "
            f"{_MEMORY_OF_A_BYTE * limit >> 20:,}"
        )
    try:
        constant = float if nan else _no_constant
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_float=_finite, parse_constant=constant)
    except UnicodeDecodeError as cause:
        raise source.error(f"it is no UTF-8 ({cause.reason} at byte {cause.start})") from cause
    except RecursionError as cause:
        raise source.error(f"it is nested deeper than {MAX_DEPTH} levels") from cause
    except ValueError as cause:
        raise source.error(f"it is no JSON ({cause})") from cause
    if _SURROGATE.search(data) and not _encodable(value):
        raise source.error(HALF_A_CHARACTER)
    _bound_depth(value, source)
    return value


def convert(value: Any, kind: type[T], source: Source, root: str = "$") -> T:
    """Make a value of ``kind`` of parsed JSON.

    Args:
        value: as ``parse`` returned it, or a part of that.
        kind: a dataclass, or whatever else msgspec can check.
        source: where it came from.
        root: the path of ``value`` in its document, for messages.

    Raises:
        IntegrityError: a field is unknown, missing, or not what it should be.
    """
    try:
        _refuse_unknown(value, _walker(cast(Hashable, kind)), "$")
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as cause:
        reason, _, path = str(cause).rpartition(" - at ")
        field = root + path.strip("`").removeprefix("$") if reason else root
        raise source.error(reason or path, field) from cause
    except (RecursionError, OverflowError, UnicodeError) as cause:
        raise source.error(f"a value is out of range ({cause})") from cause


def encode(value: Any, *, nan: bool = False) -> bytes:
    """Encode plain values and dataclasses as compact JSON.

    Args:
        value: what to encode.
        nan: write NaN and infinities, for a document that is read with ``nan=True``.

    Raises:
        TypeError: something in it is no JSON value.
        ValueError: it holds NaN or an infinity, which JSON does not know.
    """
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":"), allow_nan=nan).encode()


def check_characters(data: bytes, error: type[SparkdlError], what: str) -> None:
    """Refuse to write what ``encode`` made of a text with half a character in it, as no reader takes it.

    Raises:
        SparkdlError: an ``error`` about ``what``.
    """
    if _SURROGATE.search(data) and not _encodable(json.loads(data)):
        raise error(f"{what} cannot be written: {HALF_A_CHARACTER}: leave it out, or write it another way")


def as_json(what: str, values: Mapping[str, Any], error: type[SparkdlError], limit: int = MAX_BYTES) -> dict[str, Any]:
    """The caller's ``values`` as JSON gives them back, to whoever reads them with ``parse`` and this ``limit``.

    Raises:
        SparkdlError: an ``error`` that says of ``what``, and which of it, that JSON cannot hold it.
    """
    try:
        return dict(parse(encode(dict(values)), Source(f"{what} as JSON", _PLAIN), limit))
    except (TypeError, ValueError, RecursionError) as cause:
        raise error(f"{what} are not JSON values ({cause}): {_PLAIN}") from cause
    except IntegrityError as whole:
        for name, value in values.items():
            try:
                parse(encode({name: value}), Source(f"{name!r} of {what} as JSON", _PLAIN), limit)
            except IntegrityError as cause:
                raise error(str(cause)) from cause
        raise error(str(whole)) from whole


def _too_large(source: Source, size: int, limit: int) -> IntegrityError:
    return source.error(f"it has {size} bytes, and none of its kind has more than {limit}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        double, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {_shown(double)} stands there twice")
    return values


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {_shown(text)} is out of range")
    return number


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _shown(name: object) -> str:
    text = repr(name)  # of trees, which hold other keys than strings
    return text if len(text) <= 62 else f"{text[:61]}...{text[-1]}"


def _bound_depth(value: Any, source: Source) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        children = (part.values() if type(part) is dict else part for part in level if type(part) in (dict, list))
        level = [part for parts in children for part in parts if type(part) in (dict, list)]
    raise source.error(f"it is nested deeper than {MAX_DEPTH} levels")


_Walker = Callable[[Any, str], None] | None


def _refuse_unknown(value: Any, walk: _Walker, path: str) -> None:
    if walk is not None:
        walk(value, path)


@functools.cache
def _walker(kind: Hashable) -> _Walker:
    """What looks for unknown fields in a value of ``kind``; None where there can be none.

    msgspec refuses them in classes of its own, and passes over them in dataclasses.
    """
    return _of(inspect.type_info(kind))


def _of(info: inspect.Type) -> _Walker:
    if isinstance(info, inspect.DataclassType):
        return _fields(info)
    if isinstance(info, inspect.UnionType):
        walkers = [walk for walk in map(_of, info.types) if walk is not None]
        return walkers[0] if walkers else None
    if isinstance(info, inspect.ListType | inspect.VarTupleType | inspect.CollectionType):
        part_walker = _of(info.item_type)
        return part_walker and _items(part_walker)
    if isinstance(info, inspect.DictType):
        part_walker = _of(info.value_type)
        return part_walker and _values(part_walker)
    return None


def _fields(info: inspect.DataclassType) -> _Walker:
    walkers = {field.encode_name: _of(field.type) for field in info.fields}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                if name not in walkers:
                    raise msgspec.ValidationError(f"the field {_shown(name)} is unknown - at `{path}`")
                _refuse_unknown(part, walkers[name], f"{path}.{name}")

    return walk


def _items(inner: Callable[[Any, str], None]) -> _Walker:
    def walk(value: Any, path: str) -> None:
        if isinstance(value, list):
            for position, part in enumerate(value):
                inner(part, f"{path}[{position}]")

    return walk


def _values(inner: Callable[[Any, str], None]) -> _Walker:
    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for part in value.values():
                inner(part, f"{path}[...]")

    return walk
