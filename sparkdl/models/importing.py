"""Classes and functions that a saved file names by import path."""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from sparkdl.errors import BundleError
from sparkdl.models.trust import IMPORT_SETTING, IMPORT_VARIABLE, OWN, checked_packages, never

TORCH = ("torch.nn", OWN)
"""What may be imported without a word: torch's own layers, and the networks that sparkdl brings."""


def path_of(factory: str | Callable[..., nn.Module]) -> str:
    """The import path of a factory, ``"package.module:Name"``, the one where it is defined.

    Raises:
        BundleError: it lives where no other process can import it from, or makes no model.
    """
    if isinstance(factory, str):
        module, name = _split(factory)
        member = _member(_imported(module, "the model"), module, name, "the model")
    else:
        member = factory
    module, name = getattr(member, "__module__", "") or "", getattr(member, "__qualname__", "")
    path = f"{module}:{name}"
    if module in ("__main__", "") or "<" in name:
        raise BundleError(
            f"the model factory {path} cannot be imported by another process: move it to the top level of a module "
            "that is installed on the workers, or use allow_pickle=True"
        )
    if resolve(path, (module,)) is not member:
        raise BundleError(f"the import path {path} leads to another object than the one given: give its true path")
    return path


def build(path: str, arguments: Mapping[str, Any], trusted: Sequence[str] = ()) -> nn.Module:
    """Import ``path`` and call it with ``arguments``.

    Args:
        path: ``"package.module:Name"``.
        arguments: keyword arguments, JSON values.
        trusted: packages that may be imported besides ``torch.nn``.

    Raises:
        BundleError: it is not allowed, cannot be imported, is nothing that makes a model, or fails.
        ConfigError: ``trusted`` names what can never be allowed.
    """
    maker = resolve(path, (*TORCH, *checked_packages(trusted)))
    if not makes_a_model(maker):
        raise BundleError(
            f"{path} is neither a torch.nn.Module class nor a function annotated to return one: annotate it where it "
            "is defined"
        )
    return make(maker, arguments, path)


def make(factory: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> nn.Module:
    """Call ``factory``, whatever it raises becoming one error that names it.

    Raises:
        BundleError: it fails, or makes something else than a module.
    """
    try:
        model = factory(**arguments)
    except Exception as cause:
        shown = str(dict(arguments))
        shown = shown if len(shown) <= 300 else f"{shown[:300]}..."
        raise BundleError(
            f"{name} fails with the arguments {shown}: {type(cause).__name__}: {cause}; install the version of that "
            "module that the model was saved with"
        ) from cause
    if not isinstance(model, nn.Module):
        raise BundleError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module: let it return the model")
    return model


def resolve(path: str, allowed: Sequence[str], needed_by: str = "the model") -> Any:
    """The class or function that ``"package.module:Name"`` names.

    Importing a module runs its code, so nothing is imported before it is allowed, and a file has no say in what is. The
    object must be defined where its path says: what an allowed module has merely imported (``shutil:os.system``) is out
    of reach.

    Args:
        path: the import path.
        allowed: packages and modules that may be imported.
        needed_by: what cannot do without it, for the message.

    Raises:
        BundleError: the path is malformed, its module is not allowed or not installed here, or it does not define the
            name.
    """
    module, name = _split(path)
    reason = never(module)
    if reason:
        raise BundleError(f"{needed_by} names {path}, which {reason}: it was not saved by sparkdl, do not load it")
    if not any(f"{module}.".startswith(f"{package}.") for package in allowed):
        top = module.partition(".")[0]
        raise BundleError(
            f"{needed_by} needs {path}, and importing {module} runs its code: if you trust that module, load inside "
            f"`with sparkdl.allow_imports({top!r}):`, give trusted=[{top!r}] where it can be given, or set "
            f"{IMPORT_SETTING}={top} in Spark or {IMPORT_VARIABLE}={top} in the environment"
        )
    member = _member(_imported(module, needed_by), module, name, needed_by)
    defined = (getattr(member, "__module__", None), getattr(member, "__qualname__", None))
    if not (inspect.isclass(member) or inspect.isfunction(member)) or defined != (module, name):
        raise BundleError(f"{path} is no class or function that {module} defines: give the path of its definition")
    return member


def _split(path: str) -> tuple[str, str]:
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise BundleError(f"the import path {path[:200]!r} does not look like 'package.module:Name': write it so")
    return module, name


def _imported(module: str, needed_by: str) -> Any:
    if module in sys.modules:
        return sys.modules[module]
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise BundleError(
            f"{needed_by} needs the module {module}, which cannot be imported here ({cause}): install it where "
            f"{needed_by} is loaded"
        ) from cause


def _member(member: Any, module: str, name: str, needed_by: str) -> Any:
    for part in name.split("."):  # by what is there, as a module's own __getattr__ may import others
        if part not in vars(member):
            raise BundleError(
                f"the module {module} has no {name!r}: install the version of {module} that {needed_by} was saved with"
            )
        member = vars(member)[part]
    return member


def makes_a_model(maker: Any) -> bool:
    """Whether something is a module's class, or a function that says that it returns one."""
    if isinstance(maker, type):
        return issubclass(maker, nn.Module)
    try:
        result = typing.get_type_hints(maker).get("return")
    except Exception:  # an annotation that names something not imported here
        return False
    return isinstance(result, type) and issubclass(result, nn.Module)
