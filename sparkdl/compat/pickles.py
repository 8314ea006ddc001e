"""cloudpickle, with two things of torch (2.13) that it refuses."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from pickle import PickleBuffer
from types import ModuleType
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which takes these two, too.

    A layer with parametrizations, such as ``weight_norm`` and ``spectral_norm``, has a class of its own, made as it
    runs, though all that it is lies in its state and in the class that it had before. ``torch.backends`` and what is in
    it are objects in the place of modules, and a function that says ``torch.backends.cudnn.benchmark = True`` refers to
    them. Without this class the former can neither be fitted nor scored in executors, and the latter cannot be sent
    there out of a notebook; it can go when torch pickles both.
    """

    def reducer_override(self, value: Any) -> Any:
        """Reduce a parametrized layer to the class that it had before and its state, a module to its name."""
        # cloudpickle looks for the very class of modules, and those of torch.backends have others.
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)
        parametrize = sys.modules.get("torch.nn.utils.parametrize")
        if parametrize is None or not isinstance(value, parametrize.Module) or not parametrize.is_parametrized(value):
            return super().reducer_override(value)
        kind = parametrize.type_before_parametrizations(value)
        return _empty, (kind,), kind.__getstate__(value), None, None, _parametrize


def dumps(
    value: Any, protocol: int | None = None, buffer_callback: Callable[[PickleBuffer], Any] | None = None
) -> bytes:
    """Pickle a value as ``cloudpickle.dumps`` does."""
    with io.BytesIO() as buffer:
        Pickler(buffer, protocol=protocol, buffer_callback=buffer_callback).dump(value)
        return buffer.getvalue()


def _empty(kind: type[Any]) -> Any:
    return object.__new__(kind)


def _parametrize(module: Any, state: dict[str, Any]) -> None:
    """Give the module its state, and a class as ``register_parametrization`` does."""
    from torch.nn.utils import parametrize

    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)
