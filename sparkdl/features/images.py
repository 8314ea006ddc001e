"""Encoded pictures to arrays, decoded by Pillow in the few formats that a file may have."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.features.spec import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
MAX_PIXELS = 64 << 20
"""The most pixels of a picture before it is resized; more are taken for an attack on the memory."""


def images_of(name: str, column: pa.Array, options: Image) -> np.ndarray[Any, Any]:
    """The pictures of a column, float32 between 0 and 1 or uint8, channels first.

    Raises:
        SchemaError: it holds no byte strings.
        DataError: a row has no picture that can be decoded, and the options refuse such rows.
        ConfigError: Pillow is not installed.
    """
    types = pa.types
    kind = column.type
    binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    if not binary and not types.is_null(kind):
        raise SchemaError(f"column {name!r} is {kind}, no bytes of a picture: read its file first")
    out = np.zeros((len(column), options.channels, options.height, options.width), np.uint8)
    bad: list[tuple[int, str]] = []
    for row, data in enumerate(column.to_pylist()):
        try:
            out[row] = _decoded(data, options)
        except _Undecodable as cause:
            bad.append((row, str(cause)))
    if bad and options.invalid == "error":
        row, reason = bad[0]
        raise DataError(
            f"column {name!r} has {len(bad)} of {len(column)} rows without a picture, the first in row {row} of the "
            f"batch ({reason}): take them out, or set invalid='zeros'"
        )
    return out.astype(np.float32) / np.float32(255) if options.scale == "unit" else out


class _Undecodable(Exception):
    """Why a row has no picture."""


def _decoded(data: bytes | None, options: Image) -> np.ndarray[Any, Any]:
    try:
        from PIL import Image as pillow
    except ImportError as cause:
        raise ConfigError(
            "features of the type image need Pillow, which is not installed: pip install pillow"
        ) from cause
    if not data:
        raise _Undecodable("it is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own bound on pixels is ours below
            with pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
                if picture.width * picture.height > MAX_PIXELS:
                    raise _Undecodable(f"it has {picture.width} x {picture.height} pixels, above {MAX_PIXELS}")
                bytewise: Any = picture
                if picture.mode.startswith("I;16"):  # grey of 16 bits, which convert would cut off at 255
                    bytewise = pillow.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
                plain = bytewise.convert("RGB" if options.channels == 3 else "L")
                sized = plain.resize((options.width, options.height), pillow.Resampling.BILINEAR)
                pixels = np.asarray(sized, np.uint8)
    except _Undecodable:
        raise
    except Exception as cause:  # a decoder fails in its own ways on bytes that anybody may have made
        raise _Undecodable(f"{type(cause).__name__}: {cause}") from cause
    return pixels[None] if options.channels == 1 else pixels.transpose(2, 0, 1)
