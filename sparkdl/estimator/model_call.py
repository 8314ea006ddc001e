"""The call of a model: its arguments out of a batch's tensors, found by two made-up rows on the driver; no Spark."""

from __future__ import annotations

import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.batches.reading.batch import Batch
from sparkdl.batches.reading.gather import valid_name
from sparkdl.columns.spec import TensorSpec
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.user_code import place_of_error
from sparkdl.models.calling import Arguments, asked_forms, check_batch_norm, formed, parameters_of, remedy, value_form
from sparkdl.models.signature import COMPANIONS, Form, Signature, TensorField
from sparkdl.shards.manifest import Manifest
from sparkdl.train.objective.loss import split_outputs

COPY_SUFFIX = "__feature"
"""The suffix of a number column that is packed as a feature, and is a label or weight as well."""

Style = Literal["positional", "keywords", "dict"]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One argument of the model.

    Attributes:
        name: of the argument: its feature column, or the packed tensor.
        tensor: name of the batch's tensor that holds it.
        index: its position in the last dimension of a packed tensor; None takes the whole tensor.
        shape: to view it in, batch first as -1; None leaves it as it lies.
        dtype: to convert it to; None keeps it.
        form: of a tensor whose rows differ in length: what the model gets of it, see ``models.calling``.
        valid: name of the batch's tensor that tells elements from padding; None where no row is padded.
    """

    name: str
    tensor: str
    index: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    form: Form = ""
    valid: str | None = None

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Take the argument out of the tensors of a batch."""
        tensor = tensors[self.tensor]
        if self.index is not None:
            tensor = tensor[:, self.index]
        if self.dtype is not None:
            tensor = tensor.to(getattr(torch, self.dtype))
        if self.shape is not None:
            tensor = tensor.reshape(self.shape)
        return cast(torch.Tensor, formed(self.form, tensor, tensors[self.valid] if self.valid else None))

    @property
    def is_plain(self) -> bool:
        """Whether it is a tensor of the batch as it lies."""
        return self.index is None and self.shape is None and self.dtype is None and not self.form


@dataclass(frozen=True)
class ModelCall:
    """All arguments of a model, and how it takes them; usable as a forward pre-hook.

    Attributes:
        inputs: in the order of the model's arguments.
        style: how the model is called: ``m(a, b)``, ``m(a=a, b=b)`` or ``m({"a": a, "b": b})``; masks and the like go
            by keyword where the others go by position.
    """

    inputs: tuple[ModelInput, ...]
    style: Style = "positional"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the batch's tensors that are needed, each once, in order of first use."""
        needed = [(argument.tensor, argument.valid) for argument in self.inputs]
        return tuple(dict.fromkeys(name for names in needed for name in names if name is not None))

    @property
    def is_plain(self) -> bool:
        """Whether the model takes the batch's tensors as they lie, so that nothing is left to do."""
        plain = all(argument.is_plain and argument.name == argument.tensor for argument in self.inputs)
        return plain and len(self.tensors) == len(self.inputs)

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments for one batch."""
        named = {argument.name: argument(tensors) for argument in self.inputs}
        companion_names = [argument.name for argument in self.inputs if argument.form in COMPANIONS]
        arguments = Arguments.of(self.style, named, companion_names)
        return arguments.positional, dict(arguments.named)

    def __call__(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Be a forward pre-hook: ``args`` are the tensors named by ``tensors``, in that order."""
        if kwargs or len(args) != len(self.tensors):
            return args, kwargs  # called by the user's own code in the model's own calling convention
        return self.arguments(dict(zip(self.tensors, args, strict=True)))


def attach_call(model: torch.nn.Module, call: ModelCall) -> None:
    """Let ``model`` take the tensors of a batch, in the order of ``call.tensors``, as its positional arguments."""
    detach_call(model)
    if not (call.is_plain and call.style == "positional"):
        model.register_forward_pre_hook(call, with_kwargs=True, prepend=True)


