"""The user's own objects and functions: how they travel to the ranks, and which line of them failed."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import pickletools
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from sparkdl.documents.payload import Payload
from sparkdl.errors import LIBRARIES, ConfigError, SparkdlError
from sparkdl.observe import logger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_EXPECTED = {"sparkdl", "torch", "numpy", "pyspark", "pyarrow", "pandas", "cloudpickle", "torchmetrics", "horovod"}
"""Packages that every worker has, or sparkdl itself would not run there."""
registry_lock = threading.RLock()
"""Held from the look at what a pickle needs to the pickle that takes it along: cloudpickle's registry is one for the
process, and fits run side by side."""


def pack(parts: Any) -> Payload:
    """Pickle a dataclass of the user's objects, with the source of every loose module that they need.

    Raises:
        ConfigError: one of them cannot be pickled, or lies in a module that can travel neither way.
    """
    with registry_lock:
        payload = _packed(parts)
        loose = [name for name in foreign_modules(payload.data) if is_loose(name)]
        if loose:
            with _by_value(loose):
                payload = _packed(parts)
    tops = sorted({name.split(".")[0] for name in foreign_modules(payload.data)})
    stuck = [name for name in tops if is_loose(name)]
    if stuck:
        raise ConfigError(
            f"the model, its optimizer or loss needs {stuck[0]!r}, a module of the driver alone that cannot be copied: "
            "install it on every worker"
        )
    return replace(payload, modules=tuple(top for top in tops if top not in _EXPECTED))


def check_importable(payload: Payload, spark: SparkSession) -> None:
    """Ask one worker whether it can import what the model needs; most models need nothing that has to be asked.

    Raises:
        ConfigError: names the module, and how it gets there.
    """
    if not payload.modules:
        return
    names = payload.modules

    def ask(_: Any) -> Any:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"name": pa.array(missing_modules(names), pa.string())})

    lacking = [row["name"] for row in spark.range(0, 1, 1, 1).mapInArrow(ask, "name string").collect()]
    if lacking:
        raise ConfigError(
            f"the model, its optimizer or loss needs {lacking[0]!r}, which workers cannot import: install it there, "
            f"ship it with spark.addArtifacts, or call cloudpickle.register_pickle_by_value({lacking[0]})"
        )


@contextlib.contextmanager
def loose_by_value(value: Any) -> Iterator[None]:
    """Let whatever pickles ``value`` inside the block take loose modules along."""
    with registry_lock:
        loose = [name for name in foreign_modules(_packed(value).data) if is_loose(name)]
        if loose:
            with _by_value(loose):
                yield
    if not loose:
        yield


def _packed(value: Any) -> Payload:
    try:
        return Payload.of(value)
    except Exception as cause:
        raise ConfigError(
            f"{_culprit(value)} cannot travel to the ranks ({type(cause).__name__}: {cause}): keep locks, sessions and "
            "open files out of it, or give a function that makes it there"
        ) from cause


def _culprit(value: Any) -> str:
    """Which of the user's objects cannot be pickled, under the name of its parameter."""
    for field in fields(value) if is_dataclass(value) else ():
        value_of_field = getattr(value, field.name)
        name = field.metadata.get("parameter", field.name)
        for position, part in enumerate(value_of_field) if isinstance(value_of_field, list) else [(-1, value_of_field)]:
            try:
                Payload.of(part)
            except Exception:
                return name if position < 0 or len(value_of_field) == 1 else f"{name}[{position}]"
    return "the object"


def foreign_modules(data: bytes) -> list[str]:
    """Modules, other than the standard library's, that opening a pickle imports."""
    modules: dict[str, None] = {}
    memo: list[str] = []
    pushed = ["", ""]  # the last two values that may be strings: what STACK_GLOBAL takes
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("BINGET", "LONG_BINGET"):
            pushed = [pushed[1], memo[int(str(argument))]]
        elif opcode.name == "MEMOIZE":
            memo.append(pushed[1])
        elif opcode.name == "STACK_GLOBAL":
            modules[pushed[0]] = None
            pushed = [pushed[1], ""]
        elif opcode.name != "FRAME":
            pushed = [pushed[1], argument if isinstance(argument, str) else ""]
    modules.pop("", None)
    return [name for name in modules if name.split(".")[0] not in sys.stdlib_module_names and name != "__main__"]


