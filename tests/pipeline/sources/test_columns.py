"""The columns of a source as they are told without Spark: names and types of each kind of source."""

from __future__ import annotations

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from sparkdl.errors import DataError, SchemaError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.init import init
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.failures import source_errors
from sparkdl.pipeline.sources.files import columns_of_ddl, header_names
from sparkdl.tables.table import Table


def found(source):
    spec = loads(f"source: {source}\nlabel: {{y: binary}}\nfeatures: {{x: number}}").spec
    described = source_of(spec.source)
    return described.columns(described.snapshot())


def test_columns_of_all_parquet_files_and_of_their_folders(tmp_path):
    for day, table in (("2026-03-01", {"a": [1]}), ("2026-03-02", {"a": [1], "later": ["x"]})):
        (tmp_path / f"day={day}" / "n=1").mkdir(parents=True)
        pq.write_table(pa.table(table), tmp_path / f"day={day}" / "n=1" / "rows.parquet")
    columns = found(f"{{kind: parquet, path: {tmp_path}}}")
    assert columns.complete
    assert columns.types == {"a": pa.int64(), "later": pa.string(), "day": pa.date32(), "n": pa.int64()}


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "rows.parquet").write_text("nothing of the kind")
    with pytest.raises(DataError, match=r"rows\.parquet is no Parquet file"):
        found(f"{{kind: parquet, path: {tmp_path}}}")


def test_a_first_line_of_thousands_of_columns_is_read_to_its_end(tmp_path):
    names = [f"a_column_with_a_long_name_{number}" for number in range(9_000)]
    (tmp_path / "rows.csv").write_text(f"{','.join(names)}\n{','.join(['1'] * 9_000)}\n")
    assert list(found(f"{{kind: csv, path: {tmp_path}}}").types) == names


INT = pa.array([1, 2])


