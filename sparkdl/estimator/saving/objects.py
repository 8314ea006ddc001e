"""The objects of an estimator or a fitted model as JSON, without code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from sparkdl.documents import trees
from sparkdl.documents.tensors import DTYPE_NAMES
from sparkdl.documents.typed import Source, convert
from sparkdl.errors import BundleError
from sparkdl.estimator.params.backend import SparkBackend
from sparkdl.estimator.store import Store
from sparkdl.estimator.summary import TrainingSummary
from sparkdl.estimator.user_code import is_loose
from sparkdl.models.importing import resolve
from sparkdl.models.trust import REMEDY

INSTALLED = ("torch.nn", "torch.optim", "torchmetrics")
"""What saved objects may name without a word: what sparkdl itself needs, and loads no files."""

_PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, dict)
_NUMBERS = "biuf"  # kinds of numpy's types
_SAVED_OPTIONS = ("start_timeout", "verbose", "nics", "prefix_output_with_timestamp")
_RECORDS: dict[str, type[Any]] = {
    "Store": Store,
    "SparkBackend": SparkBackend,
    "TrainingSummary": TrainingSummary,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backend:
    """What is saved of a ``SparkBackend``: not its streams, nor what can only have one value."""

    num_proc: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    start_timeout: float | None = None
    verbose: int = 1
    nics: list[str] = field(default_factory=list)
    prefix_output_with_timestamp: bool = False


class NotPlain(Exception):
    """The object is of no kind that JSON can describe; never leaves this room."""


class Encoder(trees.Encoder):
    """Turns objects into JSON values, and collects their tensors.

    What is not of a kind listed here raises ``NotPlain``, and is left to a pickle.

        numbers, strings, lists     as in any tree (``documents/trees.py``); dtypes and numpy's scalars under marks
        functions and classes       by import path, only of torch, torchmetrics and what the reader allows; never called
        losses of torch.nn          class and constructor arguments
        optimizers                  class, groups by parameter name, state as tensors
        Store, SparkBackend, ...    the fields of sparkdl's own records, each of its type

    Args:
        known: by ``id``, tensors that the reader will have from elsewhere, and their names.
    """

    def __init__(self, known: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self._known = dict(known or {})

    def encode(self, value: Any, path: str = "") -> Any:
        """Return ``value`` as JSON.

        Raises:
            NotPlain: some part of it is of no kind that JSON can describe.
        """
        earlier = dict(self.tensors), dict(self._seen)
        try:
            if type(value) in _PLAIN:  # exactly: a subclass would come back as another type
                return super().encode(value, path)
            return self._object(value, path)
        except NotPlain:
            self.tensors, self._seen = earlier
            raise

    def _object(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
            return {"$numpy": [value.dtype.name, value.item()]}
        for name, kind in _RECORDS.items():
            if type(value) is kind:
                return {f"${name}": self.encode(_fields(value), path)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.optim.Optimizer):
            return {"$optimizer": self._optimizer(value, path)}
        if isinstance(value, nn.Module):
            return {"$loss": self._loss(value, path)}
        if inspect.isfunction(value) or inspect.isclass(value):
            return {"$name": _path_of(value)}
        raise NotPlain(f"a {type(value).__name__}")

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        if id(tensor) in self._known:
            return {"$known": self._known[id(tensor)]}
        plain = type(tensor) is torch.Tensor and not tensor.requires_grad and is_plain_tensor(tensor)
        if not plain or tensor.dtype not in DTYPE_NAMES:
            raise NotPlain("a tensor that is computed or trained")
        return super()._tensor(tensor, path)

    def _optimizer(self, value: torch.optim.Optimizer, path: str) -> Any:
        names = []
        for group in value.param_groups:
            unknown = [p for p in group["params"] if id(p) not in self._known]
            if unknown:
                raise NotPlain("an optimizer of parameters that are not the model's")
            names.append([self._known[id(p)] for p in group["params"]])
        groups = [{key: item for key, item in group.items() if key != "params"} for group in value.param_groups]
        state = {
            self._known[id(p)]: dict(parameter_state)
            for p, parameter_state in value.state.items()
            if id(p) in self._known
        }
        if len(state) != len(value.state) or value.__dict__.get("_optimizer_step_pre_hooks"):
            raise NotPlain("an optimizer with state or hooks of its own")
        return {
            "kind": _path_of(type(value)),
            "params": names,
            "groups": self.encode(groups, path),
            "defaults": self.encode(dict(value.defaults), path),
            "state": self.encode(state, path),
        }

    def _loss(self, value: nn.Module, path: str) -> Any:
        kind = type(value)
        hooked = any(getattr(value, name) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
        if getattr(nn, kind.__name__, None) is not kind or not _is_loss(kind) or hooked:
            raise NotPlain(f"a {kind.__name__}")
        names = [name for name in inspect.signature(kind).parameters if hasattr(value, name)]
        return {
            "kind": kind.__name__,
            "arguments": self.encode({name: getattr(value, name) for name in names}, path),
            "training": value.training,
        }


class Decoder(trees.Decoder):
    """Makes the objects again.

    A file can make only losses, optimizers and sparkdl's own records, and nothing is imported for it that its reader
    has not allowed (``models/trust.py``). Variables for the ranks' environment can run code (``LD_PRELOAD``), so they
    need the word that a pickle needs; a store is never temporary when restored, as such a folder is deleted.

    Args:
        tensors: those that the encoder collected.
        known: the tensors that were known, by name.
        trusted: packages whose functions and classes may be imported, besides ``INSTALLED``.
        allowed: whether the reader has allowed code to run, as a pickle's: what ranks get in their environment can.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        known: Mapping[str, torch.Tensor] | None = None,
        trusted: Sequence[str] = (),
        *,
        allowed: bool = False,
    ) -> None:
        super().__init__(tensors)
        self._code_allowed = allowed
        self._known = dict(known or {})
        self._allowed = (*INSTALLED, *trusted)

    def _made(self, mark: str, content: Any) -> Any:
        if mark == "dtype":
            dtype = vars(torch).get(content)  # torch's own __getattr__ would import modules
            if not isinstance(dtype, torch.dtype):
                raise BundleError(f"torch {torch.__version__} has no dtype {content!r}: load it with its torch")
            return dtype
        if mark == "numpy":
            kind, value = np.dtype(content[0]), content[1]
            if kind.kind not in _NUMBERS:
                raise BundleError(f"the saved objects hold a numpy {kind}, which is no number: save them again")
            return kind.type(value)
        if mark == "name":
            return resolve(content, self._allowed, "a saved object")
        if mark == "known":
            return self._parameter(content)
        if mark == "optimizer":
            return self._optimizer(**content)
        if mark == "loss":
            return self._loss(**content)
        if mark in _RECORDS:
            return self._record(mark, self._any(content))
        return super()._made(mark, content)

    def _record(self, mark: str, content: Any) -> Any:
        source, content = Source(f"a saved {mark}", "it was altered, save it again"), _without_numpy(content)
        if mark == "Store":  # a temporary one is deleted after the fit, and no file decides what is deleted
            return replace(convert(content, Store, source), temporary=False)
        if mark == "TrainingSummary":
            return convert(content, TrainingSummary, source)
        backend = convert(content, _Backend, source)
        if backend.env and not self._code_allowed:
            raise BundleError(
                f"the saved SparkBackend sets {', '.join(sorted(backend.env))[:200]} in the environment of the ranks, "
                f"which can run any code there: {REMEDY}"
            )
        options = {name: getattr(backend, name) for name in _SAVED_OPTIONS if name in content}
        return SparkBackend(backend.num_proc, backend.env, **options)

    def _parameter(self, name: str) -> torch.Tensor:
        if name not in self._known:
            raise BundleError(f"the saved objects refer to the parameter {name!r}, which the saved model lacks")
        return self._known[name]

    def _optimizer(self, *, kind: str, params: list[list[str]], groups: Any, defaults: Any, state: Any) -> Any:
        optimizer_class = resolve(kind, self._allowed, "a saved optimizer")
        if not (inspect.isclass(optimizer_class) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise BundleError(f"{kind} is no torch.optim.Optimizer: save the optimizer again")
        options = self._any(groups)
        filled = [
            {"params": [self._parameter(name) for name in of], **option}
            for of, option in zip(params, options, strict=True)
        ]
        optimizer = _made(optimizer_class, filled)
        optimizer.defaults.update(self._any(defaults))
        order = {name: position for position, name in enumerate(name for of in params for name in of)}
        places = iter(range(sum(map(len, params))))
        packed = [{**option, "params": [next(places) for _ in of]} for of, option in zip(params, options, strict=True)]
        state_by_place = {order[name]: parameter_state for name, parameter_state in self._any(state).items()}
        optimizer.load_state_dict({"state": state_by_place, "param_groups": packed})
        return optimizer

    def _loss(self, *, kind: str, arguments: Any, training: bool) -> nn.Module:
        loss_class = getattr(nn, kind, None)
        if not (inspect.isclass(loss_class) and _is_loss(loss_class)):
            raise BundleError(f"torch.nn {torch.__version__} has no loss {kind!r}: load it with its torch")
        return cast(nn.Module, loss_class(**self._any(arguments))).train(training)


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether safetensors can hold it: dense, real, a leaf, without attributes of its own."""
    dense = tensor.layout == torch.strided and not tensor.is_quantized and tensor.is_leaf
    return dense and not vars(tensor) and not tensor.is_complex() and tensor.device.type != "meta"


def _without_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_numpy(part) for key, part in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _fields(record: Any) -> dict[str, Any]:
    """The arguments that make a record again."""
    if isinstance(record, SparkBackend):
        saved = {name: value for name, value in record.options.items() if name in _SAVED_OPTIONS and value is not None}
        if "nics" in saved:
            saved["nics"] = [saved["nics"]] if isinstance(saved["nics"], str) else list(saved["nics"])
        return {"num_proc": record.num_processes(), "env": record.env, **saved}
    values = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return {**values, **record.addresses()} if isinstance(record, Store) else values


def _is_loss(kind: type[Any]) -> bool:
    return issubclass(kind, nn.modules.loss._Loss) or kind in (nn.TripletMarginLoss, nn.CTCLoss)


def _made(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer; options that its constructor takes stand in the groups, where every optimizer looks for them."""
    try:
        return kind(groups)  # type: ignore[call-arg]
    except Exception as cause:
        raise BundleError(
            f"{kind.__module__}.{kind.__qualname__} cannot be made from its groups ({type(cause).__name__}: {cause}): "
            "install the version that it was saved with"
        ) from cause


def _path_of(value: Any) -> str:
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    path = f"{module}:{name}"
    if not module or module == "__main__" or "<" in name or is_loose(module):
        raise NotPlain(f"{path}, which another process cannot import")
    try:
        resolved = resolve(path, (module,), "a saved object")
    except BundleError as cause:
        raise NotPlain(path) from cause
    if resolved is not value:
        raise NotPlain(f"{path}, which is another object than the one given")
    return path