def detach_call(model: torch.nn.Module) -> None:
    """Let ``model`` be called in its own calling convention again."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, ModelCall):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


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
        call: how the model is called.
        outputs: one a label.
        batch: the two rows.
        returned: what the model returned for them.
    """

    call: ModelCall
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
    statistics = [manifest.statistics.get(column) for column in spec.columns]
    bounds = [[(getattr(stats, end) or 0) if stats else 0 for stats in statistics] for end in ("min", "max")]
    packed = len(spec.columns) > 1 or (spec.shape == (1,) and spec.name != spec.columns[0])
    if packed:
        return torch.tensor(bounds, dtype=dtype)
    if not one_table and spec.shape and not dtype.is_floating_point:
        bounds[1] = bounds[0]
    return torch.stack([torch.full((*length, *spec.shape), bound[0], dtype=dtype) for bound in bounds])


def probe(
    model: torch.nn.Module,
    inputs: Sequence[ModelInput],
    by_column: Sequence[ModelInput],
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
    for argument in by_column:
        _check_bytes(argument, manifests[0])
    sized = [with_lengths(model, arguments, manifests) for arguments in (inputs, by_column)]
    try:
        return _probed(model, sized[0], sized[1], manifests[0], labels, written)
    except ConfigError as error:
        fixed = [with_lengths(model, arguments, manifests, every=True) for arguments in (inputs, by_column)]
        if fixed == sized:
            raise
        try:  # it looked as if it took masks in a dict, and does not use them
            return _probed(model, fixed[0], fixed[1], manifests[0], labels, written)
        except ConfigError:
            raise error from None


def _probed(
    model: torch.nn.Module,
    inputs: tuple[ModelInput, ...],
    by_column: tuple[ModelInput, ...],
    manifest: Manifest,
    labels: Sequence[str],
    written: bool,
) -> Probe:
    first_failure: tuple[ModelCall, Exception] | None = None
    for one_table in (True, False):
        batch = two_rows(manifest, one_table=one_table)
        for call in _candidates(model, inputs, by_column, batch, manifest):
            try:
                returned = _called(model, call, batch)
            except Exception as error:
                first_failure = first_failure or (call, error)
                continue
            outputs = _outputs(returned, labels)
            check_rows_independent(model, functools.partial(_called, model, call), call, batch, labels)
            return Probe(call, outputs, batch, returned)
        if first_failure is None or not isinstance(first_failure[1], IndexError):
            break
    assert first_failure is not None
    settings = "input_shapes, feature_dtypes or feature_cols" if written else "input_shapes or feature_cols"
    raise _refusal(model, *first_failure, batch, manifest, settings) from first_failure[1]


def norm_of_single_values(model: torch.nn.Module, probed: Probe) -> str | None:
    """The first batch norm layer that trains and gets one value a channel of each row; None if there is none."""
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm) and layer.training}
    of_single_values: list[str] = []

    def note(layer: _BatchNorm, args: tuple[Any, ...]) -> None:
        if args and args[0].numel() == args[0].shape[1] * probed.batch.rows:
            of_single_values.append(names[layer])

    hooks = [layer.register_forward_pre_hook(note) for layer in names]
    try:
        _called(model, probed.call, probed.batch)
    finally:
        for hook in hooks:
            hook.remove()
    return of_single_values[0] if of_single_values else None


def _check_bytes(argument: ModelInput, manifest: Manifest) -> None:
    """Refuse byte strings of other lengths than input_shapes says."""
    spec = manifest.tensor(argument.tensor)
    if spec.dtype != "binary" or argument.shape is None or spec.columns[0] not in manifest.statistics:
        return
    stats, size = manifest.statistics[spec.columns[0]], math.prod(argument.shape[1:])
    if (stats.min, stats.max) != (size, size):
        raise ConfigError(
            f"input_shapes gives {list(argument.shape)} for {argument.name!r}, whose rows hold {stats.min} to "
            f"{stats.max} bytes: {size} bytes a row are needed"
        )


def _called(model: torch.nn.Module, call: ModelCall, batch: Mapping[str, torch.Tensor]) -> Any:
    positional, named = call.arguments(batch)
    with _quiet(model), warnings.catch_warnings():
        # what torch says of row["age"] where the row is tried as one tensor
        warnings.filterwarnings("ignore", message="Using a non-tuple sequence for multidimensional indexing")
        return model(*positional, **named)


