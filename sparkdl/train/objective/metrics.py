"""Metrics of an epoch, exact over all ranks, with one exchange between ranks an epoch.

Enters: outputs and labels of each batch. Leaves: one number a metric. torchmetrics keep their own states, which are
merged by the rule each state declares; functions are averaged, weighted by rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from sparkdl.errors import ConfigError
from sparkdl.train.objective.labels import metric_pair
from sparkdl.train.objective.loss import split_outputs
from sparkdl.train.source import BatchLike
from sparkdl.train.task import takes_no_arguments

__all__ = ["MetricSet"]


class _Gatherer(Protocol):
    def all_gather_object(self, value: Any) -> list[Any]: ...


class MetricSet:
    """The metrics of one data set (training or validation) on one rank.

    Args:
        given: ``Task.metrics``.
        labels: ``Task.labels``.
        device: where states live.

    Raises:
        ConfigError: an entry is neither a metric nor a function.
    """

    def __init__(self, given: Mapping[str, Any], labels: Sequence[str], device: torch.device) -> None:
        self._labels = tuple(labels)
        self._entries: dict[str, _Entry] = {}
        for name, position, value in _flat(given, self._labels):
            made = value() if takes_no_arguments(value) else value
            self._entries[name] = _Metric(made, position, device) if _is_metric(made) else _Mean(name, made, position)

    def __bool__(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._entries)

    @property
    def names(self) -> list[str]:
        """Names of the metrics, before a metric of several values becomes several columns."""
        return list(self._entries)

    def higher_is_better(self, name: str) -> bool | None:
        """What the metric ``name`` says of itself; None if it says nothing."""
        entry = self._entries.get(name)
        return entry.higher_is_better if entry is not None else None

    def update(self, outputs: Any, batch: BatchLike) -> None:
        """Take in one batch of at least one row."""
        split = split_outputs(outputs, self._labels)
        for entry in self._entries.values():
            entry.update(split[entry.position], batch[self._labels[entry.position]], batch.rows)

    def compute(self, collective: _Gatherer, world_size: int) -> dict[str, float]:
        """Return every metric over all rows of all ranks since the last call, and start over.

        A metric of several values gives one column each, ``<name>_<index>`` or ``<name>_<key>``.
        """
        if not self._entries:
            return {}
        states = self.state()
        everyone = collective.all_gather_object(states) if world_size > 1 else [states]
        found: dict[str, float] = {}
        for index, (name, entry) in enumerate(self._entries.items()):
            entry.load([states[index] for states in everyone])
            found |= _columns(name, entry.result())
            entry.reset()
        return found

    def state(self) -> list[Any]:
        """Return what this rank has gathered since the last ``compute``, on the CPU."""
        return [entry.state() for entry in self._entries.values()]

    def load_state(self, states: Sequence[list[Any]]) -> None:
        """Take over what one or several ranks had gathered."""
        for index, entry in enumerate(self._entries.values()):
            entry.load([state[index] for state in states])


class _Entry(Protocol):
    position: int
    higher_is_better: bool | None

    def update(self, output: Any, label: torch.Tensor, rows: int) -> None: ...
    def state(self) -> Any: ...
    def load(self, states: list[Any]) -> None: ...
    def result(self) -> Any: ...
    def reset(self) -> None: ...


class _Mean:
    """A plain function, averaged over the rows; sums stay on the device until the end of the epoch."""

    higher_is_better: bool | None = None

    def __init__(self, name: str, function: Callable[..., Any], position: int) -> None:
        if not callable(function):
            raise ConfigError(
                f"metric {name!r} is a {type(function).__name__}: give a torchmetrics metric or a function"
            )
        self._name, self._function, self.position = name, function, position
        self._sum: Any = 0.0
        self._rows = 0

    def update(self, output: Any, label: torch.Tensor, rows: int) -> None:
        value = self._function(*metric_pair(output, label, classes=False))
        if isinstance(value, torch.Tensor):
            value = value.detach().double()
            if value.numel() != 1:
                value = value.mean()
        self._sum = self._sum + value * rows
        self._rows += rows

    def state(self) -> tuple[float, int]:
        return float(self._sum), self._rows

    def load(self, states: list[tuple[float, int]]) -> None:
        self._sum, self._rows = sum(total for total, _ in states), sum(rows for _, rows in states)

    def result(self) -> float:
        return float(self._sum) / self._rows if self._rows else float("nan")

    def reset(self) -> None:
        self._sum, self._rows = 0.0, 0


class _Metric:
    """A torchmetrics metric, wrappers and compositions of metrics included."""

    def __init__(self, metric: Any, position: int, device: torch.device) -> None:
        from torchmetrics import Metric

        self._metric = copy.deepcopy(metric).to(device)  # training and validation each have a state of their own
        self._parts = [part for part in self._metric.modules() if isinstance(part, Metric)]
        self._classes = any("torchmetrics.classification" in type(part).__module__ for part in self._parts)
        for part in self._parts:
            # States are merged here, over whichever collective the run uses; where torch.distributed happens to be up,
            # the metric would add its own exchange on top, and count every rank twice.
            part.sync_on_compute = part._to_sync = False
        self.position = position
        self.higher_is_better: bool | None = getattr(self._metric, "higher_is_better", None)
        self.reset()

    def update(self, output: Any, label: torch.Tensor, rows: int) -> None:
        self._metric.update(*metric_pair(output, label, classes=self._classes))

    def state(self) -> list[dict[str, Any]]:
        """For each part, how often it was updated and its states on the CPU, lists of tensors joined."""
        found = []
        for part in self._parts:
            states: dict[str, Any] = {"": part.update_count}
            for name in part._reductions:
                value = getattr(part, name)
                if isinstance(value, list):
                    joinable = part._reductions[name] is not None and len(value) > 1
                    value = [torch.cat([v.reshape(1) if v.ndim == 0 else v for v in value])] if joinable else value
                    states[name] = [v.detach().cpu() for v in value]
                else:
                    states[name] = value.detach().cpu()
            found.append(states)
        return found

    def load(self, states: list[list[dict[str, Any]]]) -> None:
        for index, part in enumerate(self._parts):
            ranks = [rank[index] for rank in states]
            used = [rank for rank in ranks if rank[""] > 0] or ranks[:1]
            for name, reduction in part._reductions.items():
                setattr(part, name, _merged([rank[name] for rank in used], reduction, part.device))
            part._update_count = sum(rank[""] for rank in ranks)
            part._computed = None

    def result(self) -> Any:
        return self._metric.compute()

    def reset(self) -> None:
        for part in self._parts:
            part.reset()


def _merged(values: list[Any], reduction: Any, device: torch.device) -> Any:
    """One state out of those of all ranks that were updated, as the metric declares it."""
    if isinstance(values[0], list):
        flat = [tensor.to(device) for value in values for tensor in value]
        return [reduction(flat)] if reduction is not None and flat else flat
    if len(values) == 1:
        return values[0].to(device)
    stacked = torch.stack(values).to(device)
    return stacked if reduction is None else reduction(stacked)


def _is_metric(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("update", "compute", "reset", "_reductions")) or (
        type(value).__name__ == "MetricCollection"
    )


def _flat(given: Mapping[str, Any], labels: Sequence[str]) -> list[tuple[str, int, Any]]:
    """Each metric with its column name and the position of its label; collections taken apart."""
    if not given:
        return []
    if not labels:
        raise ConfigError(f"metrics {sorted(given)} have no label to compare with: name labels, or leave them out")
    found: list[tuple[str, int, Any]] = []
    nested = all(isinstance(value, Mapping) and not _is_metric(value) for value in given.values())
    unknown = sorted(set(given) - set(labels)) if nested else []
    if unknown:
        raise ConfigError(f"metrics are given for {unknown}, the labels are {list(labels)}: use the labels' names")
    for position, label in enumerate(labels):
        chosen = given.get(label, {}) if nested else given
        for name, value in chosen.items():
            column = name if len(labels) == 1 else f"{label}_{name}"
            if type(value).__name__ == "MetricCollection":
                found += [(f"{column}_{part}", position, metric) for part, metric in value.items(copy_state=False)]
            else:
                found.append((column, position, value))
    return found


def _columns(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(part) for key, part in value.items()}
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return {f"{name}_{index}": part for index, part in enumerate(value.flatten().tolist())}
    if isinstance(value, torch.Tensor | int | float):
        return {name: float(value)}
    raise ConfigError(f"metric {name!r} computes a {type(value).__name__}: use one that computes numbers")
