"""Conditions of SQL that Arrow answers as Spark does: IS NOT NULL, and comparisons of numbers, joined by AND.

What is no such condition is Spark's. Spark compares NaN as greater than every number, and equal to itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.numpy_arrow import from_numpy, from_values, to_numpy
from sparkdl.pipeline.rows.expect import KEPT

_NAME = r"(?:`(?P<quoted>(?:[^`]|``)+)`|(?P<plain>[A-Za-z_]\w*))"
_NUMBER = r"[-+]?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][-+]?\d{1,3})?"
_END = r"(?=\s|\)|$)"
_TERMS = (
    re.compile(rf"{_NAME}\s+(?P<not_null>IS\s+NOT\s+NULL){_END}", re.IGNORECASE),
    re.compile(rf"(?P<not_nan>NOT)\s+isnan\s*\(\s*{_NAME}\s*\)", re.IGNORECASE),
    re.compile(rf"{_NAME}\s+BETWEEN\s+(?P<low>{_NUMBER})\s+AND\s+(?P<high>{_NUMBER}){_END}", re.IGNORECASE),
    re.compile(rf"{_NAME}\s*(?P<operator><=|>=|<>|!=|<|>|=)\s*(?P<number>{_NUMBER}){_END}", re.IGNORECASE),
)
_AND = re.compile(r"\s+AND\s+", re.IGNORECASE)
_FINITE = re.compile(
    r"(?P<name>`(?:[^`]|``)+`) IS NULL OR NOT \(isnan\((?P=name)\) OR abs\((?P=name)\) = double\('inf'\)\)"
)
"""What ``sparkdl init`` writes of a label."""
_COMPARE: dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal,
    "=": pc.equal, "<>": pc.not_equal, "!=": pc.not_equal,
}  # fmt: skip


def _scalar(value: str | bool | int | float) -> pa.Scalar:
    """A scalar of the type that ``pa.scalar`` gives it, which imports pandas."""
    kinds = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    return from_values([value], kinds[type(value)])[0]


@dataclass(frozen=True)
class _Term:
    column: str
    test: str
    number: int | float = 0

    def met(self, values: pa.Array) -> pa.Array:
        if self.test == "not null":
            return values.is_valid()
        if self.test == "not nan":
            return pc.invert(pc.fill_null(pc.is_nan(values), _scalar(False)))  # of NULL, isnan is false
        if self.test == "finite":
            return pc.or_(values.is_null(), pc.fill_null(pc.is_finite(values), _scalar(False)))
        met = _COMPARE[self.test](values, _scalar(self.number))
        if pa.types.is_floating(values.type) and self.test in (">", ">="):
            met = pc.or_(met, pc.is_nan(values))
        return met


@dataclass(frozen=True)
class ArrowCondition:
    """Terms that must all be true."""

    terms: tuple[_Term, ...]

    def broken(self, rows: pa.RecordBatch) -> pa.Array:
        """Whether the condition is not true, by row; NULL is not."""
        met = pa.repeat(_scalar(True), rows.num_rows)
        for term in self.terms:
            met = pc.and_(met, pc.fill_null(term.met(rows.column(term.column)), _scalar(False)))
        return pc.invert(met)


def arrow_condition(sql: str, schema: pa.Schema) -> ArrowCondition | None:
    """The condition ``sql`` over columns of these types; None where Spark has to be asked."""
    text = sql.strip()
    if finite := _FINITE.fullmatch(text):
        name = finite["name"][1:-1].replace("``", "`")
        fits = name in schema.names and pa.types.is_float64(schema.field(name).type)
        return ArrowCondition((_Term(name, "finite"),)) if fits else None
    terms: list[_Term] = []
    position = 0
    while True:
        match = next((match for form in _TERMS if (match := form.match(text, position))), None)
        matched = None if match is None else _terms(match, schema)
        if match is None or matched is None:
            return None
        terms += matched
        if match.end() == len(text):
            return ArrowCondition(tuple(terms))
        joined = _AND.match(text, match.end())
        if joined is None:
            return None
        position = joined.end()


def _terms(match: re.Match[str], schema: pa.Schema) -> list[_Term] | None:
    parts = match.groupdict()
    name = parts["plain"] or parts["quoted"].replace("``", "`")
    if name not in schema.names:
        return None
    kind = schema.field(name).type
    if parts.get("not_null"):
        return [_Term(name, "not null")]
    if parts.get("not_nan"):
        return [_Term(name, "not nan")] if pa.types.is_floating(kind) else None
    between = {">=": parts.get("low"), "<=": parts.get("high")}
    compared = {parts.get("operator"): parts.get("number")}
    tests = {str(test): str(number) for test, number in (between if parts.get("low") else compared).items()}
    integers = all(re.fullmatch(r"[-+]?\d+", number) for number in tests.values())
    if pa.types.is_signed_integer(kind) and integers:
        return [_Term(name, test, int(number)) for test, number in tests.items()]
    if pa.types.is_float64(kind):
        return [_Term(name, test, float(number)) for test, number in tests.items()]
    return None


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Adds to rows what ``expect.validated`` adds, and no text of a line that could not be read.

    Attributes:
        conditions: by expectation.
        reasons: the expectations that refuse a row, the first of which is its outcome.
        named: those that are listed for each row that breaks them.
    """

    conditions: Mapping[str, ArrowCondition]
    reasons: Sequence[str]
    named: Sequence[str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows, then outcome, list of what was broken, and nulls for the line."""
        for batch in batches:
            broken = {name: condition.broken(batch) for name, condition in self.conditions.items()}
            outcomes = pa.repeat(_scalar(KEPT), batch.num_rows)
            for name in reversed(self.reasons):
                outcomes = pc.if_else(broken[name], _scalar(name), outcomes)
            lines = pa.nulls(batch.num_rows, pa.string())
            columns = [*batch.columns, outcomes, _names_of(broken, self.named, batch.num_rows), lines]
            yield pa.RecordBatch.from_arrays(columns, [f"column_{position}" for position in range(len(columns))])


def _names_of(broken: Mapping[str, pa.Array], named: Sequence[str], rows: int) -> pa.Array:
    """The names of what each row broke."""
    masks = np.zeros((rows, len(named)), bool)
    for position, name in enumerate(named):
        masks[:, position] = to_numpy(broken[name])
    offsets = np.zeros(rows + 1, np.int32)
    offsets[1:] = masks.sum(axis=1).cumsum()
    names = from_values(named, pa.string()).take(from_numpy(np.nonzero(masks)[1]))
    return pa.ListArray.from_arrays(from_numpy(offsets), names)
