"""Calls the model on two made-up rows, on the driver, before any rank starts.

Enters: a copy of the model, its inputs and the manifest of the shards. Leaves: how the model is to be called and what
it returns; or an error that names shapes and ranges. The two rows hold every column's least and greatest value, so that
an id beyond an embedding's table, or a class beyond the outputs, shows here and not on rank 7 an hour later.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.batches.reading.batch import Batch
from sparkdl.batches.reading.gather import valid_name
from sparkdl.columns.spec import TensorSpec
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.inputs.faults import place_of_fault
from sparkdl.estimator.inputs.neighbours import check_neighbours
from sparkdl.estimator.inputs.row_lengths import is_varying, lengths_of, sole, wants_dict, with_lengths
from sparkdl.estimator.inputs.views import InputView, Style, Views
from sparkdl.models.calling import asked_forms, check_batch_norm, parameters_of, value_form
from sparkdl.models.signature import COMPANIONS, Form
from sparkdl.shards.manifest import Manifest
from sparkdl.train.objective.loss import split_outputs

__all__ = ["Output", "Probe", "floating_dtype", "probe", "two_rows"]

ROWS = 2
_UNKNOWN_LENGTHS = (5, 8)


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


def two_rows(manifest: Manifest, *, one_table: bool = True) -> Batch:
    """Return two rows with the least and the greatest value of every column, one shorter where lengths differ.

    Args:
        manifest: of the shards.
        one_table: whether all elements of a vector of integers may be as great as the greatest of them; not so where
            each place holds the ids of a table of its own: then both rows hold the least.
    """
    tensors: dict[str, torch.Tensor] = {}
    for spec in manifest.tensors:
        if spec.role == "mask":
            continue
        tensors[spec.name] = _extremes(spec, manifest, one_table)
        if is_varying(spec):
            lengths = torch.tensor(_lengths(spec, manifest))
            valid = torch.arange(int(lengths[1])) < lengths[:, None]
            if tensors[spec.name][1].any():  # the shorter row shall hold something else than padding
                tensors[spec.name] = tensors[spec.name].flip(0)
            tensors[spec.name][~valid] = 0
            tensors[valid_name(spec.name)] = valid
    return Batch(tensors, epoch=0, step=0, rows=ROWS, global_rows=ROWS, weight=1.0)


def _lengths(spec: TensorSpec, manifest: Manifest) -> tuple[int, int]:
    """Lengths of the two rows; they differ, where the longest row allows, even if those of the set do not."""
    least, most = lengths_of(spec, [manifest]) or _UNKNOWN_LENGTHS
    longest = max(most, 1)
    return min(least, max(longest - 1, 1)), longest


def _extremes(spec: TensorSpec, manifest: Manifest, one_table: bool) -> torch.Tensor:
    length = (_lengths(spec, manifest)[1],) if is_varying(spec) else ()
    if spec.dtype == "binary":
        return torch.ones(ROWS, *length, dtype=torch.uint8)
    dtype = getattr(torch, spec.dtype)
    found = [manifest.statistics.get(column) for column in spec.columns]
    bounds = [[(getattr(one, end) or 0) if one else 0 for one in found] for end in ("min", "max")]
    packed = len(spec.columns) > 1 or (spec.shape == (1,) and spec.name != spec.columns[0])
    if packed:
        return torch.tensor(bounds, dtype=dtype)
    if not one_table and spec.shape and not dtype.is_floating_point:
        bounds[1] = bounds[0]
    return torch.stack([torch.full((*length, *spec.shape), bound[0], dtype=dtype) for bound in bounds])


def probe(
    model: torch.nn.Module,
    inputs: Sequence[InputView],
    by_column: Sequence[InputView],
    manifests: Sequence[Manifest],
    labels: Sequence[str],
    *,
    written: bool = True,
) -> Probe:
    """Find out how ``model`` is called, and what it returns.

    Args:
        model: a copy, on the CPU.
        inputs: its inputs in order.
        by_column: one input a feature column, for models that take a dict.
        manifests: of the training shards, and of others whose rows it will see.
        labels: the label columns.
        written: whether the shards were written for this fit, so that the dtypes in them are the caller's to choose.

    Raises:
        ConfigError: it cannot be called with these inputs, fails by itself, returns another number of outputs or rows,
            or answers a row otherwise when another one is beside it.
        DataError: an id lies beyond an embedding's table.
    """
    check_batch_norm(model)
    for view in by_column:
        _check_bytes(view, manifests[0])
    asked = [with_lengths(model, views, manifests) for views in (inputs, by_column)]
    try:
        return _probed(model, asked[0], asked[1], manifests[0], labels, written)
    except ConfigError as error:
        fixed = [with_lengths(model, views, manifests, every=True) for views in (inputs, by_column)]
        if fixed == asked:
            raise
        try:  # it looked as if it took masks in a dict, and does not use them
            return _probed(model, fixed[0], fixed[1], manifests[0], labels, written)
        except ConfigError:
            raise error from None


def _probed(
    model: torch.nn.Module,
    inputs: tuple[InputView, ...],
    by_column: tuple[InputView, ...],
    manifest: Manifest,
    labels: Sequence[str],
    written: bool,
) -> Probe:
    first: tuple[Views, Exception] | None = None
    for one_table in (True, False):
        batch = two_rows(manifest, one_table=one_table)
        for views in _candidates(model, inputs, by_column, batch, manifest):
            try:
                returned = _called(model, views, batch)
            except Exception as error:
                first = first or (views, error)
                continue
            outputs = _outputs(returned, labels)
            check_neighbours(model, functools.partial(_called, model, views), views, batch, labels)
            return Probe(views, outputs, batch, returned)
        if first is None or not isinstance(first[1], IndexError):
            break
    assert first is not None
    remedy = "input_shapes, feature_dtypes or feature_cols" if written else "input_shapes or feature_cols"
    raise _refusal(model, *first, batch, manifest, remedy) from first[1]


def _check_bytes(view: InputView, manifest: Manifest) -> None:
    """Refuse byte strings of other lengths than input_shapes says."""
    spec = manifest.tensor(view.tensor)
    if spec.dtype != "binary" or view.shape is None or spec.columns[0] not in manifest.statistics:
        return
    stats, size = manifest.statistics[spec.columns[0]], math.prod(view.shape[1:])
    if (stats.min, stats.max) != (size, size):
        raise ConfigError(
            f"input_shapes gives {list(view.shape)} for {view.name!r}, whose rows hold {stats.min} to {stats.max} "
            f"bytes: {size} bytes a row are needed"
        )


def _called(model: torch.nn.Module, views: Views, batch: Mapping[str, torch.Tensor]) -> Any:
    positional, named = views.arguments(batch)
    with _quiet(model):
        return model(*positional, **named)


def _candidates(
    model: torch.nn.Module,
    inputs: tuple[InputView, ...],
    by_column: tuple[InputView, ...],
    batch: Mapping[str, Any],
    manifest: Manifest,
) -> Iterator[Views]:
    """Ways to call a model, the likeliest first."""
    parameters = [p for p in parameters_of(model) if p.kind is not p.VAR_KEYWORD]
    specs = {view.name: manifest.tensor(view.tensor) for view in by_column if view.index is None}
    varying = [view.name for view in by_column if view.index is None and _is_open(view, manifest)]
    arrays = [name for name, spec in specs.items() if spec.shape or is_varying(spec)]
    columns = [view.name for view in by_column]
    asked = asked_forms(parameters, arrays, sole=sole(varying or arrays), taken=columns)
    names = {p.name for p in parameters} | set(asked)
    styles: list[tuple[Style, tuple[InputView, ...]]] = [("positional", inputs), ("dict", by_column)]
    if len(inputs) > 1 and {view.name for view in inputs} <= names:
        styles.insert(0, ("keywords", inputs))
    elif len(by_column) > 1 and {view.name for view in by_column} <= names:
        styles.insert(0, ("keywords", by_column))
    if wants_dict(parameters):
        styles.reverse()
    # Horovod hands every column over as floats; a model written for that takes integers only so.
    floats = tuple(_as_float(view, batch, model) for view in inputs)
    if floats != inputs:
        styles.append(("positional", floats))
    for style, views in styles:
        if style == "dict":
            yield Views(tuple(one for view in views for one in _in_a_dict(view, manifest)), style)
        elif asked:
            yield _with_forms(views, asked, parameters, manifest)
        else:
            yield Views(views, style)


def _is_open(view: InputView, manifest: Manifest) -> bool:
    return is_varying(manifest.tensor(view.tensor)) and view.shape is None


def _in_a_dict(view: InputView, manifest: Manifest) -> list[InputView]:
    """A column of a dict; beside one of varying length its mask and its lengths."""
    if not _is_open(view, manifest):
        return [view]
    return [_formed(view, "padded", view.name, manifest)] + [
        _formed(view, form, f"{view.name}_{form}", manifest) for form in ("mask", "lengths")
    ]


def _with_forms(
    views: tuple[InputView, ...],
    asked: Mapping[str, Mapping[str, Form]],
    parameters: Sequence[inspect.Parameter],
    manifest: Manifest,
) -> Views:
    """Hand over each column as ``forward`` asks for it: all by keyword, or, to ``*args``, the values by position."""
    companions = {name for forms in asked.values() for name, form in forms.items() if form in COMPANIONS}
    open_names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and p.name not in companions]
    values: list[InputView] = []
    for view in views:
        forms = asked.get(view.name, {})
        jagged = next((name for name, form in forms.items() if form == "jagged"), view.name)
        values.append(_formed(view, value_form(forms), jagged, manifest) if forms else view)
    matched = {view.name for view in values} & set(open_names)
    rest = iter([name for name in open_names if name not in matched])
    named = [view if view.name in matched else replace(view, name=next(rest, "")) for view in values]
    by_keyword = all(view.name for view in named)
    beside = [
        _formed(view, form, name, manifest)
        for view in views
        for name, form in asked.get(view.name, {}).items()
        if form in COMPANIONS
    ]
    return Views((*(named if by_keyword else values), *beside), "keywords" if by_keyword else "positional")


def _formed(view: InputView, form: Form, name: str, manifest: Manifest) -> InputView:
    spec = manifest.tensor(view.tensor)
    return replace(view, name=name, form=form, valid=valid_name(spec.name) if is_varying(spec) else None)


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
    model: torch.nn.Module,
    views: Views,
    error: Exception,
    batch: Mapping[str, torch.Tensor],
    manifest: Manifest,
    remedy: str,
) -> Exception:
    ids = [view for view in views.inputs if not batch[view.tensor].is_floating_point() and view.dtype is None]
    if isinstance(error, IndexError) and "out of range in self" in str(error) and ids:  # as torch.embedding says it
        ranges = ", ".join(_range(view, manifest) for view in ids)
        return DataError(f"an id lies beyond the model's table ({error}); the ids are {ranges}: enlarge the table")
    shapes = ", ".join(
        f"{view.name} {(-1, *tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"
        for view, tensor in ((view, view(batch)) for view in views.inputs)
    )
    name, told = type(model).__name__, f"{type(error).__name__}: {error}"
    fault = place_of_fault(error)
    if fault is not None:
        return ConfigError(f"forward of {name} raised {told} at {fault}, called with {shapes}: correct it there")
    return ConfigError(f"{name} cannot be called with {shapes} ({told}): set {remedy}")


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
