"""The layout of columns as tensors: the user's choices, and the plan that follows from them and the types."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow as pa

from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.types import DTYPES, tensor_kind
from sparkdl.config import require
from sparkdl.errors import DataError, SchemaError

NULL_POLICIES = ("error", "fill", "mask")


class Preparation(Protocol):
    """What makes model inputs of raw columns before they become tensors, as ``features.fitted.Features`` does."""

    @property
    def columns(self) -> Sequence[str]:
        """The raw columns that it reads."""

    @property
    def schema(self) -> pa.Schema:
        """The schema of the columns that it makes."""

    @property
    def shapes(self) -> Mapping[str, Sequence[int] | str]:
        """The shape of a row by column that it makes, as ``Layout.shapes`` has it."""

    @property
    def hash(self) -> str:
        """Equal where it makes equal columns of equal rows."""

    @property
    def rows_at_once(self) -> int:
        """Rows that it may be given at once, for the memory that it makes of them."""

    def apply(self, batch: Any) -> Any:
        """Make the columns of ``schema`` of a record batch that has ``columns``, row by row."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How columns become tensors.

    Attributes:
        pack: ``"auto"`` packs all plain number columns that are no labels (decimals are float64), per dtype, into one
            tensor (``"features"``; with several dtypes ``"features_<dtype>"``; a dtype with one column stays as it is);
            None packs nothing; a mapping names the packed tensors and their columns, all others staying as they are.
        dtypes: target dtype by column or packed tensor; columns not named keep theirs.
        nulls: ``"error"``, ``"fill"`` or ``"mask"``, for all columns or by column (``"error"`` for those not named).
            ``"mask"`` fills too, and adds a tensor ``<name>__mask`` that is 1 where there was a value.
        fill: what stands for null, for all columns or by column. A null string gets the code behind the last one unless
            the column is named here.
        shapes: shape of a row by array or vector column; ``"ragged"`` keeps an array ragged even if all rows have the
            same length, and lets rows of arrays of arrays hold different numbers of arrays of one length.
        dictionaries: the values of string columns in the order of their codes, from another set's
            ``Manifest.dictionaries``; a value that is not there counts as null.
        prepare: makes the columns that become tensors of the raw ones, in the pass that writes them; all other
            choices are then about the columns that it makes, and about labels, which stay as they are.
    """

    pack: str | Mapping[str, Sequence[str]] | None = "auto"
    dtypes: Mapping[str, str] = field(default_factory=dict)
    nulls: str | Mapping[str, str] = "error"
    fill: float | Mapping[str, float] = 0
    shapes: Mapping[str, Sequence[int] | str] = field(default_factory=dict)
    dictionaries: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prepare: Preparation | None = None

    def __post_init__(self) -> None:
        require(
            self.pack is None or self.pack == "auto" or isinstance(self.pack, Mapping),
            f"pack={self.pack!r} is not 'auto', None or a mapping: give one of these",
        )
        for policy in [self.nulls] if isinstance(self.nulls, str) else self.nulls.values():
            require(policy in NULL_POLICIES, f"nulls={policy!r} is not one of {', '.join(NULL_POLICIES)}: choose one")
        for name, dtype in self.dtypes.items():
            require(dtype in DTYPES, f"dtypes[{name!r}]={dtype!r} is not one of {', '.join(DTYPES)}: choose one")
        for name, shape in self.shapes.items():
            even = not isinstance(shape, str) and len(shape) > 0 and all(isinstance(n, int) and n > 0 for n in shape)
            require(
                even or shape == "ragged", f"shapes[{name!r}]={shape!r} is not positive lengths or 'ragged': give one"
            )

    def nulls_of(self, column: str) -> str:
        """The null policy of a column."""
        return self.nulls if isinstance(self.nulls, str) else self.nulls.get(column, "error")

    def of_prepared(self, columns: Sequence[str] | None) -> Layout:
        """The layout of what ``prepare`` makes, shapes included.

        Raises:
            ConfigError: ``columns``, those to write, are named besides.
        """
        if self.prepare is None:
            return self
        require(columns is None, f"columns={columns} and prepare both name the columns to write: leave columns out")
        return replace(self, shapes={**self.prepare.shapes, **self.shapes})

    def schema_of_prepared(self, raw: pa.Schema, labels: Sequence[str]) -> pa.Schema:
        """The schema of the columns that become tensors: ``raw``, or what ``prepare`` makes of it, and the labels.

        Raises:
            SchemaError: a raw column is missing.
        """
        if self.prepare is None:
            return raw
        for name in [*self.prepare.columns, *labels]:
            if len(raw.get_all_field_indices(name)) != 1:
                raise SchemaError(f"column {name!r} is missing, or there twice, among {raw.names}: add or rename it")
        return pa.schema([*self.prepare.schema, *(raw.field(label) for label in labels)])

    def fill_of(self, column: str) -> float:
        """What stands for null in a column."""
        return self.fill.get(column, 0) if isinstance(self.fill, Mapping) else self.fill


def mask_name(tensor: str) -> str:
    """The name of the mask of a tensor."""
    return f"{tensor}__mask"


def plan_tensors(
    schema: pa.Schema, *, columns: Sequence[str] | None = None, labels: Sequence[str] = (), layout: Layout | None = None
) -> tuple[TensorSpec, ...]:
    """Decide the tensors of a shard set.

    Args:
        schema: of the rows that will be written.
        columns: those to write, all by default; labels are written in any case.
        labels: the columns that become labels; they are never packed by ``pack="auto"``.
        layout: how columns become tensors.

    Returns:
        the tensors; a length of -1 in a shape is one that the first row tells.

    Raises:
        SchemaError: a column is missing, is named twice, or has a type or a combination of options that cannot be used;
            the message names it.
    """
    layout = layout or Layout()
    names = list(schema.names if columns is None else columns)
    names += [label for label in labels if label not in names]
    _check_names(schema, names, labels, layout)
    singles = {name: _single(schema.field(name), name in labels, layout) for name in names}
    packs = _auto_packs(singles, layout) if layout.pack == "auto" else dict(layout.pack or {})  # type: ignore[arg-type]
    packed = {column: tensor for tensor, members in packs.items() for column in members}
    tensors: list[TensorSpec] = []
    for name in names:
        tensor = packed.get(name)
        if tensor is None:
            tensors.append(singles[name])
        elif packs[tensor][0] == name:
            tensors.append(_pack(tensor, [singles[member] for member in packs[tensor]], layout))
    tensors = [spec for tensor in tensors for spec in _with_mask(tensor)]
    tensor_names = [spec.name for spec in tensors]
    for name in tensor_names:
        if tensor_names.count(name) > 1:
            raise SchemaError(f"two tensors would be called {name!r}: rename the column or the packed tensor")
    return tuple(tensors)


def _check_names(schema: pa.Schema, names: list[str], labels: Sequence[str], layout: Layout) -> None:
    members = [] if not isinstance(layout.pack, Mapping) else [name for pack in layout.pack.values() for name in pack]
    tensors = list(layout.pack) if isinstance(layout.pack, Mapping) else []
    by_column = [layout.nulls, layout.fill, layout.shapes, layout.dictionaries]
    options = [name for option in by_column if isinstance(option, Mapping) for name in option]
    if not names:
        raise SchemaError("the frame has 0 columns to write: name at least one")
    for name in [*names, *members]:
        if not name:
            raise SchemaError("a column has an empty name: rename it, or leave it out of columns")
        if schema.get_all_field_indices(name) == []:
            close = difflib.get_close_matches(name, schema.names, n=1) or [", ".join(schema.names)]
            raise SchemaError(f"column {name!r} is missing, the frame has {close[0]}: correct the name")
        if len(schema.get_all_field_indices(name)) > 1 or names.count(name) > 1:
            raise SchemaError(f"column {name!r} is there twice: rename one of the two, or name it once")
    for name in [*members, *options, *(name for name in layout.dtypes if name not in tensors)]:
        if name not in names:
            raise SchemaError(
                f"the layout names column {name!r}, which is not written: add it to columns or take it out"
            )
    for name in members:
        if members.count(name) > 1:
            raise SchemaError(f"column {name!r} is packed twice: name it in one packed tensor only")
        if name in labels:
            raise SchemaError(f"column {name!r} is a label and packed too: take it out of one of the two")
    for tensor in tensors:
        if isinstance(layout.pack, Mapping) and not layout.pack[tensor]:
            raise SchemaError(f"packed tensor {tensor!r} has 0 columns: name at least one")


def _single(column: pa.Field, is_label: bool, layout: Layout) -> TensorSpec:
    """The tensor of one column that is not packed."""
    name = column.name
    spec = TensorSpec(
        name=name,
        columns=(name,),
        role="label" if is_label else "feature",
        nulls=layout.nulls_of(name),
        fill=(layout.fill_of(name),),
        **tensor_kind(name, column.type, layout.shapes.get(name)),
    )
    dtype = layout.dtypes.get(name, spec.dtype)
    if dtype != spec.dtype:
        if spec.logical or spec.dtype == "binary":
            stored_kind = spec.logical or spec.dtype
            raise SchemaError(
                f"column {name!r} holds a {stored_kind}, not {dtype}: take it out of dtypes or cast it in Spark"
            )
        spec = replace(spec, dtype=dtype)
    if name in layout.shapes and not spec.ragged and spec.shape == ():
        raise SchemaError(f"column {name!r} is a scalar but has shape {layout.shapes[name]}: take it out of shapes")
    if name in layout.dictionaries:
        if spec.logical != "string":
            raise SchemaError(f"column {name!r} is {column.type}, not string: take it out of dictionaries")
        spec = replace(spec, dictionary=tuple(layout.dictionaries[name]))
    return spec


def _auto_packs(singles: Mapping[str, TensorSpec], layout: Layout) -> dict[str, list[str]]:
    """Group the plain number columns by dtype and null policy."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, spec in singles.items():
        plain = not spec.ragged and spec.shape == () and not spec.logical and spec.dtype not in ("bool", "binary")
        if plain and spec.role == "feature":
            groups.setdefault((spec.dtype, spec.nulls), []).append(name)
    groups = {key: members for key, members in groups.items() if len(members) > 1}
    dtypes = [dtype for dtype, _ in groups]
    packs = {}
    for (dtype, nulls), members in groups.items():
        name = "features" if len(set(dtypes)) == 1 else f"features_{dtype}"
        packs[name if dtypes.count(dtype) == 1 else f"{name}_{nulls}"] = members
    return packs


