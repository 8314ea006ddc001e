"""Calls the model on two made-up rows, on the driver, before any rank starts.

Enters: a copy of the model, its inputs and the manifest of the shards. Leaves: how the model is to be called and what
it returns; or an error that names shapes and ranges. The two rows hold every column's least and greatest value, so that
an id beyond an embedding's table, or a class beyond the outputs, shows here and not on rank 7 an hour later.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.batches.reading.batch import Batch
from sparkdl.columns.spec import TensorSpec
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.fit.views import InputView, Style, Views
from sparkdl.shards.manifest import Manifest
from sparkdl.train.objective.loss import split_outputs

__all__ = ["Output", "Probe", "floating_dtype", "probe", "two_rows"]

ROWS = 2


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the model.

    Attributes:
        label: the label it is compared with.
        shape: of one row: ``()`` or ``(k,)``, or more dimensions.
        dtype: torch's name of it.
    """

    label: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found.

    Attributes:
        views: how the model is called.
        outputs: one a label.
        batch: the two rows.
        returned: what the model returned for them.
    """

    views: Views
    outputs: tuple[Output, ...]
    batch: Batch
    returned: Any


def floating_dtype(model: torch.nn.Module) -> str:
    """The dtype of the model's first floating parameter; float32 without one."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.float32, torch.float64):
            return str(parameter.dtype).removeprefix("torch.")
    return "float32"


def two_rows(manifest: Manifest) -> Batch:
    """Return two rows with the least and the greatest value of every column."""
    tensors: dict[str, torch.Tensor] = {}
    for spec in manifest.tensors:
        if spec.role != "mask":
            tensors[spec.name] = _extremes(spec, manifest)
        if spec.ragged or spec.dtype == "binary":
            tensors[f"{spec.name}__valid"] = torch.ones(tensors[spec.name].shape[:2], dtype=torch.bool)
    return Batch(tensors, epoch=0, step=0, rows=ROWS, global_rows=ROWS, weight=1.0)


def _extremes(spec: TensorSpec, manifest: Manifest) -> torch.Tensor:
    if spec.dtype == "binary":
        lengths = manifest.statistics.get(spec.columns[0])
        return torch.zeros(ROWS, int((lengths and lengths.max) or 1), dtype=torch.uint8)
    dtype = getattr(torch, spec.dtype)
    found = [manifest.statistics.get(column) for column in spec.columns]
    bounds = [[(getattr(one, end) or 0) if one else 0 for one in found] for end in ("min", "max")]
    packed = len(spec.columns) > 1 or (spec.shape == (1,) and spec.name != spec.columns[0])
    if packed:
        return torch.tensor(bounds, dtype=dtype)
    length = (max((found[0].max_length if found[0] else None) or 1, 1),) if spec.ragged else ()
    return torch.stack([torch.full((*length, *spec.shape), bound[0], dtype=dtype) for bound in bounds])


def probe(
    model: torch.nn.Module,
    inputs: Sequence[InputView],
    by_column: Sequence[InputView],
    manifest: Manifest,
    labels: Sequence[str],
) -> Probe:
    """Find out how ``model`` is called, and what it returns.

    Args:
        model: a copy, on the CPU.
        inputs: its inputs in order.
        by_column: one input a feature column, for models that take a dict.
        manifest: of the training shards.
        labels: the label columns.

    Raises:
        ConfigError: it cannot be called with these inputs, or returns another number of outputs or rows.
        DataError: an id lies beyond an embedding's table.
    """
    batch = two_rows(manifest)
    first: tuple[Views, Exception] | None = None
    for views in _candidates(model, tuple(inputs), tuple(by_column), batch):
        positional, named = views.arguments(batch)
        try:
            with _quiet(model):
                returned = model(*positional, **named)
        except Exception as error:
            first = first or (views, error)
            continue
        return Probe(views, _outputs(returned, labels), batch, returned)
    assert first is not None
    raise _refusal(model, *first, batch, manifest) from first[1]


def _candidates(
    model: torch.nn.Module, inputs: tuple[InputView, ...], by_column: tuple[InputView, ...], batch: Mapping[str, Any]
) -> Iterator[Views]:
    """Ways to call a model, the likeliest first."""
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in parameters}
    wants_dict = bool(parameters) and "dict" in str(parameters[0].annotation).lower() + str(parameters[0].name).lower()
    styles: list[tuple[Style, tuple[InputView, ...]]] = [("positional", inputs), ("dict", by_column)]
    if len(inputs) > 1 and {view.name for view in inputs} <= names:
        styles.insert(0, ("keywords", inputs))
    elif len(by_column) > 1 and {view.name for view in by_column} <= names:
        styles.insert(0, ("keywords", by_column))
    if wants_dict:
        styles.reverse()
    for style, views in styles:
        yield Views(views, style)
    # Horovod hands every column over as floats; a model written for that takes integers only so.
    floats = tuple(_as_float(view, batch, model) for view in inputs)
    if floats != inputs:
        yield Views(floats, "positional")


def _as_float(view: InputView, batch: Mapping[str, torch.Tensor], model: torch.nn.Module) -> InputView:
    return view if batch[view.tensor].is_floating_point() else replace(view, dtype=floating_dtype(model))


def _outputs(returned: Any, labels: Sequence[str]) -> tuple[Output, ...]:
    found = []
    for label, output in zip(labels, split_outputs(returned, labels), strict=True):
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"the model returns a {type(output).__name__} for {label!r}: return one tensor a label")
        if output.ndim == 0 or output.shape[0] != ROWS:
            raise ConfigError(
                f"the model returns shape {tuple(output.shape)} for {ROWS} rows: return one row for each that comes in"
            )
        found.append(Output(label, tuple(output.shape[1:]), str(output.dtype).removeprefix("torch.")))
    return tuple(found)


def _refusal(
    model: torch.nn.Module, views: Views, error: Exception, batch: Mapping[str, torch.Tensor], manifest: Manifest
) -> Exception:
    ids = [view for view in views.inputs if not batch[view.tensor].is_floating_point() and view.dtype is None]
    if isinstance(error, IndexError) and ids:
        ranges = ", ".join(_range(view, manifest) for view in ids)
        return DataError(f"an id lies beyond the model's table ({error}); the ids are {ranges}: enlarge the table")
    shapes = ", ".join(
        f"{view.name} {(-1, *tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"
        for view, tensor in ((view, view(batch)) for view in views.inputs)
    )
    return ConfigError(
        f"{type(model).__name__} cannot be called with {shapes} ({type(error).__name__}: {error}): "
        "set input_shapes, feature_dtypes or feature_cols"
    )


def _range(view: InputView, manifest: Manifest) -> str:
    columns = manifest.tensor(view.tensor).columns
    chosen = columns if view.index is None else columns[view.index : view.index + 1]
    found = [(column, manifest.statistics[column]) for column in chosen]
    return ", ".join(f"{column} in {stats.min}..{stats.max}" for column, stats in found)


@contextmanager
def _quiet(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes, buffers and the random state are as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    state = torch.get_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(state)
        for module, training in modes.items():
            module.training = training
