"""Makes one parcel of what the ranks need, and sees to it that they can open it.

Enters: a job with the user's model, optimizer, loss and callbacks. Leaves: a ``Parcel``, one pickle, so that an
optimizer stays bound to its model's parameters. Classes and functions of a script, a notebook or a loose module travel
with it, since a worker could not import them; those of installed packages are imported there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import pickletools
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from sparkdl.documents.payload import Parcel
from sparkdl.errors import ConfigError
from sparkdl.observe import logger

__all__ = ["foreign_modules", "is_loose", "loose_by_value", "missing_modules", "pack"]

_EXPECTED = {"sparkdl", "torch", "numpy", "pyspark", "pyarrow", "pandas", "cloudpickle", "torchmetrics", "horovod"}
"""Packages that every worker has, or sparkdl itself would not run there."""


def pack(value: Any, what: str = "the model, its optimizer or loss", like: Parcel | None = None) -> Parcel:
    """Pickle ``value``, with the source of every loose module that it needs.

    Args:
        value: anything.
        what: it is, for the error.
        like: a parcel of the same code, which was looked through already.

    Raises:
        ConfigError: a part of it cannot be pickled, or lies in a module that can travel neither way.
    """
    if like is not None:
        with _by_value(list(like.loose)) if like.loose else contextlib.nullcontext():
            return replace(_packed(value, what), modules=like.modules, loose=like.loose)
    parcel = _packed(value, what)
    loose = [name for name in foreign_modules(parcel.data) if is_loose(name)]
    if loose:
        with _by_value(loose):
            parcel = _packed(value, what)
    tops = sorted({name.split(".")[0] for name in foreign_modules(parcel.data)})
    stuck = [name for name in tops if is_loose(name)]
    if stuck:
        raise ConfigError(
            f"{what} needs {stuck[0]!r}, a module of the driver alone that cannot be copied: install it on every worker"
        )
    return replace(parcel, modules=tuple(top for top in tops if top not in _EXPECTED), loose=tuple(loose))


@contextlib.contextmanager
def loose_by_value(value: Any) -> Iterator[None]:
    """Let whatever pickles ``value`` inside the block take loose modules along."""
    loose = [name for name in foreign_modules(_packed(value, "the object").data) if is_loose(name)]
    with _by_value(loose) if loose else contextlib.nullcontext():
        yield


def _packed(value: Any, what: str) -> Parcel:
    try:
        return Parcel.of(value)
    except Exception as cause:
        raise ConfigError(
            f"{what} cannot travel to the ranks ({type(cause).__name__}: {cause}): keep locks, sessions and open files "
            "out of it, or give a function that makes it there"
        ) from cause


def foreign_modules(data: bytes) -> list[str]:
    """Modules, other than the standard library's, that opening a pickle imports."""
    found: dict[str, None] = {}
    memo: list[str] = []
    pushed = ["", ""]  # the last two values that may be strings: what STACK_GLOBAL takes
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("BINGET", "LONG_BINGET"):
            pushed = [pushed[1], memo[int(str(argument))]]
        elif opcode.name == "MEMOIZE":
            memo.append(pushed[1])
        elif opcode.name == "STACK_GLOBAL":
            found[pushed[0]] = None
            pushed = [pushed[1], ""]
        elif opcode.name != "FRAME":
            pushed = [pushed[1], argument if isinstance(argument, str) else ""]
    found.pop("", None)
    return [name for name in found if name.split(".")[0] not in sys.stdlib_module_names and name != "__main__"]


def missing_modules(names: tuple[str, ...]) -> list[str]:
    """Those of ``names`` that this process cannot import; to be called on a worker."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def is_loose(name: str) -> bool:
    """Whether a loaded module belongs to no installed package: a user's own file beside a script or a notebook."""
    top = name.split(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None)
    if top in _EXPECTED or not file:
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in _installed_folders()) and top not in _distributed()


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    paths = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(Path(path).resolve() for path in paths if path)


@functools.cache
def _distributed() -> frozenset[str]:
    """Packages that are installed, those in place included, whose files lie outside site-packages."""
    return frozenset(importlib.metadata.packages_distributions())


_registry = threading.Lock()  # cloudpickle's registry is one for the process


@contextlib.contextmanager
def _by_value(names: list[str]) -> Iterator[None]:
    """Let the packages of ``names`` travel by value, each with all its loaded modules."""
    tops = {name.split(".")[0] for name in names}
    known = cloudpickle.list_registry_pickle_by_value()
    loaded = [name for name in list(sys.modules) if name.split(".")[0] in tops and name not in known]
    with _registry, contextlib.ExitStack() as stack:
        for name in loaded:
            if str(getattr(sys.modules[name], "__file__", "")).endswith(".py"):
                cloudpickle.register_pickle_by_value(sys.modules[name])
                stack.callback(cloudpickle.unregister_pickle_by_value, sys.modules[name])
        logger.debug("modules that travel by value: %s", loaded)
        yield
