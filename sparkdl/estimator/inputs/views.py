"""From the tensors of a batch to the arguments of a model: views, no copies.

Enters: tensors as they lie in the shards, packed. Leaves: what the model is called with: one tensor a feature column in
Horovod's shapes, whole packed tensors, or a dict by column name. Besides the calling convention it imports torch alone,
so that ranks load it at no cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from sparkdl.models.calling import Arguments, formed
from sparkdl.models.signature import COMPANIONS, Form

__all__ = ["InputView", "Style", "Views", "attach_views", "detach_views"]

Style = Literal["positional", "keywords", "dict"]


@dataclass(frozen=True, slots=True)
class InputView:
    """One argument of the model.

    Attributes:
        name: of the argument: its feature column, or the packed tensor.
        tensor: name of the batch's tensor that holds it.
        index: its position in the last dimension of a packed tensor; None takes the whole tensor.
        shape: to view it in, batch first as -1; None leaves it as it lies.
        dtype: to convert it to; None keeps it.
        form: of a tensor whose rows differ in length: what the model gets of it, see ``models.calling``.
        valid: name of the batch's tensor that tells elements from padding; None where no row is padded.
    """

    name: str
    tensor: str
    index: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    form: Form = ""
    valid: str | None = None

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Take the argument out of the tensors of a batch."""
        found = tensors[self.tensor]
        if self.index is not None:
            found = found[:, self.index]
        if self.dtype is not None:
            found = found.to(getattr(torch, self.dtype))
        if self.shape is not None:
            found = found.reshape(self.shape)
        return cast(torch.Tensor, formed(self.form, found, tensors[self.valid] if self.valid else None))

    @property
    def is_plain(self) -> bool:
        """Whether it is a tensor of the batch as it lies."""
        return self.index is None and self.shape is None and self.dtype is None and not self.form


@dataclass(frozen=True)
class Views:
    """All arguments of a model, and how it takes them; usable as a forward pre-hook.

    Attributes:
        inputs: in the order of the model's arguments.
        style: how the model is called: ``m(a, b)``, ``m(a=a, b=b)`` or ``m({"a": a, "b": b})``; masks and the like go
            by keyword where the others go by position.
    """

    inputs: tuple[InputView, ...]
    style: Style = "positional"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the batch's tensors that are needed, each once, in order of first use."""
        needed = [(view.tensor, view.valid) for view in self.inputs]
        return tuple(dict.fromkeys(name for names in needed for name in names if name is not None))

    @property
    def is_plain(self) -> bool:
        """Whether the model takes the batch's tensors as they lie, so that nothing is left to do."""
        plain = all(view.is_plain and view.name == view.tensor for view in self.inputs)
        return plain and len(self.tensors) == len(self.inputs)

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments for one batch."""
        named = {view.name: view(tensors) for view in self.inputs}
        beside = [view.name for view in self.inputs if view.form in COMPANIONS]
        arguments = Arguments.of(self.style, named, beside)
        return arguments.positional, dict(arguments.named)

    def __call__(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Be a forward pre-hook: ``args`` are the tensors named by ``tensors``, in that order."""
        if kwargs or len(args) != len(self.tensors):
            return args, kwargs  # called by the user's own code in the model's own calling convention
        return self.arguments(dict(zip(self.tensors, args, strict=True)))


def attach_views(model: torch.nn.Module, views: Views) -> None:
    """Let ``model`` take the tensors of a batch, in the order of ``views.tensors``, as its positional arguments."""
    detach_views(model)
    if not (views.is_plain and views.style == "positional"):
        model.register_forward_pre_hook(views, with_kwargs=True, prepend=True)


def detach_views(model: torch.nn.Module) -> None:
    """Let ``model`` be called in its own calling convention again."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, Views):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
