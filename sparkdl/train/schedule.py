"""The learning rate: the user's scheduler, warm-up over it, and scaling with the number of ranks where it is wanted."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.observe import emit, logger

_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # the rates that schedulers keep in parameter groups
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "_last_lr")  # a floor such as eta_min is absolute, and stays


class LearningRate:
    """Steps the scheduler, warms up, scales.

    Args:
        optimizer: whose groups are set.
        scheduler: a scheduler of that optimizer, or None.
        interval: ``"epoch"`` or ``"step"``, when the scheduler steps.
        warmup_steps: steps over which the rate climbs linearly from 0 to the scheduler's.
        scale: what all rates are multiplied by; 1 leaves them. A run that resumes with another one corrects its rates.
        reports: whether this rank says so.

    Raises:
        ConfigError: a scheduler that steps by what is monitored is to step after every optimizer step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        interval: str,
        warmup_steps: int,
        scale: int,
        reports: bool,
    ) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._per_step = scheduler is not None and interval == "step"
        self._per_epoch = scheduler is not None and interval == "epoch"
        self._warmup = warmup_steps
        self._scale, self._reports = scale, reports
        self._steps = 0
        self._advanced = False
        self._nominal: list[float] = []
        self._warmed: list[float] | None = None
        self._wants_metric = scheduler is not None and "metrics" in inspect.signature(scheduler.step).parameters
        if self._per_step and self._wants_metric:
            raise ConfigError(
                f"scheduler_interval='step' does not go with {type(scheduler).__name__}, which steps by what is "
                "monitored, and an epoch alone has that: let it step once an epoch"
            )

    def start(self) -> None:
        """Set the first step's rates; call once, on a fresh start."""
        if self._scale > 1:
            self._multiply(self._scale, f"scale_lr: {self._scale} ranks")
        self._remember()
        self._warm()

    def after_step(self) -> None:
        """Set the rates of the next step."""
        self._steps += 1
        if self._per_step:
            self._restore()
            self._advance()
            self._remember()
        if self._steps <= self._warmup:
            self._restore()
            self._warm()

    def after_epoch(self, monitored: float | None) -> None:
        """Set the rates of the next epoch; a plateau scheduler is given the monitored value."""
        if not self._per_epoch:
            return
        self._restore()
        self._advance(*([monitored] if self._wants_metric else []))
        self._remember()
        self._warm()

    @property
    def current(self) -> float:
        """The rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the rates themselves stand in the optimizer's own."""
        return {
            "steps": self._steps,
            "nominal": list(self._nominal),
            "scaled_by": self._scale,
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state, after the optimizer has taken over its own.

        Raises:
            CheckpointError: the checkpoint has a scheduler and this task has none, or the other way round.
        """
        if (state["scheduler"] is None) != (self._scheduler is None):
            in_task, in_checkpoint = ("no", "one") if self._scheduler is None else ("one", "none")
            raise CheckpointError(
                f"the task has {in_task} scheduler, the checkpoint {in_checkpoint}: resume with the same task"
            )
        self._steps, self._nominal = int(state["steps"]), list(state["nominal"])
        if self._steps < self._warmup:
            self._warmed = [float(group["lr"]) for group in self._optimizer.param_groups]
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if self._scale != state["scaled_by"]:
            self._restore()
            factor = self._scale / state["scaled_by"]
            self._multiply(factor, f"resumed: scaled by {state['scaled_by']} before, {self._scale} now")
            self._remember()
            self._warm()

    def _advance(self, *monitored: float | None) -> None:
        if self._advanced:
            self._scheduler.step(*monitored)
            return
        with warnings.catch_warnings():
            # A scheduler that travelled lost the mark it had put on the optimizer's step, and complains once.
            warnings.filterwarnings("ignore", message="Seems like `optimizer.step\\(\\)` has been overridden")
            self._scheduler.step(*monitored)
        self._advanced = True

    def _multiply(self, factor: float, reason: str) -> None:
        earlier = self.current
        for group in self._optimizer.param_groups:
            for name in _GROUP_RATES:
                if name in group:
                    group[name] = group[name] * factor
        if self._scheduler is not None:
            _scale_scheduler(self._scheduler, factor)
        if self._reports:
            logger.info("learning rate %g -> %g (%s)", earlier, self.current, reason)
            emit("log", message=f"learning rate {earlier:g} -> {self.current:g} ({reason})")

    def _remember(self) -> None:
        self._nominal = [float(group["lr"]) for group in self._optimizer.param_groups]

    def _restore(self) -> None:
        """Put the scheduler's rates in the place of warm-up's; rates that others have set stay.

        Raises:
            ConfigError: somebody has set a rate while warm-up sets them.
        """
        warmed, self._warmed = self._warmed, None
        if warmed is None:
            return
        groups = self._optimizer.param_groups  # those that a callback has added have their own rate so far
        for group, rate, expected in zip(groups, self._nominal, warmed, strict=False):
            if float(group["lr"]) != expected:
                raise ConfigError(
                    f"the learning rate was set to {float(group['lr']):g} while warmup_steps={self._warmup} sets it to "
                    f"{expected:g}: drop warmup_steps, or set the rate after them"
                )
            _set_rate(group, rate)

    def _warm(self) -> None:
        if self._steps < self._warmup:
            factor = (self._steps + 1) / self._warmup
            self._nominal += [float(group["lr"]) for group in self._optimizer.param_groups[len(self._nominal) :]]
            for group, rate in zip(self._optimizer.param_groups, self._nominal, strict=True):
                _set_rate(group, rate * factor)
            self._warmed = [float(group["lr"]) for group in self._optimizer.param_groups]


def _scale_scheduler(scheduler: Any, factor: float) -> None:
    for name in _SCHEDULER_RATES:
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list):
            setattr(scheduler, name, [rate * factor for rate in rates])
    for nested in getattr(scheduler, "_schedulers", ()):
        _scale_scheduler(nested, factor)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)  # a capturable optimizer holds its rate in a tensor
    else:
        group["lr"] = rate
