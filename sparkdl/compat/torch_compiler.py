"""Training that compiles nothing, without an import of torch's compiler."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_ENTERING = threading.Lock()


class _Dynamo(ModuleType):
    """Answers the two calls that optimizers make; at anything else it makes way for the real package."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        self.__spec__, self.__file__, self.__package__ = spec, spec.origin, _NAME
        self.__path__ = spec.submodule_search_locations or []
        self._finder = _Submodules(self)
        self._lock = threading.RLock()
        self._bare: list[Any] = []

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Break the graph that is being traced: there is none."""

    def disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **more: Any) -> Any:
        """Return ``fn``, hidden from a compiler that is not there; only torch's optimizers ask for no wrapping."""
        if wrapping or fn is None:
            return self.__getattr__("disable")(fn, recursive, wrapping=wrapping, **more)
        self._bare.append(fn)
        return fn

    def enter(self) -> None:
        """Stand in for the package."""
        sys.meta_path.insert(0, self._finder)
        sys.modules[_NAME] = vars(torch)["_dynamo"] = self

    def leave(self) -> None:
        """Make way; torch then hides anew what was returned as it is. Idempotent."""
        with self._lock:
            if sys.modules.get(_NAME) is self:
                sys.meta_path.remove(self._finder)
                del sys.modules[_NAME], vars(torch)["_dynamo"]
            while self._bare:
                with suppress(AttributeError):
                    delattr(self._bare.pop(), "__dynamo_disable")

    def __getattr__(self, name: str) -> Any:
        self.leave()
        return getattr(importlib.import_module(_NAME), name)


class _Submodules(Loader):
    """Finder and loader: the first import of a submodule loads the package itself before.

    It has no other attribute, for ``importlib.metadata`` asks every finder for its distributions.
    """

    def __init__(self, standing_in: _Dynamo) -> None:
        self._standing_in = standing_in

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Take over the import of submodules."""
        return spec_from_loader(name, self) if name.startswith(_NAME + ".") else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty one."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the real submodule in the place of the empty one."""
        self._standing_in.leave()
        del sys.modules[module.__name__]
        importlib.import_module(module.__name__)


@contextmanager
def eager() -> Iterator[None]:
    """Spare the block the import of ``torch._dynamo``, unless something in it compiles; nothing else changes.

    Every optimizer of torch imports that package at its first ``state_dict``, ``zero_grad`` or ``step``, only to tell a
    compiler where not to look: 830 modules, 70 MB and 1.7 s of processor in each rank of a first fit (torch 2.13; the
    first fit of a session took 7.8 and 11.9 s instead of 14.9 and 15.9, in turns on a busy machine). It can go when
    torch's optimizers train without that import; ``tests/compat/test_torch_compiler.py`` notices when they ask for
    more.
    """
    standing_in = _entered()
    try:
        yield
    finally:
        if standing_in is not None:
            standing_in.leave()


def _entered() -> _Dynamo | None:
    """What stands in for the package from now on; None where it is loaded, or another thread's stands in already."""
    with _ENTERING:
        spec = None if _NAME in sys.modules else find_spec(_NAME)
        if spec is None:
            return None
        standing_in = _Dynamo(spec)
        standing_in.enter()
        return standing_in
