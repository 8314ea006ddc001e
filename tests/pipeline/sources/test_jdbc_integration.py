"""Rows of a real PostgreSQL through JDBC: types, tasks that share them, and one sentence for what goes wrong."""

from __future__ import annotations

import datetime as dt
import logging
import traceback
from decimal import Decimal

import pytest
from pyspark.sql import functions as F

from sparkdl.errors import ConfigError, DataError, SparkdlError, StorageError
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.sources.read import of_windows, read_rows
from sparkdl.pipeline.spec.base import Secret
from sparkdl.pipeline.spec.source import JdbcSource
from sparkdl.pipeline.windows import NO_TIME

ORDERS = """
    CREATE TABLE orders (id bigint PRIMARY KEY, day date, at timestamptz, local_at timestamp, price numeric(10,2),
                         code text, "Odd ""Name" int);
    INSERT INTO orders SELECT i, date '2026-03-01' + i / 500, timestamptz '2026-03-01 00:00Z' + i * interval '3 min',
        timestamp '2026-03-01' + i * interval '3 min', i * 0.25, 'c' || i, i % 300 FROM generate_series(0, 1999) i;
    INSERT INTO orders VALUES (2000, NULL, NULL, NULL, NULL, NULL, NULL);
    ALTER TABLE orders OWNER TO reader;
"""


@pytest.fixture(scope="module")
def database(postgres):
    postgres.run(ORDERS)
    yield postgres
    postgres.run("DROP TABLE orders")


def frame_of(spark, section):
    return source_of(section).frame(spark, SourceSnapshot(state=None))


def section_of(database, table="orders", **more):
    password = Secret(database.password, "${DB_PASSWORD}")
    options = {"user": "reader", "password": password, **more.pop("options", {})}
    given = {"query": more["query"]} if "query" in more else {"table": table}
    return JdbcSource(url=database.url, **{**more, **given}, options=options)


def rows_by_task(frame):
    return {row[0]: row[1] for row in frame.groupBy(F.spark_partition_id()).count().collect()}


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ({"key": ("id",)}, {}),
        ({"key": ("code", "id")}, {}),
        pytest.param({"key": ("code",), "time": "at"}, {}, marks=pytest.mark.slow),
        ({"time": "day"}, {}),
        pytest.param({"key": ("price",)}, {}, marks=pytest.mark.slow),
        ({"key": ("code",)}, {"partitionColumn": 'Odd "Name'}),
    ],
)
def test_tasks_share_the_rows_by_a_column_and_lose_none(spark, database, named, options):
    frame = frame_of(spark, section_of(database, **named, options={"numPartitions": "4", **options}))
    found = rows_by_task(frame)
    assert sum(found.values()) == frame.select("id").distinct().count() == 2001
    assert len(found) >= 3
    assert max(found.values()) <= 1000


@pytest.mark.parametrize("named", [{}, {"key": ("code",)}, {"time": "local_at"}])
def test_rows_without_a_column_to_share_them_by_are_one_tasks(spark, database, named):
    assert rows_by_task(frame_of(spark, section_of(database, **named))) == {0: 2001}
    with pytest.raises(ConfigError, match="numPartitions=4 divides the rows by a whole number, a date or a timestamp"):
        frame_of(spark, section_of(database, **named, options={"numPartitions": 4}))


def test_a_number_of_tasks_that_is_none_is_told(spark, database):
    with pytest.raises(ConfigError, match=r"source\.options\.numPartitions='four' is no whole number: write one"):
        frame_of(spark, section_of(database, key=("id",), options={"numPartitions": "four"}))


