"""The meaning of ``where``: conditions on columns, all of which a row must meet, as in Spark's SQL."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.errors import ConfigError, SchemaError
from sparkdl.tables.parquet import is_ordered

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_LISTS, _NULLS = ("in", "not in"), ("is", "is not")
_OPERATORS = (*_COMPARE, *_LISTS, *_NULLS)
_COARSE = dt.timedelta(milliseconds=1)  # logs keep greatest times cut to milliseconds
_MOST_VALUES = 1000  # of a list; beyond, no files are left out by it


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on one column.

    Attributes:
        column: its name in the table.
        operator: ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``in``, ``not in``, ``is`` or ``is not`` (null).
        value: to compare with, in the type that is compared; of ``in`` an array, of ``is`` a null.
    """

    column: str
    operator: str
    value: Any

    @property
    def kind(self) -> pa.DataType:
        """The type that is compared; Arrow's null where none is."""
        return pa.null() if self.value is None else self.value.type

    def mask(self, values: pa.Array) -> pa.Array:
        """Which of a column's values meet the condition: booleans, none of them null."""
        if self.operator in _NULLS:
            return pc.is_null(values) if self.operator == "is" else pc.is_valid(values)
        values = _comparable(values, self.kind)
        if self.operator in _LISTS:
            matches = pc.is_in(values, value_set=self.value)
            met = matches if self.operator == "in" else pc.and_(pc.invert(matches), pc.is_valid(values))
        else:
            met = _COMPARE[self.operator](values, self.value)
            if self.operator in (">", ">=") and pa.types.is_floating(self.kind):
                met = pc.or_(met, pc.is_nan(values))
        return met.fill_null(False)

    def possible(self, least: pa.Array, greatest: pa.Array) -> pa.Array:
        """Which files can hold a value that meets the condition, by the least and greatest value of each.

        A null, where the log does not tell, rules nothing out. Floating-point columns never do: writers differ in what
        NaN does to their statistics.
        """
        kind = self.kind
        if self.operator in ("!=", "not in") or not is_ordered(kind):
            return pa.array([True] * len(least))
        least, greatest = _comparable(least, kind), _comparable(greatest, kind)
        if pa.types.is_timestamp(kind):
            greatest = pc.add(greatest, pa.scalar(_COARSE, pa.duration("us")))
        if self.operator == "in":
            return self._some(least, greatest)
        below = _COMPARE["<" if self.operator == "<" else "<="](least, self.value)
        above = _COMPARE[">" if self.operator == ">" else ">="](greatest, self.value)
        if self.operator == "=":
            below = pc.and_kleene(below, above)
        return (above if self.operator in (">", ">=") else below).fill_null(True)

    def _some(self, least: pa.Array, greatest: pa.Array) -> pa.Array:
        """Whether a file's range holds one of a list's values."""
        if len(self.value) > _MOST_VALUES:
            return pa.array([True] * len(least))
        possible = pa.array([False] * len(least))
        for value in self.value:
            inside = pc.and_kleene(pc.less_equal(least, value), pc.greater_equal(greatest, value))
            possible = pc.or_(possible, inside.fill_null(True))
        return possible


def conditions_of(where: Sequence[tuple[str, str, Any]], schema: pa.Schema) -> tuple[Condition, ...]:
    """Check conditions against a table's columns.

    They are written as ``pyarrow.parquet.read_table`` takes them::

        [("day", ">=", date(2026, 3, 1)), ("country", "in", ["DE", "FR"])]

    As in SQL a null meets nothing but ``is``; NaN is greater than every number, and -0.0 is 0.0.

    Args:
        where: ``(column, operator, value)`` each; ``in`` and ``not in`` take a list, ``is`` and ``is not`` take None.
        schema: of the table.

    Raises:
        ConfigError: one is no such triple, or compares a column with a value of another type.
        SchemaError: the table has no such column, or one of a type that has no order.
    """
    if not all(isinstance(term, tuple | list) and len(term) == 3 for term in where):
        raise ConfigError(f"where={where!r} is no list of conditions: give [('day', '>=', '2026-03-01'), ...]")
    return tuple(_condition(*term, schema) for term in where)


def _condition(column: str, operator: str, value: Any, schema: pa.Schema) -> Condition:
    if column not in schema.names:
        raise SchemaError(f"where names the column {column!r}, the table has {schema.names}: name one of these")
    operator = {"==": "="}.get(operator, operator)
    if operator not in _OPERATORS:
        raise ConfigError(f"where compares {column!r} by {operator!r}, not one of {_OPERATORS}: use one of these")
    if operator in _NULLS:
        if value is not None:
            raise ConfigError(f"where compares {column!r} by {operator!r} with {value!r}, which takes None alone")
        return Condition(column, operator, None)
    kind = _compared_as(column, schema.field(column).type)
    if operator not in _LISTS:
        return Condition(column, operator, _literal(value, kind, column))
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise ConfigError(f"where compares {column!r} by {operator!r} with {value!r}: give a list of values")
    return Condition(column, operator, pa.array([_literal(member, kind, column).as_py() for member in value], kind))


def _compared_as(column: str, kind: pa.DataType) -> pa.DataType:
    """The type in which a column is compared: the widest of its kind, so that no value is rounded to fit."""
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if any(test(kind) for test in (pa.types.is_string, pa.types.is_boolean, pa.types.is_date32, pa.types.is_decimal)):
        return kind
    raise SchemaError(f"where compares the column {column!r} of type {kind}, which has no order: filter by another one")


def _literal(value: Any, kind: pa.DataType, column: str) -> pa.Scalar:
    """A value of the user's in the type of its column."""
    wrong = ConfigError(f"where compares the column {column!r} of type {kind} with {value!r}: give a value of its type")
    if isinstance(value, np.datetime64):
        value = (value.astype("datetime64[us]") if pa.types.is_timestamp(kind) else value).item()
    if value is None:
        raise ConfigError(f"where compares the column {column!r} with None, which nothing equals: use 'is' or 'is not'")
    nothing = isinstance(value, float | np.floating | dt.date) and value != value  # NaN, and NaT of pandas
    if nothing or isinstance(value, bool | np.bool_) != pa.types.is_boolean(kind):
        raise wrong
    if pa.types.is_temporal(kind) and not isinstance(value, str | dt.date):  # a number of what, since when?
        raise wrong
    if isinstance(value, dt.datetime) and (
        not pa.types.is_timestamp(kind) or (value.tzinfo is None) != (kind.tz is None)  # whose clock?
    ):
        raise wrong
    try:
        if isinstance(value, str) and pa.types.is_temporal(kind):
            return pa.scalar(value).cast(kind)
        scalar = pa.scalar(Decimal(str(value)) if pa.types.is_decimal(kind) else value, kind)
        if pa.types.is_integer(kind) and scalar.as_py() != value:  # Arrow takes 5.7 for 5
            raise wrong
        return _comparable(scalar, kind)
    except (pa.ArrowException, ArithmeticError, TypeError, ValueError) as cause:
        raise wrong from cause


def _comparable(values: Any, kind: pa.DataType) -> Any:
    """Values in the type in which they are compared; -0.0 becomes 0.0, which it equals."""
    values = values if values.type == kind else values.cast(kind)
    return pc.add(values, 0.0) if pa.types.is_floating(kind) else values
