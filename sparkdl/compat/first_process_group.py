"""A call before the first process group of a block, without loading torch for a block that makes none."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HOME, _NAME = "torch.distributed", "init_process_group"


@contextmanager
def before_first_group(prepare: Callable[[], Any]) -> Iterator[None]:
    """Call ``prepare`` once, before the first ``torch.distributed.init_process_group()`` of the block, if there is one.

    Where torch is loaded already, somebody may hold that function under a name of his own: then at once.
    """
    if _HOME in sys.modules:
        prepare()
        yield
        return
    pending = [prepare]
    undo: list[Callable[[], None]] = []

    def watch(home: ModuleType) -> None:
        for module in (home, sys.modules.get(f"{_HOME}.distributed_c10d")):
            original = getattr(module, _NAME, None)
            if module is not None and original is not None:
                setattr(module, _NAME, _after(pending, original))
                undo.append(functools.partial(setattr, module, _NAME, original))

    finder = _Watcher(watch)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        pending.clear()  # whoever keeps the function that stood in calls torch's own from now on
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for step in undo:
            step()


def _after(pending: list[Callable[[], Any]], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        while pending:
            pending.pop()()
        return original(*args, **kwargs)

    return prepared


class _Watcher(importlib.abc.MetaPathFinder):
    """Sees one module being imported, once, and looks at it when it is complete."""

    def __init__(self, watch: Callable[[ModuleType], None]) -> None:
        self._watch = watch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the others do, and have a look at it after it was executed."""
        if fullname != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            self._watch(module)

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec
