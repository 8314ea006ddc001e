"""The task of a training, and how a rank makes its parts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sparkdl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, on which tensors of a batch, towards what.

    A task travels to the ranks as one object, so an optimizer stays bound to the parameters of its model, with its
    parameter groups, and a scheduler to its optimizer.

    Attributes:
        model: a module, or a callable without arguments that makes one. Whatever its modules leave in an attribute
            ``auxiliary_loss`` in a training forward pass, each a scalar that is a mean over the rows (a balance loss, a
            penalty of activations), is added to the loss of training, not to that of validation, and is None again
            then; a ``train_step`` adds it itself. ``sparkdl.nn.MixtureOfExperts`` is such a module.
        optimizer: an optimizer over the parameters of ``model``; or an optimizer class, or ``functools.partial`` of
            one, which is given ``model.parameters()``; or any other callable, which is given the model.
        loss: ``loss(output, label) -> scalar mean over the rows, or one value a row``; a module, a function, a class,
            or a callable without arguments that makes one. One for all labels, a sequence in the order of
            ``labels``, or a mapping by label. Without labels it is called as ``loss(output)``. None only with
            ``train_step``.
        inputs: names of the tensors the model is called with.
        labels: names of the tensors the outputs are compared with: the n-th output with the n-th label, or by name
            where the model returns a dict.
        input_style: ``"positional"`` calls ``model(a, b)``, ``"keyword"`` ``model(a=a, b=b)``, ``"dict"``
            ``model({"a": a, "b": b})``.
        loss_weights: factor of each label's loss, by position or by name; None means 1 each.
        sample_weight: name of a tensor of shape ``(rows,)``. The loss is then the weighted mean over the global batch,
            ``sum(w * loss) / sum(w)``, whatever rank the rows are on. Beside class weights ``c`` of a torch loss that
            divides by them, as ``CrossEntropyLoss`` does of class numbers, it is ``sum(w * c * loss) / sum(w * c)``;
            an ignored label counts in neither sum.
        metrics: by name, a torchmetrics metric (instance, class or callable without arguments that makes one) or a
            function of (output, label), called once with all rows; or, by label, such a mapping. With several labels a
            plain mapping applies to each of them, and columns are called ``<label>_<name>``.
        scheduler: a torch scheduler of ``optimizer``, or a callable that is given the optimizer and makes one.
        scheduler_interval: whether the scheduler steps after every ``"epoch"`` or every optimizer ``"step"``.
        train_step: replaces calling the model and the loss: ``train_step(model, batch)`` returns the scalar mean loss
            over the batch's rows, or a pair of it and the outputs (for metrics). Backward pass, synchronisation,
            clipping and the optimizer stay with the trainer.
        manual_step: makes the optimizer's steps itself, beside a ``loss``: ``manual_step(model, optimizer, batch,
            loss)`` calls ``zero_grad``, ``backward`` and ``step`` as a plain training script would, and returns
            (outputs, loss). ``loss(outputs, batch)`` is the task's own. See ``train.own_step``.
        forward: how the model is called with a batch, ``forward(model, batch)``; None goes by ``inputs`` and
            ``input_style``.
    """

    model: Any
    optimizer: Any
    loss: Any = None
    inputs: Sequence[str] = ("features",)
    labels: Sequence[str] = ("label",)
    input_style: Literal["positional", "keyword", "dict"] = "positional"
    loss_weights: Sequence[float] | Mapping[str, float] | None = None
    sample_weight: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Any = None
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    train_step: Callable[[torch.nn.Module, Any], Any] | None = None
    manual_step: Callable[..., Any] | None = None
    forward: Callable[[torch.nn.Module, Any], Any] | None = None

    def __post_init__(self) -> None:
        for name, value in (("inputs", self.inputs), ("labels", self.labels)):
            if isinstance(value, str):
                raise ConfigError(f"{name}={value!r} is one string: give a sequence of names, as in ({value!r},)")
        if self.input_style not in ("positional", "keyword", "dict"):
            raise ConfigError(f"input_style={self.input_style!r} is unknown: use 'positional', 'keyword' or 'dict'")
        if self.scheduler_interval not in ("epoch", "step"):
            raise ConfigError(f"scheduler_interval={self.scheduler_interval!r} is unknown: use 'epoch' or 'step'")
        if (self.loss is None) == (self.train_step is None):
            which = "neither" if self.loss is None else "both"
            raise ConfigError(f"loss and train_step: {which} of them is given: give exactly one of the two")
        if self.train_step is not None and (self.sample_weight or self.loss_weights):
            raise ConfigError("sample_weight and loss_weights do nothing beside a train_step: apply them inside it")
        if self.train_step is not None and self.manual_step is not None:
            raise ConfigError("train_step and manual_step are both given, and each replaces the usual step: give one")
        if not self.inputs and self.train_step is None:
            raise ConfigError("inputs is empty: name the tensors that the model is called with")


