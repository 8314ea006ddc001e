"""A bundle's layers made without memory for their tensors, and within bounds, however a few bytes ask."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from sparkdl.compat.torch_compiler import eager
from sparkdl.errors import BundleError

_PARAMETER, _IMPORT = nn.Parameter.__new__.__code__, importlib._bootstrap._find_and_load.__code__  # type: ignore
_CALLS, _CALLS_OF_A_TENSOR = 500_000, 5_000  # torch's own layers take up to 700 a tensor, and once 70,000
_PARAMETERS, _PARAMETERS_OF_A_TENSOR = 500, 4  # an encoder makes its layer, and copies of that


class _BudgetError(BaseException):
    """The budget is spent; no ``except Exception`` of a constructor's stops it."""


class _NotDrawn(TorchFunctionMode):
    """Passes over what fills a tensor on the meta device, which holds nothing, and joins vectors there itself.

    For normal numbers, ones on a diagonal and vectors in a row torch imports sympy, and its compiler unless ``eager``:
    2.6 s of a first load (torch 2.13).
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (nn.init.normal_, torch.Tensor.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if function is torch.eye and kwargs and kwargs.get("out") is not None and kwargs["out"].is_meta:
            return kwargs["out"]
        if function is torch.cat and len(args) == 1 and not kwargs:
            parts = tuple(args[0])
            if parts and all(part.is_meta and part.ndim == 1 and part.dtype == parts[0].dtype for part in parts):
                return parts[0].new_empty(sum(map(len, parts)))
        return function(*args, **(kwargs or {}))


def bounded_build(make: Callable[[], nn.Module], tensors: int) -> nn.Module:
    """Make a module of torch's own or sparkdl's on the meta device: its tensors have shapes, and take no memory.

    A few bytes can ask for millions of layers, or for anything else a million times. However they ask, the calls of
    Python's functions and the parameters are counted, and stopped where they are more than a model of so many tensors
    can need. What torch imports at the first use of an operation is not counted, and so never left half imported.

    Args:
        make: makes it.
        tensors: in the model's state, each name of a tied one counted.

    Raises:
        BundleError: it is larger, or nested too deep.
    """
    calls = _CALLS + _CALLS_OF_A_TENSOR * tensors
    parameters = _PARAMETERS + _PARAMETERS_OF_A_TENSOR * tensors
    imports = 0
    outcome: list[nn.Module | BaseException] = []

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls, parameters, imports
        code = frame.f_code
        if code is _IMPORT:
            imports += (event == "call") - (event == "return")
        elif event == "call" and not imports:
            calls -= 1
            parameters -= code is _PARAMETER
            if calls < 0 or parameters < 0:
                raise _BudgetError

    def run() -> None:
        sys.setprofile(count)
        try:
            with eager(), torch.device("meta"), _NotDrawn():
                model = make()
                model.state_dict()  # whoever walks a model meets a module at each name that it has
            outcome.append(model)
        except BaseException as error:
            outcome.append(error)
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=run, name="sparkdl-rebuild")  # of its own: the caller may be profiled himself
    thread.start()
    thread.join()
    (result,) = outcome
    if isinstance(result, _BudgetError):
        raise BundleError(
            f"the bundle's model asks for far more layers than its {tensors:,} tensors belong to: publish it with "
            "factory= and arguments= if it is yours, do not load it otherwise"
        )
    if isinstance(result, RecursionError):
        raise BundleError("the bundle's model is nested too deep: do not load it") from result
    if isinstance(result, BaseException):
        raise result
    return result