def missing_modules(names: tuple[str, ...]) -> list[str]:
    """The modules among ``names`` that this process cannot import; to be called on a worker."""
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
    """Packages that are installed in place, so that their files lie outside site-packages.

    Others count by where their files lie alone: some wheels bring a package called ``tests``, or say that they do.
    """
    in_place = set()
    for distribution in importlib.metadata.distributions():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        home = Path(str(distribution.locate_file(""))).resolve()
        if origin.get("dir_info", {}).get("editable") or home not in _installed_folders():
            in_place.add(distribution.metadata["Name"])
    packages = importlib.metadata.packages_distributions()
    return frozenset(name for name, owners in packages.items() if in_place.intersection(owners))


@contextlib.contextmanager
def _by_value(names: list[str]) -> Iterator[None]:
    """Let the packages of ``names`` travel by value, each with all its loaded modules; its caller holds the lock."""
    tops = {name.split(".")[0] for name in names}
    registered = cloudpickle.list_registry_pickle_by_value()
    loaded = [name for name in list(sys.modules) if name.split(".")[0] in tops and name not in registered]
    with contextlib.ExitStack() as stack:
        for name in loaded:
            if str(getattr(sys.modules[name], "__file__", "")).endswith(".py"):
                cloudpickle.register_pickle_by_value(sys.modules[name])
                stack.callback(cloudpickle.unregister_pickle_by_value, sys.modules[name])
        logger.debug("modules that travel by value: %s", loaded)
        yield


_BY_ARGUMENTS = (RuntimeError, TypeError, ValueError, IndexError)
"""What torch and its kin raise where tensors do not fit an operation or a signature."""


def place_of_error(error: Exception) -> str | None:
    """Return ``file:line`` where the user's code itself failed, None where its arguments plausibly do not fit.

    An operation that refuses its tensors is no fault of the code that calls it; neither is a call with the wrong number
    of arguments, which has run nothing yet. A name that does not exist is one, and so is what the user's own ``raise``
    says.
    """
    frames = _frames(error)
    user_frames = _users_frames(frames)
    explicit = bool(user_frames) and user_frames[-1] is frames[-1] and _raises(user_frames[-1])
    if isinstance(error, _BY_ARGUMENTS) and not isinstance(error, NotImplementedError) and not explicit:
        return None
    return _line(user_frames or frames)


@contextmanager
def naming_errors(parameter: str) -> Iterator[None]:
    """Let what the user's function raises, which makes the value of ``parameter``, be one sentence with its line.

    Raises:
        ConfigError: the block raised something untyped.
    """
    try:
        yield
    except SparkdlError:
        raise
    except Exception as error:
        frames = _frames(error)
        message, line = f"{type(error).__name__}: {error}", _line(_users_frames(frames) or frames)
        raise ConfigError(f"the function given as {parameter} raised {message} at {line}: correct it there") from error


def _users_frames(frames: list[TracebackType]) -> list[TracebackType]:
    return [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(LIBRARIES)]


def _line(frames: list[TracebackType]) -> str:
    entry = traceback.extract_tb(frames[-1], limit=1)[0]
    return f"{entry.filename}:{entry.lineno}"


def _frames(error: Exception) -> list[TracebackType]:
    frames, frame = [], error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    return frames


def _raises(frame: TracebackType) -> bool:
    """Whether the frame stands at a ``raise`` or an ``assert``."""
    code = frame.tb_frame.f_code
    return any(
        instruction.offset == frame.tb_lasti and instruction.opname == "RAISE_VARARGS"
        for instruction in dis.get_instructions(code)
    )


def built(model: Any) -> torch.nn.Module:
    """The module itself, made if a function was given.

    Raises:
        ConfigError: it is none, its class wants arguments, or its function fails.
    """
    if not isinstance(model, torch.nn.Module):
        try:
            inspect.signature(model).bind()
        except TypeError as error:
            name = getattr(model, "__name__", type(model).__name__)
            raise ConfigError(
                f"model={name} cannot be made without arguments ({error}): give the module itself, {name}(...), or "
                f"functools.partial({name}, ...)"
            ) from error
    with naming_errors("model"):
        model = model if isinstance(model, torch.nn.Module) else model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module, or a function that makes one")
    return model
