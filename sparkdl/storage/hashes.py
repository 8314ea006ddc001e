"""The two hashes: one against accidents, one that names content."""

from __future__ import annotations

import hashlib
from typing import Any

import xxhash


def xxh3_hex(data: Any) -> str:
    """The 64-bit xxh3 hash of a buffer as 16 hexadecimal digits: against accidents, not attackers."""
    return xxhash.xxh3_64_hexdigest(data)


def sha256_hex(data: Any) -> str:
    """The SHA-256 hash of a buffer as 64 hexadecimal digits: the name of content in keys."""
    return hashlib.sha256(data).hexdigest()
