"""What a fitted model holds besides its plain parameters: the module, its history, optimizer and loss.

Enters: what the fit made, or what the caller sets. Leaves: the same, under the names of Horovod's getters and setters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from sparkdl.errors import ConfigError
from sparkdl.estimator.params.params import CheckedParams
from sparkdl.estimator.saving.saved import Withheld
from sparkdl.estimator.summary import TrainingSummary, epoch_rows, horovod_history, plot_epochs
from sparkdl.models.calling import check_batch_norm

__all__ = ["TrainedParts", "checked_module"]


class TrainedParts(CheckedParams):
    """Getters and setters of what a ``TorchModel`` holds."""

    _model: torch.nn.Module | None
    _history: list[Any]
    _summary: TrainingSummary | None
    _optimizer: Any
    _loss: Any
    _loss_constructors: Any

    @property
    def history(self) -> Any:
        """The epochs as a pandas DataFrame: losses, metrics, learning rate, seconds and rows."""
        import pandas as pd

        return pd.DataFrame(self._history)

    @property
    def summary(self) -> TrainingSummary:
        """The course of the fit.

        Raises:
            ConfigError: this model was not fitted by sparkdl.
        """
        if self._summary is None:
            raise ConfigError("this model has no summary: it was made around a module, not fitted")
        return self._summary

    @property
    def hasSummary(self) -> bool:
        """Whether there is a summary."""
        return self._summary is not None

    def plot_history(self) -> Any:
        """Draw losses and metrics over epochs; return the matplotlib figure."""
        return plot_epochs(self._history)

    def getModel(self) -> torch.nn.Module:
        """Return the module, on the CPU, in evaluation mode.

        Raises:
            ConfigError: there is none.
        """
        if self._model is None:
            raise ConfigError("this TorchModel holds no model: give model=, or use TorchModel.load(path)")
        return self._model

    def getHistory(self) -> list[dict[str, Any]]:
        """Return the epochs in Horovod's form: ``{"epoch", "train": {...}, "validation": {...}}``."""
        return horovod_history(self._history)

    def setHistory(self, value: Sequence[Any]) -> Self:
        """Set the epochs: rows of the epoch table, or as ``getHistory()`` returns them."""
        self._history = epoch_rows(value)
        return self

    def getOptimizer(self) -> Any:
        """Return the optimizer with its state after the last step, bound to the parameters of ``getModel()``.

        None where it was given as a function that only works on a rank.

        Raises:
            BundleError: it is saved as a pickle, and whoever loaded this model has not allowed any.
        """
        return _given(self._optimizer)

    def setOptimizer(self, value: Any) -> Self:
        """Set the optimizer."""
        self._optimizer = value
        return self

    def getLoss(self) -> Any:
        """Return the loss that the model was trained with.

        Raises:
            BundleError: it is saved as a pickle, and whoever loaded this model has not allowed any.
        """
        return _given(self._loss)

    def setLoss(self, value: Any) -> Self:
        """Set the loss."""
        self._loss = value
        return self

    def getLossConstructors(self) -> Any:
        """Return the functions that made the loss.

        Raises:
            BundleError: they are saved as a pickle, and whoever loaded this model has not allowed any.
        """
        return _given(self._loss_constructors)

    def setLossConstructors(self, value: Any) -> Self:
        """Set the functions that made the loss."""
        self._loss_constructors = value
        return self

    def setLabelColoumns(self, value: list[str]) -> Self:
        """Set label_columns, under the name that Horovod misspells."""
        return self.setParams(label_columns=value)  # type: ignore[no-any-return]


def checked_module(given: Any) -> torch.nn.Module | None:
    """Return the module, which is one, and says of a row the same whatever lies beside it.

    Raises:
        ConfigError: it is something else, or has batch norm without running statistics.
    """
    if given is None:
        return None
    if isinstance(given, torch.nn.Module):
        check_batch_norm(given)
        return given
    name = getattr(given, "__name__", type(given).__name__)
    raise ConfigError(
        f"model={name} is no torch.nn.Module: give the module itself, such as {name}(...), with its weights"
    )


def _given(value: Any) -> Any:
    if isinstance(value, Withheld):
        raise value.refusal()
    return value
