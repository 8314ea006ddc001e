"""Rows as Spark reads them: those of some windows, and those of formats and tables that Spark alone knows."""

from __future__ import annotations

import re

import pytest
from pyspark.errors import PythonException

from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.pipeline import Pipeline
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.failures import source_errors
from sparkdl.pipeline.sources.read import of_windows, read_rows
from sparkdl.pipeline.spec.source import CsvSource, SparkSource, SqlSource
from sparkdl.pipeline.windows import NO_TIME, WINDOW

AT = "timestamp'2026-03-01 00:00:00Z' + make_dt_interval(0, id)"
KINDS = {
    "timestamp": AT,
    "timestamp_ntz": "timestamp_ntz'2026-03-01 00:00:00' + make_dt_interval(0, id)",
    "date": f"date({AT})",
    "string": f"date_format({AT}, 'yyyy-MM-dd HH:mm')",
}


ZONES = ("UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago")
FURTHEST = {"timestamp": ZONES[1], "date": ZONES[2]}


@pytest.fixture
def zone(spark, request):
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield request.param
    spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize(
    ("zone", "kind"),
    [
        pytest.param(zone, kind, marks=() if FURTHEST.get(kind) == zone else pytest.mark.slow)
        for kind in KINDS
        for zone in ZONES
    ],
    indirect=["zone"],
)
def test_rows_of_windows_are_those_of_no_others_in_every_time_zone(spark, zone, kind):
    query = f"SELECT id, IF(id % 50 = 7, NULL, {KINDS[kind]}) AS `t``x` FROM range(0, 500)"
    source = source_of(SqlSource(query=query, time="t`x", every="day" if kind == "date" else "hour"))
    rows = read_rows(spark, source, source.snapshot())
    by_window = {row[WINDOW]: row["count"] for row in rows.groupBy(WINDOW).count().collect()}
    names = sorted(by_window)
    for chosen in (names[:1], [names[3], names[-2]], names, [NO_TIME], [NO_TIME, names[0]], []):
        found = of_windows(rows, source, chosen).groupBy(WINDOW).count().collect()
        assert {row[WINDOW]: row["count"] for row in found} == {name: by_window[name] for name in chosen}


def test_parquet_skips_what_lies_before_and_after(spark, tmp_path):
    from sparkdl.pipeline.spec.source import ParquetSource

    spark.range(0, 24 * 60).selectExpr("id", f"{AT} AS at").write.parquet(str(tmp_path / "rows"))
    source = source_of(ParquetSource(path=str(tmp_path / "rows"), time="at"))
    rows = of_windows(read_rows(spark, source, source.snapshot()), source, ["2026-03-30"])
    assert "PushedFilters: [IsNotNull(at), GreaterThanOrEqual(at,2026-03-28" in rows._jdf.queryExecution().toString()
    assert rows.count() == 24


def test_any_format_that_spark_knows_is_read(spark, tmp_path):
    spark.range(9).selectExpr("id", "id * 2 AS x").write.orc(str(tmp_path / "rows"))
    source = SparkSource(format="orc", path=str(tmp_path / "rows"))
    assert sorted(row.x for row in rows_of(spark, source).collect()) == list(range(0, 18, 2))
    (tmp_path / "people.xml").write_text("<r><row><a>1</a></row><row><a>2</a></row></r>")
    xml = SparkSource(format="xml", path=str(tmp_path / "people.xml"), schema="a INT", options={"rowTag": "row"})
    assert sorted(row.a for row in rows_of(spark, xml).collect()) == [1, 2]


@pytest.mark.parametrize("read", ["a query", "a format"])
def test_rows_that_a_table_has_removed_do_not_come_back_through_spark(spark, tmp_path, read):
    place = tmp_path / "orders"
    (place / "_delta_log").mkdir(parents=True)
    spark.range(3).write.orc(str(place / "day=1"))
    sources = {
        "a query": SqlSource(query=f"SELECT * FROM ORC.`{place}/day=1`"),
        "a format": SparkSource(format="ORC", path=f"{place}/day=*"),
    }
    with pytest.raises(ConfigError, match=r"those of a table \(Delta\).*kind: delta, table: .*/orders"):
        rows_of(spark, sources[read])


def rows_of(spark, section):
    source = source_of(section)
    return read_rows(spark, source, source.snapshot())


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (None, "x1,x2"),
        ("id INT, {} DOUBLE, {} DOUBLE", "a,b"),
        pytest.param(None, "a,b", marks=pytest.mark.slow),
        pytest.param("id INT, {} DOUBLE, {} DOUBLE", "x1,x2", marks=pytest.mark.slow),
    ],
)
def test_columns_of_csv_files_are_taken_by_their_names(spark, tmp_path, names, schema):
    one, other = names.split(",")
    (tmp_path / "1.csv").write_text(f"id,{one},{other}\n1,1.0,100.0\n2,2.0,200.0\n")
    (tmp_path / "2.csv").write_text(f"id,{other},{one}\n3,300.0,3.0\n")
    given = {"path": str(tmp_path), "schema": schema and schema.format(one, other)}
    said = rf"2\.csv has the columns id, {other}, {one} in its first line, and id, {one}, {other} are expected: deliver"
    with pytest.raises(DataError, match=said), source_errors():
        rows_of(spark, CsvSource(**given)).collect()
    if schema:
        by_place = rows_of(spark, CsvSource(**given, options={"enforceSchema": "true"}))
        assert {row[one] for row in by_place.collect()} == {1.0, 2.0, 300.0}
    (tmp_path / "2.csv").write_text("id\n3\n")
    with pytest.raises(DataError, match=r"2\.csv has 1 columns in its first line, and 3 are"), source_errors():
        rows_of(spark, CsvSource(**given)).collect()


