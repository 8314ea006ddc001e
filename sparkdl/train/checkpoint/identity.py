"""The identity of a run: what decides it, by name, kept in its checkpoints and compared before it goes on."""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from types import CodeType
from typing import Any

import numpy as np
import torch

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.storage import xxh3_hex
from sparkdl.train.task import Task

_PROGRESS = ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "_is_initial")
_SETTINGS = (
    *("steps_per_epoch", "seed", "precision", "max_grad_norm", "accumulate_steps", "scale_lr", "warmup_steps"),
    *("monitor", "monitor_mode"),
)
_DEEPEST = 5


def identity_of(task: Task, config: TrainConfig, others: Mapping[str, Any]) -> dict[str, str]:
    """Return what decides a run: the parts of ``task``, the settings of ``config`` that change weights, ``others``.

    How long to train is none of it: epochs, patience and the like may change when a run goes on. Call it before the
    first step, which changes the optimizer.
    """
    parts = {name: getattr(task, name) for name in ("model", "optimizer", "scheduler", "scheduler_interval", "loss")}
    parts |= {"columns": (task.inputs, task.labels, task.sample_weight), "loss_weights": task.loss_weights}
    parts |= {"train_step": task.train_step, "train_minibatch_fn": task.manual_step}
    parts |= {name: getattr(config, name) for name in _SETTINGS} | asdict(config.sync)
    return {name: described(value) for name, value in (parts | dict(others)).items()}


def check_same(saved: Mapping[str, str] | None, mine: Mapping[str, str] | None, where: str) -> None:
    """Compare what decides the run of a checkpoint with what decides this one.

    Raises:
        ConfigError: something differs; names it and both values.
    """
    if saved is None or mine is None:
        return
    for name in [*mine, *(name for name in saved if name not in mine)]:
        saved_value, now = saved.get(name, "none"), mine.get(name, "none")
        if saved_value != now:
            rows = (
                " (the same rows; with shuffle=False or spread_rows=False in the same partitions)"
                if name.endswith(" data")
                else ""
            )
            raise ConfigError(
                f"{name} is {now}, and the run whose checkpoints lie in {where} had {saved_value}: go on with what it "
                f'had{rows}, start from its weights with resume="warm", or start another run, with a run_id or a '
                "folder of its own"
            )


def described(value: Any, depth: int = 0) -> str:
    """A text of ``value`` that is equal for equal settings in every process; weights do not count, their shapes do."""
    if depth > _DEEPEST:
        return type(value).__qualname__
    inner = functools.partial(described, depth=depth + 1)
    if isinstance(value, torch.optim.Optimizer):
        groups = [
            {k: len(part) if k == "params" else part for k, part in group.items()} for group in value.param_groups
        ]
        return f"{type(value).__qualname__}({'; '.join(map(inner, groups))})"
    if isinstance(value, torch.nn.Module):
        return _module(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {_hash(value.detach().cpu().tolist())}"
    if isinstance(value, functools.partial):
        return f"{inner(value.func)}({inner(value.args)}, {inner(value.keywords)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {inner(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inner, value)) + "]"
    if isinstance(value, set | frozenset):  # whose order is another one in every process
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, np.ndarray):  # of which a text shows the first and last numbers alone
        return f"array {value.shape} {value.dtype} {_hash(value.tolist())}"
    if inspect.isclass(value):
        return value.__qualname__
    if inspect.ismethod(value):
        return f"{inner(value.__self__)}.{value.__name__}"
    if isinstance(getattr(value, "__code__", None), CodeType):
        cells = {}
        with suppress(ValueError):  # a name that its function has not bound yet
            cells = dict(inspect.getclosurevars(value).nonlocals)
        further = [settings for settings in (value.__kwdefaults__, _global_settings(value)) if settings]
        return f"{value.__qualname__} {_hash(_code(value.__code__), inner([value.__defaults__, cells, *further]))}"
    if hasattr(value, "state_dict") and hasattr(value, "step"):  # a scheduler
        scheduler_state = {key: part for key, part in value.state_dict().items() if key not in _PROGRESS}
        return f"{type(value).__qualname__}({inner(scheduler_state)})"
    called = ""
    if callable(value) and isinstance(getattr(type(value).__call__, "__code__", None), CodeType):
        called = f" {inner(type(value).__call__)}"
    if getattr(value, "__dict__", None):
        return f"{type(value).__qualname__}({inner(vars(value))}){called}"
    return f"{_without_addresses(repr(value))}{called}"


def _global_settings(function: Any) -> dict[str, Any]:
    """Numbers and texts of its module that ``function`` reads and never sets, as it would a counter."""
    code = function.__code__
    counters = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    names = [name for name in code.co_names if name in function.__globals__ and name not in counters]
    settings = {name: function.__globals__[name] for name in names if not name.startswith("__")}
    return {name: part for name, part in settings.items() if _is_plain(part)}


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, int | float | str)


def _module(module: torch.nn.Module) -> str:
    state = module.state_dict()
    tensors = [(name, tuple(t.shape), str(t.dtype)) for name, t in state.items() if isinstance(t, torch.Tensor)]
    trained = [parameter.requires_grad for parameter in module.parameters()]
    # A loss may hold tensors of its own, as class weights are; those of a model are what is trained.
    loss_tensors = [] if trained else [tensor.tolist() for tensor in module.buffers()]
    settings = {
        f"{name}.{k}" if name else k: part
        for name, layer in module.named_modules()
        for k, part in vars(layer).items()
        if k[:1] != "_" and k != "training" and isinstance(part, int | float | str)
    }
    facts = _hash(_without_addresses(repr(module)), tensors, trained, loss_tensors, settings)
    return f"{type(module).__qualname__} of {sum(p.numel() for p in module.parameters())} parameters, structure {facts}"


def _code(code: CodeType) -> str:
    constants = [
        _code(part)
        if isinstance(part, CodeType)
        else sorted(map(repr, part))
        if isinstance(part, frozenset)
        else repr(part)
        for part in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _hash(*facts: Any) -> str:
    return xxh3_hex(repr(facts).encode())[:8]