def _candidates(
    model: torch.nn.Module,
    inputs: tuple[ModelInput, ...],
    by_column: tuple[ModelInput, ...],
    batch: Mapping[str, Any],
    manifest: Manifest,
) -> Iterator[ModelCall]:
    """Ways to call a model, the likeliest first."""
    parameters = [p for p in parameters_of(model) if p.kind is not p.VAR_KEYWORD]
    specs = {argument.name: manifest.tensor(argument.tensor) for argument in by_column if argument.index is None}
    varying = [argument.name for argument in by_column if argument.index is None and _is_open(argument, manifest)]
    arrays = [name for name, spec in specs.items() if spec.shape or is_varying(spec)]
    columns = [argument.name for argument in by_column]
    forms_by_column = asked_forms(parameters, arrays, sole=sole(varying or arrays), taken=columns)
    names = {p.name for p in parameters} | set(forms_by_column)
    styles: list[tuple[Style, tuple[ModelInput, ...]]] = [("positional", inputs), ("dict", by_column)]
    if len(inputs) > 1 and {argument.name for argument in inputs} <= names:
        styles.insert(0, ("keywords", inputs))
    elif len(by_column) > 1 and {argument.name for argument in by_column} <= names:
        styles.insert(0, ("keywords", by_column))
    if wants_dict(parameters):
        styles.reverse()
    # Horovod hands every column over as floats; a model written for that takes integers only so.
    floats = tuple(
        argument if batch[argument.tensor].is_floating_point() else replace(argument, dtype=floating_dtype(model))
        for argument in inputs
    )
    if floats != inputs:
        styles.append(("positional", floats))
    for style, arranged in styles:
        if style == "dict":
            yield ModelCall(tuple(entry for argument in arranged for entry in _in_a_dict(argument, manifest)), style)
        elif forms_by_column:
            yield _with_forms(arranged, forms_by_column, parameters, manifest)
        else:
            yield ModelCall(arranged, style)


def _is_open(argument: ModelInput, manifest: Manifest) -> bool:
    return is_varying(manifest.tensor(argument.tensor)) and argument.shape is None


def _in_a_dict(argument: ModelInput, manifest: Manifest) -> list[ModelInput]:
    """A column of a dict; beside one of varying length its mask and its lengths."""
    if not _is_open(argument, manifest):
        return [argument]
    return [_formed(argument, "padded", argument.name, manifest)] + [
        _formed(argument, form, f"{argument.name}_{form}", manifest) for form in ("mask", "lengths")
    ]


def _with_forms(
    inputs: tuple[ModelInput, ...],
    asked: Mapping[str, Mapping[str, Form]],
    parameters: Sequence[inspect.Parameter],
    manifest: Manifest,
) -> ModelCall:
    """Hand over each column as ``forward`` asks for it: all by keyword, or, to ``*args``, the values by position.

    ``models/calling.py`` has the forms of columns of varying length.
    """
    companions = {name for forms in asked.values() for name, form in forms.items() if form in COMPANIONS}
    open_names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and p.name not in companions]
    values: list[ModelInput] = []
    for argument in inputs:
        forms = asked.get(argument.name, {})
        jagged = next((name for name, form in forms.items() if form == "jagged"), argument.name)
        values.append(_formed(argument, value_form(forms), jagged, manifest) if forms else argument)
    matched = {argument.name for argument in values} & set(open_names)
    free_names = iter([name for name in open_names if name not in matched])
    named = [
        argument if argument.name in matched else replace(argument, name=next(free_names, "")) for argument in values
    ]
    by_keyword = all(argument.name for argument in named)
    companion_inputs = [
        _formed(argument, form, name, manifest)
        for argument in inputs
        for name, form in asked.get(argument.name, {}).items()
        if form in COMPANIONS
    ]
    return ModelCall(
        (*(named if by_keyword else values), *companion_inputs), "keywords" if by_keyword else "positional"
    )


def _formed(argument: ModelInput, form: Form, name: str, manifest: Manifest) -> ModelInput:
    spec = manifest.tensor(argument.tensor)
    return replace(argument, name=name, form=form, valid=valid_name(spec.name) if is_varying(spec) else None)