def test_few_rows_are_one_tasks_and_many_are_shared_unasked(spark, database, monkeypatch):
    assert rows_by_task(frame_of(spark, section_of(database, key=("id",)))) == {0: 2001}
    monkeypatch.setattr("sparkdl.pipeline.sources.jdbc._ROWS_PER_TASK", 700)
    assert len(rows_by_task(frame_of(spark, section_of(database, key=("id",))))) == 3
    query = "SELECT id, at FROM orders WHERE id < 1000; -- thousand"
    assert "syntax error" in refused(spark, section_of(database, query=query), StorageError)
    asked = frame_of(spark, section_of(database, query=query.replace("; --", " --"), key=("id",)))
    assert asked.columns == ["id", "at"]
    assert sorted(rows_by_task(asked).values()) in ([499, 501], [500, 500])


def test_users_may_divide_the_rows_themselves(spark, database):
    options = {"partitionColumn": "id", "lowerBound": 0, "upperBound": 100, "numPartitions": 2}
    assert rows_by_task(frame_of(spark, section_of(database, options=options))) == {0: 50, 1: 1951}


def test_an_empty_table_has_columns_and_no_rows(spark, database):
    frame = frame_of(spark, section_of(database, query="SELECT * FROM orders WHERE false", key=("id",)))
    assert frame.columns[:2] == ["id", "day"]
    assert frame.count() == 0


def test_values_of_every_common_type_arrive(spark, database):
    database.run("""CREATE TYPE mood AS ENUM ('sad', 'ok');
        CREATE TABLE kinds AS SELECT 1::smallint small, 2::int whole, 3::bigint big, 1.5::real single, 2.5::float8 dbl,
        123.45::numeric(7,2) price, 0.1::numeric loose, true yes, timestamptz '2026-03-01 12:00+02' at,
        timestamp '2026-03-01 12:00' local_at, date '2026-03-01' AS day, 'text'::text t, 'v'::varchar(5) v,
        '\\x0001'::bytea raw, ARRAY[1, NULL, 3] nums, ARRAY['a', 'b'] tags, ARRAY[0.5::float8] vector,
        '{"a": 1}'::jsonb js, 'ok'::mood md, 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid u;
        INSERT INTO kinds SELECT FROM generate_series(1, 1);
        ALTER TABLE kinds OWNER TO reader""")
    try:
        frame = frame_of(spark, section_of(database, "kinds"))
        full, empty = sorted(frame.collect(), key=lambda row: row.small is None)
    finally:
        database.run("DROP TABLE kinds; DROP TYPE mood")
    kinds = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    assert full.asDict() == {
        "small": 1, "whole": 2, "big": 3, "single": 1.5, "dbl": 2.5, "price": Decimal("123.45"),
        "loose": Decimal("0.1"), "yes": True, "at": full.at, "local_at": dt.datetime(2026, 3, 1, 12),
        "day": dt.date(2026, 3, 1), "t": "text", "v": "v", "raw": b"\x00\x01", "nums": [1, None, 3], "tags": ["a", "b"],
        "vector": [0.5], "js": '{"a": 1}', "md": "ok", "u": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    }  # fmt: skip
    assert full.at.timestamp() == dt.datetime(2026, 3, 1, 10, tzinfo=dt.UTC).timestamp()
    assert set(empty.asDict().values()) == {None}
    assert (kinds["at"], kinds["local_at"], kinds["price"]) == ("timestamp", "timestamp_ntz", "decimal(7,2)")


def test_columns_that_may_lose_digits_are_named(spark, database, caplog):
    with caplog.at_level(logging.WARNING, "sparkdl"):
        frame_of(spark, section_of(database, query="SELECT 1::numeric AS loose, 1::numeric(9,2) AS sound"))
    assert "rounds ['loose'] to 18 decimal places" in caplog.text


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("12345678901234567890123.5::numeric", "cannot be represented as Decimal"),
        ("'NaN'::numeric", "NaN"),
        ("ARRAY[ARRAY[1, 2], ARRAY[3, 4]]", "incompatible with the column array type"),
    ],
)
def test_values_that_spark_cannot_hold_are_refused(spark, database, expression, said):
    database.run(f"CREATE TABLE odd AS SELECT {expression} AS x; ALTER TABLE odd OWNER TO reader")
    try:
        sentence = refused(spark, section_of(database, "odd"), (DataError, StorageError))
    finally:
        database.run("DROP TABLE odd")
    assert said in sentence