def _pack(name: str, members: list[TensorSpec], layout: Layout) -> TensorSpec:
    dtype = layout.dtypes.get(name)
    if dtype is not None:
        members = [replace(member, dtype=dtype) for member in members]
    first = members[0]
    for member in members:
        if member.ragged or member.shape or member.dtype == "binary":
            raise SchemaError(f"column {member.name!r} of packed tensor {name!r} is no scalar: leave it out of pack")
        if (member.dtype, member.nulls) != (first.dtype, first.nulls):
            raise SchemaError(
                f"packed tensor {name!r} mixes {first.dtype} with nulls={first.nulls!r} ({first.name!r}) and "
                f"{member.dtype} with nulls={member.nulls!r} ({member.name!r}): make them equal or split it"
            )
        if member.logical:
            raise SchemaError(
                f"column {member.name!r} of packed tensor {name!r} is a {member.logical}: leave it out of pack"
            )
    return replace(
        first,
        name=name,
        shape=(len(members),),
        columns=tuple(member.name for member in members),
        fill=tuple(member.fill[0] for member in members),
    )


def _with_mask(spec: TensorSpec) -> list[TensorSpec]:
    if spec.nulls != "mask":
        return [spec]
    by_row = spec.ragged or spec.dtype == "binary"
    mask = TensorSpec(
        name=mask_name(spec.name),
        dtype="bool",
        shape=() if by_row else spec.shape,
        columns=spec.columns,
        role="mask",
        mask_of=spec.name,
    )
    return [spec, mask]


def with_dictionaries(
    tensors: Sequence[TensorSpec], found: Mapping[str, Sequence[str]], layout: Layout, most: int
) -> tuple[TensorSpec, ...]:
    """Complete string tensors by the values that were found in them, and by the code of null.

    Raises:
        DataError: a column has more than ``most`` values.
    """
    complete = []
    for spec in tensors:
        if spec.logical == "string":
            values = tuple(found.get(spec.name, spec.dictionary))
            if len(values) > most:
                raise DataError(
                    f"column {spec.name!r} has {len(values)} or more strings, above max_dictionary_values={most}: "
                    f"hash the column, leave it out, or raise the limit"
                )
            named = isinstance(layout.fill, Mapping) and spec.name in layout.fill
            spec = replace(spec, dictionary=values, fill=spec.fill if named else (len(values),))
        complete.append(spec)
    return tuple(complete)