def _outputs(returned: Any, labels: Sequence[str]) -> tuple[Output, ...]:
    outputs = []
    for label, output in zip(labels, split_outputs(returned, labels), strict=True):
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"the model returns a {type(output).__name__} for {label!r}: return one tensor a label")
        if output.ndim == 0 or output.shape[0] != ROWS:
            raise ConfigError(
                f"the model returns shape {tuple(output.shape)} for {ROWS} rows: return one row for each that comes in"
            )
        outputs.append(Output(label, tuple(output.shape[1:]), str(output.dtype).removeprefix("torch.")))
    return tuple(outputs)


def _refusal(
    model: torch.nn.Module,
    call: ModelCall,
    error: Exception,
    batch: Mapping[str, torch.Tensor],
    manifest: Manifest,
    settings: str,
) -> Exception:
    ids = [
        argument
        for argument in call.inputs
        if not batch[argument.tensor].is_floating_point() and argument.dtype is None
    ]
    if isinstance(error, IndexError) and "out of range in self" in str(error) and ids:  # as torch.embedding says it
        ranges = ", ".join(_range(argument, manifest) for argument in ids)
        return DataError(f"an id lies beyond the model's table ({error}); the ids are {ranges}: enlarge the table")
    shapes = ", ".join(
        f"{argument.name} {(-1, *tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"
        for argument, tensor in ((argument, argument(batch)) for argument in call.inputs)
    )
    name, message = type(model).__name__, f"{type(error).__name__}: {error}"
    fault = place_of_error(error)
    if fault is not None:
        return ConfigError(f"forward of {name} raised {message} at {fault}, called with {shapes}: correct it there")
    return ConfigError(f"{name} cannot be called with {shapes} ({message}): set {settings}")


def _range(argument: ModelInput, manifest: Manifest) -> str:
    columns = manifest.tensor(argument.tensor).columns
    chosen = columns if argument.index is None else columns[argument.index : argument.index + 1]
    statistics = [(column, manifest.statistics[column]) for column in chosen]
    return ", ".join(f"{column} in {stats.min}..{stats.max}" for column, stats in statistics)


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


def is_varying(spec: TensorSpec) -> bool:
    """Whether rows of a tensor may differ in length, by its type."""
    return spec.ragged or spec.dtype == "binary"


def lengths_of(spec: TensorSpec, manifests: Sequence[Manifest]) -> tuple[int, int] | None:
    """Elements, or bytes, of the shortest and of the longest row of some sets; None where nobody counted."""
    statistics = [manifest.statistics.get(spec.columns[0]) for manifest in manifests if manifest.rows]
    ends = [
        (stats.min, stats.max) if spec.dtype == "binary" else (stats.min_length, stats.max_length)
        for stats in statistics
        if stats
    ]
    counted = [(int(least), int(most)) for least, most in ends if least is not None and most is not None]
    if not counted or len(counted) < len(statistics):
        return None
    return min(least for least, _ in counted), max(most for _, most in counted)


