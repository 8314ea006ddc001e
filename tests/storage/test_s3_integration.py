"""What a real session says of S3; and what is said of a store that lets nobody in, lacks the bucket, is not there."""

from __future__ import annotations

import logging
import re
import socket
import uuid

import fsspec.config
import pyarrow as pa
import pytest

from sparkdl.errors import StorageError
from sparkdl.storage import Storage, check_places, session
from sparkdl.tables.table import Table


@pytest.fixture(autouse=True)
def _nothing_is_said_elsewhere(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(fsspec.config.conf, "s3", raising=False)


@pytest.fixture
def set_on(spark):
    """Set something in a configuration of the running session; as it was, afterwards."""
    hadoop, undo = spark.sparkContext._jsc.hadoopConfiguration(), []

    def on_the_context(name, value):
        undo.append(lambda: hadoop.unset(name))
        hadoop.set(name, value)

    def on_the_session(name, value):
        undo.append(lambda: spark.conf.unset(name))
        spark.conf.set(name, value)

    yield on_the_context, on_the_session
    for step in undo:
        step()


def test_settings_are_those_that_spark_itself_would_take_and_a_change_is_seen(spark, set_on):
    on_the_context, on_the_session = set_on
    plain = session.s3a_settings()
    assert "TemporaryAWSCredentialsProvider" in plain["aws.credentials.provider"]
    assert Storage.of("s3://b/a").options == {}
    on_the_context("fs.s3a.access.key", "k")
    on_the_context("fs.s3a.secret.key", "first")
    on_the_context("fs.s3a.bucket.b.endpoint", "https://b.lake")
    assert session.s3a_settings() is not session.s3a_settings()
    assert session.s3a_settings() == {
        **plain, "access.key": "k", "secret.key": "first", "bucket.b.endpoint": "https://b.lake"
    }  # fmt: skip
    on_the_session("fs.s3a.secret.key", "of this session alone")
    assert Storage.of("s3://b/a").options["secret"] == "of this session alone"
    assert Storage.of("s3://b/a").options["endpoint_url"] == "https://b.lake"
    assert "endpoint_url" not in Storage.of("s3://c/a").options


def test_secrets_in_hadoops_files_of_credentials_are_found_and_py4j_logs_none(spark, set_on, tmp_path, caplog):
    on_the_context, _ = set_on
    path = f"localjceks://file{tmp_path}/keys.jceks"
    jvm, hadoop = spark.sparkContext._jvm, spark.sparkContext._jsc.hadoopConfiguration()
    conf = jvm.org.apache.hadoop.conf.Configuration(hadoop)
    conf.set("hadoop.security.credential.provider.path", path)
    [file] = jvm.org.apache.hadoop.security.alias.CredentialProviderFactory.getProviders(conf)
    for name, value in {"access.key": "k", "secret.key": "hidden-secret", "bucket.b.secret.key": "hidden-too"}.items():
        letters = spark.sparkContext._gateway.new_array(jvm.char, len(value))
        for place, letter in enumerate(value):
            letters[place] = letter
        file.createCredentialEntry(f"fs.s3a.{name}", letters)
    file.flush()
    with caplog.at_level(logging.DEBUG):
        on_the_context("fs.s3a.security.credential.provider.path", path)
        caplog.clear()
        found = session.s3a_settings()
        assert spark.range(1).count() == 1
    assert (found["access.key"], found["secret.key"], found["bucket.b.secret.key"]) == (
        "k",
        "hidden-secret",
        "hidden-too",
    )
    assert "hidden" not in caplog.text
    assert "py4j" in " ".join(record.name for record in caplog.records)  # its log is open, before and after


def test_a_machine_without_a_session_reads_what_one_would_find(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_context", lambda: None)
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.s3a.access.key</name><value>k</value></property>"
        "<property><name>fs.s3a.endpoint</name><value>https://${host}</value></property></configuration>"
    )
    (tmp_path / "spark-defaults.conf").write_text(
        "# all of us\nspark.master local[2]\nspark.hadoop.fs.s3a.secret.key   a=b c \n"
        "spark.hadoop.fs.s3a.endpoint.region=here\n"
    )
    for name in ("HADOOP_CONF_DIR", "SPARK_CONF_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    assert session.s3a_settings() == {"access.key": "k", "secret.key": "a=b c", "endpoint.region": "here"}


ROADS = {
    "reading": lambda uri, spark: Storage.of(uri).read_bytes(),
    "looking": lambda uri, spark: Storage.of(uri).exists(),
    "listing": lambda uri, spark: Storage.of(uri).list(),
    "writing": lambda uri, spark: check_places({"target": Storage.of(uri)}),
    "table": lambda uri, spark: Table(uri).version(),
    "append": lambda uri, spark: Table(uri).append(pa.table({"x": [1]})),
    "write": lambda uri, spark: Table(uri).write(spark.range(1)),
}


_REFUSED = r"the store does not take these credentials \(.+\): check key, secret and token in fs\.s3a|access is denied"
WRONG = {
    "secret": _REFUSED,
    "key": _REFUSED,
    "none": r"there are no credentials for it \(.+\): give some in fs\.s3a\.\* of the session, fsspec's",
    "bucket": r"there is no such bucket \(.+\): create it, or check its name and the endpoint",
    "endpoint": r"cannot reach .*nobody answers at http://127.0.0.1:\d+ \(.*refused\): check the endpoint",
}


def test_who_is_on_spark_connect_is_told_what_cannot_be_known_there(guarded_s3, monkeypatch):
    monkeypatch.setattr("sparkdl.storage.failures.connected", lambda: True)
    place = Storage.of("s3://no-such-bucket/a", {"endpoint_url": guarded_s3[0], "key": "wrong", "secret": "w"})
    with pytest.raises(StorageError, match=r"; of Spark Connect's server only what spark\.conf shows is known here$"):
        place.read_bytes()


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    WRONG.items(),
    ids=WRONG,
)
def test_what_is_wrong_is_one_sentence_on_every_road(spark, set_on, guarded_s3, monkeypatch, road, wrong, sentence):
    on_the_context, _ = set_on
    endpoint, key, secret = guarded_s3
    monkeypatch.setattr("sparkdl.storage.connect._CONNECT_TRIES", 1)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = f"b-{uuid.uuid4().hex[:8]}"
    Storage.of("s3://x", {"endpoint_url": endpoint, "key": key, "secret": secret})._fs.call_s3(
        "create_bucket", Bucket=bucket
    )
    if wrong == "endpoint":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    settings = {"endpoint": endpoint, "endpoint.region": "us-east-1", "path.style.access": "true"}
    if wrong != "none":
        settings["access.key"] = "AKIAWRONG" if wrong == "key" else key
        settings["secret.key"] = "hidden-wrong" if wrong == "secret" else secret
    for name, value in settings.items():
        on_the_context(f"fs.s3a.{name}", value)
    place = f"s3://{'no-such-bucket' if wrong == 'bucket' else bucket}/place"
    with pytest.raises(StorageError, match=sentence) as refused:
        ROADS[road](place, spark)
    text = str(refused.value)
    assert place in text
    assert "\n" not in text
    assert "\x1b" not in text
    assert not re.search(rf"hidden|{re.escape(secret)}", text)
    assert len(text) < 420
