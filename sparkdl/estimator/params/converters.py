"""The values that each parameter of the estimator accepts: one converter a kind of value."""

from __future__ import annotations

import inspect
import numbers
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.config import BACKENDS, Compression
from sparkdl.errors import ConfigError
from sparkdl.estimator.params.backend import Backend, SparkBackend, backend_of
from sparkdl.estimator.store import Store
from sparkdl.metrics.names import check_metric_name
from sparkdl.storage import Storage

Converter = Callable[[str, Any], Any]
"""``(name of the parameter, value) -> value``; None never reaches a converter: it means "the default"."""


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} is a {type(value).__name__}: give {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and -sys.float_info.max <= value <= sys.float_info.max


def metrics(name: str, value: Any) -> Any:
    """Take functions, torchmetrics objects and names, in lists of lists or by name; every name is one that there is."""
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for entry in (value,) if isinstance(value, str) else entries:
        if isinstance(entry, str):
            try:
                check_metric_name(entry)
            except ConfigError as refused_name:
                raise ConfigError(f"{name}: {refused_name}") from None
        else:
            metrics(name, entry)
    return value


def refused(remedy: str) -> Converter:
    """Refuse every value: the peer's parameter has no counterpart, and ``remedy`` says what to do."""

    def convert(name: str, value: Any) -> Any:
        raise ConfigError(f"{name}={value!r} has no effect in sparkdl: {remedy}")

    return convert


def only(allowed: Any, remedy: str) -> Converter:
    """Take the peer's default and nothing else: what else it offers has no counterpart, and ``remedy`` says why."""

    def convert(name: str, value: Any) -> Any:
        if value != allowed:
            raise ConfigError(f"{name}={value!r} has no effect in sparkdl, only {allowed!r} is taken: {remedy}")
        return value

    return convert


def integer(least: int, most: int = 2**31 - 1) -> Converter:
    """Whole numbers in ``least..most``; 3.0 counts as 3, True does not."""

    def convert(name: str, value: Any) -> int:
        if not _is_number(value) or value % 1 != 0:  # of inf and NaN, too
            raise _wrong(name, value, f"a whole number of at least {least}")
        if value < least:
            raise ConfigError(f"{name}={value} is below {least}: give at least {least}")
        if value > most:
            raise ConfigError(f"{name}={value} is above {most}: give at most {most}")
        return int(value)

    return convert


def number(least: float, *, exclusive: bool = False) -> Converter:
    """Finite real numbers from ``least`` on (above it if ``exclusive``)."""

    def convert(name: str, value: Any) -> float:
        if not _is_finite(value):
            raise _wrong(name, value, "a finite number")
        if value < least or (exclusive and value == least):
            raise ConfigError(f"{name}={value} must be {'above' if exclusive else 'at least'} {least:g}")
        return float(value)

    return convert


def boolean(name: str, value: Any) -> bool:
    """True or False, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def column(name: str, value: Any) -> str:
    """The name of one column."""
    if not isinstance(value, str):
        raise _wrong(name, value, "the name of one column")
    if not value:
        raise ConfigError(f"{name}='' is an empty name: give the name of one column")
    return value


def columns(name: str, value: Any) -> list[str]:
    """Names of columns, each once; one bare name counts as a list of one."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise _wrong(name, value, "a list of column names")
    if not names or not all(names):
        raise ConfigError(f"{name}={value!r} holds {'an empty name' if names else 'no name'}: give names of columns")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ConfigError(f"{name} names {twice} more than once: name each column once")
    return list(names)


def numbers_list(name: str, value: Any) -> list[float]:
    """Finite numbers, at least one of them above 0."""
    good = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if not good or not all(_is_finite(number) for number in value):
        raise _wrong(name, value, "a list of finite numbers")
    if not any(number > 0 for number in value):
        raise ConfigError(f"{name}={list(value)} leaves nothing to learn: give at least one number above 0")
    return [float(number) for number in value]


def shapes(name: str, value: Any) -> list[list[int]]:
    """One shape a column, as Horovod writes them: ``[-1, 1, 28, 28]``, the batch first as -1; or a row's, ``[2]``."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise _wrong(name, value, "a list with one shape a column, such as [[-1, 1, 28, 28]]")
    with_batch: list[list[int]] = []
    for shape in value:
        ints = isinstance(shape, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in shape)
        if not ints or not shape:
            raise ConfigError(
                f"{name} holds {shape!r}: give each shape as a list of whole numbers, such as [-1, 28, 28]"
            )
        if shape[0] == 1 and len(shape) > 1:
            raise ConfigError(
                f"{name} holds {list(shape)}, whose 1 may be the batch or the first size of a row: write "
                f"{[-1, *shape[1:]]} or {[-1, *shape]}"
            )
        if shape[0] != -1:
            shape = [-1, *shape]
        varying = name == "input_shapes" and list(shape) == [-1, -1]
        if any(n < 1 for n in shape[1:]) and not varying:
            raise ConfigError(
                f"{name} holds {list(shape)}: only the batch may be -1, the other sizes are 1 or more; [-1, -1] in "
                "input_shapes is an array whose rows differ in length"
            )
        with_batch.append(list(shape))
    return with_batch


def edit_fields(name: str, value: Any) -> list[tuple[Any, ...]]:
    """Columns that a transformation makes: (name, numpy dtype, shape, nullable) each."""
    good = isinstance(value, Sequence) and not isinstance(value, str)
    for edit in value if good else [value]:
        four = isinstance(edit, Sequence) and not isinstance(edit, str) and len(edit) == 4
        if not four or not isinstance(edit[0], str) or not isinstance(edit[2], list | tuple | None):
            raise _wrong(
                name, edit, "a list of (name, numpy dtype, shape, nullable), such as [('x', 'float32', (), True)]"
            )
    return [tuple(edit) for edit in value]


def function(name: str, value: Any) -> Callable[..., Any]:
    """Anything that can be called."""
    if not callable(value):
        raise _wrong(name, value, "a function")
    return value  # type: ignore[no-any-return]


def scheduler(name: str, value: Any) -> Callable[..., Any]:
    """What makes a scheduler of an optimizer alone."""
    factory = function(name, value)
    try:
        inspect.signature(factory).bind(None)
    except ValueError:  # it has no signature
        pass
    except TypeError as error:
        raise ConfigError(
            f"{name}={getattr(factory, '__name__', factory)} cannot be called with an optimizer alone ({error}): give "
            f"a function, such as lambda optimizer: StepLR(optimizer, step_size=10)"
        ) from None
    return factory


def functions(name: str, value: Any) -> list[Callable[..., Any]]:
    """Functions, as a list; a bare one counts as a list of one."""
    listed = list(value) if isinstance(value, Sequence) and not callable(value) else [value]
    if not listed or not all(callable(function) for function in listed):
        raise _wrong(name, value, "a function or a list of functions")
    return listed


def model(name: str, value: Any) -> Any:
    """A module, or a function that makes one."""
    if not callable(value):  # a module is callable, too
        raise _wrong(name, value, "a torch.nn.Module, or a function that makes one")
    return value


def optimizer(name: str, value: Any) -> Any:
    """An optimizer, or a function from the model to one."""
    if not (callable(value) or callable(getattr(value, "step", None))):
        raise _wrong(name, value, "a torch.optim.Optimizer, or a function from the model to one")
    return value


def loss_or_losses(name: str, value: Any) -> Any:
    """One loss for all labels, or a list with one a label."""
    listed = functions(name, value)
    return listed if isinstance(value, Sequence) else listed[0]


def callbacks(name: str, value: Any) -> list[Any]:
    """Callbacks of the training loop, as a list."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        value = [value]
    for callback in value:
        if not hasattr(callback, "on_epoch_end"):
            raise ConfigError(
                f"{name} holds {callback!r}, which has no on_epoch_end: derive it from sparkdl.train.callbacks.Callback"
            )
    return list(value)


def anything_in(*allowed: Any) -> Converter:
    """One of a few values."""

    def convert(name: str, value: Any) -> Any:
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise ConfigError(f"{name}={value!r} is not one of {list(allowed)}: choose one of these")
        return value

    return convert


def backend(name: str, value: Any) -> str | SparkBackend | Backend:
    """A collective's name, a SparkBackend, ours or Horovod's, or a user's own backend."""
    if isinstance(value, str):
        return str(anything_in(*BACKENDS)(name, value))
    return backend_of(name, value)


def strategy(name: str, value: Any) -> str:
    """A name of ``sparkdl.strategies``, a ``sparkdl.Mesh``, or the text of one; returned as a text."""
    from sparkdl.strategies import STRATEGIES
    from sparkdl.strategies.choice import AUTO, Choice, choice_of

    if isinstance(value, Choice):
        return str(value)
    if not isinstance(value, str):
        raise _wrong(name, value, "a name such as 'fsdp', or a sparkdl.Mesh")
    return value if value == AUTO or value in STRATEGIES else str(choice_of(value))


def compression(name: str, value: Any) -> str:
    """The text of a ``Compression``, or ``"none"``; Horovod's ``Compression.fp16`` and ``.none`` go by their names."""
    horovod = {"FP16Compressor": "fp16", "NoneCompressor": "none"}
    called = value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
    text = horovod.get(called, called)
    try:
        return "none" if text == "none" else str(Compression.of_text(text))
    except ConfigError as cause:
        raise ConfigError(f"{name}={value!r}: {cause}") from None


def validation(name: str, value: Any) -> float | str:
    """A fraction of the rows, ``0 <= x < 1``, or the name of the column that marks validation rows."""
    if isinstance(value, str):
        return column(name, value)
    if not _is_number(value):
        raise _wrong(name, value, "a fraction of the rows, or the name of a column that marks validation rows")
    if not 0 <= value < 1:
        raise ConfigError(f"{name}={value} does not lie in [0, 1): give the fraction of the rows to validate on")
    return float(value)


def dtypes(name: str, value: Any) -> dict[str, str]:
    """Column name to torch dtype, given as ``torch.float32`` or ``"float32"``."""
    allowed = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a dict from column name to dtype")
    names = {}
    for key, dtype in value.items():
        called = str(dtype).removeprefix("torch.")
        if called not in allowed:
            raise ConfigError(f"{name}[{key!r}]={dtype!r} is not one of {list(allowed)}: choose one of these")
        names[column(name, key)] = called
    return names


def compile_mode(name: str, value: Any) -> bool | str:
    """True, False, or a mode of ``torch.compile``."""
    if isinstance(value, bool):
        return value
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    return str(anything_in(*modes)(name, value))


def store(name: str, value: Any) -> Any:
    """A path or URI, or a ``Store``; a ``Storage`` becomes a store, which is saved without its credentials."""
    if isinstance(value, Storage):
        return Store.create(value)
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if not isinstance(value, Store):
        raise _wrong(name, value, "a path, a URI or Store.create(prefix)")
    return value
