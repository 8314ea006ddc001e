"""Metrics of an epoch, exact over all ranks, with one exchange between ranks an epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from sparkdl.errors import ConfigError
from sparkdl.train.objective.labels import metric_pair
from sparkdl.train.objective.loss import split_outputs
from sparkdl.train.objective.named_metrics import MetricRule, NamedMetric
from sparkdl.train.source import BatchLike
from sparkdl.train.task import takes_no_arguments

MOST_BYTES = 256 << 20
"""The most bytes of outputs and labels that one rank keeps for a metric given as a function, or one that ranks rows."""


class _Gatherer(Protocol):
    def all_gather_object(self, value: Any) -> list[Any]: ...


class MetricSet:
    """The metrics of one data set (training or validation) on one rank.

    What a name means adds up (``named_metrics.py``); torchmetrics keep their own states, which are merged by the rule
    each state declares; a function is computed once, over the outputs and labels of all rows.

    Args:
        metrics: ``Task.metrics``.
        labels: ``Task.labels``.
        device: where states live.

    Raises:
        ConfigError: an entry is neither a metric nor a function, or has the name of another column of an epoch.
    """

    def __init__(self, metrics: Mapping[str, Any], labels: Sequence[str], device: torch.device) -> None:
        self._labels = tuple(labels)
        self._entries: dict[str, _Entry] = {}
        for name, position, value in _flat(metrics, self._labels):
            if isinstance(value, NamedMetric):
                self._entries[name] = _Named(value, position)
                continue
            metric = value() if takes_no_arguments(value) else value
            self._entries[name] = (
                _Metric(metric, position, device) if _is_metric(metric) else _Function(name, metric, position)
            )
        columns = {"epoch", "step", "loss", "lr", "seconds", "rows"}
        columns |= {f"{label}_loss" for label in self._labels if len(self._labels) > 1}
        for name in self._entries:
            of_validation = name.startswith("val_") and name.removeprefix("val_") in {*columns, *self._entries}
            if name in columns or of_validation:
                raise ConfigError(f"metric {name!r} has the name of another column of the history: name it otherwise")

    def __bool__(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._entries)

    @property
    def names(self) -> list[str]:
        """Names of the metrics, before a metric of several values becomes several columns."""
        return list(self._entries)

    def higher_is_better(self, name: str) -> bool | None:
        """What the metric whose column is ``name`` says of itself; None if it says nothing."""
        owners = [entry for entry in self._entries if name == entry or name.startswith(f"{entry}_")]
        return self._entries[max(owners, key=len)].higher_is_better if owners else None

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
        values: dict[str, float] = {}
        for index, (name, entry) in enumerate(self._entries.items()):
            entry.load([states[index] for states in everyone])
            values |= _columns(name, entry.result())
            entry.reset()
        return values

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


class _Function:
    """A function of outputs and labels, called once with all rows: a mean of batches would be another number.

    Outputs and labels are kept for an epoch, at most ``MOST_BYTES`` of them on a rank.
    """

    higher_is_better: bool | None = None

    def __init__(self, name: str, function: Callable[..., Any], position: int) -> None:
        if not callable(function):
            raise ConfigError(
                f"metric {name!r} is a {type(function).__name__}: give a torchmetrics metric or a function"
            )
        self._name, self._function, self.position = name, function, position
        self._batches: list[Any] = []
        self._bytes = 0

    def update(self, output: Any, label: torch.Tensor, rows: int) -> None:
        pair = _copied(metric_pair(output, label, classes=False))
        self._bytes += _bytes(pair)
        if self._bytes > MOST_BYTES:
            raise ConfigError(
                f"metric {self._name!r} is a function, computed over all rows, and their outputs and labels exceed "
                f"{MOST_BYTES >> 20} MiB on one rank: give a torchmetrics metric, which keeps sums alone"
            )
        self._batches.append(pair)

    def state(self) -> Any:
        return _joined([_moved(batch, "cpu") for batch in self._batches]) if self._batches else None

    def load(self, states: list[Any]) -> None:
        self._batches = [state for state in states if state is not None]
        self._bytes = sum(map(_bytes, self._batches))

    def result(self) -> Any:
        if not self._batches:
            return float("nan")
        value = self._function(*_joined(self._batches))
        return value.detach().double().mean() if isinstance(value, torch.Tensor) else value

    def reset(self) -> None:
        self._batches, self._bytes = [], 0


def _mapped(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same nesting of tuples, lists and dicts with each tensor mapped."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(function, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_mapped(function, part) for part in value)
    return value


def _copied(value: Any) -> Any:
    """A copy: the reader uses the memory of a batch again."""
    return _mapped(lambda tensor: tensor.detach().clone(), value)


def _moved(value: Any, device: str) -> Any:
    return _mapped(lambda tensor: tensor.to(device), value)


def _bytes(value: Any) -> int:
    sizes: list[int] = []
    _mapped(lambda tensor: sizes.append(tensor.numel() * tensor.element_size()), value)
    return sum(sizes)


def _joined(parts: Sequence[Any]) -> Any:
    """Batches of one nesting joined row by row."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)) if len(parts) > 1 else first
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(column) for column in zip(*parts, strict=True))
    return first