@pytest.mark.parametrize(("header", "names"), [(",a", ["_c0", "a"]), ("a,a", ["a0", "a1"]), ("id,x1", ["id", "x1"])])
def test_columns_without_a_name_of_their_own_are_taken_by_their_place(spark, tmp_path, caplog, header, names):
    for number in (1, 2):
        (tmp_path / f"{number}.csv").write_text(f"{header}\n{number},5\n")
    rows = rows_of(spark, CsvSource(path=str(tmp_path)))
    assert rows.columns == [*names, "_malformed", WINDOW]
    assert sorted(tuple(row)[:2] for row in rows.collect()) == [(1, 5), (2, 5)]
    assert ("taken by their place" in caplog.text) == (header != "id,x1")


def test_a_table_or_view_of_the_catalog_is_read_by_its_name(spark):
    spark.sql("CREATE TABLE of_the_catalog USING orc AS SELECT id, id + 1 AS x FROM range(5)")
    try:
        for name in ("of_the_catalog", "spark_catalog.default.of_the_catalog"):
            assert rows_of(spark, SparkSource(table=name)).count() == 5
        spark.sql("CREATE TEMPORARY VIEW some_of_it AS SELECT * FROM of_the_catalog WHERE id < 2")
        assert rows_of(spark, SparkSource(table="some_of_it")).count() == 2
    finally:
        spark.sql("DROP TABLE of_the_catalog")


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        (SparkSource(format="nosuch"), ConfigError, "this session has no data source 'nosuch': correct source.format"),
        (SparkSource(format="avro", path="/x"), ConfigError, "no data source 'avro': correct source.format, or"),
        (SparkSource(format="rate"), SchemaError, "rate is not a valid Spark SQL Data Source"),
        (SparkSource(format="orc", path="/no/such"), DataError, "file:/no/such is not there: correct source.path"),
        (SparkSource(format="orc", path="/no/such/*.orc"), DataError, "/no/such/*.orc is not there: correct"),
        (SparkSource(table="no.such.table"), SchemaError, "requires a single-part namespace"),
        (SparkSource(table="nosuch"), SchemaError, "`nosuch` cannot be found"),
        (SparkSource(format="orc", schema="a NOSUCH", path="/"), SchemaError, "NOSUCH"),
    ],
    ids=str,
)  # fmt: skip
def test_what_spark_cannot_read_is_one_sentence(spark, source, kind, said):
    with pytest.raises(kind) as caught:
        rows_of(spark, source)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_source_without_rows_is_refused_where_nothing_has_been_done_before(spark, tmp_path):
    (tmp_path / "rows.csv").write_text("id,x,y\n")
    source = f"{{kind: csv, path: {tmp_path}/rows.csv, schema: 'id BIGINT, x DOUBLE, y BIGINT'}}"
    file = tmp_path / "empty.yaml"
    file.write_text(f"source: {source}\nroot: {tmp_path}/data\nlabel: {{y: binary}}\nfeatures: {{x: number}}\n")
    with pytest.raises(DataError, match="the source has no rows: wait for data, or correct source"):
        Pipeline.load(file).run(spark, until="ingest")


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        (
            "1 / (id - 1)",
            "1 / (id - 1) fails for a row: Division by zero; correct the source, or take try_divide, whose",
        ),
        (
            "array(1)[id]",
            "array(1)[id] fails for a row: The index 1 is out of bounds; correct the source, or take get, ",
        ),
        ("to_date(concat(id, 'x'), 'yyyy')", "SQL fails for a row: Text '0x' could not be parsed at index 0; correct "),
        (
            "map(0, id, id, id)",
            "SQL fails for a row: Duplicate map key 0 was found, please check the input data; correct",
        ),
        (
            "IF(id < 1, 'x', raise_error('too high'))",
            "SQL fails for a row: too high; correct the source or what is made",
        ),
    ],
)
def test_a_value_that_sql_refuses_is_told_in_one_sentence(spark, capfd, sql, said):
    rows = spark.range(0, 2, 1, 1).selectExpr(f"{sql} AS value")
    with pytest.raises(DataError, match=re.escape(said)) as caught, source_errors():
        rows.mapInArrow(lambda batches: batches, rows.schema).collect()
    assert "\n" not in str(caught.value)
    assert "QueryContextLogger" not in capfd.readouterr().err


def test_what_a_function_of_the_users_raises_stays_his(spark):
    def broken(batches):
        raise ValueError("my own")
        yield from batches

    with pytest.raises(PythonException, match="my own"), source_errors():
        spark.range(2).mapInArrow(broken, "id long").collect()
