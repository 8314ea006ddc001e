"""The section source: kinds that Spark alone can tell about, and secrets that must not stand in an address."""

from __future__ import annotations

import pytest

from sparkdl.errors import ConfigError, PipelineFileError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.spec.source import JdbcSource, SparkSource

REST = "features: {a: number}\nlabel: {y: binary}\n"


def sentence_of(make):
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "jdbc:postgresql://me:hunter2@h:1/db",
        "jdbc:postgresql://me:hunter2?x@h:1/db",
        "jdbc:mysql://me@h/db",
        "jdbc:oracle:thin:scott/hunter2@//h:1/s",
        "jdbc:postgresql://h/db?ssl=true&user=me",
        "jdbc:postgresql://h/db?sslpassword=hunter2",
        "jdbc:sqlserver://h;databaseName=x;Password=hunter2",
        "jdbc:mysql://address=(host=h)(user=me)/db",
        "jdbc:snowflake://h/?authenticator=oauth&token=hunter2",
    ],
)
def test_an_address_that_tells_who_reads_is_refused_and_not_shown(url):
    for said in (sentence_of(lambda: JdbcSource(url=url, table="t")), sentence_of(lambda: of_environment(url))):
        assert said.endswith(
            "url holds a user or a password: take them out, and give user and password: ${NAME} in options"
        )
        assert "hunter2" not in said


def of_environment(url):
    return loads(REST + "source: {kind: jdbc, url: '${SHOP}', table: t}", environment={"SHOP": url})


@pytest.mark.parametrize("url", ["postgresql://me:hunter2@h/db", "jdbc:", "hunter2"])
def test_what_is_no_address_is_refused_and_not_shown(url):
    said = sentence_of(lambda: JdbcSource(url=url, table="t"))
    assert said == "url is no JDBC address: write it like 'jdbc:postgresql://host:5432/database'"


@pytest.mark.parametrize(
    "url",
    [
        "jdbc:postgresql://h:5432/db?currentSchema=a@b&ssl=true",
        "jdbc:oracle:thin:@//h:1521/service",
        "jdbc:sqlserver://h:1433;databaseName=users",
        "jdbc:postgresql://[::1]/db",
        "jdbc:sqlite:/tmp/users=1.db",
    ],
)
def test_an_address_without_secrets_is_taken(url):
    assert JdbcSource(url=url, table="t").url == url


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: JdbcSource(url="jdbc:x:y"), "has neither table nor query: write one of the two"),
        (lambda: JdbcSource(url="jdbc:x:y", table="t", query="q"), "has both table and query: write one of the two"),
        (
            lambda: JdbcSource(url="jdbc:x:y", table="t", options={"dbTable": "t"}),
            "options.dbTable is said by url",
        ),
        (lambda: SparkSource(), "has neither format nor table"),
        (lambda: SparkSource(format="orc", table="t"), "has both format and table"),
        (lambda: SparkSource(format="csv"), "format='csv' has a kind of its own: write kind: csv"),
        (lambda: SparkSource(table="t", path="/d"), "path='/d' belongs to format, and table is given: leave it out"),
        (lambda: SparkSource(table="t", schema="a INT"), "schema='a INT' belongs to format"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(make, said):
    assert said in sentence_of(make)


def test_names_of_tables_stay_names_and_paths_become_addresses(tmp_path):
    def source(text):
        return loads(REST + f"source: {text}", folder=tmp_path).spec.source

    assert source("{kind: jdbc, url: 'jdbc:x:y', table: sales.orders}").table == "sales.orders"
    assert source("{kind: spark, table: sales.orders}").table == "sales.orders"
    assert source("{kind: spark, format: orc, path: rows}").path == f"file://{tmp_path}/rows"


def test_a_password_is_shown_by_its_reference_or_not_at_all():
    text = REST + "source: {kind: jdbc, url: 'jdbc:x:y', table: t, options: {user: me, password: %s}}"
    file = loads(text % "'${DB_PASSWORD}'", environment={"DB_PASSWORD": "hunter2"})
    assert file.spec.source.options["password"] == "hunter2"
    assert file.resolved()["source"]["options"] == {"user": "me", "password": "${DB_PASSWORD}"}
    assert "hunter2" not in repr(file)
    assert loads(text % "hunter2").resolved()["source"]["options"]["password"] == "(hidden)"
    with pytest.raises(PipelineFileError, match=r"source\.url='\$\{DB_PASSWORD\}' is written into the run's record"):
        loads(REST + "source: {kind: jdbc, url: '${DB_PASSWORD}', table: t}", environment={"DB_PASSWORD": "jdbc:x:y"})