class _Metric:
    """A torchmetrics metric, wrappers and compositions of metrics included."""

    def __init__(self, metric: Any, position: int, device: torch.device) -> None:
        from torchmetrics import Metric

        self.metric = copy.deepcopy(metric).to(device)  # training and validation each have a state of their own
        self._parts = [part for part in self.metric.modules() if isinstance(part, Metric)]
        self._classes = any("torchmetrics.classification" in type(part).__module__ for part in self._parts)
        for part in self._parts:
            # States are merged here, over whichever collective the run uses; where torch.distributed happens to be up,
            # the metric would add its own exchange on top, and count every rank twice.
            part.sync_on_compute = part._to_sync = False
        self.position = position
        self.higher_is_better: bool | None = getattr(self.metric, "higher_is_better", None)
        self.reset()

    def update(self, output: Any, label: torch.Tensor, rows: int) -> None:
        self.metric.update(*metric_pair(output, label, classes=self._classes))

    def state(self) -> list[dict[str, Any]]:
        """The number of updates of each part, and its states on the CPU, lists of tensors joined."""
        part_states = []
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
            part_states.append(states)
        return part_states

    def load(self, states: list[list[dict[str, Any]]]) -> None:
        for index, part in enumerate(self._parts):
            ranks = [rank[index] for rank in states]
            used = [rank for rank in ranks if rank[""] > 0] or ranks[:1]
            for name, reduction in part._reductions.items():
                setattr(part, name, _merged([rank[name] for rank in used], reduction, part.device))
            part._update_count = sum(rank[""] for rank in ranks)
            part._computed = None

    def result(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        for part in self._parts:
            part.reset()


class _Named:
    """A metric by name; the first output tells of how many classes, so a rank without rows has no state."""

    def __init__(self, named: NamedMetric, position: int) -> None:
        self._named, self.position = named, position
        self.higher_is_better: bool | None = named.higher_is_better
        self._rule: MetricRule | None = None
        self._bytes = 0

    def update(self, output: Any, label: torch.Tensor, rows: int) -> None:
        name = self._named.name
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"metric {name!r} is of a tensor, the output is a {type(output).__name__}: give a function"
            )
        if self._rule is None:
            self._rule = MetricRule(self._named, output.shape[1] if output.ndim > 1 else 1)
        if self._rule.keeps_rows:
            self._bytes += 8 * (output.numel() + label.numel())
            if self._bytes > MOST_BYTES:
                raise ConfigError(
                    f"metric {name!r} keeps the probability and label of each row, and these exceed "
                    f"{MOST_BYTES >> 20} MiB on one rank: give a torchmetrics metric with thresholds"
                )
        self._rule.update(output, label)

    def state(self) -> Any:
        return None if self._rule is None else (self._rule.width, self._rule.state())

    def load(self, states: list[Any]) -> None:
        self._rule, self._bytes = None, 0
        of_ranks = [state for state in states if state is not None]
        if of_ranks:
            self._rule = MetricRule(self._named, of_ranks[0][0])
            self._rule.load([state for _, state in of_ranks])

    def result(self) -> float:
        return float("nan") if self._rule is None else self._rule.result()

    def reset(self) -> None:
        self._bytes = 0
        if self._rule is not None:
            self._rule.reset()


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


def _flat(metrics: Mapping[str, Any], labels: Sequence[str]) -> list[tuple[str, int, Any]]:
    """Each metric with its column name and the position of its label; collections taken apart."""
    if not metrics:
        return []
    if not labels:
        raise ConfigError(f"metrics {sorted(metrics)} have no label to compare with: name labels, or leave them out")
    flat_metrics: list[tuple[str, int, Any]] = []
    nested = all(isinstance(value, Mapping) and not _is_metric(value) for value in metrics.values())
    unknown = sorted(set(metrics) - set(labels)) if nested else []
    if unknown:
        raise ConfigError(f"metrics are given for {unknown}, the labels are {list(labels)}: use the labels' names")
    for position, label in enumerate(labels):
        label_metrics = metrics.get(label, {}) if nested else metrics
        for name, value in label_metrics.items():
            column = name if len(labels) == 1 else f"{label}_{name}"
            if type(value).__name__ == "MetricCollection":
                flat_metrics += [
                    (f"{column}_{part}", position, metric) for part, metric in value.items(copy_state=False)
                ]
            else:
                flat_metrics.append((column, position, value))
    return flat_metrics


def _columns(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(part) for key, part in value.items()}
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return {f"{name}_{index}": part for index, part in enumerate(value.flatten().tolist())}
    if isinstance(value, torch.Tensor | int | float):
        return {name: float(value)}
    raise ConfigError(f"metric {name!r} computes a {type(value).__name__}: use one that computes numbers")
