"""Variables of this process, set for the time of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set ``variables`` inside the block, unset those of None, for libraries that read nothing else.

    Afterwards the whole environment and the working directory are as before, whatever the block did to them.
    """
    earlier, directory = dict(os.environ), _directory()
    _set(variables)
    try:
        yield
    finally:
        _set({name: earlier.get(name) for name in {*earlier, *os.environ} if os.environ.get(name) != earlier.get(name)})
        if directory is not None and _directory() != directory:
            with suppress(FileNotFoundError):  # removed by now, and there is no other to go back to
                os.chdir(directory)


def _directory() -> str | None:
    """The working directory; None where it was removed, as a temporary one is at the end of its block."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
