"""Texts to tokens: at white space, by character, or by a function of the user's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.numpy_arrow import filled
from sparkdl.columns.types import is_text
from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.features.spec import Text
from sparkdl.features.values import Lists, coded

Tokens = Callable[[str], Sequence[str]]
"""Cuts a text into tokens."""

Functions = Mapping[str, Tokens]
"""Functions that cut texts, by ``"module:function"``. They are imported elsewhere, and handed in: what a file names is
imported only where its reader allows it."""


def tokens_of(name: str, column: pa.Array, options: Text, functions: Functions) -> Lists:
    """The tokens of a column of texts; a null text has none.

    Raises:
        SchemaError: it holds no strings.
        DataError: it holds bytes that are no UTF-8, or the user's function fails or returns something else.
        ConfigError: the user's function was not handed in.
    """
    if pa.types.is_null(column.type):
        column = column.cast(pa.string())
    if not is_text(column.type):
        raise SchemaError(f"column {name!r} is {column.type}, no text: cast it, or make it another type of feature")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        texts = pc.utf8_normalize(filled(column.cast(pa.string()), ""), form="NFC").to_pylist()
    except (pa.ArrowInvalid, UnicodeDecodeError) as cause:
        raise DataError(f"column {name!r} holds texts that are no UTF-8 ({cause}): decode them first") from cause
    cut = _cutter(name, options.tokens, functions)
    tokens = [cut(text) for text in (map(str.lower, texts) if options.lowercase else texts)]
    try:
        flat = pa.array(itertools.chain.from_iterable(tokens), pa.string())
    except (TypeError, pa.ArrowInvalid, pa.ArrowTypeError) as cause:
        raise DataError(
            f"{options.tokens} returns something else than strings for the column {name!r} ({cause}): correct it"
        ) from cause
    return Lists(coded(name, flat), np.array([len(row) for row in tokens], np.int64), column.null_count)


def _cutter(name: str, tokens: str, functions: Functions) -> Tokens:
    if tokens == "words":
        return str.split  # Arrow 26 reads behind the end of a text where it splits at white space
    if tokens == "characters":
        return list
    if tokens not in functions:
        raise ConfigError(f"the feature {name!r} is cut by {tokens}, which was not loaded: allow its module")
    function = functions[tokens]

    def cut(text: str) -> Sequence[str]:
        try:
            return list(function(text))
        except Exception as cause:
            raise DataError(
                f"{tokens} fails on the column {name!r} ({type(cause).__name__}: {cause}): let it return a list of "
                "strings for every text"
            ) from cause

    return cut
