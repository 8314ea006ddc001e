"""The result of a training run: its history as two tables, and its end."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparkdl.config import require

_STEP_COLUMNS = ("step", "epoch", "loss", "lr", "grad_norm")


class History:
    """One row a step, one row an epoch.

    ``steps`` holds, by column, ``step`` (from 1), ``epoch`` (from 0), ``loss`` (mean over the global batch), ``lr`` (of
    the first parameter group) and ``grad_norm`` (before clipping; NaN without clipping), 40 bytes a step.
    ``epochs`` is a list of rows: ``epoch``, ``step``, ``loss``, ``val_loss``, metrics, ``lr``, ``seconds``, ``rows``.
    """

    def __init__(self) -> None:
        self.steps: dict[str, array[float]] = {name: array("d") for name in _STEP_COLUMNS}
        self.epochs: list[dict[str, float]] = []
        self._table, self._tabled = np.zeros((len(_STEP_COLUMNS), 0)), 0

    def add_steps(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Append the rows of several optimizer steps, given by column."""
        for name, column in self.steps.items():
            column.extend(columns[name])

    def drop_step(self) -> None:
        """Take the last step's row away, which its other batches change."""
        for column in self.steps.values():
            column.pop()
        self._tabled = min(self._tabled, len(self.steps["step"]))

    def add_epoch(self, row: Mapping[str, float]) -> None:
        """Append the row of one epoch."""
        self.epochs.append(dict(row))

    def __len__(self) -> int:
        """Number of epochs."""
        return len(self.epochs)

    def step_rows(self) -> list[dict[str, float]]:
        """The table of steps as a list of rows."""
        rows = [dict(zip(self.steps, values, strict=True)) for values in zip(*self.steps.values(), strict=True)]
        for row in rows:
            row["step"], row["epoch"] = int(row["step"]), int(row["epoch"])
        return rows

    def to_pandas(self, table: str = "epochs") -> Any:
        """Return ``"epochs"`` or ``"steps"`` as a pandas data frame.

        Raises:
            ConfigError: there is no such table.
        """
        import pandas as pd

        require(table in ("epochs", "steps"), f"there is no table {table!r}: choose 'epochs' or 'steps'")
        return pd.DataFrame(self.step_rows() if table == "steps" else self.epochs)

    def column(self, name: str) -> list[float]:
        """Values of an epoch column, in order of the epochs that have it."""
        return [row[name] for row in self.epochs if name in row]

    def state_dict(self) -> dict[str, Any]:
        """Return both tables; the steps as one float64 tensor ``(columns, capacity)``.

        Its capacity is a power of two, so that the layout of a checkpoint changes rarely while the table grows. Rows
        are only ever added, so one table serves all calls, and each copies the new ones alone: training waits for it.
        """
        rows = len(self.steps["step"])
        capacity = 1 << max(rows - 1, 1023).bit_length()
        if self._table.shape[1] != capacity:
            self._table, self._tabled = np.zeros((len(_STEP_COLUMNS), capacity)), 0
        if rows > self._tabled:
            for target, column in zip(self._table, self.steps.values(), strict=True):
                target[self._tabled : rows] = np.frombuffer(column)[self._tabled :]
            self._tabled = rows
        return {"steps": torch.from_numpy(self._table), "rows": rows, "epochs": self.epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over both tables."""
        table = state["steps"][:, : state["rows"]].tolist()
        self.steps = {name: array("d", values) for name, values in zip(_STEP_COLUMNS, table, strict=True)}
        self.epochs = [dict(row) for row in state["epochs"]]
        self._table, self._tabled = np.zeros((len(_STEP_COLUMNS), 0)), 0


@dataclass(kw_only=True)
class TrainResult:
    """The end of a run, equal on all ranks.

    Attributes:
        model: the trained module of this rank; its weights are those of the best epoch where that was asked for.
        optimizer: with its state after the last step; None once it has left this rank.
        history: one row a step and one row an epoch, earlier parts of a resumed run included.
        backend: what carried the gradients: ``"torch"``, ``"horovod"``, or ``"torch, gradients in shared memory"``.
        metrics: the row of the epoch the weights belong to: losses and metrics by column name.
        monitor: the column by which epochs were compared.
        best_epoch: the epoch with the best ``monitor``, from 0; None if none was compared.
        best_value: ``monitor`` of that epoch.
        epochs: epochs that were finished, earlier parts of a resumed run included.
        steps: optimizer steps, likewise.
        rows: rows of all ranks that were trained on, likewise.
        seconds: wall-clock seconds of this call.
        stopped_early: whether the run ended before its last epoch.
        stop_reason: why, if it did.
        resumed_step: the step of the checkpoint this call continued from; None for a fresh or a warm start.
    """

    model: torch.nn.Module
    history: History
    optimizer: torch.optim.Optimizer | None = None
    backend: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    monitor: str = "loss"
    best_epoch: int | None = None
    best_value: float | None = None
    epochs: int = 0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    stopped_early: bool = False
    stop_reason: str | None = None
    resumed_step: int | None = None
