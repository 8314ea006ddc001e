"""Times in Parquet files that Spark and Arrow do not take alike: nanoseconds, as pandas writes them, and INT96.

Spark refuses a file with nanoseconds: here it reads their count and makes microseconds of it, as its own times are;
what is finer is dropped. INT96, as Spark itself wrote times for long, it reads in microseconds; Arrow takes them for
nanoseconds, which end in 2262.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.columns.names import quoted
from sparkdl.columns.numpy_arrow import filled, from_numpy, to_numpy
from sparkdl.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_AS_NUMBERS = "spark.sql.legacy.parquet.nanosAsLong"
_NO_ZONES = "spark.sql.parquet.inferTimestampNTZ.enabled"
_ALIKE = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.large_string(): pa.string(),
}  # fmt: skip
_PLAIN = frozenset((*_ALIKE, *_ALIKE.values(), pa.int8(), pa.float32(), pa.float64(), pa.bool_(), pa.date32()))


def schema_of(footer: Any) -> pa.Schema:
    """The columns of a file, INT96 in microseconds."""
    schema = footer.schema.to_arrow_schema()
    int96 = {footer.schema.column(index).path for index in range(len(footer.schema))
           if footer.schema.column(index).physical_type == "INT96"}  # fmt: skip
    return pa.schema([field.with_type(pa.timestamp("us", "UTC")) if field.name in int96 else field for field in schema])


def check_types(schema: pa.Schema, file: str) -> None:
    """Refuse a file with a column of a type that Spark does not read: it would not read the others either.

    Raises:
        SchemaError: names the column, its type and what to write instead.
    """
    for field in schema:
        leaf_types = [] if pa.types.is_timestamp(field.type) else _leaves(field.type)
        nested = any(_nanoseconds(kind) for kind in leaf_types)
        if nested or any(pa.types.is_time(kind) or pa.types.is_float16(kind) for kind in leaf_types):
            instead = "microseconds (pyarrow: write_table(..., coerce_timestamps='us'))" if nested else "another type"
            raise SchemaError(
                f"the column {field.name!r} of {file} is {field.type}, which Spark does not read: write it in {instead}"
            )


def _nanoseconds(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.unit == "ns")


def _of_spark(kind: pa.DataType) -> pa.DataType | None:
    """The plain type that Spark makes of one, times and decimals without what it merges; None of others."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us")
    if pa.types.is_decimal(kind):
        return pa.decimal256(76, kind.scale)
    return _ALIKE.get(kind, kind) if kind in _PLAIN else None


def check_alike(
    schemas: Mapping[str, pa.Schema], plain_type: Callable[[pa.DataType], pa.DataType | None] = _of_spark
) -> None:
    """Refuse files in which a column is of two types that Spark does not merge, such as int64 and double.

    Args:
        schemas: of each file.
        plain_type: what has to be the same in all files; None of a type that is not looked at.

    Raises:
        SchemaError: names the column, both types and a file of each.
    """
    first: dict[str, tuple[str, pa.DataType, pa.DataType]] = {}
    for file, schema in schemas.items():
        for field in schema:
            if (kind := plain_type(field.type)) is None:
                continue
            first_file, first_type, first_kind = first.setdefault(field.name, (file, field.type, kind))
            if kind != first_kind:
                raise SchemaError(
                    f"the column {field.name!r} is {first_type} in {first_file} and {field.type} in {file}, which "
                    "Spark does not read together: write the one as the other"
                )


def nanosecond_columns(schemas: Mapping[str, pa.Schema]) -> dict[str, str | None]:
    """The columns that are in nanoseconds, each with its time zone.

    Args:
        schemas: of each file.

    Raises:
        SchemaError: a column is in nanoseconds in one file and something else in another.
    """
    check_alike(schemas, lambda kind: kind if _nanoseconds(kind) else pa.null())
    return {field.name: field.type.tz for schema in schemas.values() for field in schema if _nanoseconds(field.type)}


@contextmanager
def nanoseconds_as_numbers(spark: SparkSession) -> Iterator[None]:
    """Let Spark find columns of nanoseconds to be whole numbers."""
    setting_before = spark.conf.get(_AS_NUMBERS, None)
    spark.conf.set(_AS_NUMBERS, "true")
    try:
        yield
    finally:
        if setting_before is None:
            spark.conf.unset(_AS_NUMBERS)
        else:
            spark.conf.set(_AS_NUMBERS, setting_before)


def in_microseconds(spark: SparkSession, frame: DataFrame, columns: Mapping[str, str | None]) -> DataFrame:
    """The rows with times in the place of counts of nanoseconds, in the types that Spark gives to microseconds."""
    from pyspark.sql import functions as F

    no_zones = str(spark.conf.get(_NO_ZONES, "true")).lower() == "true"
    times = {}
    for name, zone in columns.items():
        nanoseconds, thousand = F.col(quoted(name)), F.lit(1000).cast("bigint")
        below = F.when(nanoseconds % thousand < 0, 1).otherwise(0)
        count = F.call_function("div", nanoseconds, thousand) - below
        start = F.expr("timestamp_ntz'1970-01-01 00:00:00'")
        naive = zone is None and no_zones
        times[name] = F.timestamp_add("MICROSECOND", count, start) if naive else F.timestamp_micros(count)
    return frame.withColumns(times)


def microseconds(kind: pa.DataType) -> pa.DataType:
    """The type that a column of a file has in Spark, as far as times go."""
    return pa.timestamp("us", kind.tz) if _nanoseconds(kind) else kind


def times_of_spark(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of a file with times as Spark has them."""
    for index, field in enumerate(rows.schema):
        if _nanoseconds(field.type):
            column = rows.column(index)
            floored = to_numpy(filled(column.cast(pa.int64()), 0)) // 1000
            in_spark = from_numpy(floored, to_numpy(column.is_null())).cast(microseconds(field.type))
            rows = rows.set_column(index, field.name, in_spark)
    return rows


def _leaves(kind: pa.DataType) -> Sequence[pa.DataType]:
    if kind.num_fields == 0:
        return [kind]
    return [leaf for index in range(kind.num_fields) for leaf in _leaves(kind.field(index).type)]
