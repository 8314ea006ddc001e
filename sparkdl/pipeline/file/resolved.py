"""What a file says, as JSON values without secrets: for the record of a run, and for the keys of its steps.

Enters: frozen sections. Leaves: dicts, lists, texts and numbers. A secret of the environment is its reference; one that
stands in the file itself is hidden: by the name of a setting, and within addresses and lists of ``name=value``.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sparkdl.pipeline.file.environment import tells_a_secret
from sparkdl.pipeline.spec.base import Secret

__all__ = ["host_of", "plain"]

HIDDEN = "(hidden)"
_FREE_NAMES = ("conf", "options")
"""Fields whose keys are other systems' names, which may tell that a value is a secret."""
_BEFORE_HOST = re.compile(r"(?<=://)[^/\s@:]*:(?!\d*/)\S*@")
"""User and password of an address; passwords hold any character, and a port is none."""
_NAMED = re.compile(
    r"((?:secret|token|passw(?:or)?d|passphrase|pwd|credential|(?:access|account)key)\w*=)(\"[^\"]*\"|[^\s'\"&;,)]+)",
    re.IGNORECASE,
)
"""A secret within a value: ``...;AccountKey=...``, ``-Djavax.net.ssl.trustStorePassword=...``."""


def plain(value: Any, name: str = "", free: bool = False) -> Any:
    """Return ``value`` as JSON values.

    Args:
        value: a section, or a part of one.
        name: its key.
        free: whether that key is another system's name.
    """
    if isinstance(value, Secret) and name != "webhook":
        return value.reference
    if isinstance(value, msgspec.Struct):
        tagged = type(value).__struct_config__
        kind = {tagged.tag_field: tagged.tag} if tagged.tag_field and tagged.tag is not None else {}
        return kind | {one: plain(getattr(value, one), one) for one in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(inner, key, name in _FREE_NAMES) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if name == "webhook" and isinstance(value, str):
        return "/".join(filter(None, [host_of(value), HIDDEN]))
    if free and tells_a_secret(name):
        return HIDDEN
    if not isinstance(value, str):
        return value
    text = _BEFORE_HOST.sub(f"{HIDDEN}@", value)
    return _NAMED.sub(rf"\1{HIDDEN}", text) if free else text


def host_of(address: str) -> str:
    """The host of an address, as far as the file shows it: whoever knows the rest of a webhook's may post to it."""
    shown = address.reference if isinstance(address, Secret) else address
    try:
        host = urlsplit(shown).hostname
    except ValueError:  # a reference within brackets
        return ""
    return host if host and "$" not in host else ""