def refused(spark, section, kind):
    """The one sentence of reading all rows, with the password nowhere in what is printed."""
    from sparkdl.pipeline.sources.failures import source_errors

    source = source_of(section)
    with pytest.raises(kind) as caught, source_errors():
        read_rows(spark, source, source.snapshot()).collect()
    sentence, whole = str(caught.value), "".join(traceback.format_exception(caught.value))
    assert isinstance(caught.value, SparkdlError)
    assert len(sentence.splitlines()) == 1
    assert len(sentence) < 500
    assert str(section.options["password"]) not in whole
    return sentence


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"options": {"password": Secret("secret-wrong", "${X}")}}, StorageError, "password authentication failed"),
        ({"table": "nosuch"}, StorageError, 'relation "nosuch" does not exist'),
        ({"query": "SELECT nosuch FROM orders"}, StorageError, 'column "nosuch" does not exist'),
        ({"query": "SELECT 1 / (id - 7) x FROM orders"}, StorageError, "division by zero"),
        ({"url": "jdbc:postgresql://127.0.0.1:1/shop"}, StorageError, "Connection to 127.0.0.1:1 refused"),
        ({"url": "jdbc:postgresql://nowhere.invalid/shop"}, StorageError, "UnknownHostException: nowhere.invalid"),
        ({"url": "jdbc:mariadb://127.0.0.1/shop"}, ConfigError, "no JDBC class org.mariadb.jdbc.Driver: add the"),
        ({"url": "jdbc:unheard:of"}, ConfigError, "no JDBC driver for source.url: add the driver's JAR"),
        ({"options": {"partitionColumn": "code", "numPartitions": 2}}, ConfigError, "there is {'code': 'string'}"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_without_the_password(spark, database, change, kind, said):
    source = section_of(database, **{name: value for name, value in change.items() if name != "url"})
    if "url" in change:
        source = JdbcSource(url=change["url"], table="orders", options=source.options)
    assert said in refused(spark, source, kind)


def test_a_server_that_goes_away_is_one_sentence(spark, database):
    source = section_of(database)
    frame = frame_of(spark, source)
    database.stop()
    try:
        assert "refused" in refused(spark, source, StorageError)
        with pytest.raises(Exception, match=r"refused|FAILED_JDBC"):
            frame.count()
    finally:
        database.start()
    assert frame.count() == 2001


def test_the_database_passes_over_windows_that_are_not_asked_for(spark, database):
    source = source_of(section_of(database, key=("id",), time="at"))
    rows = read_rows(spark, source, source.snapshot())
    windows = ["2026-03-01", "2026-03-03"]
    day = of_windows(rows, source, ["2026-03-01"])
    assert "PushedFilters: [*IsNotNull(at), *GreaterThanOrEqual(at," in day._jdf.queryExecution().toString()
    chosen = of_windows(rows, source, windows)
    assert chosen.count() == rows.where(rows["_window"].isin(windows)).count() == 960
    assert of_windows(rows, source, [NO_TIME, "2026-03-01"]).count() == 481


def test_who_reads_is_no_part_of_what_is_read(database):
    one = section_of(database, key=("id",))
    other = section_of(
        database, key=("id",), options={"USER": "x", "password": "y", "fetchSize": 7, "numPartitions": 2}
    )
    options = {**one.options, "password": Secret("rotated", "${DB_PASSWORD}")}
    rotated = JdbcSource(url=one.url, table="orders", key=("id",), options=options)
    assert source_of(one).identity()[1]["options"] == {"password": "(hidden)"}
    assert source_of(one).identity() == source_of(rotated).identity()
    assert source_of(other).identity()[1]["options"] == {"password": "(hidden)"}
    assert source_of(one).identity() != source_of(section_of(database, "others", key=("id",))).identity()
