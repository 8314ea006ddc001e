"""The columns of a DataFrame that are written into shards, by tensor, and the model's inputs among them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.columns.layout import Layout
from sparkdl.columns.names import check_names, quoted
from sparkdl.columns.spec import TensorSpec
from sparkdl.errors import ConfigError, SchemaError
from sparkdl.estimator.model_call import COPY_SUFFIX, ModelInput
from sparkdl.shards.manifest import Manifest

_INTEGERS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_FRACTIONS = (T.FloatType, T.DoubleType, T.DecimalType, T.BooleanType)


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Which column plays which part, as the parameters say.

    Attributes:
        features: input columns, in the order of the model's arguments.
        labels: label columns.
        weight: sample weights; None without.
        validation: column that marks validation rows; None without.
        continuous: features that pack into a tensor of their own as floats.
        categorical: features that pack into a tensor of their own as int64.
        shapes: of each feature column's tensor, batch first; None packs.
        label_shapes: of each label's tensor, batch first.
        dtypes: by feature column.
        float_dtype: the model's floating dtype, which floating features take.
        by_column: give each feature a tensor of its own name even without shapes (dict-style models).
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None = None
    validation: str | None = None
    continuous: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None
    label_shapes: tuple[tuple[int, ...], ...] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    float_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, shapes, columns in (
            ("input_shapes", self.shapes, self.features),
            ("label_shapes", self.label_shapes, self.labels),
        ):
            if shapes is not None and len(shapes) != len(columns):
                raise ConfigError(f"{name} has {len(shapes)} shapes for {len(columns)} columns: give one a column")
        for name, named in (("continuous_cols", self.continuous), ("categorical_cols", self.categorical)):
            unknown = [column for column in named if column not in self.features]
            if unknown:
                raise ConfigError(f"{name} names {unknown}, which feature_cols does not: name them there, too")
            if named and self.shapes is not None:
                raise ConfigError(
                    f"{name} packs columns, and input_shapes gives each its own tensor: drop one of the two"
                )
        overlap = sorted(set(self.continuous) & set(self.categorical))
        if overlap:
            raise ConfigError(f"continuous_cols and categorical_cols both name {overlap}: name each in one of them")
        unknown = sorted(set(self.dtypes) - set(self.features))
        if unknown:
            raise ConfigError(f"feature_dtypes names {unknown}, which are no feature columns: take them out")


@dataclass(frozen=True, kw_only=True)
class ColumnPlan:
    """What is written, and how the model finds its inputs in it.

    Attributes:
        roles: what was asked for.
        casts: Spark type by column that has to be cast before it is written.
        layout: of the shards.
        copies: by feature that is a label or weight, too, the name under which it is written once more, to be packed.
        varying: features whose rows may differ in length: arrays and bytes of which input_shapes says no size.
        types: Spark's name of the type of each feature column, where a frame has told.
    """

    roles: Roles
    casts: Mapping[str, str]
    layout: Layout
    copies: Mapping[str, str] = field(default_factory=dict)
    varying: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The columns to write, each once."""
        weight = [self.roles.weight] if self.roles.weight else []
        features = [self.copies.get(name, name) for name in self.roles.features]
        return list(dict.fromkeys([*features, *self.roles.labels, *weight]))

    @property
    def sources(self) -> list[str]:
        """The columns of the frame that they are made of, each once."""
        return list(dict.fromkeys(self._source(name) for name in self.columns))

    def _source(self, name: str) -> str:
        return name.removesuffix(COPY_SUFFIX) if name in self.copies.values() else name

    @property
    def packed_labels(self) -> list[str]:
        """Columns with the role of a label in the shards, which ``pack`` leaves alone."""
        return list(self.roles.labels)

    def select(self, df: DataFrame, *extra: Column) -> DataFrame:
        """Return the frame with the columns of the plan, cast, and ``extra`` behind them."""
        chosen = [self._expression(name) for name in self.columns]
        return df.select(*chosen, *extra)

    def _expression(self, name: str) -> Column:
        source = self._source(name)
        column = F.col(quoted(source))
        return (column.cast(self.casts[source]) if source in self.casts else column).alias(name)

    def inputs(self, manifest: Manifest, *, by_column: bool = False) -> tuple[ModelInput, ...]:
        """Return the model's inputs, as they lie in a shard set.

        Args:
            manifest: of the set.
            by_column: one input a feature column, as dict-style models want them.

        Raises:
            ConfigError: an entry of input_shapes does not fit its column; both shapes are named.
            SchemaError: the set lacks a column.
        """
        places = {name: _place(manifest, self.copies.get(name, name)) for name in self.roles.features}
        if self.roles.shapes is not None:
            return tuple(
                _shaped(name, *places[name], shape)
                for name, shape in zip(self.roles.features, self.roles.shapes, strict=True)
            )
        if by_column:
            return tuple(_own(name, *places[name]) for name in self.roles.features)
        tensors = dict.fromkeys(spec.name for spec, _ in places.values())
        return tuple(ModelInput(name=name, tensor=name) for name in tensors)


