"""Names below a folder: the one place where text that a file holds becomes part of a path."""

from __future__ import annotations

import re

from sparkdl.errors import IntegrityError

_FOREIGN = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:")


def plain_name(name: str, folder: str) -> str:
    """Return ``name`` if it is a path of plain segments below ``folder``.

    It comes from a manifest, a checkpoint, a bundle or a table's log, which anybody may have written.

    Raises:
        IntegrityError: it is absolute or empty, or has a segment that is empty, ``.`` or ``..``, a drive, a backslash
            or a control character.
    """
    segments = name.split("/") if isinstance(name, str) else ()
    if not segments or _FOREIGN.search(name) or any(segment in ("", ".", "..") for segment in segments):
        raise IntegrityError(
            f"{_shortened(name)} is not the plain name of a file below {folder}: the document that holds it was "
            "altered, write it again"
        )
    return name


def _shortened(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