def wants_dict(parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether a model takes one dict, in which it finds the masks and lengths of all columns."""
    if not parameters:
        return False
    annotated = re.search(r"dict(?![a-z])|mapping(?![a-z])", str(parameters[0].annotation), re.IGNORECASE)
    return annotated is not None or not {"dict", "mapping"}.isdisjoint(parameters[0].name.lower().split("_"))


def sole(columns: Sequence[str]) -> str | None:
    """The column that a parameter called ``mask`` speaks of."""
    return columns[0] if len(columns) == 1 else None


def with_lengths(
    model: torch.nn.Module,
    inputs: Sequence[ModelInput],
    manifests: Sequence[Manifest],
    *,
    every: bool = False,
) -> tuple[ModelInput, ...]:
    """Give the inputs whose rows all have one length that length, where the model does not ask for masks or the like.

    Args:
        model: any.
        inputs: of it.
        manifests: of the sets that it will see.
        every: fix them even if the model asks.

    Raises:
        ConfigError: rows differ in length, and the model cannot tell their elements from padding.
    """
    specs = {argument.name: manifests[0].tensor(argument.tensor) for argument in inputs}
    varying = [argument.name for argument in inputs if is_varying(specs[argument.name]) and argument.shape is None]
    sizes: dict[str, int] = {}
    for name in varying if every else _unasked(model, varying):
        least, most = lengths_of(specs[name], manifests) or (0, 0)
        if least == most > 0:
            sizes[name] = most
    _check(
        model, [name for name in varying if name not in sizes], {n: lengths_of(specs[n], manifests) for n in varying}
    )
    return tuple(
        replace(argument, shape=(-1, sizes[argument.name], *specs[argument.name].shape))
        if argument.name in sizes
        else argument
        for argument in inputs
    )


def check_forms(model: torch.nn.Module, varying: Sequence[str]) -> None:
    """Refuse a model that cannot tell the elements of a column from its padding.

    Args:
        model: any; one that takes a dict finds the masks and lengths of all columns in it.
        varying: columns whose rows may differ in length.

    Raises:
        ConfigError: names the column and what the model could take.
    """
    _check(model, varying, {})


def _unasked(model: torch.nn.Module, varying: Sequence[str]) -> list[str]:
    parameters = parameters_of(model)
    if wants_dict(parameters):
        return []
    forms_by_column = asked_forms(parameters, varying, sole=sole(varying))
    return [name for name in varying if name not in forms_by_column]


def _check(model: torch.nn.Module, varying: Sequence[str], lengths: dict[str, tuple[int, int] | None]) -> None:
    for name in _unasked(model, varying):
        ends = lengths.get(name)
        range_text = f"have {ends[0]} to {ends[1]} elements" if ends else "may differ in length"
        takes = ", ".join(p.name for p in parameters_of(model))
        raise ConfigError(
            f"rows of {name!r} {range_text}, and forward({takes}) of {type(model).__name__} cannot tell their "
            f"elements from padding: {remedy(name)}"
        )


Rows = Mapping[str, torch.Tensor]


def check_rows_independent(
    model: torch.nn.Module, forward: Callable[[Rows], Any], call: ModelCall, batch: Rows, labels: Sequence[str]
) -> None:
    """Refuse a model whose answer to a row depends on the row beside it.

    Args:
        model: the model.
        forward: calls it with the tensors of a batch, in evaluation mode.
        call: how it is called.
        batch: two rows; the first is the shorter one where lengths differ.
        labels: the label columns.

    Raises:
        ConfigError: names both answers.
    """

    def answers(rows: Rows) -> list[torch.Tensor]:
        return list(split_outputs(forward(rows), labels))

    together, again = answers(batch), answers(batch)
    if not all(map(_alike, together, again)):
        return  # it draws its answers, and nothing can be said
    # The same shapes with another neighbour: the same kernels run, so that rounding is no difference.
    twice = {name: torch.cat([tensor[:1], tensor[:1]]) for name, tensor in batch.items()}
    doubled = answers(twice)
    for label, beside_other, beside_itself in zip(labels, together, doubled, strict=True):
        if beside_other.shape == beside_itself.shape and not _alike(beside_other[:1], beside_itself[:1]):
            raise ConfigError(
                f"{type(model).__name__} answers a row with {_short(beside_itself)} for {label!r}, and with "
                f"{_short(beside_other)} when another row is beside it, first in "
                f"{_meeting(model, forward, batch, twice)}: let rows meet nowhere but in the loss"
            )
    if any(argument.valid for argument in call.inputs):
        _check_padding(model, answers, together, _shorter_row(call, batch), labels)


def _check_padding(
    model: torch.nn.Module,
    answers: Callable[[Rows], list[torch.Tensor]],
    together: Sequence[torch.Tensor],
    row: Rows,
    labels: Sequence[str],
) -> None:
    """Refuse a model that answers the shorter row otherwise where it is padded to the length of the longer one."""
    name = type(model).__name__
    try:
        alone = answers(row)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{name} cannot be called with a shorter row by itself ({message}): use the mask or lengths in forward"
        ) from error
    for label, pair, single in zip(labels, together, alone, strict=True):
        padded, unpadded = pair[:1], single
        if padded.shape != unpadded.shape:
            raise ConfigError(
                f"{name} returns shape {tuple(unpadded.shape[1:])} for a row of {label!r}, and "
                f"{tuple(padded.shape[1:])} when a longer row is beside it: return one shape for all rows"
            )
        if not _alike(padded, unpadded):
            raise ConfigError(
                f"{name} answers a row with {_short(unpadded)} for {label!r}, and with {_short(padded)} when a "
                "longer row is beside it: use the mask or lengths in forward, so that padding counts for nothing"
            )


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one.double(), two.double(), rtol=1e-3, atol=1e-4, equal_nan=True)


def _shorter_row(call: ModelCall, batch: Rows) -> dict[str, torch.Tensor]:
    """The first row by itself: as long as it is, without padding."""
    row = {name: tensor[:1] for name, tensor in batch.items()}
    for argument in call.inputs:
        if argument.valid is not None:
            length = int(batch[argument.valid][0].sum())
            row[argument.tensor], row[argument.valid] = (
                batch[argument.tensor][:1, :length],
                batch[argument.valid][:1, :length],
            )
    return row


def _meeting(model: torch.nn.Module, forward: Callable[[Rows], Any], batch: Rows, twice: Rows) -> str:
    """The first layer whose output for the first row depends on the second one."""

    def outputs(rows: Rows) -> list[tuple[str, torch.Tensor]]:
        by_layer: list[tuple[str, torch.Tensor]] = []

        def note(name: str) -> Callable[..., None]:
            return lambda _module, _args, out: by_layer.append((name, out)) if isinstance(out, torch.Tensor) else None

        hooks = [
            module.register_forward_hook(note(f"{name} ({type(module).__name__})"))
            for name, module in model.named_modules()
            if name and not any(True for _ in module.children())
        ]
        try:
            forward(rows)
        finally:
            for hook in hooks:
                hook.remove()
        return by_layer

    for (name, paired), (_, doubled) in zip(outputs(batch), outputs(twice), strict=False):
        if paired.shape == doubled.shape and paired.ndim and not _alike(paired[:1], doubled[:1]):
            return name
    return "forward"


def _short(values: torch.Tensor) -> str:
    return str([float(f"{value:.4g}") for value in values.reshape(-1)[:3].tolist()])


def signature_of(probed: Probe, manifest: Manifest) -> Signature:
    """Describe how a fitted model is fed from a table's columns."""
    inputs = probed.call.inputs
    owners = {argument.tensor: argument.name for argument in inputs if argument.form not in COMPANIONS}
    labels_and_weight = {tensor.name for tensor in manifest.tensors} - {argument.tensor for argument in inputs}
    sources = {f"{name}{COPY_SUFFIX}": name for name in labels_and_weight}
    return Signature(
        inputs=tuple(
            _companion(argument, owners[argument.tensor])
            if argument.form in COMPANIONS
            else _field(argument, manifest, sources)
            for argument in inputs
        ),
        outputs=tuple(
            # a single number a row is a number, not an array of one
            TensorField(name=output.label, dtype=output.dtype, shape=() if output.shape == (1,) else output.shape)
            for output in probed.outputs
        ),
        call=probed.call.style,
        labels=tuple(output.label for output in probed.outputs),
    )


def _companion(argument: ModelInput, owner: str) -> TensorField:
    if argument.form in ("lengths", "offsets"):
        return TensorField(name=argument.name, dtype="int64", form=argument.form, of=owner)
    return TensorField(name=argument.name, dtype="bool", shape=(None,), form=argument.form, of=owner)


def _field(argument: ModelInput, manifest: Manifest, sources: Mapping[str, str]) -> TensorField:
    """One input; ``sources`` are labels and weight, by the names of the copies that are features."""
    spec = manifest.tensor(argument.tensor)
    row: tuple[int | None, ...] = (None, *spec.shape) if spec.ragged or spec.dtype == "binary" else spec.shape
    columns = spec.columns
    if argument.index is not None:
        row, columns = (), (spec.columns[argument.index],)
    columns = tuple(sources.get(name, name) for name in columns)
    if argument.shape is not None:
        row = argument.shape[1:]
    dtype = argument.dtype or ("uint8" if spec.dtype == "binary" else spec.dtype)
    return TensorField(
        name=argument.name, dtype=dtype, shape=row, columns=columns, form=argument.form, logical=spec.logical
    )