def plan_columns(schema: T.StructType, roles: Roles, *, cases: bool = False) -> ColumnPlan:
    """Plan what is written; ``cases`` says that the session tells ``a`` from ``A``.

    Number columns pack: one (batch, n) tensor of floats (of integers, if all are), so that a step reads one slice.
    Vectors, arrays and images keep a tensor of their own.

    Raises:
        SchemaError: a column is missing, or of a type that cannot be used in its part.
    """
    labels_and_weight = {*roles.labels, *([roles.weight] if roles.weight else [])}
    check_names(schema.fieldNames(), [*roles.features, *labels_and_weight], cases=cases)
    for name in sorted(labels_and_weight):
        if name + COPY_SUFFIX in roles.features:
            raise SchemaError(
                f"the feature column {name + COPY_SUFFIX!r} is called as the copy of {name!r}, a label or weight, "
                "would be: rename it"
            )
    kinds = {name: _kind(schema, name, "feature column") for name in roles.features}
    casts: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    copies: dict[str, str] = {}
    packs = dict.fromkeys(roles.continuous, "continuous") | dict.fromkeys(roles.categorical, "categorical")
    plain = [
        name for name, kind in kinds.items() if _is_number(kind) and name not in packs and name not in roles.dtypes
    ]
    floating = roles.shapes is None and any(isinstance(kinds[name], _FRACTIONS) for name in plain)
    for name, kind in kinds.items():
        if _is_number(kind):
            dtype = _number_dtype(name, kind, roles, packs.get(name), floating)
            if isinstance(kind, T.DecimalType | T.BooleanType):
                casts[name] = "double"
            if name in labels_and_weight and roles.shapes is None:
                copies[name] = name + COPY_SUFFIX
            stored = copies.get(name, name)
            groups.setdefault(packs.get(name, f"features_{dtype}"), []).append(stored)
            dtypes[stored] = dtype
        else:
            dtype = roles.dtypes.get(name) or (roles.float_dtype if _is_floating(kind) else "")
            dtypes |= {name: dtype} if dtype else {}
    for name in labels_and_weight:
        if isinstance(_kind(schema, name, "label or weight column"), T.DecimalType):
            casts[name] = "double"
    pack = _named([(name, [c for c in columns if c not in labels_and_weight]) for name, columns in groups.items()])
    if roles.weight:
        dtypes[roles.weight] = "float32"
    sizes = _array_sizes(kinds, roles)
    layout = Layout(pack=pack, dtypes=dtypes, shapes=sizes | _label_shapes(schema, roles))
    shape_of = dict(zip(roles.features, roles.shapes or (), strict=False))
    images = [name for name, kind in kinds.items() if isinstance(kind, T.BinaryType)]
    loose = [name for name in images if not _is_sized(shape_of.get(name))]
    varying = [name for name in roles.features if name in loose or sizes.get(name) == "ragged"]
    types = {name: kind.simpleString() for name, kind in kinds.items()}
    return ColumnPlan(roles=roles, casts=casts, layout=layout, copies=copies, varying=tuple(varying), types=types)


def _array_sizes(kinds: Mapping[str, T.DataType], roles: Roles) -> dict[str, tuple[int, ...] | str]:
    """Sizes of plain arrays, as input_shapes gives them: they are then stored as even rows, without offsets.

    Of arrays of arrays, which need none to be even, those that input_shapes gives no size.

    Arrays of no given size count as rows that differ in length, even if none of these does: the next ones may.
    """
    sizes: dict[str, tuple[int, ...] | str] = {}
    shape_of = dict(zip(roles.features, roles.shapes or (), strict=False))
    for name, kind in kinds.items():
        if isinstance(kind, T.ArrayType):
            shape = shape_of.get(name)
            if shape is not None and _is_sized(shape):
                sizes |= {name: (math.prod(shape[1:]),)} if _is_number(kind.elementType) else {}
            elif name not in roles.labels:  # whose rows a loss compares: they have one length
                sizes[name] = "ragged"
    return sizes


