"""A step of the user's own: a function that calls ``zero_grad``, ``backward`` and ``step`` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.batches.reading.batch import Batch
from sparkdl.errors import ConfigError
from sparkdl.strategies.base import Strategy
from sparkdl.train.callbacks import Run
from sparkdl.train.objective.batch_loss import AuxiliaryLoss, autocast_of
from sparkdl.train.objective.loss import Objective
from sparkdl.train.schedule import LearningRate
from sparkdl.train.source import BatchLike
from sparkdl.train.task import Task

_NAMES = ("backward_passes_per_step", "set_backward_passes_per_step", "skip_synchronize", "synchronize")


class OwnStep:
    """Runs ``Task.manual_step`` with the optimizer of the run; the trainer's ``Step``.

    N ranks compute what one process computes that runs the function on whole global batches with a plain optimizer, as
    far as the function's loss is a mean over the rows of its batch. The optimizer is the user's own object. Hooks weigh
    what each backward pass adds to the gradients by the rows of this rank's batch, and exchange the gradients where the
    pass ends: whatever looks at them afterwards, be it clipping, ``step()`` or a print, finds the gradient of the
    global batch. Averaging is linear, so a pass that adds to gradients already exchanged may exchange their sum; Adasum
    is not, and refuses such a pass.

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
        run: where the run stands.

    Attributes:
        pending: whether there are gradients that no step has used yet.
        norm: gradient norm of the newest step before clipping; None without clipping.
    """

    def __init__(self, task: Task, strategy: Strategy, objective: Objective, rate: LearningRate, run: Run) -> None:
        config = run.config
        self._function = task.manual_step
        self._name = getattr(task.manual_step, "__name__", "manual_step")
        if config.precision == "fp16":
            raise ConfigError(f"precision='fp16' scales the loss, which {self._name} owns: choose 'bf16' or 'fp32'")
        if config.accumulate_steps != 1:
            raise ConfigError(
                f"accumulate_steps={config.accumulate_steps} does nothing beside {self._name}, which decides itself "
                "when to step: leave it at 1"
            )
        if not strategy.allows_own_steps:
            raise ConfigError(f"the strategy takes no step of a user's own, and {self._name} is one: leave one of them")
        self._strategy, self._objective, self._rate, self._run = strategy, objective, rate, run
        self._optimizer = optimizer = strategy.optimizer
        self._precision, self._max_norm = config.precision, config.max_grad_norm
        self._device = torch.device(run.world.device)
        self._hooked: set[torch.nn.Parameter] = set()
        self._auxiliary = AuxiliaryLoss()
        self._nodes: list[Any] = []  # the graph forgets them otherwise, and the hooks with them
        self._stand_in: BatchLike | None = None
        self._batch: BatchLike | None = None
        self._queued = self._exchanged = False
        self._whole_epoch = False
        self._used = self._batches = self._epoch_steps = self._made = 0
        self._made_lr = rate.current
        self.pending = False
        self.norm: torch.Tensor | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._offer_horovods_names()

    # --- one batch ----------------------------------------------------------------------------------------------

    def backward(self, batch: BatchLike) -> tuple[torch.Tensor, Any]:
        """Run the function on one batch, with whatever steps it makes.

        Returns:
            The batch's loss on this rank, detached, such that its mean over ranks is the loss of the global batch; and
            the outputs, None where there is no row.

        Raises:
            ConfigError: the function does not return (outputs, loss).
        """
        if self._batches == 0:
            self._whole_epoch = self._run.batch == 0
        self._hook_parameters()
        self._batch, self._queued = batch, False
        self._batches += 1
        rows = batch if batch.rows else self._rows_of_none(batch)
        assert self._function is not None
        with self._strategy.gradients.weighted(batch.weight), autocast_of(self._precision, self._device):
            returned = self._function(self._strategy.net, self._optimizer, rows, self._loss)
        if not isinstance(returned, tuple) or len(returned) != 2 or not _is_number(returned[1]):
            raise ConfigError(f"{self._name} must return (outputs, loss), the loss a single number: return both")
        if batch.rows == 0:
            return torch.zeros((), device=self._device), None
        self._stand_in = batch
        loss = torch.as_tensor(returned[1]).detach().reshape(()).to(self._device)
        return (loss if batch.weight == 1.0 else loss * batch.weight), returned[0]

    @property
    def number(self) -> int:
        """The step that the gradient of the newest batch went into, or will go into."""
        return max(1, self._run.step + self._made + self.pending)

    @property
    def lr(self) -> float:
        """The learning rate of the newest step, or of the one to come where the newest batch made none."""
        return self._made_lr if self._made else self._rate.current

    def update(self, *, epoch_ends: bool) -> int:
        """Return how many steps were made since the last call; where the epoch ends, step with what is left first.

        Raises:
            ConfigError: the function has trained nothing in a whole epoch.
        """
        if epoch_ends:
            self._finish_epoch()
        steps, self._made = self._made, 0
        return steps

    def _loss(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """The task's loss of this rank's rows, as a mean: what the hooks weigh is then the global batch's, exactly."""
        assert self._batch is not None
        auxiliary = self._auxiliary.take(self._strategy.net)
        if self._batch.rows == 0:
            self._objective.skip(self._batch)
            return self._objective.alone(outputs, batch)
        loss = self._objective.unweighted(outputs, batch, self._batch.weight)
        return loss if auxiliary is None else loss + auxiliary

    def _rows_of_none(self, batch: BatchLike) -> BatchLike:
        """A batch for a rank that has no row: functions rarely expect none, and their gradients count nothing."""
        last = self._stand_in
        if last is not None:
            rows, tensors = last.rows, dict(last.items())
        else:
            rows, tensors = 1, {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
        return Batch(tensors, step=batch.step, epoch=batch.epoch, rows=rows, global_rows=batch.global_rows, weight=0.0)

    # --- backward passes ----------------------------------------------------------------------------------------

    def _hook_parameters(self) -> None:
        """Hook the parameters that take gradients and did not so far."""
        for parameter in {p: None for p in self._strategy.parameters() if p.requires_grad and p not in self._hooked}:
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._weigh))
            self._hooked.add(parameter)

    def _weigh(self, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Called by autograd before it adds to a ``param.grad``."""
        if not self._queued:
            self._queued = True
            if self._exchanged and not self._strategy.averages:
                self._check_none_waits()
            torch.autograd.Variable._execution_engine.queue_callback(self._pass_ended)
        assert self._batch is not None
        weight = self._batch.weight
        if weight == 1.0:
            return None
        return tuple(gradient * weight if weight else torch.zeros_like(gradient) for gradient in gradients)

    def _check_none_waits(self) -> None:
        """Refuse to join gradients by Adasum that it has joined already.

        Raises:
            ConfigError: a pass adds to gradients that another has exchanged.
        """
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._strategy.parameters()):
            raise ConfigError(
                f"{self._name} goes backward once more before it steps, and gradient_compression='adasum' would join "
                f"gradients that are joined already: step after each pass, or leave {self._name} out and give "
                "backward_passes_per_step alone"
            )

    def _pass_ended(self) -> None:
        assert self._batch is not None
        self._queued = False
        self._strategy.exchange(self._batch.weight)
        self._exchanged = self.pending = True

    def _synchronize(self) -> None:
        """Exchange gradients that no backward pass has exchanged: the function has put them there itself."""
        if self._exchanged:
            return
        assert self._batch is not None
        weight = self._batch.weight
        with torch.no_grad():
            for parameter in self._strategy.parameters():
                if parameter.grad is not None and weight != 1.0:
                    # Gradients of the step before, which are equal on all ranks, come out of this as they were.
                    parameter.grad = parameter.grad * weight if weight else torch.zeros_like(parameter.grad)
        self._strategy.exchange(weight)
        self._exchanged = True

    # --- steps --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._made_lr = self._rate.current
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
            rank_loss = loss * self._batch.weight if self._batch.rows else torch.zeros_like(loss)
            return self._strategy.collective.all_reduce(rank_loss, "mean") if self._run.world.size > 1 else rank_loss

        return of_all_ranks

    def _clip(self) -> None:
        self._used += any(parameter.grad is not None for parameter in self._strategy.parameters())
        if self._max_norm is not None:
            self.norm = self._strategy.clip(self._max_norm)

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._made += 1
        self._epoch_steps += 1
        self.pending = self._exchanged = False
        self._rate.after_step()

    def _finish_epoch(self) -> None:
        """Step with what is left, as Horovod's loop does behind each epoch; refuse a function that trains nothing."""
        passes = int(getattr(self._optimizer, "backward_passes_per_step", 1))
        batches, steps, used, whole_epoch = self._batches, self._epoch_steps, self._used, self._whole_epoch
        self.pending &= any(parameter.grad is not None for parameter in self._strategy.parameters())
        if whole_epoch and not self.pending and not used:
            raise ConfigError(
                f"{self._name} made no gradient in {batches} batches: it owns zero_grad, backward and step, so call "
                "loss.backward() and optimizer.step() in it"
            )
        if whole_epoch and not steps and batches > passes:
            raise ConfigError(
                f"{self._name} never called optimizer.step() in {batches} batches, with "
                f"backward_passes_per_step={passes}: it owns zero_grad, backward and step, so call them in it"
            )
        if self.pending:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._batches = self._epoch_steps = self._used = 0

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients that wait for a step, equal on all ranks."""
        waiting = [parameter.grad for parameter in self._strategy.parameters()] if self.pending else []
        return {"gradients": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over gradients that wait for a step."""
        for parameter, gradient in zip(self._strategy.parameters(), state["gradients"], strict=False):
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
