"""The reader's word on what a saved model may make him run: nothing, unless he allows it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from sparkdl.errors import ConfigError

SETTING, VARIABLE = "spark.sparkdl.allowPickle", "SPARKDL_ALLOW_PICKLE"
IMPORT_SETTING, IMPORT_VARIABLE = "spark.sparkdl.allowImports", "SPARKDL_ALLOW_IMPORTS"
OWN = "sparkdl.models.networks"
"""The one module of sparkdl whose classes a saved model may name: it holds networks and nothing else."""
REMEDY = (
    f"if you trust whoever saved it, load it inside `with sparkdl.allow_pickle():`, or set {SETTING}=true in Spark or "
    f"{VARIABLE}=1 in the environment"
)

# Blocks, settings of the Spark session and variables of the environment allow; what is loaded has no say in it.
_pickle: ContextVar[bool] = ContextVar("sparkdl_allow_pickle", default=False)
_imports: ContextVar[tuple[str, ...]] = ContextVar("sparkdl_allow_imports", default=())


@contextlib.contextmanager
def allow_pickle() -> Iterator[None]:
    """Let what is loaded inside the block bring pickles, which can run any code; also for ``PipelineModel.load``.

    Their hashes are compared first in any case.

    Example:
        >>> with sparkdl.allow_pickle():
        ...     fitted = PipelineModel.load("/models/churn")
    """
    token = _pickle.set(True)
    try:
        yield
    finally:
        _pickle.reset(token)


def pickle_allowed(spark: Any = None) -> bool:
    """Whether the caller, the environment or, if given, the Spark session has said so."""
    settings = [os.environ.get(VARIABLE, "")]
    if spark is not None:
        settings.append(str(spark.conf.get(SETTING, "") or ""))
    return _pickle.get() or any(word.strip().lower() in ("1", "true", "yes") for word in settings)


@contextlib.contextmanager
def allow_imports(*packages: str) -> Iterator[None]:
    """Let what is loaded inside the block import these packages, and make models of their classes and functions.

    Importing a module runs its code, so a saved model that needs one of your own is loaded only where you name it.

    Args:
        packages: ``"my_package"`` allows all that lies in it, ``"my_package.nets"`` one module and what lies in that.

    Raises:
        ConfigError: one of them can never be allowed: it is of the standard library, torch outside of ``torch.nn``,
            or sparkdl itself.

    Example:
        >>> with sparkdl.allow_imports("my_package"):
        ...     fitted = PipelineModel.load("/models/churn")
    """
    token = _imports.set((*_imports.get(), *checked_packages(packages)))
    try:
        yield
    finally:
        _imports.reset(token)


def allowed_imports(spark: Any = None) -> tuple[str, ...]:
    """The packages that the caller, the environment and, if given, the Spark session have named."""
    settings = [os.environ.get(IMPORT_VARIABLE, "")]
    if spark is not None:
        settings.append(str(spark.conf.get(IMPORT_SETTING, "") or ""))
    named = [name.strip() for text in settings for name in text.split(",") if name.strip()]
    return (*_imports.get(), *checked_packages(named))


def checked_packages(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the names, of which each can be allowed.

    Raises:
        ConfigError: one cannot.
    """
    if isinstance(packages, str):
        raise ConfigError(f"{packages!r} is a text, not a list of packages: give [{packages!r}]")
    for name in packages:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"{name!r} is not the name of a package: give it as an import statement does")
        reason = never(name)
        if reason:
            raise ConfigError(f"{name!r} cannot be allowed, as it {reason}: name the package of your own model")
    return tuple(packages)


def never(module: str) -> str:
    """Why nothing of a module is ever made by what is loaded; empty for one that may be allowed."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return "is of Python's standard library, which holds no models"
    if top == "torch" and not f"{module}.".startswith(("torch.nn.", "torch.optim.")):
        return "is part of torch outside of torch.nn, which loads and runs files"
    return "is sparkdl itself, which loads and runs files" if top == "sparkdl" and module != OWN else ""
