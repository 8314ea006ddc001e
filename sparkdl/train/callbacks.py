"""Hooks of a user's own into the run.

Enters: the events of the loop. Leaves: whatever a callback does with them; it may look at everything, log, and ask the
run to stop, on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError

if TYPE_CHECKING:
    from sparkdl.train.run import Run

__all__ = ["Callback", "Hooks"]


class Callback:
    """Override what you need; every hook is called on every rank, unless ``leader_only``.

    A callback travels to the ranks by pickling, so each rank has its own copy, rank 0's of which keeps its
    ``state_dict`` in checkpoints. A hook that talks to other ranks must not be ``leader_only``.

    Attributes:
        leader_only: call the hooks on rank 0 alone.
    """

    leader_only: bool = False

    def on_fit_start(self, run: Run) -> None:
        """Before the first step; a resumed run has its state already."""

    def on_epoch_start(self, run: Run) -> None:
        """Before the first batch of an epoch."""

    def on_step_end(self, run: Run) -> None:
        """After each optimizer step. ``run.loss`` costs a wait for the device: ask for it rarely."""

    def on_validation_start(self, run: Run) -> None:
        """Before each validation."""

    def on_validation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """After each validation, with its columns (``val_loss``, ...), equal on all ranks."""

    def on_epoch_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """After each epoch, with its row of the history, equal on all ranks."""

    def on_checkpoint(self, run: Run) -> None:
        """After a checkpoint's content was taken; it becomes durable a little later."""

    def on_fit_end(self, run: Run) -> None:
        """After the last epoch, with the final weights in the model."""

    def on_error(self, run: Run, error: BaseException) -> None:
        """When the run ends by an error; other ranks may be gone already."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: numbers, strings, tensors, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""


class Hooks:
    """The callbacks of one rank, ready to be called: only hooks that somebody overrides cost anything.

    Raises:
        ConfigError: one of them is no ``Callback``.
    """

    def __init__(self, callbacks: Sequence[Callback], is_leader: bool) -> None:
        unknown = [type(c).__name__ for c in callbacks if not isinstance(c, Callback)]
        if unknown:
            raise ConfigError(
                f"callbacks holds {unknown}, which are none: derive them from sparkdl.train.callbacks.Callback"
            )
        self.callbacks = list(callbacks)
        self._active = [callback for callback in callbacks if is_leader or not callback.leader_only]
        self.step_end = self._overridden("on_step_end")

    def call(self, hook: str, *arguments: Any) -> None:
        """Call ``hook`` of every callback that overrides it, in order."""
        for function in self._overridden(hook):
            function(*arguments)

    def _overridden(self, hook: str) -> list[Callable[..., None]]:
        plain = getattr(Callback, hook)
        return [getattr(c, hook) for c in self._active if getattr(type(c), hook, plain) is not plain]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each callback, in order."""
        return [callback.state_dict() for callback in self.callbacks]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over the states, as far as the callbacks are the same ones in the same order."""
        for callback, state in zip(self.callbacks, states, strict=False):
            callback.load_state_dict(state)
