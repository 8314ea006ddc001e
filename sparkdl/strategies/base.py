"""The contract of a strategy with the trainer."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch

from sparkdl.collective.base import Collective, GradientSync
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies import STRATEGIES
from sparkdl.strategies.choice import Choice, choice_of


class StepObjective(Protocol):
    """What one batch shall reach, as the trainer hands it to a strategy."""

    def __call__(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return the loss of this rank's rows, whose mean over ranks is that of the global batch, and the outputs."""
        ...

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what to call ``backward`` on: the loss by its share in the step and the scale of fp16."""
        ...

    def skip(self, batch: Any) -> None:
        """Take part in what ranks exchange for the loss, on a rank that has no row of ``batch``."""
        ...

    def without_rows(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Do as ``skip``, with a forward pass of a row that stands in for none; return its loss."""
        ...

    def evaluate(self, model: torch.nn.Module, batch: Any) -> tuple[Any, torch.Tensor]:
        """Return the outputs, and what the losses of this rank's rows add up to; nothing is exchanged."""
        ...

    def forward_without_rows(self, model: torch.nn.Module, batch: Any) -> None:
        """Call the model with a row that stands in for none; nothing else is exchanged."""
        ...

    # What follows takes a batch apart, for strategies that call the parts of a model by themselves.

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which a forward pass has the precision that was asked for."""
        ...

    def divisors(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Exchange what the losses are divided by, once a batch: all ranks call this or ``skip``.

        Args:
            outputs: of a row or more, of which the shapes alone count.
            batch: this rank's rows, one or more.
        """
        ...

    def part(self, outputs: Any, batch: Any, rows: slice, divisors: torch.Tensor) -> torch.Tensor:
        """Return the loss of these rows of ``batch``; added up over all, it is what a call of the objective gives.

        Args:
            outputs: of these rows.
            batch: this rank's rows.
            rows: which of them; both ends are given.
            divisors: what ``divisors`` returned for ``batch``.
        """
        ...

    def sums(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return what the losses of this rank's rows add up to, as ``evaluate`` does, of outputs computed before."""
        ...


@dataclass(frozen=True)
class TaskView:
    """What a strategy may have to know of the task.

    Attributes:
        inputs: names of the tensors it is called with.
        input_style: how, as in ``Task``.
        by_user: a function of the user's calls it, in a way that nobody knows.
        example: gives this rank's first batch.
        earlier_cuts: gives the ``cuts`` of an earlier attempt, None where it left no checkpoint; the leader alone calls
            it.
        optimizer: what the user made of the whole model already; None where it is still to be made.
    """

    inputs: Sequence[str] = ("features",)
    input_style: Literal["positional", "keyword", "dict"] = "positional"
    by_user: bool = False
    example: Callable[[], Any] | None = None
    earlier_cuts: Callable[[], Sequence[str] | None] | None = None
    optimizer: torch.optim.Optimizer | None = None


class Strategy(ABC):
    """Trains one model on all ranks; every rank calls every method, in the same order.

    The trainer owns the order of batches, objective, metrics, schedule, checkpoints, selection and callbacks; a
    strategy owns where parameters, gradients and optimizer state live, and what travels.

    Ranks that read the same rows have the same ``data_rank``; each part of the data is read by equally many. Metrics
    and sums are those of the one among them that ``counts_rows``, so its ``step`` and ``evaluate`` return the outputs.

    Args:
        collective: the ranks.
        config: how gradients travel, whether the model is compiled.

    Attributes:
        data_rank: which part of each global batch this rank reads.
        data_size: of how many parts.
        model: the user's own module, once it is built.
        net: the module that a step calls: ``model``, or what wraps or compiles it.
        optimizer: the one to step, with every parameter group: the user's own, or what wraps it.
        gradients: what exchanges gradients, once the model is built.
        allows_own_steps: whether a function of the user's own may call ``backward`` and ``optimizer.step()``.
        takes_groups: whether a callback may give the optimizer further groups, of parameters that the model has had.
        steps_together: whether each optimizer step waits for all ranks.
        text: what ``open_strategy`` was given; a run of ``strategy="auto"`` goes on by it.
        cuts: the modules that stages begin with, where the model is cut into some: a run that goes on cuts alike.
    """

    model: torch.nn.Module
    net: Any
    optimizer: torch.optim.Optimizer
    gradients: GradientSync
    allows_own_steps: bool = False
    takes_groups: bool = False
    steps_together: bool = True
    text: str = "all_reduce"
    cuts: tuple[str, ...] | None = None

    def __init__(self, collective: Collective, config: TrainConfig) -> None:
        self.collective, self.config = collective, config
        self.data_rank, self.data_size = collective.world.rank, collective.world.size
        self._built: tuple[set[torch.nn.Parameter], set[torch.nn.Parameter]] | None = None
        self._weighted_rows, self._global_rows = 0.0, 0  # of the batches behind the gradients that wait

    def counts_rows(self) -> bool:
        """Whether metrics and sums take in this rank's rows; every rank calls it.

        Of the ranks that read the same ones, the first does.
        """
        world = self.collective.world
        if self.data_size == world.size:
            return True
        readers = self.collective.all_gather_object(self.data_rank)
        return bool(readers.index(self.data_rank) == world.rank)

    def counts_layers(self) -> bool:
        """Whether sums of what layers count take in this rank's layers; every rank calls it.

        Of the ranks whose layers count the same, the first does.
        """
        return self.counts_rows()

    @property
    def carried_by(self) -> str:
        """What carries the gradients, as logs and records say it."""
        return self.gradients.carried_by

    @property
    def averages(self) -> bool:
        """Whether a step's gradient is the mean of those of the ranks; Adasum joins them otherwise."""
        return self.config.sync.compression != "adasum" or self.collective.world.size == 1

    @abstractmethod
    def build(
        self,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        call: TaskView,
    ) -> None:
        """Make the model and spread it, then make the optimizer of what this rank holds.

        Raises:
            CheckpointError: the ranks made different models.
            ConfigError: what they made does not go with this strategy.
        """

    def step(self, batch: Any, objective: StepObjective, *, last: bool = True) -> tuple[torch.Tensor, Any]:
        """Forward, backward and, behind the last batch of an optimizer step, the exchange.

        The trainer clips by ``clip`` and calls ``optimizer.step()`` then.

        Returns:
            The batch's loss on this rank, detached, such that its mean over ranks is the loss of the global batch; and
            the model's outputs, None where there is no row.
        """
        outputs = None
        self._weighted_rows += batch.weight * batch.global_rows
        self._global_rows += batch.global_rows
        if batch.rows:
            loss, outputs = objective(self.net, batch)  # forward, and the loss weighted by this rank's rows
            if last:
                objective.scaled(loss).backward()  # type: ignore[no-untyped-call]
            else:
                with self.gradients.accumulate():
                    objective.scaled(loss).backward()  # type: ignore[no-untyped-call]
            loss = loss.detach()
        else:
            self._pass_without_rows(batch, objective)
            loss = torch.zeros((), device=self.collective.world.device)
        if last:
            self.exchange()
        return loss, outputs

    def _pass_without_rows(self, batch: Any, objective: StepObjective) -> None:
        """Take part in what the other ranks exchange while they compute with their rows.

        Layers that wait for other ranks in both passes need passes: a row that stands in for none counts for nothing,
        and its gradients are thrown away.
        """
        if not self.gradients.forward_is_collective:
            objective.skip(batch)
            return
        with self.gradients.weighted(0.0):
            loss = objective.without_rows(self.net, batch)
        if loss.requires_grad:
            trained = {*self.model.parameters(), *self.parameters()}
            torch.autograd.grad(loss, [p for p in trained if p.requires_grad], allow_unused=True)

    def exchange(self, weight: float | None = None) -> None:
        """Wait until the gradients of this step are those of the global batch.

        ``step`` calls it with the last batch; the trainer does where no last one follows.

        Args:
            weight: of this rank in the global batch, see ``GradientSync.synchronize``; None is that of the batches
                which ``step`` had.
        """
        if weight is None:
            weight = self._weighted_rows / self._global_rows if self._global_rows else 1.0
        self._weighted_rows, self._global_rows = 0.0, 0
        self.gradients.synchronize(weight)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer steps."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def check_parameters(self) -> None:
        """Refuse what callbacks did to model or optimizer that would be lost, or apply on this rank alone.

        The trainer calls it when all is built, before an epoch, behind it, and where it looks at losses.

        Raises:
            ConfigError: names the parameter, and what to do instead.
        """
        names = {parameter: repr(name) for name, parameter in self.model.named_parameters()}
        stepped = set(self.parameters())
        if self._built is None:
            self._built = {*names, *stepped}, stepped
        present, stepped_before = self._built
        if self.takes_groups and self.collective.world.size == 1:
            return
        for parameter in (*names, *self.parameters()):
            if parameter not in present:
                raise ConfigError(
                    f"parameter {names.get(parameter, 'that the optimizer has got')} was made while the model trained, "
                    f"and strategy='{self.text}' has spread those that there were: make it before, with "
                    "requires_grad_(False) as long as it waits, and write into a weight instead of replacing it"
                )
        if not self.takes_groups and stepped != stepped_before:
            raise ConfigError(
                f"the optimizer has {len(stepped)} parameters, and had {len(stepped_before)} when "
                f"strategy='{self.text}' dealt them out: give it all from the start, with requires_grad_(False) as "
                "long as they wait, or choose strategy='all_reduce'"
            )

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their common 2-norm is at most ``max_norm``; return the norm before.

        The norm is that of the whole model's gradient, equal on all ranks. Here each rank has all of it; where a rank
        holds a part, its strategy adds the squares up over the ranks.

        Unlike torch's own function this one takes sparse gradients, too (Pascanu et al., ICML 2013, section 3.2).
        """
        parameters = self.parameters()
        if not any(p.grad is not None and p.grad.is_sparse for p in parameters):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # entries of one row must be added before they are squared
        values = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(values)
        torch._foreach_mul_(values, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def evaluate(self, batch: Any, objective: StepObjective) -> tuple[Any, torch.Tensor] | None:
        """Return the outputs of this rank's rows and what their losses add up to; None where there is no row."""
        return objective.evaluate(self.model, batch) if batch.rows else None

    def end_evaluation(self) -> None:  # noqa: B027 - most have nothing to do
        """Called behind the last batch of a validation, before callbacks look at the model."""

    def plain_state(self) -> Mapping[str, Any]:
        """The state of the plain model, of which names and shapes alone count."""
        return self.model.state_dict()

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, so that all validate and save the same model."""
        self.gradients.share_buffers()

    def end_epoch(self) -> None:
        """Give all ranks one model, which is validated and saved: here all but its buffers is one already."""
        self.share_buffers()

    def rank_state(self) -> Any:
        """What this rank alone has to go on exactly: plain values and tensors, saved beside ``state_dict``."""
        return None

    def load_rank_state(self, state: Any) -> None:  # noqa: B027 - most have none
        """Take over what ``rank_state`` gave on the rank of this number; called behind ``load_state_dict``.

        It is not called where there are other numbers of ranks than before, or another strategy left None.

        Raises:
            CheckpointError: it does not fit the model or the optimizer.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any] | None:
        """Gather ``model``, ``optimizer`` and ``sync``, in whole tensors under the user's own names, on the leader.

        The form is that of one plain module and one plain optimizer, so that any strategy loads what any other saved.
        Other ranks get None.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what ``state_dict`` gave; of a state without ``optimizer`` the weights alone.

        Args:
            state: on the leader; the other ranks give None.

        Raises:
            CheckpointError: it does not fit the model or the optimizer; on every rank.
        """

    @abstractmethod
    def gather_model(self) -> torch.nn.Module:
        """Return one plain module with the current weights: on the leader at least."""

    @abstractmethod
    def close(self) -> None:
        """Take every hook off model and optimizer; idempotent. ``state_dict`` still works."""


def open_strategy(strategy: str | Choice, collective: Collective, config: TrainConfig) -> Strategy:
    """Make a strategy for the ranks of ``collective``.

    Args:
        strategy: a name of ``STRATEGIES``, a mesh, local steps, or the text of these.
        collective: the ranks.
        config: of the training.

    Raises:
        ConfigError: there is none of that name, or it does not go with this collective.
    """
    if isinstance(strategy, str) and strategy in STRATEGIES:
        opened = cast(Strategy, _class_at(STRATEGIES[strategy])(collective, config))
        opened.text = strategy
        return opened
    choice = (choice_of(strategy) if isinstance(strategy, str) else strategy).filled(collective.world.size)
    if choice.is_data_parallel:
        return open_strategy("all_reduce", collective, config)
    opened = cast(Strategy, _class_at(choice.implementation)(collective, config, choice))
    opened.text = str(strategy)
    return opened


def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
