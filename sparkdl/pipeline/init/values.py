"""What the texts of a column stand for: numbers, dates, missing values; and how Spark's SQL writes their types.

A column has the narrowest type that all its texts have, for Arrow and for Spark alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.names import quoted, stands_in_sql
from sparkdl.columns.numpy_arrow import to_numpy
from sparkdl.columns.types import is_text

_NOTHING = (
    *("NA", "N/A", "NULL", "null", "NaN", "nan", "NAN", "-nan", "None", "?", "-", "\\N"),
    *("n/a", "na", "none", "#N/A", "<NA>", "."),
)
"""Texts that often stand for a value that is not there."""
_PRECISION, PLACES = 38, 18
"""Digits of numbers that are read as decimals, the most that Spark has, and the least behind the comma: rows not seen
may have more, which Spark rounds."""
_NUMBER = r"^\s*[-+]?(\d+[.,]?\d*|[.,]\d+|\d{1,3}(\.\d{3})+,\d+)([eE][-+]?\d+)?\s*$"
_SIGNS = "[$€£¥,% ]"
_WITH_UNIT = r"^[-+]?[$€£¥]? ?[-+]?([1-9]\d{0,2}(,\d{3})+|\d+)(\.\d+)? ?[$€£¥%]?$"
_DATE = r"^(\d{4}-\d\d-\d\d|\d{1,2}[/.-]\d{1,2}[/.-]\d{4})([ T].*)?$"
_COMMA = r"^-?(\d+|[1-9]\d{0,2}(\.\d{3})+)(,\d+)?$"  # as most of Europe writes numbers: 1.234,5
_POINT = r"^-?(\d+\.(\d{1,2}|\d{4,})|0\.\d+)$"  # a dot that cannot part thousands
_THOUSANDS = r"^-?\d{1,3}(,\d{3})+$"  # as English writes whole numbers
_NUMBERS = pa.int64(), pa.float64()
TIMES = pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us")
TYPES = (*_NUMBERS, pa.bool_(), *TIMES)
"""The types that a column of texts may have, the narrowest first."""
_ARROW_ALONE = (
    r"^[-+]?(0[\dxX][^-]*$|(?i:inf))|^([-+](?i:nan)|(?i:nan)\(|n[aA][nN]|NA[nN]|Nan)"
    r"|[ T]\d\d$|[ T]\d\d:\d\d([zZ]|[-+]\d\d(:?\d\d)?)$"
)
"""What Arrow reads as numbers and times and Spark does not: 0x1F, inf, nan, 2026-03-01 05, 2026-03-01T05:00Z; and codes
such as 0815."""
_DATED = r"^(?P<first>\d{1,2})(?P<sep>[/.-])(?P<second>\d{1,2})(?P<sep2>[/.-])\d{4}(?P<time> \d{1,2}:\d\d(?::\d\d)?)?$"
_TIMES = (("", ""), (" H:mm", " %H:%M"), (" H:mm:ss", " %H:%M:%S"))


def any_of(mask: Any) -> bool:
    """Whether an Arrow array of booleans is true anywhere."""
    return bool(pc.any(mask).as_py())


def is_nothing(text: str) -> bool:
    """Whether a text often stands for a value that is not there."""
    return text in _NOTHING


def nothing_of(columns: Sequence[pa.Array]) -> str | None:
    """The text that stands for missing numbers; Spark takes one."""
    columns_by_text: Counter[str] = Counter()
    for column in columns:
        number = pc.match_substring_regex(column, _NUMBER)
        non_numbers = pc.unique(column.filter(pc.invert(number))) if any_of(number) else pa.array([], pa.string())
        if len(non_numbers) == 1 and non_numbers[0].as_py() in _NOTHING:
            columns_by_text[non_numbers[0].as_py()] += 1
    return columns_by_text.most_common(1)[0][0] if columns_by_text else None


def has_commas(texts: pa.Array) -> bool:
    """Whether all of them are numbers, and some have a decimal comma that cannot part thousands."""
    thousands = pc.match_substring_regex(texts, _THOUSANDS)
    decimal = any_of(pc.and_(pc.match_substring(texts, ","), pc.invert(thousands)))
    return decimal and bool(pc.all(pc.match_substring_regex(texts, _COMMA)).as_py())


def has_points(texts: pa.Array) -> bool:
    """Whether all of them are numbers, and some have a decimal point that cannot part thousands."""
    decimal = any_of(pc.match_substring_regex(texts, _POINT))
    return decimal and bool(pc.all(pc.match_substring_regex(texts, r"^-?\d+(\.\d+)?$")).as_py())


def has_points_alone(texts: pa.Array) -> bool:
    """Whether all of them have one dot and three digits behind it, as decimals of one form have, and nothing else."""
    return len(texts) > 0 and bool(pc.all(pc.match_substring_regex(texts, r"^-?\d+\.\d{3}$")).as_py())


def typed(
    table: pa.Table, nothing: str | None, *, comma: bool = False, kinds: Sequence[pa.DataType] = TYPES
) -> pa.Table:
    """The table with columns of texts as the types of ``kinds`` that all their texts have.

    Args:
        table: of texts, at least in part.
        nothing: the text that stands for a missing value.
        comma: whether numbers are written like 1.234,5.
        kinds: types, the narrowest first.
    """
    for index, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            column = table.column(index).combine_chunks()
            column = column if nothing is None else pc.if_else(pc.equal(column, nothing), None, column)
            numbers = _decimals(column) if comma else None
            table = table.set_column(index, field.name, _as_its_type(column, kinds) if numbers is None else numbers)
    return table


def _decimals(column: pa.Array) -> pa.Array | None:
    """Numbers like 1.234,5; None where some text is none, or nothing shows what dots and commas are."""
    texts = column.drop_null()
    if (
        not any_of(pc.match_substring_regex(texts, "[.,]"))
        or has_points_alone(texts)
        or not pc.all(pc.match_substring_regex(texts, _COMMA)).as_py()
    ):
        return None
    plain = pc.replace_substring(pc.replace_substring(column, ".", ""), ",", ".")
    parts = [text.lstrip("-").partition(".") for text in pc.unique(plain.drop_null()).to_pylist()]
    scale = max(PLACES, *(len(places) for _, _, places in parts))
    if max(len(digits) for digits, _, _ in parts) > _PRECISION - scale:
        return None
    return plain.cast(pa.decimal128(_PRECISION, scale))


def _as_its_type(column: pa.Array, kinds: Sequence[pa.DataType] = TYPES) -> pa.Array:
    """The column as the first type that Arrow reads all its texts as, and Spark reads like Arrow."""
    texts = column.drop_null()
    if not len(texts) or any_of(pc.match_substring_regex(texts, _ARROW_ALONE)):
        return column
    for kind in kinds:
        if pa.types.is_boolean(kind) and any_of(pc.match_substring_regex(texts, r"\d")):
            continue  # 1 is true for Arrow alone
        try:
            values = column.cast(kind)
        except pa.ArrowInvalid:
            if kind == pa.int64() and pc.all(pc.match_substring_regex(texts, r"^[-+]?\d+$")).as_py():
                return column  # ids beyond 64 bits, of which DOUBLE makes one of two
            continue
        return values.cast(pa.timestamp("us", "UTC")) if pa.types.is_timestamp(kind) else values
    return column


def strays_of(column: pa.Array) -> tuple[np.ndarray[Any, Any] | None, str]:
    """Which texts of a column of numbers or dates are none, as a unit or a total is, and they themselves.

    None where there are none, or more than two and than one in a thousand.
    """
    for pattern in (_NUMBER, _DATE):
        is_stray = pc.invert(pc.match_substring_regex(column, pattern)).fill_null(False)
        strays = is_stray.true_count
        if not 0 < strays <= max(2, len(column) // 1000) or strays * 100 > len(column) - column.null_count:
            continue
        column_without = column.filter(pc.invert(is_stray))
        if not pa.types.is_string(_as_its_type(column_without).type) or date_format_of(column_without) is not None:
            shown = ", ".join(f"{text!r:.30}" for text in pc.unique(column.filter(is_stray))[:3].to_pylist())
            return to_numpy(is_stray), shown
    return None, ""


def numbers_of_texts(table: pa.Table) -> tuple[pa.Table, dict[str, str]]:
    """The table with columns of texts as numbers where all their texts are, but for those that stand for none.

    A column of "$1,234.50" or "12 %" is one, too, if all of it is of one unit.

    Returns:
        it, and the SQL that makes the numbers of each such column.
    """
    casts = {}
    for index, field in enumerate(table.schema):
        if not is_text(field.type) or not stands_in_sql(field.name):
            continue
        texts, value = table.column(index).cast(pa.string()).combine_chunks(), quoted(field.name)
        texts = pc.if_else(pc.is_in(texts, pa.array(["", *_NOTHING])), None, texts)
        numbers = _as_its_type(texts, _NUMBERS)
        if numbers.type not in _NUMBERS and _have_one_unit(texts.drop_null()):
            numbers = pc.replace_substring_regex(texts, _SIGNS, "").cast(pa.float64())
            value = f"regexp_replace({value}, '{_SIGNS}', '')"
        elif numbers.type not in _NUMBERS and _have_exponents(texts.drop_null()):
            numbers = pc.replace_substring(texts, ",", ".").cast(pa.float64())
            value = f"replace({value}, ',', '.')"
        if numbers.type in _NUMBERS:
            table = table.set_column(index, field.name, numbers)
            casts[field.name] = f"try_cast({value} AS {_SQL[numbers.type]})"
    return table, casts


def _have_exponents(texts: pa.Array) -> bool:
    """Whether all texts are numbers with decimal commas, and some have an exponent, which Spark reads of no DECIMAL."""
    exponents = any_of(pc.match_substring_regex(texts, ",.*[eE]"))
    return exponents and bool(pc.all(pc.match_substring_regex(texts, r"^-?\d+(,\d+)?([eE][-+]?\d+)?$")).as_py())


def other_texts(texts: pa.Array) -> list[str]:
    """Some of the texts that are no plain numbers, where more than 80 % are; else none."""
    is_number = pc.match_substring_regex(texts, r"^\s*[-+]?(\d+[.,]?\d*|[.,]\d+)\s*$")
    others: list[str] = pc.unique(texts.filter(pc.invert(is_number)))[:3].to_pylist()
    return others if is_number.true_count > 0.8 * len(texts) else []


def _have_one_unit(texts: pa.Array) -> bool:
    """Whether all texts are numbers with commas between thousands or one sign of currency or per cent."""
    if not any_of(pc.match_substring_regex(texts, _SIGNS)):
        return False
    if not pc.all(pc.match_substring_regex(texts, _WITH_UNIT)).as_py():
        return False
    return len(pc.unique(pc.replace_substring_regex(texts, "[^$€£¥%]", ""))) == 1


@dataclass(frozen=True)
class DateFormat:
    """How dates are written.

    Attributes:
        spark: as an option of Spark's reader says it, such as ``M/d/yyyy H:mm``.
        strptime: as the standard library says it.
        type: of what they are.
    """

    spark: str
    strptime: str
    type: pa.DataType

    def read(self, texts: pa.Array) -> pa.Array:
        """The dates, null where a text is none; times are of UTC."""
        times = pc.strptime(texts, format=self.strptime, unit="us", error_is_null=True)
        return times.cast(self.type) if pa.types.is_date(self.type) else pc.assume_timezone(times, "UTC")


def date_format_of(column: pa.Array) -> DateFormat | None:
    """How all texts of a column are written; None where they are no such dates, or none tells day and month apart."""
    parts = pc.extract_regex(column.drop_null(), _DATED)
    if not len(parts) or parts.null_count:
        return None
    first, sep, second, sep2, time = (parts.field(position) for position in range(5))
    separators, colons = pc.unique(pa.concat_arrays([sep, sep2])), pc.unique(pc.count_substring(time, ":"))
    is_day = [pc.max(part.cast(pa.int8())).as_py() > 12 for part in (first, second)]
    if len(separators) > 1 or len(colons) > 1 or is_day[0] == is_day[1]:
        return None
    mark, (of_spark, of_strptime) = separators[0].as_py(), _TIMES[colons[0].as_py()]
    order = ("d", "M") if is_day[0] else ("M", "d")
    return DateFormat(
        spark=mark.join([*order, "yyyy"]) + of_spark,
        strptime=mark.join(f"%{part.replace('M', 'm')}" for part in (*order, "Y")) + of_strptime,
        type=pa.timestamp("us", "UTC") if of_spark else pa.date32(),
    )


def ddl(schema: pa.Schema) -> str:
    """A schema as Spark's SQL; columns of types that it does not write are left out."""
    parts = ((field.name, _sql(field.type)) for field in schema)
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in parts if kind)


_SQL: Mapping[pa.DataType, str] = {
    pa.bool_(): "BOOLEAN", pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.string(): "STRING", pa.null(): "STRING",
    pa.date32(): "DATE", pa.timestamp("us", "UTC"): "TIMESTAMP",
}  # fmt: skip


def _sql(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        inner = _sql(kind.value_type)
        return f"ARRAY<{inner}>" if inner else ""
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_struct(kind):
        fields = [f"{quoted(field.name)}: {_sql(field.type)}" for field in kind if _sql(field.type)]
        return f"STRUCT<{', '.join(fields)}>" if fields else ""
    return _SQL.get(kind, "")
