"""The modules that a function will need, guessed, and loaded while the ranks wait for each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import FunctionType, ModuleType

_LARGEST_GUESS_BYTES = 1 << 20


def likely(preload: Sequence[str], pickled: memoryview) -> tuple[str, ...]:
    """Return those of the modules ``preload`` that a function, ``pickled``, seems to use.

    It seems to use a package that it names, or that a module it refers to has loaded here. A guess in either direction
    costs time and nothing else: a module that was not loaded early is loaded when the function imports it.
    """
    if pickled.nbytes > _LARGEST_GUESS_BYTES:
        return tuple(preload)
    words = {word.decode() for word in re.findall(rb"[A-Za-z_][\w.]*", pickled)}
    tops = {word.partition(".")[0] for word in words}
    modules = [module for module in map(sys.modules.get, words) if module is not None]  # None forbids an import
    return tuple(
        name
        for name in preload
        if (top := name.partition(".")[0]) in tops or any(_refers(module, top) for module in modules)
    )


def _refers(module: ModuleType, top: str) -> bool:
    for value in list(vars(module).values()):
        kind = type(value)  # isinstance would ask the value, and some warn when they are looked at
        if issubclass(kind, ModuleType):
            home = value.__name__
        else:
            home = str(value.__module__) if issubclass(kind, type | FunctionType) else ""
        if home.partition(".")[0] == top:
            return True
    return False
