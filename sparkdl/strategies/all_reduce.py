"""The whole model on every rank, gradients averaged while the backward pass goes on: ``collective/gradients``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.collective.base import GradientSync, on_leader
from sparkdl.errors import CheckpointError, SparkdlError
from sparkdl.strategies.base import Strategy, TaskView


class AllReduce(Strategy):
    """Data parallelism: see ``Strategy``."""

    allows_own_steps = True
    takes_groups = True

    def build(
        self,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        call: TaskView,
    ) -> None:
        """Make both, give every rank those of rank 0, and hook the gradients."""
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.gradients = self._hooked_gradients()
        mode = self.config.compile
        self.net = torch.compile(self.model, mode=None if mode is True else mode) if mode else self.model
        self.optimizer.zero_grad(set_to_none=True)

    def _hooked_gradients(self) -> GradientSync:
        """Give every rank rank 0's model and optimizer, and let their gradients be exchanged."""
        return self.collective.wrap(self.model, self.optimizer, self.config.sync)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the leader's own state, which is every rank's."""
        optimizer = self.optimizer_state()
        if not self.collective.world.is_leader:
            return None
        return {"model": self.model.state_dict(), "optimizer": optimizer, "sync": self.gradients.state_dict()}

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
            self.gradients.load_state_dict(layout)

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return the optimizer's state as one plain optimizer has it, on the leader; every rank calls it."""
        return self.optimizer.state_dict() if self.collective.world.is_leader else None

    def load_optimizer_state(self, state: dict[str, Any] | None) -> None:
        """Take over the leader's ``state`` of a plain optimizer; every rank calls it."""

        def load() -> None:
            with fitting("optimizer"):
                self.optimizer.load_state_dict(state or {})

        on_leader(self.collective, load)
        self.gradients.share_optimizer()

    def rank_state(self) -> Any:
        """Return what compression has left to send."""
        return self.gradients.rank_state()

    def load_rank_state(self, state: Any) -> None:
        """Send that first."""
        with fitting("state of a rank"), torch.no_grad():
            self.gradients.load_rank_state(state)

    def end_epoch(self) -> None:
        """Give all ranks rank 0's buffers; weights, too, where they may have drifted apart.

        Ranks compute what compressed gradients stand for each by itself, and processors of two kinds may round it
        differently.
        """
        self.share_buffers()
        if self.config.sync.compression not in (None, "fp16", "bf16"):
            with torch.no_grad():
                self.collective.broadcast(list(self.model.parameters()))

    def gather_model(self) -> torch.nn.Module:
        """Return the model, which is whole on every rank."""
        return self.model

    def close(self) -> None:
        """Remove every hook."""
        if hasattr(self, "gradients"):  # build() may have failed before
            self.gradients.close()


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
