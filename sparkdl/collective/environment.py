"""Set variables of this process for the time of a block.

Enters: names and values. Leaves: the environment as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["environment"]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` inside the block, for C libraries that read nothing else, and restore them after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
