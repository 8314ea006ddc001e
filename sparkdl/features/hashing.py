"""The one hash of values: stable over platforms, versions and languages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

SEED = 42


def hashes(texts: Iterable[str]) -> np.ndarray[Any, Any]:
    """The hash of each text, ``(n,)`` uint64.

    It is XXH64 with the seed 42 over a text's UTF-8 bytes, which is what Spark SQL's ``xxhash64(column)`` gives for a
    string. Integers are hashed as their decimal text, so that a column of strings that hold numbers and one of integers
    agree.
    """
    digest = xxhash.xxh64_intdigest
    return np.array([digest(text.encode(), SEED) for text in texts], np.uint64)


def to_buckets(texts: Iterable[str], buckets: int) -> np.ndarray[Any, Any]:
    """The id of each text, ``(n,)`` int64 from 1 to ``buckets``; 0 is left for what is missing."""
    return (hashes(texts) % np.uint64(buckets)).astype(np.int64) + 1
