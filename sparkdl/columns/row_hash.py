"""A hash of each row, made of Arrow's buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from sparkdl.errors import SchemaError

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_NULL = np.uint64(0x9E3779B97F4A7C15)
_LONG = 256
"""Bytes above which a text is hashed by itself, in C; the shorter ones of a column word by word, all at once."""


def column_hashes(columns: Mapping[str, pa.Array]) -> dict[str, Hashes]:
    """A hash of the value in each row by column, ``(rows,)``; their sum, modulo 2^64 and ``mixed``, is the row's.

    The hash follows from names and values alone, whatever the order of the columns and whatever else lies in the batch.
    Equal numbers hash alike, -0.0 and 0.0, and one NaN as another; null differs from every value, and an empty list
    from one of nulls. It finds changes; it does not withstand an attacker. 20,000 rows of 502 numbers take 0.14 s, with
    Spark's xxhash64 3.5 s.

    Raises:
        SchemaError: a column is of a type that this does not know.
    """
    hashes = {}
    for name, array in columns.items():
        try:
            hashes[name] = mixed(_values(array) + np.uint64(xxhash.xxh3_64_intdigest(name.encode())))
        except NotImplementedError as error:
            raise SchemaError(f"column {name!r} is {error}, whose rows cannot be told apart: cast it") from error
    return hashes


def mixed(numbers: Hashes) -> Hashes:
    """Each number as one that looks like chance (the finalizer of SplitMix64: Steele et al., OOPSLA 2014)."""
    numbers = numbers ^ (numbers >> np.uint64(30))
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def _values(array: pa.Array) -> Hashes:
    """A hash of each value, ``_NULL`` of a null."""
    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL)
    if isinstance(array, pa.ExtensionArray):
        return _values(array.storage)
    if pa.types.is_map(kind):
        hashes = _lists(_fields([array.keys, array.items], len(array.keys)), _numbers(array.offsets))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        hashes = _lists(_values(array.values), _numbers(array.offsets))
    elif pa.types.is_struct(kind):
        hashes = _fields([array.field(position) for position in range(kind.num_fields)], len(array))
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        hashes = _texts(array, np.int32)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        hashes = _texts(array, np.int64)
    else:
        hashes = _fixed(array)
    if array.null_count:
        hashes[~_numbers(array.is_valid().cast(pa.uint8())).view(bool)] = _NULL
    return hashes


def _numbers(array: pa.Array) -> np.ndarray[Any, Any]:
    return np.from_dlpack(array)


def _fixed(array: pa.Array) -> Hashes:
    """The hashes of values that are all of one width; what lies below a null is whatever it is."""
    kind = array.type
    if pa.types.is_boolean(kind):
        array, kind = array.cast(pa.uint8()), pa.uint8()
    if not (pa.types.is_primitive(kind) or pa.types.is_decimal(kind)):
        raise NotImplementedError(str(kind))
    width = kind.bit_width // 8
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.full(len(array), _NULL)
    span = slice(array.offset, array.offset + len(array))
    if pa.types.is_floating(kind) and width > 2:
        floats = np.frombuffer(data, f"<f{width}")[span] + 0.0  # -0.0 becomes 0.0
        floats[np.isnan(floats)] = np.nan
        return mixed(floats.view(f"<u{width}").astype(np.uint64))
    if width <= 8:
        return mixed(np.frombuffer(data, f"<u{width}")[span].astype(np.uint64))
    words = np.frombuffer(data, "<u8").reshape(-1, width // 8)[span]
    hashes = np.zeros(len(array), np.uint64)
    for position in range(width // 8):
        hashes = mixed(hashes + words[:, position])
    return hashes


def _texts(array: pa.Array, offset: type[np.signedinteger[Any]]) -> Hashes:
    """The hashes of texts and bytes, made of eight bytes of all of them at a time."""
    _, places, data = array.buffers()
    if not len(array) or places is None:
        return np.full(len(array), _NULL)
    edges = np.frombuffer(places, offset)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    starts, lengths = edges[:-1], np.diff(edges)
    hashes = mixed(lengths.astype(np.uint64))
    if data is None or not edges[-1] - edges[0]:
        return hashes
    view = memoryview(data)
    for row in np.flatnonzero(lengths > _LONG).tolist():
        hashes[row] = xxhash.xxh3_64_intdigest(view[edges[row] : edges[row + 1]])
    padded = np.concatenate([np.frombuffer(data, np.uint8, edges[-1] - edges[0], edges[0]), np.zeros(8, np.uint8)])
    words = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))  # those that begin at each byte
    starts = starts - edges[0]
    rows = np.flatnonzero((lengths > 0) & (lengths <= _LONG))
    for word in range(0, _LONG, 8):
        rows = rows[lengths[rows] > word]
        if not len(rows):
            break
        remaining_bits = np.minimum(lengths[rows] - word, 8).astype(np.uint64) * np.uint64(8)
        bits = words[starts[rows] + word] & (np.uint64(2**64 - 1) >> (np.uint64(64) - remaining_bits))
        hashes[rows] = mixed(hashes[rows] + bits)
    return hashes


def _lists(values: Hashes, offsets: np.ndarray[Any, Any]) -> Hashes:
    """The hashes of lists: of their lengths, and of their elements by place."""
    offsets = offsets.astype(np.int64)
    lengths, first = np.diff(offsets), offsets[0] if len(offsets) else 0
    values = values[first : offsets[-1]] if len(offsets) else values[:0]
    places = np.arange(len(values), dtype=np.int64) - np.repeat(offsets[:-1] - first, lengths)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed(values + mixed(places.astype(np.uint64))))])
    hashes = sums[offsets[1:] - first] - sums[offsets[:-1] - first]
    return mixed(hashes + mixed(lengths.astype(np.uint64)))


def _fields(fields: list[pa.Array], rows: int) -> Hashes:
    """The hashes of structs. Zero mixed is zero: begun with it, zeros in one field could stand for those in another."""
    hashes = np.full(rows, _NULL)
    for field in fields:
        hashes = mixed(hashes + _values(field))
    return hashes