@pytest.mark.parametrize(
    ("later", "types"),
    [
        (pa.array([1.0, None]), "int64 in .*a.parquet and double in .*b.parquet"),
        (INT.cast(pa.int32()), "int64 in .*a.parquet and int32 in .*b.parquet"),
        (INT.cast(pa.string()), "int64 in .*a.parquet and string in .*b.parquet"),
        (INT.cast(pa.uint32()), ""),
        (INT.dictionary_encode(), ""),
    ],
)
def test_a_column_of_two_types_is_refused_before_spark_fails_at_it(tmp_path, later, types):
    pq.write_table(pa.table({"x": [0.5, 1.5], "c": INT, "y": [0, 1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [0.5, 1.5], "c": later, "y": [0, 1]}), tmp_path / "b.parquet")
    unmerged = f"{{kind: parquet, path: {tmp_path}, options: {{mergeSchema: false}}}}"
    assert found(unmerged).types["c"] == pa.int64()
    if not types:
        assert found(f"{{kind: parquet, path: {tmp_path}}}").types["c"] == pa.int64()
        return
    for look in (lambda: found(f"{{kind: parquet, path: {tmp_path}}}"), lambda: init(f"{tmp_path}/p", str(tmp_path))):
        with pytest.raises(SchemaError, match=f"the column 'c' is {types}, which Spark does not read together: write"):
            look()


def test_what_spark_says_of_columns_that_it_cannot_merge_is_one_sentence():
    said = (
        "[CANNOT_MERGE_SCHEMAS] Failed merging schemas:\nCaused by: x.SparkException: [CANNOT_MERGE_INCOMPATIBLE_DATA_"
        'TYPE] Failed to merge incompatible data types "INT" and "BIGINT". Please check the data types'
    )
    with pytest.raises(SchemaError, match="is of two types, INT and BIGINT, which Spark does not"), source_errors():
        raise PySparkException(said)


def test_columns_of_a_version_of_a_delta_table(tmp_path):
    Table(str(tmp_path / "t")).append(pa.table({"a": pa.array([1], pa.int16()), "b": [[1.5]]}))
    assert found(f"{{kind: delta, table: {tmp_path}/t, version: 0}}").types == {
        "a": pa.int16(),
        "b": pa.list_(pa.float64()),
    }


def test_a_header_and_what_is_plainly_a_text(tmp_path):
    with gzip.open(tmp_path / "rows.csv.gz", "wt") as file:
        file.write('\ufeffid;said;"a; b";when;none\n1;NA;1,5;2026-03-01 10:00;?\n2;good;;2026-03-02;?\n')
    columns = found(f'{{kind: csv, path: {tmp_path}, options: {{sep: ";", nullValue: "?"}}}}')
    assert columns.types == {"id": None, "said": pa.string(), "a; b": None, "when": None, "none": None}
    bare = found(f'{{kind: csv, path: {tmp_path}, options: {{sep: ";", header: false}}}}')
    assert list(bare.types) == ["_c0", "_c1", "_c2", "_c3", "_c4"]


def test_names_that_spark_makes_of_a_header(spark, tmp_path):
    cells = ["a", "", "A", "b", "b", "c"]
    (tmp_path / "rows.csv").write_text(",".join(cells) + "\n1,2,3,4,5,6\n")
    assert header_names(cells) == spark.read.csv(str(tmp_path), header=True).columns


def test_a_header_of_which_spark_would_make_one_name_twice_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("id,x,x,x1,y\n1,2,3,4,0\n")
    for look in (lambda: found(f"{{kind: csv, path: {tmp_path}}}"), lambda: init(f"{tmp_path}/p", str(tmp_path))):
        with pytest.raises(
            SchemaError, match="id, x, x, x1, y, of which Spark calls two 'x1', as it adds their places"
        ):
            look()


def test_folders_above_the_path_are_no_columns(tmp_path):
    folder = tmp_path / "day=2026-03-01"
    folder.mkdir()
    pq.write_table(pa.table({"x": [0.5, 1.5], "day": ["a", "b"], "y": [0, 1]}), folder / "rows.parquet")
    for path in (folder, folder / "rows.parquet", f"{folder}/*.parquet"):
        assert found(f"{{kind: parquet, path: '{path}'}}").types["day"] == pa.string()
    assert found(f"{{kind: parquet, path: {tmp_path}}}").types["day"] == pa.date32()
    (folder / "rows.csv").write_text("x,day,y\n0.5,a,0\n1.5,b,1\n")
    done = init(str(tmp_path / "p"), str(folder / "rows.csv"))
    assert done.file.spec.source.schema == "`x` DOUBLE, `day` STRING, `y` BIGINT"


def test_a_cell_may_be_longer_than_pythons_limit(tmp_path):
    rows = [f"{n},{'word ' * (30_000 if n == 3 else 3)},{n % 2}\n" for n in range(60)]
    (tmp_path / "rows.csv").write_text("".join(["id,note,y\n", *rows]))
    assert found(f"{{kind: csv, path: {tmp_path}}}").types["note"] == pa.string()
    assert "note" in init(str(tmp_path / "p"), str(tmp_path / "rows.csv")).file.spec.source.schema


def test_the_first_rows_of_json_may_not_have_every_column(tmp_path):
    line = '{"a": 1, "b": [1]}\n'
    (tmp_path / "rows.json").write_text(line)
    assert found(f"{{kind: json, path: {tmp_path}}}").complete
    (tmp_path / "rows.json").write_text(line * 20_000)
    columns = found(f"{{kind: json, path: {tmp_path}}}")
    assert (columns.types, columns.complete) == ({"a": None, "b": None}, False)
    (tmp_path / "rows.json").write_text("[1,\n")
    with pytest.raises(DataError, match="no JSON object"):
        found(f"{{kind: json, path: {tmp_path}}}")


def test_a_schema_in_the_file_is_taken_at_its_word(tmp_path):
    (tmp_path / "rows.csv").write_text("1,2\n")
    ddl = "id BIGINT NOT NULL, `a ``b``, c` DECIMAL(10, 2) COMMENT 'x, y', d: ARRAY<STRUCT<e: INT, f: INT>>, g date"
    assert columns_of_ddl(ddl) == {"id": pa.int64(), "a `b`, c": pa.decimal128(10), "d": None, "g": pa.date32()}
    columns = found(f"{{kind: csv, path: {tmp_path}, schema: 'a INT, b STRING'}}")
    assert columns.types == {"a": pa.int32(), "b": pa.string()}


@pytest.mark.parametrize(
    "source",
    ["{kind: sql, query: SELECT 1}", "{kind: delta, table: a.b.c}", "{kind: function, function: 'a:b'}"],
)
def test_what_spark_alone_knows_is_said(source):
    assert "Spark alone" in found(source).why_not
