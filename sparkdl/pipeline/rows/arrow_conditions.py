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

from sparkdl.columns.numpy_arrow import filled, from_numpy, from_values, to_numpy
from sparkdl.pipeline.rows.expect import BROKEN, KEPT, NOT_DATED, OUTCOME
from sparkdl.pipeline.windows import MALFORMED, NO_TIME, WINDOW

_NAME = r"(?:`(?P<quoted>(?:[^`]|``)+)`|(?P<plain>[A-Za-z_]\w*))"
_NUMBER = r"[-+]?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][-+]?\d{1,3})?"
_OUTSIDE = r"(?=(?:[^`]*`[^`]*`)*[^`]*$)"
"""An even number of backticks follows: this is in no name."""
_BETWEEN = re.compile(
    rf"(?P<name>{_NAME})\s+BETWEEN\s+(?P<low>{_NUMBER})\s+AND\s+(?P<high>{_NUMBER}){_OUTSIDE}", re.IGNORECASE
)
_AND = re.compile(rf"\s+AND\s+{_OUTSIDE}", re.IGNORECASE)
_NOT_NULL = re.compile(rf"{_NAME}\s+IS\s+NOT\s+NULL", re.IGNORECASE)
_NOT_NAN = re.compile(rf"NOT\s+isnan\s*\(\s*{_NAME}\s*\)", re.IGNORECASE)
_COMPARED = re.compile(rf"{_NAME}\s*(?P<operator><=|>=|<>|!=|<|>|=)\s*(?P<number>{_NUMBER})")
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
            return pc.invert(filled(pc.is_nan(values), False))  # of NULL, isnan is false
        if self.test == "finite":
            return pc.or_(values.is_null(), filled(pc.is_finite(values), False))
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
            met = pc.and_(met, filled(term.met(rows.column(term.column)), False))
        return pc.invert(met)


def arrow_condition(sql: str, schema: pa.Schema) -> ArrowCondition | None:
    """The condition ``sql`` over columns of these types; None where Spark has to be asked."""
    text = sql.strip()
    if finite := _FINITE.fullmatch(text):
        name = finite["name"][1:-1].replace("``", "`")
        fits = name in schema.names and pa.types.is_float64(schema.field(name).type)
        return ArrowCondition((_Term(name, "finite"),)) if fits else None
    compared = _BETWEEN.sub(r"\g<name> >= \g<low> AND \g<name> <= \g<high>", text)
    terms = [_term(term, schema) for term in _AND.split(compared)]
    known_terms = tuple(term for term in terms if term is not None)
    return ArrowCondition(known_terms) if len(known_terms) == len(terms) else None


def _term(sql: str, schema: pa.Schema) -> _Term | None:
    match = _NOT_NULL.fullmatch(sql) or _NOT_NAN.fullmatch(sql) or _COMPARED.fullmatch(sql)
    if match is None:
        return None
    name = match["plain"] or match["quoted"].replace("``", "`")
    if name not in schema.names:
        return None
    kind = schema.field(name).type
    if match.re is _NOT_NULL:
        return _Term(name, "not null")
    if match.re is _NOT_NAN:
        return _Term(name, "not nan") if pa.types.is_floating(kind) else None
    if pa.types.is_signed_integer(kind) and re.fullmatch(r"[-+]?\d+", match["number"]):
        return _Term(name, match["operator"], int(match["number"]))
    return _Term(name, match["operator"], float(match["number"])) if pa.types.is_float64(kind) else None


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Adds to rows what ``expect.validated`` adds, and no text of a line that could not be read.

    Attributes:
        conditions: by expectation.
        reasons: the expectations that refuse a row, the first of which is its outcome; before all, that it has no time.
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
            undated = pc.equal(batch.column(WINDOW), _scalar(NO_TIME))
            outcomes = pc.if_else(undated, _scalar(NOT_DATED), outcomes)
            lines = pa.nulls(batch.num_rows, pa.string())
            columns = [*batch.columns, outcomes, _names_of(broken, self.named, batch.num_rows), lines]
            yield pa.RecordBatch.from_arrays(columns, [*batch.schema.names, OUTCOME, BROKEN, MALFORMED])


def _names_of(broken: Mapping[str, pa.Array], named: Sequence[str], rows: int) -> pa.Array:
    """The names of what each row broke."""
    masks = np.zeros((rows, len(named)), bool)
    for position, name in enumerate(named):
        masks[:, position] = to_numpy(broken[name])
    offsets = np.zeros(rows + 1, np.int32)
    offsets[1:] = masks.sum(axis=1).cumsum()
    names = from_values(named, pa.string()).take(from_numpy(np.nonzero(masks)[1]))
    return pa.ListArray.from_arrays(from_numpy(offsets), names)
