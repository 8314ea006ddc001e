"""The columns of a table that forbid nulls, and the nulls in nested columns of a write; no Spark, no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from sparkdl.columns.names import quoted
from sparkdl.errors import DataError

_INSIDE = {"elementType": "containsNull", "keyType": "", "valueType": "valueContainsNull"}


def forbids_nulls(kind: Any, above: str = "") -> list[str]:
    """The columns of a schema that forbid nulls, and what does so inside of others.

    Paths are the same as in Spark: a struct's ```s`.`a```, an array's ```tags`.`element```, a map's ```m`.`value```.

    Args:
        kind: the schema in Delta's JSON, decoded, or a type inside of it.
        above: the path of what it is inside of.
    """
    if not isinstance(kind, dict):
        return []
    inside = [(field["name"], field["nullable"], field["type"]) for field in kind.get("fields", ())]
    inside += [
        (name.removesuffix("Type"), kind.get(allowed, True), kind[name])
        for name, allowed in _INSIDE.items()
        if name in kind
    ]
    columns = []
    for name, nullable, inner in inside:
        path = above + quoted(name)
        columns += [*([] if nullable else [path]), *forbids_nulls(inner, f"{path}.")]
    return columns


def check_nulls(uri: str, schema: str, null_counts: Mapping[str, int]) -> None:
    """Refuse nulls where a table forbids them.

    The nulls of plain columns are in the files' statistics; those of nested ones are counted.

    Args:
        uri: the table, for the message.
        schema: of it, as JSON.
        null_counts: nulls by column, and by what is inside of one.

    Raises:
        DataError: names the column.
    """
    for path in forbids_nulls(json.loads(schema)):
        if null_counts.get(path):
            raise DataError(
                f"column {path} of the Delta table {uri} forbids nulls, and {null_counts[path]} are in these rows: "
                "drop or fill them"
            )


def all_nulls(rows: pa.Table) -> Counter[str]:
    """Nulls of the columns of a small table, and of what is inside of them."""
    null_counts: Counter[str] = Counter()
    for batch in rows.to_batches():
        plain = {
            quoted(name): column.null_count for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        null_counts.update(Counter(plain | nested_nulls(batch)))
    return null_counts


def nested_nulls(batch: pa.RecordBatch) -> Counter[str]:
    """Nulls of the nested columns of a batch, and of what is inside of them."""
    null_counts: Counter[str] = Counter()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_nested(column.type):
            null_counts.update(dict(_nulls(column, quoted(name))))
    return null_counts


def _nulls(column: pa.Array, path: str) -> Iterator[tuple[str, int]]:
    """Nulls of a column, and of what is inside of it where it is none itself."""
    kind = column.type
    yield path, column.null_count
    if pa.types.is_struct(kind):
        present = column.drop_null()
        for number, inner in enumerate(kind):
            yield from _nulls(present.field(number), f"{path}.{quoted(inner.name)}")
    elif pa.types.is_map(kind):
        present = column.drop_null()
        offsets = present.offsets  # keys and items are those of the buffers, not of a slice
        start, end = (offsets[0].as_py(), offsets[-1].as_py()) if len(present) else (0, 0)
        for name, part in (("key", present.keys), ("value", present.items)):
            yield from _nulls(part.slice(start, end - start), f"{path}.{quoted(name)}")
    elif pa.types.is_nested(kind):
        yield from _nulls(column.flatten(), f"{path}.{quoted('element')}")
