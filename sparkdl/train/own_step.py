"""Steps that a function of the user's own makes: it calls ``zero_grad``, ``backward`` and ``step`` itself.

Enters: one rank's batches, and a function of (model, optimizer, batch, loss). Leaves: what N such functions did, with
gradients that are those of the global batch: N ranks compute what one process computes that runs the function on whole
global batches with a plain optimizer, as far as the function's loss is a mean over the rows of its batch.

The optimizer is the user's own object. Hooks weigh what each backward pass adds to the gradients by the rows of this
rank's batch, and exchange the gradients where the pass ends: whatever looks at them afterwards, be it clipping,
``step()`` or a print, finds the gradient of the global batch. Averaging is linear, so a pass that adds to gradients
already exchanged may exchange their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.batches.reading.batch import Batch
from sparkdl.collective.base import Collective
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies.base import Strategy
from sparkdl.train.objective.loss import Objective
from sparkdl.train.schedule import LearningRate
from sparkdl.train.source import BatchLike
from sparkdl.train.step import autocast_of, clip_gradients
from sparkdl.train.task import Task

__all__ = ["OwnStep"]

_NAMES = ("backward_passes_per_step", "set_backward_passes_per_step", "skip_synchronize", "synchronize")


class OwnStep:
    """Runs ``Task.manual_step`` with the optimizer of the run.

    The optimizer gets the methods of Horovod's ``DistributedOptimizer`` for as long as the run lasts:
    ``synchronize()``, ``skip_synchronize()``, ``set_backward_passes_per_step()`` and the attribute
    ``backward_passes_per_step``. ``step(closure)`` gives the closure's loss as its mean over the global batch, so that
    an optimizer that searches along a line, as LBFGS does, takes the same way on all ranks.

    Every rank calls ``backward`` and ``step`` equally often. A rank that has no row of a global batch runs the function
    on the batch before once more, and its gradients count nothing.

    Args:
        task: with a ``manual_step``.
        strategy: the model to hand to the function, the optimizer, and the exchange of gradients.
        objective: the losses, for the function to call.
        rate: is stepped behind each step of the optimizer.
        collective: the ranks.
        config: precision, clipping.

    Attributes:
        steps: steps that the optimizer has made in this call of ``fit``.
        pending: whether there are gradients that no step has used yet.
        norm: gradient norm of the newest step before clipping; None without clipping.
        lr: rate of the first parameter group in the newest step.
    """

    def __init__(
        self,
        task: Task,
        strategy: Strategy,
        objective: Objective,
        rate: LearningRate,
        collective: Collective,
        config: TrainConfig,
    ) -> None:
        self._function = task.manual_step
        self._name = getattr(task.manual_step, "__name__", "manual_step")
        if config.precision == "fp16":
            raise ConfigError(f"precision='fp16' scales the loss, which {self._name} owns: choose 'bf16' or 'fp32'")
        if config.accumulate_steps != 1:
            raise ConfigError(
                f"accumulate_steps={config.accumulate_steps} does nothing beside {self._name}, which decides itself "
                "when to step: leave it at 1"
            )
        if strategy.sync is None:
            raise ConfigError(f"the strategy takes no step of a user's own, and {self._name} is one: leave one of them")
        optimizer = strategy.optimizer
        self._model, self._optimizer, self._sync, self._objective = strategy.net, optimizer, strategy.sync, objective
        self._rate, self._collective, self._config = rate, collective, config
        self._device = torch.device(collective.world.device)
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._unhooked = list(self._parameters)
        self._nodes: list[Any] = []  # the graph forgets them otherwise, and the hooks with them
        self._last: BatchLike | None = None
        self._batch: BatchLike | None = None
        self._queued = self._exchanged = False
        self._used = self._batches = self._epoch_steps = 0
        self.steps, self.pending = 0, False
        self.norm: torch.Tensor | None = None
        self.lr = rate.current
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._offer_horovods_names()

    # --- one batch ----------------------------------------------------------------------------------------------

    def train(self, batch: BatchLike) -> tuple[torch.Tensor, Any]:
        """Run the function on one batch.

        Returns:
            The batch's loss on this rank, detached, such that its mean over ranks is the loss of the global batch; and
            the outputs, None where there is no row.

        Raises:
            ConfigError: the function does not return (outputs, loss).
        """
        self._hook_parameters()
        self._batch, self._queued = batch, False
        self._batches += 1
        given = batch if batch.rows else self._stand_in(batch)
        assert self._function is not None
        with self._sync.weighted(batch.weight), autocast_of(self._config.precision, self._device):
            found = self._function(self._model, self._optimizer, given, self._loss)
        if not isinstance(found, tuple) or len(found) != 2 or not _is_number(found[1]):
            raise ConfigError(f"{self._name} must return (outputs, loss), the loss a single number: return both")
        if batch.rows == 0:
            return torch.zeros((), device=self._device), None
        self._last = batch
        loss = torch.as_tensor(found[1]).detach().reshape(()).to(self._device)
        return (loss if batch.weight == 1.0 else loss * batch.weight), found[0]

    def _loss(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """The task's loss of this rank's rows, as a mean: what the hooks weigh is then the global batch's, exactly."""
        assert self._batch is not None
        if self._batch.rows == 0:
            self._objective.skip(self._batch)
            return self._objective.alone(outputs, batch)
        return self._objective.unweighted(outputs, batch, self._batch.weight)

    def _stand_in(self, batch: BatchLike) -> BatchLike:
        """A batch for a rank that has no row: functions rarely expect none, and their gradients count nothing."""
        last = self._last
        if last is not None:
            rows, tensors = last.rows, dict(last.items())
        else:
            rows, tensors = 1, {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
        return Batch(tensors, step=batch.step, epoch=batch.epoch, rows=rows, global_rows=batch.global_rows, weight=0.0)

    # --- backward passes ----------------------------------------------------------------------------------------

    def _hook_parameters(self) -> None:
        """Hook the parameters that take gradients and did not so far."""
        for parameter in [p for p in self._unhooked if p.requires_grad]:
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._weigh))
            self._unhooked.remove(parameter)

    def _weigh(self, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Called by autograd before it adds to a ``param.grad``."""
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._pass_ended)
        assert self._batch is not None
        weight = self._batch.weight
        if weight == 1.0:
            return None
        return tuple(gradient * weight if weight else torch.zeros_like(gradient) for gradient in gradients)

    def _pass_ended(self) -> None:
        self._queued = False
        self._sync.synchronize()
        self._exchanged = self.pending = True

    def _synchronize(self) -> None:
        """Exchange gradients that no backward pass has exchanged: the function has put them there itself."""
        if self._exchanged:
            return
        assert self._batch is not None
        weight = self._batch.weight
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None and weight != 1.0:
                    # Gradients of the step before, which are equal on all ranks, come out of this as they were.
                    parameter.grad = parameter.grad * weight if weight else torch.zeros_like(parameter.grad)
        self._sync.synchronize()
        self._exchanged = True

    # --- steps --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.lr = self._rate.current
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._synchronize()
            self._clip()
            return None
        return (args[0], self._agreed(closure)), {}

    def _agreed(self, closure: Callable[[], Any]) -> Callable[[], torch.Tensor]:
        def of_all_ranks() -> torch.Tensor:
            assert self._batch is not None
            loss = torch.as_tensor(closure()).detach().to(self._device)
            self._synchronize()
            self._clip()
            mine = loss * self._batch.weight if self._batch.rows else torch.zeros_like(loss)
            return self._collective.all_reduce(mine, "mean") if self._collective.world.size > 1 else mine

        return of_all_ranks

    def _clip(self) -> None:
        self._used += any(parameter.grad is not None for parameter in self._parameters)
        if self._config.max_grad_norm is not None:
            self.norm = clip_gradients(self._parameters, self._config.max_grad_norm)

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.steps += 1
        self._epoch_steps += 1
        self.pending = self._exchanged = False
        self._rate.after_step()

    def finish_epoch(self, *, whole: bool) -> None:
        """Step with what is left, as Horovod's loop does behind each epoch; refuse a function that trains nothing.

        Args:
            whole: the function has seen the epoch from its first batch on.

        Raises:
            ConfigError: it never called ``backward``, or never ``step``.
        """
        passes = int(getattr(self._optimizer, "backward_passes_per_step", 1))
        seen, made, used = self._batches, self._epoch_steps, self._used
        self.pending &= any(parameter.grad is not None for parameter in self._parameters)
        if whole and not self.pending and not used:
            raise ConfigError(
                f"{self._name} made no gradient in {seen} batches: it owns zero_grad, backward and step, so call "
                "loss.backward() and optimizer.step() in it"
            )
        if whole and not made and seen > passes:
            raise ConfigError(
                f"{self._name} never called optimizer.step() in {seen} batches, with backward_passes_per_step={passes}:"
                " it owns zero_grad, backward and step, so call them in it"
            )
        if self.pending:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._batches = self._epoch_steps = self._used = 0

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients that wait for a step, equal on all ranks."""
        waiting = [parameter.grad for parameter in self._parameters] if self.pending else []
        return {"gradients": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over gradients that wait for a step."""
        for parameter, gradient in zip(self._parameters, state["gradients"], strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self.pending = self._exchanged = bool(state["gradients"])

    def _offer_horovods_names(self) -> None:
        optimizer: Any = self._optimizer

        @contextmanager
        def skip_synchronize() -> Iterator[None]:
            """Nothing to skip: a backward pass has exchanged the gradients already, and no step does it twice."""
            yield

        def set_backward_passes_per_step(passes: int) -> None:
            optimizer.backward_passes_per_step = passes

        optimizer.synchronize, optimizer.skip_synchronize = self._synchronize, skip_synchronize
        optimizer.set_backward_passes_per_step = set_backward_passes_per_step
        optimizer.backward_passes_per_step = 1

    def close(self) -> None:
        """Take every hook and name off the optimizer and its parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []
        for name in _NAMES:
            vars(self._optimizer).pop(name, None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
