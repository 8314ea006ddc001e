"""Objects as JSON: what an estimator or a fitted model is made of, without code.

Enters: settings, histories, losses, optimizers, functions of installed packages. Leaves: JSON values and the tensors
they refer to by name; from these, equal objects. What is not of a kind listed here raises ``NotPlain``, and is left to
a pickle.

    numbers, strings, lists     as they are; tuples, dicts, dtypes and numpy's scalars under a tag
    functions and classes       by import path, only of torch, torchmetrics and what the reader allows; never called
    losses of torch.nn          class and constructor arguments
    optimizers                  class, groups by parameter name, state as tensors
    Store, SparkBackend, ...    the fields of sparkdl's own records

A file can therefore make only losses, optimizers and sparkdl's own records, and nothing is imported for it that its
reader has not allowed (``models/trust.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from sparkdl.errors import BundleError
from sparkdl.estimator.fit.shipping import is_loose
from sparkdl.estimator.params.backend import SparkBackend
from sparkdl.estimator.saving.artifacts import is_plain_tensor
from sparkdl.estimator.store import Store
from sparkdl.estimator.summary import TrainingSummary
from sparkdl.models.importing import resolve

__all__ = ["INSTALLED", "Decoder", "Encoder", "NotPlain"]

INSTALLED = ("torch.nn", "torch.optim", "torchmetrics")
"""What saved objects may name without a word: what sparkdl itself needs, and loads no files."""

_TAG = "!"
_RECORDS: dict[str, type[Any]] = {
    "Store": Store,
    "SparkBackend": SparkBackend,
    "TrainingSummary": TrainingSummary,
}


class NotPlain(Exception):
    """The object is of no kind that JSON can describe; never leaves this room."""


class Encoder:
    """Turns objects into JSON values, and collects their tensors.

    Args:
        known: by ``id``, tensors that the reader will have from elsewhere, and their names.

    Attributes:
        tensors: by name, those that were met and are not known, in the memory that they have: write them, or copy them.
    """

    def __init__(self, known: Mapping[int, str] | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known = dict(known or {})

    def encode(self, value: Any) -> Any:
        """Return ``value`` as JSON.

        Raises:
            NotPlain: some part of it is of no kind that JSON can describe.
        """
        before = dict(self.tensors)
        try:
            return self._any(value)
        except NotPlain:
            self.tensors = before
            raise

    def _any(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return [self._any(item) for item in value]
        if type(value) is tuple:
            return {_TAG: "tuple", "items": [self._any(item) for item in value]}
        if type(value) is dict:
            return {_TAG: "dict", "items": [[self._any(key), self._any(item)] for key, item in value.items()]}
        if isinstance(value, torch.dtype):
            return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {_TAG: "numpy", "dtype": value.dtype.name, "value": value.item()}
        for name, kind in _RECORDS.items():
            if type(value) is kind:
                return {_TAG: name, "fields": self._any(_fields(value))}
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        if isinstance(value, nn.Module):
            return self._loss(value)
        if inspect.isfunction(value) or inspect.isclass(value):
            return {_TAG: "name", "path": _path_of(value)}
        raise NotPlain(f"a {type(value).__name__}")

    def _tensor(self, value: torch.Tensor) -> Any:
        if id(value) in self._known:
            return {_TAG: "known", "name": self._known[id(value)]}
        if type(value) is not torch.Tensor or value.requires_grad or not is_plain_tensor(value):
            raise NotPlain("a tensor that is computed or trained")
        name = str(len(self.tensors))
        self.tensors[name] = value.detach()
        return {_TAG: "tensor", "name": name}

    def _optimizer(self, value: torch.optim.Optimizer) -> Any:
        names = []
        for group in value.param_groups:
            unknown = [p for p in group["params"] if id(p) not in self._known]
            if unknown:
                raise NotPlain("an optimizer of parameters that are not the model's")
            names.append([self._known[id(p)] for p in group["params"]])
        groups = [{key: item for key, item in group.items() if key != "params"} for group in value.param_groups]
        state = {self._known[id(p)]: dict(found) for p, found in value.state.items() if id(p) in self._known}
        if len(state) != len(value.state) or value.__dict__.get("_optimizer_step_pre_hooks"):
            raise NotPlain("an optimizer with state or hooks of its own")
        return {
            _TAG: "optimizer",
            "class": _path_of(type(value)),
            "params": names,
            "groups": [self._any(group) for group in groups],
            "defaults": self._any(dict(value.defaults)),
            "state": self._any(state),
        }

    def _loss(self, value: nn.Module) -> Any:
        kind = type(value)
        hooked = any(getattr(value, name) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
        if getattr(nn, kind.__name__, None) is not kind or not _is_loss(kind) or hooked:
            raise NotPlain(f"a {kind.__name__}")
        names = [name for name in inspect.signature(kind).parameters if hasattr(value, name)]
        return {
            _TAG: "loss",
            "class": kind.__name__,
            "arguments": {name: self._any(getattr(value, name)) for name in names},
            "training": value.training,
        }


class Decoder:
    """Makes the objects again.

    Args:
        tensors: those that the encoder collected.
        known: the tensors that were known, by name.
        trusted: packages whose functions and classes may be imported, besides ``INSTALLED``.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        known: Mapping[str, torch.Tensor] | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        self._tensors, self._known = tensors, dict(known or {})
        self._allowed = (*INSTALLED, *trusted)

    def decode(self, value: Any) -> Any:
        """Return the object that ``value`` describes.

        Raises:
            BundleError: it names something that is not installed here, or of no kind that may be made.
        """
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = value[_TAG]
        if tag in ("tuple", "dict", "dtype", "numpy", "name", "tensor", "known", "optimizer", "loss"):
            return getattr(self, f"_make_{tag}")(value)
        if tag in _RECORDS:
            return _RECORDS[tag](**self.decode(value["fields"]))
        raise BundleError(f"the saved objects hold a {tag!r}, which this sparkdl does not know: update sparkdl")

    def _make_tuple(self, value: Mapping[str, Any]) -> Any:
        return tuple(self.decode(item) for item in value["items"])

    def _make_dict(self, value: Mapping[str, Any]) -> Any:
        return {self.decode(key): self.decode(item) for key, item in value["items"]}

    def _make_dtype(self, value: Mapping[str, Any]) -> Any:
        return getattr(torch, value["name"])

    def _make_numpy(self, value: Mapping[str, Any]) -> Any:
        return np.dtype(value["dtype"]).type(value["value"])

    def _make_name(self, value: Mapping[str, Any]) -> Any:
        return resolve(value["path"], self._allowed, "a saved object")

    def _make_tensor(self, value: Mapping[str, Any]) -> Any:
        return self._tensors[value["name"]]

    def _make_known(self, value: Mapping[str, Any]) -> Any:
        return self._parameter(value["name"])

    def _parameter(self, name: str) -> torch.Tensor:
        if name not in self._known:
            raise BundleError(f"the saved objects refer to the parameter {name!r}, which the saved model lacks")
        return self._known[name]

    def _make_optimizer(self, value: Mapping[str, Any]) -> Any:
        kind = resolve(value["class"], self._allowed, "a saved optimizer")
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
            raise BundleError(f"{value['class']} is no torch.optim.Optimizer: save the optimizer again")
        options = [self.decode(group) for group in value["groups"]]
        names = value["params"]
        groups = [
            {"params": [self._parameter(name) for name in of], **option}
            for of, option in zip(names, options, strict=True)
        ]
        optimizer = _made(kind, groups)
        optimizer.defaults.update(self.decode(value["defaults"]))
        state, order = self.decode(value["state"]), [name for of in names for name in of]
        places = iter(range(len(order)))
        packed = [{**option, "params": [next(places) for _ in of]} for of, option in zip(names, options, strict=True)]
        found = {order.index(name): one for name, one in state.items()}
        optimizer.load_state_dict({"state": found, "param_groups": packed})
        return optimizer

    def _make_loss(self, value: Mapping[str, Any]) -> Any:
        kind = getattr(nn, value["class"], None)
        if not (inspect.isclass(kind) and _is_loss(kind)):
            raise BundleError(f"torch.nn {torch.__version__} has no loss {value['class']!r}: load it with its torch")
        loss = cast(nn.Module, kind(**{name: self.decode(item) for name, item in value["arguments"].items()}))
        return loss.train(value["training"])


def _fields(record: Any) -> dict[str, Any]:
    """The arguments that make a record again."""
    if isinstance(record, SparkBackend):
        return {"num_proc": record.num_processes(), "env": record.env, "start_timeout": record.start_timeout}
    return {one.name: getattr(record, one.name) for one in fields(record)}


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
        found = resolve(path, (module,), "a saved object")
    except BundleError as cause:
        raise NotPlain(path) from cause
    if found is not value:
        raise NotPlain(f"{path}, which is another object than the one given")
    return path
