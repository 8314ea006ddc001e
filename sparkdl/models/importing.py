"""Models that are rebuilt by calling a class or a function by its import path.

Enters: a class, a function, or ``"package.module:Name"``. Leaves: the path that names it, checked; on loading, the
module that calling it gives. A bundle is data from somewhere else, so it may only call what can make a model: classes
derived from ``torch.nn.Module`` and functions annotated to return one. Anything more powerful is refused unless the
caller lists its module as trusted.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from sparkdl.errors import BundleError

__all__ = ["build", "path_of", "resolve"]


def path_of(factory: str | Callable[..., nn.Module]) -> str:
    """The import path of a factory, ``"package.module:Name"``.

    Raises:
        BundleError: it lives where no other process can import it from.
    """
    if isinstance(factory, str):
        path = factory
    else:
        module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
        path = f"{module}:{name}"
        if module in ("__main__", "") or "<" in name:
            raise BundleError(
                f"the model factory {path} cannot be imported by another process: move it to the top level of a module "
                "that is installed on the workers, or use allow_pickle=True"
            )
    found = resolve(path)
    if not isinstance(factory, str) and found is not factory:
        raise BundleError(f"the import path {path} leads to another object than the one given: give its true path")
    return path


def build(path: str, arguments: Mapping[str, Any], trusted: Sequence[str] = ()) -> nn.Module:
    """Import ``path`` and call it with ``arguments``.

    Args:
        path: ``"package.module:Name"``.
        arguments: keyword arguments, JSON values.
        trusted: modules whose functions may be called whatever their annotation says.

    Raises:
        BundleError: it cannot be imported, is nothing that makes a model, or fails.
    """
    found = resolve(path)
    if not _makes_a_model(found) and path.partition(":")[0] not in trusted:
        raise BundleError(
            f"{path} is neither a torch.nn.Module class nor a function annotated to return one: annotate it, or load "
            f"with trusted=[{path.partition(':')[0]!r}] if you trust it"
        )
    try:
        model = found(**arguments)
    except Exception as cause:
        raise BundleError(
            f"{path} fails with the arguments {dict(arguments)}: {type(cause).__name__}: {cause}; install the "
            "version of that module that the model was saved with"
        ) from cause
    if not isinstance(model, nn.Module):
        raise BundleError(f"{path} returned a {type(model).__name__}, not a torch.nn.Module: let it return the model")
    return model


def resolve(path: str, needed_by: str = "the model") -> Any:
    """Import what ``"package.module:Name"`` names, whatever it is.

    Args:
        path: the import path.
        needed_by: what cannot do without it, for the message.

    Raises:
        BundleError: the path is malformed, its module is not installed here, or it lacks the name.
    """
    module, separator, name = path.partition(":")
    if not separator or not module or not name:
        raise BundleError(f"the import path {path!r} does not look like 'package.module:Name': write it so")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ImportError as cause:
        raise BundleError(
            f"{needed_by} needs the module {module}, which cannot be imported here ({cause}): install it where "
            f"{needed_by} is loaded"
        ) from cause
    except AttributeError as cause:
        raise BundleError(
            f"the module {module} has no {name!r}: install the version of {module} that {needed_by} was saved with"
        ) from cause
    return found


def _makes_a_model(found: Any) -> bool:
    module = getattr(found, "__module__", "") or ""
    if module.startswith("torch.") and not module.startswith("torch.nn."):
        return False  # torch.jit, torch.hub and the like run what they load
    if isinstance(found, type):
        return issubclass(found, nn.Module)
    try:
        result = typing.get_type_hints(found).get("return")
    except Exception:  # an annotation that names something not imported here
        return False
    return isinstance(result, type) and issubclass(result, nn.Module)
