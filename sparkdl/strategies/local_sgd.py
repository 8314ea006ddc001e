"""Ranks that train by themselves, and go on from the mean of their models now and then: ``LocalSteps``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from sparkdl.collective.agree import named_parameters, share_optimizer
from sparkdl.collective.backends.group import BROADCAST_BYTES, batches_of
from sparkdl.collective.backends.solo import LocalGradients
from sparkdl.collective.base import Collective, GradientSync, on_leader
from sparkdl.collective.gradients.sparse import sparse_parameters
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies.all_reduce import AllReduce, fitting
from sparkdl.strategies.base import StepObjective, TaskView
from sparkdl.strategies.local_steps import LocalSteps
from sparkdl.strategies.server_options import ServerOptions


class LocalSGD(AllReduce):
    """Every rank has a model and an optimizer of its own, which steps with the rank's own rows.

    Behind ``every`` steps, and at the end of an epoch, all go on from the mean of their models; each keeps the state of
    its own optimizer. With ``every=1`` and an optimizer that is linear in the gradient, as SGD with momentum is, that
    is what ``AllReduce`` does. Between two means ranks exchange no gradient; a loss that is divided by a sum over the
    global batch, as with sample weights, still asks for that number.

    Batch norm takes each rank's own rows; its statistics are averaged as the weights are. A parameter that was frozen
    in all steps since the last mean has no part in the next one, nor does outer momentum move it.

    Args:
        collective: the ranks.
        config: of the training.
        steps: how many steps lie between two means, and what becomes of a mean.

    Raises:
        ConfigError: a setting has nothing to act on.
    """

    allows_own_steps = False  # such a step may call the optimizer on some ranks more often than on others
    steps_together = False

    def __init__(self, collective: Collective, config: TrainConfig, steps: LocalSteps) -> None:
        super().__init__(collective, config)
        check_local_training(steps, config)
        self.steps = steps
        self._steps_alone = 0  # optimizer steps since all ranks had one model
        self._moved: dict[torch.nn.Parameter, None] = {}  # what was trained in these
        self._called: dict[torch.nn.Parameter, None] = {}  # what a pass over rows has given a gradient
        self._lacks_rows = False  # whether the step under way has a batch without rows
        self._common: list[torch.nn.Parameter] = []  # the last common model, where outer steps begin
        self._is_common = False  # whether it was taken since: a callback may have written into the weights
        self._outer: torch.optim.SGD | None = None

    def build(
        self,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        call: TaskView,
    ) -> None:
        """Make both, give every rank those of rank 0, and count the optimizer's steps."""
        super().build(make_model, make_optimizer, call)
        self._hooks = [
            self.optimizer.register_step_pre_hook(lambda *_: self._begin_step()),
            self.optimizer.register_step_post_hook(lambda *_: self._count_step()),
        ]
        self._begin_outer_steps()

    def _hooked_gradients(self) -> GradientSync:
        """Give every rank rank 0's model and optimizer, and leave each its own gradients."""
        self._parameters = list(named_parameters(self.model, self.optimizer))
        self._share([*self._parameters, *self.model.buffers()])
        self._share_optimizer()
        return LocalGradients(self.model, self.optimizer, self.collective.name)

    def _begin_outer_steps(self) -> None:
        if self.steps.outer_lr == 1 and self.steps.outer_momentum == 0:
            return  # a step from the common model to the mean is the mean
        self._common = [torch.nn.Parameter(parameter.detach().clone()) for parameter in self._parameters]
        momentum = self.steps.outer_momentum
        self._outer = torch.optim.SGD(self._common, self.steps.outer_lr, momentum=momentum, nesterov=momentum > 0)

    def _pass_without_rows(self, batch: Any, objective: StepObjective) -> None:
        """Step with gradients of zero, by which momentum and decay go on as on the other ranks.

        What the model never calls has no gradient there, and none here, as this rank's passes over rows have shown; one
        that has had no row yet takes all.
        """
        super()._pass_without_rows(batch, objective)
        self._lacks_rows = True
        sparse = sparse_parameters(self.model)
        for parameter in self._called or self._parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = _without_rows(parameter) if parameter in sparse else torch.zeros_like(parameter)

    # --- the mean of the models ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin_step(self) -> None:
        self._moved |= dict.fromkeys(parameter for parameter in self._parameters if parameter.requires_grad)
        if not self._lacks_rows:
            self._called |= dict.fromkeys(parameter for parameter in self._parameters if parameter.grad is not None)
        self._lacks_rows = False
        if self._outer is not None and not self._is_common:
            for common, parameter in zip(self._common, self._parameters, strict=True):
                common.copy_(parameter)
            self._is_common = True

    def _count_step(self) -> None:
        self._steps_alone += 1
        if self._steps_alone == self.steps.every:
            self._meet()

    def end_epoch(self) -> None:
        """Go on from the mean, which is the model that is validated and saved."""
        if self._steps_alone:
            self._meet()

    @torch.no_grad()
    def _meet(self) -> None:
        """Let all ranks go on from the mean of their models, or from an outer step towards it."""
        self._average(self._apart())
        if self._outer is not None:
            for common, mean in zip(self._common, self._parameters, strict=True):
                common.grad = common - mean if mean in self._moved else None
            self._outer.step()
            self._outer.zero_grad(set_to_none=True)
            for parameter, common in zip(self._parameters, self._common, strict=True):
                parameter.copy_(common)
        self._steps_alone, self._moved, self._is_common = 0, {}, False

    def _apart(self) -> list[torch.Tensor]:
        """What may differ between the ranks."""
        return [*(parameter for parameter in self._parameters if parameter in self._moved), *self.model.buffers()]

    def _average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors of numbers with fractions by their mean over the ranks, others by those of rank 0."""
        if self.collective.world.size == 1:
            return
        tensors = list(tensors)
        self.collective.broadcast([tensor for tensor in tensors if not tensor.is_floating_point()])
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors if tensor.is_floating_point()):
            for batch in batches_of([tensor for tensor in tensors if tensor.dtype == dtype], BROADCAST_BYTES):
                mean = self.collective.all_reduce(torch.cat([tensor.detach().reshape(-1) for tensor in batch]), "mean")
                for tensor, part in zip(batch, torch.split(mean, [tensor.numel() for tensor in batch]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def share_buffers(self) -> None:
        """Leave each rank its own until all meet."""

    # --- state --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any] | None:
        """Return the mean of the models, the leader's optimizer, and how far outer steps are; the ranks go on alone."""
        tensors = self._apart() if self._steps_alone else []
        rank_values = [tensor.detach().clone() for tensor in tensors]
        if rank_values:
            self._average(tensors)
        state = None
        if self.collective.world.is_leader:
            model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            state = {"model": model, "optimizer": self.optimizer.state_dict(), "sync": self._outer_state()}
        for tensor, value in zip(tensors, rank_values, strict=True):
            tensor.copy_(value)
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Give every rank the leader's model and optimizer, and outer steps where they were."""

        def load() -> dict[str, Any]:
            assert state is not None
            with fitting("model"):
                self.model.load_state_dict(state["model"])
            if "optimizer" in state:
                with fitting("optimizer"):
                    self.optimizer.load_state_dict(state["optimizer"])
            return dict(state.get("sync") or {})

        outer = on_leader(self.collective, load)
        self._share([*self._parameters, *self.model.buffers()])
        self._share_optimizer()
        self._steps_alone, self._moved, self._is_common = 0, {}, False
        if self._outer is None:
            return
        self._begin_outer_steps()  # from these weights, unless the state says where
        if "outer" in outer:
            with fitting("outer optimizer"), torch.no_grad():
                for common, value in zip(self._common, outer["common"], strict=True):
                    common.copy_(value)
                self._outer.load_state_dict(outer["outer"])
            together = zip(self._common, self._parameters, strict=True)
            self._is_common = not all(torch.equal(common, parameter) for common, parameter in together)

    def _outer_state(self) -> dict[str, Any]:
        if self._outer is None:
            return {}
        return {"common": [common.detach().clone() for common in self._common], "outer": self._outer.state_dict()}

    def rank_state(self) -> Any:
        """This rank's optimizer and, between two means, its model."""
        alone = [tensor.detach().clone() for tensor in (*self._parameters, *self.model.buffers())]
        return {
            "strategy": "local_sgd",
            "steps_alone": self._steps_alone,
            "tensors": alone if self._steps_alone else None,
            "moved": [index for index, parameter in enumerate(self._parameters) if parameter in self._moved],
            "called": [index for index, parameter in enumerate(self._parameters) if parameter in self._called],
            "optimizer": self.optimizer.state_dict(),
        }

    def load_rank_state(self, state: Any) -> None:
        """Go on by itself, as it did."""
        with fitting("state of a rank"), torch.no_grad():
            if state.get("strategy") != "local_sgd":
                return
            self._steps_alone = int(state["steps_alone"])
            moved = state.get("moved", range(len(self._parameters)))  # an earlier version averaged all
            self._moved = dict.fromkeys(self._parameters[int(index)] for index in moved)
            self._called = dict.fromkeys(self._parameters[int(index)] for index in state.get("called", ()))
            self.optimizer.load_state_dict(state["optimizer"])
            tensors = [*self._parameters, *self.model.buffers()]
            for tensor, value in zip(tensors, state["tensors"] or tensors, strict=True):
                tensor.copy_(value)

    def _share(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            self.collective.broadcast(tensors)

    def _share_optimizer(self) -> None:
        if self.collective.world.size > 1:
            share_optimizer(self.collective, self.optimizer)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop counting."""
        for hook in getattr(self, "_hooks", ()):  # build() may have failed before
            hook.remove()


def _without_rows(table: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of no row, to which another may be added."""
    rows, values = table.new_empty((1, 0), dtype=torch.int64), table.new_empty((0, *table.shape[1:]))
    return torch.sparse_coo_tensor(rows, values, table.shape, is_coalesced=True, check_invariants=False)


def check_local_training(strategy: LocalSteps | ServerOptions, config: TrainConfig) -> None:
    """Refuse settings that do not go with ranks that average no gradients among themselves.

    Raises:
        ConfigError: names both.
    """
    if config.precision == "fp16":
        raise ConfigError(
            f"strategy='{strategy}' lets each rank compute by itself, and the scaler of precision='fp16' would leave "
            "steps out on some ranks: choose precision='bf16'"
        )
    if config.sync.compression is not None:
        raise ConfigError(
            f"strategy='{strategy}' averages no gradients over the ranks, and "
            f"gradient_compression={config.sync.compression!r} is of these: drop one"
        )
    if config.sync.sync_batch_norm:
        raise ConfigError(
            f"strategy='{strategy}' lets each rank compute by itself, and sync_batch_norm=True joins them: drop one"
        )
