"""Labels as the losses of torch want them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch

from sparkdl.errors import ConfigError, DataError

LabelKind = Literal["classes", "elements", "own"]
Meaning = Literal["value", "classes", "logit", "probability"]
"""What an output says: a value; one number a class, the greatest being the answer; the log-odds of class 1; or its
probability."""

_CLASSES = {"CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"}
_ELEMENTS = {
    *("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "PoissonNLLLoss"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "poisson_nll_loss"),
}

_MEANINGS: dict[str, Meaning] = {
    **dict.fromkeys(("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"), "classes"),
    **dict.fromkeys(("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"), "logit"),
    **dict.fromkeys(("BCELoss", "binary_cross_entropy"), "probability"),
}


class LikeOutput:
    """A function of (output, label, ...) that sees the label in the output's shape when both hold as many numbers.

    Losses of the user's own get labels untouched but for this.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def __call__(self, output: Any, label: Any, *more: Any, **named: Any) -> Any:
        """Call the function."""
        if isinstance(output, torch.Tensor) and isinstance(label, torch.Tensor) and output.numel() == label.numel():
            label = label.reshape(output.shape)
        return self.function(output, label, *more, **named)


def meaning_of(loss: Any) -> Meaning:
    """What the output means that a loss is computed from: ``value`` for a loss that is not torch's or derived."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    if inspect.isfunction(loss):
        return _MEANINGS.get(loss.__name__, "value") if loss.__module__.startswith("torch.") else "value"
    kind = loss if inspect.isclass(loss) else type(loss)
    meanings = (_MEANINGS[ancestor.__name__] for ancestor in kind.__mro__ if ancestor.__module__.startswith("torch.nn")
                and ancestor.__name__ in _MEANINGS)  # fmt: skip
    return next(meanings, "value")


def label_kind(loss: Any) -> LabelKind:
    """Whether a loss of torch takes class numbers, or one value for each element of the output; else ``"own"``.

    A class derived from one of torch's is what that one is, unless it has a ``forward`` of its own.
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    owner = loss if hasattr(loss, "__qualname__") else type(loss)
    if inspect.isclass(owner):
        owner = next((ancestor for ancestor in owner.__mro__ if "forward" in vars(ancestor)), owner)
    if not str(getattr(owner, "__module__", "")).startswith("torch."):
        return "own"
    name = getattr(owner, "__name__", "")
    return "classes" if name in _CLASSES else "elements" if name in _ELEMENTS else "own"


def fitting_label(kind: LabelKind, output: Any, label: torch.Tensor) -> torch.Tensor:
    """Return ``label`` as the loss wants it.

    Class numbers become int64 of shape ``(rows, ...)``, whatever numeric type their column has. A label of shape
    ``(rows,)`` meets an output of shape ``(rows, 1)`` as ``(rows, 1)``: broadcasting would compare every row with every
    other. Its dtype becomes the output's where that is float32 or float64.

    Raises:
        ConfigError: the shapes cannot be compared element by element, or the output has no classes.
        DataError: class numbers are not whole.
    """
    if kind == "own" or not isinstance(output, torch.Tensor):
        return label
    if kind == "classes":
        return _class_numbers(output, label)
    if label.shape != output.shape:
        if _core(label.shape) != _core(output.shape):
            raise ConfigError(
                f"the label has shape {tuple(label.shape)}, the output {tuple(output.shape)}: make the model return "
                "one value for each value of the label"
            )
        label = label.reshape(output.shape)
    if label.dtype == output.dtype:
        return label
    if output.dtype in (torch.float32, torch.float64):
        return label.to(output.dtype)
    return label if label.dtype == torch.float32 else label.float()  # under autocast: keep the label's precision


def _class_numbers(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    if output.ndim < 2:  # torch would take the rows for the classes of one row, and labels for their probabilities
        raise ConfigError(
            f"the output has shape {tuple(output.shape)}, and a loss over classes takes one number a class, (rows, "
            "classes): let the model return these, or choose a loss of one number a row"
        )
    if label.dtype == torch.int64 and label.ndim == output.ndim - 1:
        return label
    if label.shape == output.shape and label.is_floating_point():
        return label  # class probabilities
    if label.ndim == output.ndim and label.shape[1] == 1:
        label = label.squeeze(1)
    if label.is_floating_point():
        integers = label.to(torch.int64)
        if not torch.equal(integers.to(label.dtype), label):
            raise DataError("a class label is not a whole number: give classes as 0, 1, 2, or use a regression loss")
        return integers
    return label.to(torch.int64)


def _core(shape: torch.Size) -> tuple[int, ...]:
    """The shape without trailing ones."""
    core = tuple(shape)
    while len(core) > 1 and core[-1] == 1:
        core = core[:-1]
    return core


def metric_pair(output: Any, label: torch.Tensor, *, classes: bool) -> tuple[Any, torch.Tensor]:
    """Return output and label as a metric wants them: ``(rows, 1)`` as ``(rows,)``, half precision as float32.

    Args:
        output: what the model returned for this label.
        label: the label's tensor.
        classes: whether the metric wants whole numbers, whatever numeric type the column has.
    """
    if isinstance(output, torch.Tensor):
        output = output.detach()
        if output.ndim == 2 and output.shape[1] == 1:
            output = output[:, 0]
        if output.dtype in (torch.float16, torch.bfloat16):
            output = output.float()
        if label.ndim == 2 and label.shape[1] == 1:
            label = label[:, 0]
    if classes and label.is_floating_point():
        label = label.to(torch.int64)
    return output, label