def _is_sized(shape: Sequence[int] | None) -> bool:
    """Whether an entry of input_shapes says how many numbers a row has."""
    return shape is not None and all(size > 0 for size in shape[1:])


def _label_shapes(schema: T.StructType, roles: Roles) -> dict[str, tuple[int, ...] | str]:
    """Shapes of a row of array and vector labels, as label_shapes gives them."""
    row_shapes: dict[str, tuple[int, ...] | str] = {}
    for name, shape in zip(roles.labels, roles.label_shapes or (), strict=False):
        kind = _kind(schema, name, "label or weight column")
        if not _is_number(kind):
            row_shapes[name] = shape[1:]
        elif math.prod(shape[1:]) != 1:
            raise ConfigError(f"label_shapes gives {list(shape)} for {name!r}, one number a row: give [-1] or [-1, 1]")
    return row_shapes


def _named(groups: Sequence[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Packed tensors by name; a lone group of plain numbers is called ``features``."""
    filled = {name: columns for name, columns in groups if columns}
    plain = [name for name in filled if name.startswith("features_")]
    return {"features" if [name] == plain else name: columns for name, columns in filled.items()}


def _number_dtype(name: str, kind: T.DataType, roles: Roles, pack: str | None, floating: bool) -> str:
    if name in roles.dtypes:
        return roles.dtypes[name]
    if pack == "continuous":
        return roles.float_dtype
    if pack == "categorical":
        if not isinstance(kind, _INTEGERS):
            raise SchemaError(
                f"categorical_cols names {name!r}, a {kind.simpleString()} column: index it to integers first"
            )
        return "int64"
    if isinstance(kind, _FRACTIONS) or floating:
        return roles.float_dtype
    return "int64"


def _kind(schema: T.StructType, name: str, part: str) -> T.DataType:
    names = schema.fieldNames()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1) or [", ".join(names)]
        raise SchemaError(f"the {part} {name!r} is missing, the frame has {near[0]}: correct the name")
    kind = schema[name].dataType
    scalar = _is_number(kind)
    nested = isinstance(kind, T.ArrayType) and _element(kind) is not None
    image = isinstance(kind, T.BinaryType) and part == "feature column"
    if not (scalar or nested or image or _is_vector(kind)):
        remedy = "index it with StringIndexer" if isinstance(kind, T.StringType) else "cast it to numbers"
        raise SchemaError(
            f"the {part} {name!r} is of type {kind.simpleString()}, which cannot be trained on: {remedy} first"
        )
    return kind


def _is_number(kind: T.DataType) -> bool:
    return isinstance(kind, _INTEGERS + _FRACTIONS)


def _is_vector(kind: T.DataType) -> bool:
    return isinstance(kind, T.UserDefinedType) and type(kind).__name__ == "VectorUDT"


def _element(kind: T.DataType) -> T.DataType | None:
    """The number type inside arrays of arrays; None if there is none."""
    while isinstance(kind, T.ArrayType):
        kind = kind.elementType
    return kind if _is_number(kind) and not isinstance(kind, T.DecimalType) else None


def _is_floating(kind: T.DataType) -> bool:
    return _is_vector(kind) or isinstance(_element(kind), T.FloatType | T.DoubleType)


def _place(manifest: Manifest, column: str) -> tuple[TensorSpec, int | None]:
    """The tensor that holds a column, and its position in it if it is packed."""
    for spec in manifest.tensors:
        if spec.role != "mask" and column in spec.columns:
            packed = len(spec.columns) > 1 or spec.name != column
            return spec, spec.columns.index(column) if packed else None
    raise SchemaError(f"shard set {manifest.uri} holds no column {column!r}: write it anew with that column")


def _own(name: str, spec: TensorSpec, index: int | None) -> ModelInput:
    return ModelInput(name=name, tensor=spec.name, index=index)


def _shaped(name: str, spec: TensorSpec, index: int | None, shape: tuple[int, ...]) -> ModelInput:
    row = () if index is not None else spec.shape
    ragged = spec.ragged or spec.dtype == "binary"
    if not _is_sized(shape):
        return ModelInput(name=name, tensor=spec.name, index=index)
    if not ragged and math.prod(shape[1:]) != math.prod(row):
        raise ConfigError(
            f"input_shapes gives {list(shape)} for {name!r}, whose rows have shape {list(row)}: "
            f"{math.prod(shape[1:])} numbers a row against {math.prod(row)}"
        )
    return ModelInput(name=name, tensor=spec.name, index=index, shape=shape)