def make_model(task: Task, device: torch.device, *, seed: int, channels_last: bool = False) -> torch.nn.Module:
    """Make the model of ``task`` on ``device``; the same seed gives the same initial weights on every rank.

    Raises:
        ConfigError: it is no module, or what an earlier training left of one that it spread over ranks.
    """
    torch.manual_seed(seed)
    model = task.model if isinstance(task.model, torch.nn.Module) else _made("model", task.model)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module or a callable that makes one")
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "placements"):
            raise ConfigError(
                f"a training before has spread this {type(model).__name__} over its ranks, and left a part of {name!r} "
                "here: make a new one, or give a callable that makes it"
            )
    model.to(device)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def make_optimizer(task: Task, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Make the optimizer of ``task`` over the parameters of ``model``.

    Raises:
        ConfigError: it is no optimizer, or belongs to another model.
    """
    optimizer = task.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        maker = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
        is_class = inspect.isclass(maker) and issubclass(maker, torch.optim.Optimizer)
        optimizer = _made("optimizer", optimizer, model.parameters() if is_class else model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer or what makes one")
    check_optimizer(optimizer, model, closures=task.manual_step is not None)
    _move_state(optimizer, device)
    return optimizer


def takes_no_arguments(value: Any) -> bool:
    """Whether ``value`` is a class, or a callable without required arguments: something that makes a part."""
    if inspect.isclass(value):
        return True
    if isinstance(value, torch.nn.Module) or not callable(value):
        return False
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return False
    required = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return not any(p.default is p.empty and p.kind in required for p in parameters) and not any(
        p.kind is p.VAR_POSITIONAL for p in parameters
    )


def _made(role: str, factory: Any, *arguments: Any) -> Any:
    if not callable(factory):
        raise ConfigError(f"{role} is a {type(factory).__name__}: give the {role} itself or a callable that makes it")
    return factory(*arguments)


def check_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, closures: bool = False) -> None:
    """Refuse an optimizer that cannot train ``model`` on several ranks.

    Args:
        optimizer: to check.
        model: whose parameters it shall train.
        closures: whether its ``step`` is given a closure.

    Raises:
        ConfigError: it is bound to another model, or needs a closure and gets none.
    """
    model_parameters = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in model_parameters for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigError(
            f"{foreign} parameters of the optimizer are not among the {len(model_parameters)} of the model: make the "
            "optimizer from this very model, or give a callable that makes it from the model"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if not closures and closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates the loss several times a step, which synchronised training does not"
            ": choose an optimizer whose step() needs no closure"
        )


def _move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Bring the state of an optimizer that has stepped before to where its parameters are now."""
    places = device, torch.device("meta")  # meta tensors are of parameters that another stage of a pipeline holds
    for state in optimizer.state.values():
        for name, value in state.items():
            # "step" counters stay where the optimizer put them: the CPU, unless it is capturable or fused
            if isinstance(value, torch.Tensor) and name != "step" and value.device not in places:
                state[name] = value.to(device)


def make_scheduler(task: Task, optimizer: torch.optim.Optimizer) -> Any:
    """Make the learning-rate scheduler of ``task`` for ``optimizer``; None without one.

    Raises:
        ConfigError: it is no scheduler, or belongs to another optimizer.
    """
    scheduler = task.scheduler
    if scheduler is None:
        return None
    if not hasattr(scheduler, "step") or inspect.isclass(scheduler):
        scheduler = _made("scheduler", scheduler, optimizer)
    if not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        raise ConfigError(
            f"scheduler is a {type(scheduler).__name__}: give a torch scheduler or a callable that makes one"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError("the scheduler belongs to another optimizer: make it from this one, or give a callable")
    return scheduler
