"""The whole model on every rank, gradients averaged while the backward pass goes on: ``collective/gradients``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.collective.base import Collective, GradientSync, on_leader
from sparkdl.config import TrainConfig
from sparkdl.errors import CheckpointError, SparkdlError
from sparkdl.strategies.base import StepObjective

__all__ = ["AllReduce", "fitting"]


class AllReduce:
    """Data parallelism: see ``Strategy``."""

    def __init__(self, collective: Collective, config: TrainConfig) -> None:
        self.collective, self._config = collective, config
        self.data_rank, self.data_size = collective.world.rank, collective.world.size
        self._gradients: GradientSync | None = None

    @property
    def carried_by(self) -> str:
        """The backend, or ``"horovod, gradients in shared memory"``."""
        return self._built.carried_by

    @property
    def sync(self) -> GradientSync | None:
        """By which a step of the user's own exchanges gradients."""
        return self._gradients

    @property
    def _built(self) -> GradientSync:
        assert self._gradients is not None, "build() comes first"
        return self._gradients

    def build(
        self,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    ) -> None:
        """Make both, give every rank those of rank 0, and hook the gradients."""
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self._gradients = self.collective.wrap(self.model, self.optimizer, self._config.sync)
        how = self._config.compile
        self.net: Any = torch.compile(self.model, mode=None if how is True else how) if how else self.model
        self._trained = {*self.model.parameters()} | {p for g in self.optimizer.param_groups for p in g["params"]}
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch: Any, objective: StepObjective, *, last: bool = True) -> tuple[torch.Tensor, Any]:
        """Forward, backward, and the exchange behind the last batch of a step."""
        outputs = None
        if batch.rows:
            loss, outputs = objective(self.net, batch)
            if last:
                objective.scaled(loss).backward()  # type: ignore[no-untyped-call]
            else:
                with self._built.accumulate():
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
        if not self._built.forward_is_collective:
            objective.skip(batch)
            return
        with self._built.weighted(0.0):
            loss = objective.without_rows(self.net, batch)
        if loss.requires_grad:
            torch.autograd.grad(loss, [p for p in self._trained if p.requires_grad], allow_unused=True)

    def exchange(self) -> None:
        """Wait until every ``param.grad`` holds the mean over all ranks."""
        self._built.synchronize()

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers."""
        self._built.share_buffers()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the leader's own state, which is every rank's."""
        optimizer = self.optimizer_state()
        if not self.collective.world.is_leader:
            return None
        return {"model": self.model.state_dict(), "optimizer": optimizer, "sync": self._built.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load on the leader, then give every rank what it has."""

        def load() -> tuple[bool, Any]:
            assert state is not None
            with fitting("model"):
                self.model.load_state_dict(state["model"])
            return "optimizer" in state, state.get("sync")

        has_optimizer, layout = on_leader(self.collective, load)
        with torch.no_grad():
            self.collective.broadcast([*self.model.parameters(), *self.model.buffers()])
        if has_optimizer:
            self.load_optimizer_state(state["optimizer"] if state is not None else None)
        if layout:
            self._built.load_state_dict(layout)

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return the optimizer's state as one plain optimizer has it, on the leader; every rank calls it."""
        return self.optimizer.state_dict() if self.collective.world.is_leader else None

    def load_optimizer_state(self, state: dict[str, Any] | None) -> None:
        """Take over the leader's ``state`` of a plain optimizer; every rank calls it."""

        def load() -> None:
            with fitting("optimizer"):
                self.optimizer.load_state_dict(state or {})

        on_leader(self.collective, load)
        self._built.share_optimizer()

    def gather_model(self) -> torch.nn.Module:
        """Return the model, which is whole on every rank."""
        return self.model

    def close(self) -> None:
        """Remove every hook."""
        if self._gradients is not None:
            self._gradients.close()


@contextmanager
def fitting(part: str) -> Iterator[None]:
    """Let whatever ``part`` makes of a state that is not its own be one error.

    Raises:
        CheckpointError: the block raised something untyped.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
        if isinstance(cause, SparkdlError):
            raise
        parts = "optimizer and parameter groups" if part == "optimizer" else part
        raise CheckpointError(
            f"the {part} in the checkpoint does not fit the task's ({cause}): resume with the same {parts}"
        ) from cause
