"""Nulls are counted in nested columns, too, and refused where a table forbids them; without Spark."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from sparkdl.errors import DataError
from sparkdl.tables.nulls import nested_nulls
from sparkdl.tables.table import Table

INNER = pa.struct([pa.field("a", pa.int64(), nullable=False)])
TAGS, MAP, STRUCT = pa.list_(pa.string()), pa.map_(pa.string(), pa.int64()), pa.struct([("a", pa.int64())])
STRICT_MAP = pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))
# column of the table, type of the rows, values that it takes, one that it does not, what is named
COLUMNS = [
    (pa.field("v", TAGS, nullable=False), TAGS, [["x"], [], [None]], None, "`v` "),
    (pa.field("v", MAP, nullable=False), MAP, [[("k", 1)], [], [("k", None)]], None, "`v` "),
    (pa.field("v", STRUCT, nullable=False), STRUCT, [{"a": 1}, {"a": None}], None, "`v` "),
    (pa.field("v", INNER), STRUCT, [{"a": 1}, None], {"a": None}, "`v`.`a` "),
    (pa.field("v", pa.list_(INNER)), pa.list_(STRUCT), [[{"a": 1}, None], None], [{"a": None}], "`v`.`element`.`a` "),
    (pa.field("v", pa.list_(pa.field("element", pa.string(), nullable=False))), TAGS, [[], None], [None],
     "`v`.`element` "),
    (pa.field("v", STRICT_MAP), MAP, [[("k", 1)], None], [("k", None)], "`v`.`value` "),
]  # fmt: skip


@pytest.mark.parametrize(("column", "kind", "taken", "refused", "named"), COLUMNS)
def test_a_nested_column_that_forbids_nulls_gets_none(tmp_path, column, kind, taken, refused, named):
    DeltaTable.create(tmp_path, schema=Schema.from_arrow(pa.schema([pa.field("id", pa.int64()), column])))
    table = Table(str(tmp_path))

    def write(values):
        rows = pa.table({"id": range(len(values)), "v": pa.array(values, kind)})
        staged = table.stage(Schema.from_arrow(rows.schema).to_json())
        return staged.commit(staged.task.write(iter(rows.to_batches())))

    assert write(taken).version == 1
    files = sorted(tmp_path.rglob("*.parquet"))
    with pytest.raises(DataError, match=f"column {named}.* forbids nulls, and 1 are in these rows"):
        write([*taken, refused])
    assert (table.version(), sorted(tmp_path.rglob("*.parquet"))) == (1, files)


def test_a_plain_column_that_forbids_nulls_gets_none(tmp_path):
    strict = pa.schema([pa.field("x", pa.float64(), nullable=False), pa.field("day", pa.string(), nullable=False)])
    DeltaTable.create(tmp_path, schema=Schema.from_arrow(strict), partition_by=["day"])
    for rows, named in (({"x": [1.0, None], "day": ["a", "b"]}, "`x`"), ({"x": [1.0], "day": [None]}, "`day`")):
        given = pa.table({name: pa.array(values, strict.field(name).type) for name, values in rows.items()})
        staged = Table(str(tmp_path)).stage(Schema.from_arrow(given.schema).to_json())
        with pytest.raises(DataError, match=f"column {named} .* forbids nulls"):
            staged.commit(staged.task.write(iter(given.to_batches())))


def test_nulls_are_those_of_the_slice_and_not_of_what_is_around_it():
    kind = pa.struct([("m", MAP), ("t", TAGS)])
    values = [
        *[{"m": [("k", None)], "t": [None]}, None, {"m": None, "t": [None, "a"]}],
        *[{"m": [("k", None), ("l", 2)], "t": None}, {"m": [("k", None)], "t": [None]}],
    ]
    batch = pa.record_batch({"s": pa.array(values, kind), "x": pa.array([None] * 5, pa.int64())}).slice(1, 3)
    assert nested_nulls(batch) == {
        "`s`": 1,
        "`s`.`m`": 1,
        "`s`.`m`.`key`": 0,
        "`s`.`m`.`value`": 1,
        "`s`.`t`": 1,
        "`s`.`t`.`element`": 1,
    }
