"""Set variables of this process for the time of a block.

Enters: names and values. Leaves: the environment as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["environment"]


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set ``variables`` inside the block, unset those of None, for C libraries that read nothing else; restore them."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
