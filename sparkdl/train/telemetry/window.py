"""The losses of the newest steps, looked at on all ranks together once a window."""

from __future__ import annotations

import math
from typing import Any

import torch

from sparkdl.collective.base import Collective
from sparkdl.errors import NonFiniteLossError
from sparkdl.train.callbacks import Run
from sparkdl.train.source import BatchLike


class LossWindow:
    """Collects losses on the device; one all-reduce and one wait for the device a window.

    The history gets the loss of the global batch, and all ranks decide alike when a loss is not finite or a rank asks
    to stop.

    On the CPU, where nobody waits, numbers are kept instead: fifty small tensors between the large ones of fifty steps
    keep the allocator from giving each step the memory of the step before, which is still in the cache.

    Args:
        collective: the ranks.
        run: whose history gets the rows.
    """

    def __init__(self, collective: Collective, run: Run) -> None:
        self._collective, self._run = collective, run
        self._device = torch.device(collective.world.device)
        self._reads = self._device.type == "cpu"
        self._values: list[Any] = []
        self._facts: list[tuple[int, int, int, int, float]] = []
        self._norms: dict[int, Any] = {}
        self._open: tuple[int, float, int, float] | None = None
        self.epoch_sum = 0.0
        self.epoch_rows = 0
        self.newest: float | None = None

    def add(self, value: torch.Tensor, batch: BatchLike, step: int, lr: float) -> None:
        """Take in one batch's contribution to the loss; ``step`` is the optimizer step it goes into, from 1."""
        self._values.append(value.item() if self._reads else value)
        self._facts.append((step, batch.step, batch.rows, batch.global_rows, lr))

    def add_norm(self, norm: torch.Tensor, step: int) -> None:
        """Take in the gradient norm of one optimizer step, from 1."""
        self._norms[step] = norm.item() if self._reads else norm

    def start_epoch(self) -> None:
        """Forget the sums of the epoch before."""
        self.epoch_sum, self.epoch_rows = 0.0, 0

    @property
    def epoch_loss(self) -> float:
        """Mean over the rows of the epoch so far."""
        return self.epoch_sum / self.epoch_rows if self.epoch_rows else math.nan

    def flush(self) -> None:
        """Exchange the losses, add their rows to the history, and let all ranks decide alike.

        Raises:
            NonFiniteLossError: on every rank, naming the first step, the rank and the batch.
        """
        request = self._run.stop_request
        local = self._joined(self._values or [0.0])
        size = self._collective.world.size
        if size > 1:
            flag = torch.full((1,), 0.0 if request is None else 1.0, dtype=torch.float64, device=self._device)
            *losses, requested = (self._collective.all_reduce(torch.cat((local, flag)), "sum") / size).tolist()
        else:
            losses, requested = local.tolist(), 0.0 if request is None else 1.0
        if self._facts:
            if not all(map(math.isfinite, losses)):
                self._raise_non_finite(local.tolist())
            self._record(losses)
        self._values, self._facts, self._norms = [], [], {}
        if requested:
            self._run.agree_to_stop(self._collective.all_gather_object(request) if size > 1 else [request])

    def _joined(self, values: list[Any]) -> torch.Tensor:
        if isinstance(values[0], torch.Tensor):
            return torch.stack(values).to(torch.float64)
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    def _record(self, losses: list[float]) -> None:
        """Add the rows of the window's steps; a step of several batches is their mean by rows."""
        steps, _, _, rows, rates = (list(column) for column in zip(*self._facts, strict=True))
        self.epoch_rows += sum(rows)
        for loss, count in zip(losses, rows, strict=True):  # one by one: the same sum wherever windows end
            self.epoch_sum += loss * count
        if self._open is not None or steps[0] + len(steps) - 1 != steps[-1]:
            steps, losses, rates = self._by_step(steps, losses, rows, rates)
        norms = (
            dict(zip(self._norms, self._joined(list(self._norms.values())).tolist(), strict=True))
            if self._norms
            else {}
        )
        self._run.history.add_steps(
            {
                "step": steps,
                "epoch": [self._run.epoch] * len(steps),
                "loss": losses,
                "lr": rates,
                "grad_norm": [norms.get(step, math.nan) for step in steps],
            }
        )
        self.newest = losses[-1]

    def _by_step(self, steps: list[int], losses: list[float], rows: list[int], rates: list[float]) -> Any:
        """Join the batches of each step, those of an earlier window included that went into a step of this one."""
        table: dict[int, tuple[float, int, float]] = {}
        if self._open is not None and self._open[0] == steps[0]:
            table[steps[0]] = self._open[1:]
            self._run.history.drop_step()
        for step, loss, count, rate in zip(steps, losses, rows, rates, strict=True):
            total, so_far, _ = table.get(step, (0.0, 0, rate))
            table[step] = (total + loss * count, so_far + count, rate)
        last = next(reversed(table))
        self._open = (last, *table[last])
        return list(table), [t / n for t, n, _ in table.values()], [rate for _, _, rate in table.values()]

    def _raise_non_finite(self, local: list[float]) -> None:
        non_finite = next(((index, value) for index, value in enumerate(local) if not math.isfinite(value)), None)
        everyone = self._collective.all_gather_object(
            None
            if non_finite is None
            else (non_finite[0], self._collective.world.rank, non_finite[1], self._facts[non_finite[0]])
        )
        _, rank, value, (step, batch, rows, global_rows, lr) = min(
            (entry for entry in everyone if entry is not None), key=lambda entry: entry[:2]
        )
        raise NonFiniteLossError(
            f"the loss of rank {rank} is {value} at step {step} (epoch {self._run.epoch}, batch {batch}: {rows} of its "
            f"{global_rows} rows, learning rate {lr:g}): lower the learning rate, clip gradients with max_grad_norm, "
            "or look for NaN and infinite values in this batch"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the epoch so far; call after ``flush``."""
        return {"sum": self.epoch_sum, "rows": self.epoch_rows, "open": self._open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the sums of an epoch under way."""
        self.epoch_sum, self.epoch_rows, self._open = state["sum"], int(state["rows"]), state.get("open")
