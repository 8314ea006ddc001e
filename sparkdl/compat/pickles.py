"""Pickles of modules that carry parametrizations, such as ``weight_norm`` and ``spectral_norm``.

torch (2.13) gives such a module a class of its own, made as it runs, and refuses to pickle it, though all that it is
lies in its state and in the class that it had before. Without this file they can neither be fitted nor scored in
executors; it can go when torch pickles them.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import cloudpickle

__all__ = ["Pickler", "dumps"]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which takes parametrized modules, too."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce a parametrized module to the class that it had before, and what that makes its state."""
        parametrize = sys.modules.get("torch.nn.utils.parametrize")
        if parametrize is None or not isinstance(value, parametrize.Module) or not parametrize.is_parametrized(value):
            return super().reducer_override(value)
        kind = parametrize.type_before_parametrizations(value)
        return _empty, (kind,), kind.__getstate__(value), None, None, _parametrize


def dumps(value: Any) -> bytes:
    """As ``cloudpickle.dumps``."""
    with io.BytesIO() as buffer:
        Pickler(buffer).dump(value)
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
