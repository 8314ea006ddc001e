"""What the texts of a column stand for: numbers, dates, missing values; and how Spark's SQL writes their types.

A column has the narrowest type that all its texts have, for Arrow and for Spark alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.names import quoted, stands_in_sql
from sparkdl.columns.types import is_text

NOTHING = (
    *("NA", "N/A", "NULL", "null", "NaN", "nan", "NAN", "-nan", "None", "?", "-", "\\N"),
    *("n/a", "na", "none", "#N/A", "<NA>", "."),
)
"""Texts that often stand for a value that is not there."""
_PRECISION, PLACES = 38, 18
"""Digits of numbers that are read as decimals, the most that Spark has, and the least behind the comma: rows not seen
may have more, which Spark rounds."""
_TRIED = 100
"""Texts that are tried before all of a column are: Arrow takes ten times as long for those that are not of a type."""
_NUMBER = r"^\s*[-+]?(\d+[.,]?\d*|[.,]\d+|\d{1,3}(\.\d{3})+,\d+)([eE][-+]?\d+)?\s*$"
_SIGNS = "[$€£¥,% ]"
_WITH_UNIT = r"^[-+]?[$€£¥]? ?[-+]?([1-9]\d{0,2}(,\d{3})+|\d+)(\.\d+)? ?[$€£¥%]?$"
_DATE = r"^(\d{4}-\d\d-\d\d|\d{1,2}[/.-]\d{1,2}[/.-]\d{4})([ T].*)?$"
_COMMA = r"^-?(\d+|[1-9]\d{0,2}(\.\d{3})+)(,\d+)?$"  # as most of Europe writes numbers: 1.234,5
_COMMA_EXPONENT = r"^-?\d+(,\d+)?([eE][-+]?\d+)?$"
_POINT = r"^-?(\d+\.(\d{1,2}|\d{4,})|0\.\d+)$"  # a dot that cannot part thousands
_THREE_PLACES = r"^-?\d+\.\d{3}$"  # a dot that may part thousands
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


def any_match(texts: pa.Array, pattern: str) -> bool:
    """Whether a pattern is in some text."""
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def all_match(texts: pa.Array, pattern: str) -> bool:
    """Whether a pattern is in every text; False without any."""
    return all(pc.all(pc.match_substring_regex(part, pattern)).as_py() for part in (texts[:_TRIED], texts))


def typed(column: pa.Array, kinds: Sequence[pa.DataType] = TYPES, *, comma: bool = False) -> pa.Array:
    """The texts as the first type that Arrow reads all of them as, and Spark reads like Arrow.

    Args:
        column: texts.
        kinds: types, the narrowest first.
        comma: whether numbers are written like 1.234,5.
    """
    texts = column.drop_null()
    numbers = _decimals(column, texts) if comma else None
    if numbers is not None:
        return numbers
    if not len(texts) or any_match(texts, _ARROW_ALONE):
        return column
    for kind in kinds:
        if pa.types.is_boolean(kind) and any_match(texts, r"\d"):
            continue  # 1 is true for Arrow alone
        try:
            texts[:_TRIED].cast(kind)
            values = column.cast(kind)
        except pa.ArrowInvalid:
            if kind == pa.int64() and all_match(texts, r"^[-+]?\d+$"):
                return column  # ids beyond 64 bits, of which DOUBLE makes one of two
            continue
        return values.cast(pa.timestamp("us", "UTC")) if pa.types.is_timestamp(kind) else values
    return column


def _decimals(column: pa.Array, texts: pa.Array) -> pa.Array | None:
    """Numbers like 1.234,5; None where some text is none, or nothing shows what dots and commas are."""
    if not all_match(texts, _COMMA) or not any_match(texts, "[.,]") or all_match(texts, _THREE_PLACES):
        return None
    plain = pc.replace_substring(pc.replace_substring(column, ".", ""), ",", ".")
    parts = [text.lstrip("-").partition(".") for text in pc.unique(plain.drop_null()).to_pylist()]
    scale = max(PLACES, *(len(places) for _, _, places in parts))
    if max(len(digits) for digits, _, _ in parts) > _PRECISION - scale:
        return None
    return plain.cast(pa.decimal128(_PRECISION, scale))


def have_commas(columns: Sequence[pa.Array]) -> bool:
    """Whether numbers have decimal commas: a column shows that its commas part no thousands, and none has points."""

    def has_commas(texts: pa.Array) -> bool:
        no_thousands = pc.invert(pc.match_substring_regex(texts, _THOUSANDS))
        return all_match(texts, _COMMA) and any_match(texts.filter(no_thousands), ",")

    def has_points(texts: pa.Array) -> bool:
        return all_match(texts, r"^-?\d+(\.\d+)?$") and any_match(texts, _POINT)

    return any(map(has_commas, columns)) and not any(map(has_points, columns))


def has_three_places(texts: pa.Array) -> bool:
    """Whether all have one dot and three digits behind it: decimals of one form, since thousands would vary."""
    return all_match(texts, _THREE_PLACES)


def nothing_of(columns: Sequence[pa.Array]) -> str | None:
    """The text that stands for missing numbers; Spark takes one."""
    columns_by_text: Counter[str] = Counter()
    for texts in columns:
        is_number = pc.match_substring_regex(texts, _NUMBER)
        others = pc.unique(texts.filter(pc.invert(is_number))).to_pylist() if is_number.true_count else []
        columns_by_text.update(others if len(others) == 1 and others[0] in NOTHING else [])
    return columns_by_text.most_common(1)[0][0] if columns_by_text else None


def strays_of(column: pa.Array) -> pa.Array | None:
    """Which texts of a column of numbers or dates are none, as a unit or a total is.

    None where there are none, or more than two and than one in a thousand.
    """
    for pattern in (_NUMBER, _DATE):
        is_stray = pc.invert(pc.match_substring_regex(column, pattern)).fill_null(False)
        strays = is_stray.true_count
        if not 0 < strays <= max(2, len(column) // 1000) or strays * 100 > len(column) - column.null_count:
            continue
        others = column.filter(pc.invert(is_stray))
        if not pa.types.is_string(typed(others).type) or date_format_of(others) is not None:
            return is_stray
    return None


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
        column, value = table.column(index).cast(pa.string()).combine_chunks(), quoted(field.name)
        column = pc.if_else(pc.is_in(column, pa.array(["", *NOTHING])), None, column)
        numbers, texts = typed(column, _NUMBERS), column.drop_null()
        if numbers.type not in _NUMBERS and _have_one_unit(texts):
            numbers = pc.replace_substring_regex(column, _SIGNS, "").cast(pa.float64())
            value = f"regexp_replace({value}, '{_SIGNS}', '')"
        elif numbers.type not in _NUMBERS and all_match(texts, _COMMA_EXPONENT) and any_match(texts, ",.*[eE]"):
            numbers = pc.replace_substring(column, ",", ".").cast(pa.float64())  # Spark reads no exponent of a DECIMAL
            value = f"replace({value}, ',', '.')"
        if numbers.type in _NUMBERS:
            table = table.set_column(index, field.name, numbers)
            casts[field.name] = f"try_cast({value} AS {_SQL[numbers.type]})"
    return table, casts


def _have_one_unit(texts: pa.Array) -> bool:
    """Whether all texts are numbers with commas between thousands or one sign of currency or per cent."""
    if not all_match(texts, _WITH_UNIT) or not any_match(texts, _SIGNS):
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
    texts = column.drop_null()
    if not all_match(texts, _DATED):
        return None
    first, sep, second, sep2, time = pc.extract_regex(texts, _DATED).flatten()
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


_SQL: Mapping[pa.DataType, str] = {
    pa.bool_(): "BOOLEAN", pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.string(): "STRING", pa.null(): "STRING",
    pa.date32(): "DATE", pa.timestamp("us", "UTC"): "TIMESTAMP",
}  # fmt: skip


def ddl(fields: Any) -> str:
    """Columns as Spark's SQL; those of types that it does not write are left out."""
    named = ((field.name, _sql(field.type)) for field in fields)
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in named if kind)


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
