"""Rows of CSV and JSON files.

Enters: the section ``source``, and the files that were there when it was looked at. Leaves: a DataFrame with the column
``_malformed`` beside those of the files. Columns of CSV files with a header are taken by name: Spark compares each
file's header with the columns, and a file with others, or with the same in another order, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.errors import SchemaError
from sparkdl.observe import logger
from sparkdl.pipeline.spec import CsvSource, JsonSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader
    from pyspark.sql.types import StructType

__all__ = ["MALFORMED", "header_names", "rows_of_texts"]

MALFORMED = "_malformed"
"""The column with the text of a row that does not fit its file's columns; null where it does."""


def header_names(cells: Sequence[str]) -> list[str]:
    """The names that Spark makes of a first line: what is empty or stands there twice gets its number."""
    double = {name for name, count in Counter(cell.lower() for cell in cells).items() if count > 1}
    return [
        f"_c{place}" if not cell else f"{cell}{place}" if cell.lower() in double else cell
        for place, cell in enumerate(cells)
    ]


def rows_of_texts(reader: DataFrameReader, source: CsvSource | JsonSource, places: Sequence[str]) -> DataFrame:
    """The rows of some files.

    Args:
        reader: of the session, with the folder that partitions lie in.
        source: the section of the file.
        places: addresses of the files.

    Raises:
        SchemaError: what stands under ``schema`` is no columns.
    """
    from pyspark.sql.types import StringType, StructField

    form = "csv" if isinstance(source, CsvSource) else "json"
    options: dict[str, Any] = {"columnNameOfCorruptRecord": MALFORMED, "mode": "PERMISSIVE"}
    options |= {"header": True, "enforceSchema": False} if form == "csv" else {}
    reader = reader.format(form).options(**{**options, **source.options})
    if source.schema is not None:
        schema = _declared(source.schema)
    elif form == "json":
        schema = reader.load(list(places)).schema
    else:
        schema = reader.options(inferSchema=True).load(list(places)).schema
        if not _by_name(reader, source, schema.names, places[0]):
            reader = reader.options(header=True, enforceSchema=True)
            if len(places) > 1:
                told = "columns of %s have no name, or one name, and are taken by their place in each file"
                logger.warning(told, source.path)
    if MALFORMED not in schema.names:
        schema = schema.add(StructField(MALFORMED, StringType(), True))
    return reader.schema(schema).load(list(places))


def _by_name(reader: DataFrameReader, source: CsvSource | JsonSource, names: Sequence[str], first: str) -> bool:
    """Whether the names that Spark found are those of the header, and not some that it made of it."""
    options = {name.lower(): str(value).lower() for name, value in source.options.items()}
    if options.get("header") == "false" or options.get("enforceschema") == "true":
        return True
    if not any(name.endswith(str(place)) for place, name in enumerate(names)):
        return True
    row = reader.options(header=False, inferSchema=False).load(first).first()
    reader.options(header=True)
    cells = [str(cell or "") for cell in row or ()]
    made = header_names(cells)
    return made == cells or made != list(names)[: len(made)]


def _declared(columns: str) -> StructType:
    from pyspark.sql.types import StructType

    declared = StructType.fromDDL(columns)
    if not isinstance(declared, StructType):
        raise SchemaError(f"source.schema={columns} is one type: write columns, as in 'id BIGINT, at TIMESTAMP'")
    return declared
