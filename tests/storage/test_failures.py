"""A store that does not answer is told from one that refuses, whichever client says so."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from sparkdl.errors import ConfigError, StorageError, StoreUnavailableError
from sparkdl.storage import Storage, check_places, outage_error, storage_errors
from sparkdl.storage.failures import store_error
from sparkdl.tables.delta import open_table

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


def java(text):
    """An error of Spark's, as pyspark raises it."""
    return type("Py4JJavaError", (Exception,), {"__module__": "py4j.protocol"})(f"An error occurred: {text}")


S3A = "java.lang.RuntimeException: x\nCaused by: org.apache.hadoop.fs.s3a."


@pytest.mark.parametrize(
    "raised",
    [
        ConnectionRefusedError(111, "Connection refused"),
        TimeoutError(),
        OSError("Connection refused (os error 111)"),  # hdfs-native
        OSError("Generic S3 error: Error performing PUT http://h/b/k in 3s, after 10 retries, max_retries: 10 - "
                "Server returned non-2xx status code: 503 Service Unavailable: "),
        OSError("Generic S3 error: error sending request for url (http://h/b/k): operation timed out"),
        java(f"{S3A}AWSClientIOException: open s3a://lake/x: SdkClientException: Unable to execute HTTP request: "
             "Connect to h:1 failed: Connection refused"),
        java(f"{S3A}AWSServiceThrottledException: getFileStatus on s3a://lake/x: Slow Down (Status Code: 503)"),
        java("x\nCaused by: java.net.ConnectException: Call From a/1 to b:8020 failed on connection exception: "
             "Connection refused\n\tat org.apache.hadoop.net.NetUtils.wrapException(x.java:1)"),
        java("org.apache.hadoop.ipc.RemoteException(org.apache.hadoop.hdfs.server.namenode.SafeModeException): Cannot "
             "create file/x. Name node is in safe mode."),
    ],
)  # fmt: skip
def test_what_an_outage_looks_like(raised):
    with pytest.raises(StoreUnavailableError) as caught, storage_errors("s3://lake/x", "read"):
        raise raised
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith("cannot read s3://lake/x: ")


@pytest.mark.parametrize(
    "raised",
    [
        FileNotFoundError("s3://lake/x"),
        PermissionError("Forbidden"),
        OSError("The specified bucket does not exist (NoSuchBucket)"),
        OSError("An error occurred (AccessDenied) when calling the PutObject operation (reached max retries: 4)"),
        OSError("error in IMDS http://169.254.169.254: operation timed out"),  # of who has no credentials at all
        OSError(28, "No space left on device", "/data/SlowDown"),
        OSError(5, "Input/output error", "/data/SlowDown"),
        ValueError("s3://lake/Throttled/x is no Parquet file"),
        ValueError("x"),
        java(f"{S3A}UnknownStoreException: `s3a://lake/x': Bucket does not exist"),
        java("org.apache.hadoop.security.AccessControlException: Permission denied\n\tat o.a.h.Throttling.run()"),
    ],
)  # fmt: skip
def test_what_is_refused_is_no_outage(raised):
    with pytest.raises(StorageError) as caught, storage_errors("s3://lake/x", "read"):
        raise raised
    assert not isinstance(caught.value, StoreUnavailableError)


def test_an_error_that_no_block_has_seen_is_an_outage_only_where_a_store_says_so():
    lost = "java.net.ConnectException: Connection refused"
    found = outage_error(java(f"{lost} to s3a://lake/x\n\tat org.apache.hadoop.fs.s3a.Invoker.retry(Invoker.java:1)"))
    assert str(found).startswith("s3a://lake/x cannot be reached: nobody answers there (ConnectException): check")
    assert outage_error(java(f"FetchFailed: {lost}\n\tat org.apache.spark.network.client.x(y.java:1)")) is None
    assert outage_error(ConnectionRefusedError(111, "Java is gone")) is None
    assert outage_error(ConfigError("Connection refused by s3a://lake/x")) is None


def test_one_place_that_refuses_makes_of_many_that_do_not_answer_a_refusal(tmp_path, monkeypatch):
    from sparkdl.storage import places

    def tries(place):
        error = PermissionError("x") if place.uri.endswith("b") else TimeoutError("x")
        raise store_error(error, f"cannot write {place.uri}")

    monkeypatch.setattr(places, "_try", tries)
    a, b = Storage.of(str(tmp_path / "a")), Storage.of(str(tmp_path / "b"))
    with pytest.raises(StoreUnavailableError, match=r"^one: cannot write .*a; two: cannot write .*a$"):
        check_places({"one": a, "two": a})
    with pytest.raises(StorageError, match=r"^one: .*a; two: .*b$") as caught:
        check_places({"one": a, "two": b})
    assert not isinstance(caught.value, StoreUnavailableError)


@pytest.fixture
def failing_store():
    """The address of a store that answers every request with 503, and of one where nobody listens."""
    pytest.importorskip("s3fs")
    server = socket.create_server(("127.0.0.1", 0))
    answer = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    answer += b"Content-Length: %d\r\n\r\n%s" % (len(SLOW_DOWN), SLOW_DOWN)

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                time.sleep(0.01)

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    server.close()


def test_clients_of_s3_say_when_it_cannot_serve(failing_store):
    options = {
        "key": "k", "secret": "s", "endpoint_url": failing_store, "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }  # fmt: skip
    place = Storage.of("s3://lake/set", options)
    with pytest.raises(StoreUnavailableError, match="cannot write s3://lake/set/a: the store cannot serve this now"):
        place.child("a").write_atomic(b"x")
    delta = {
        "AWS_ENDPOINT_URL": failing_store, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "max_retries": "1", "retry_timeout": "1s",
    }  # fmt: skip
    with pytest.raises(StoreUnavailableError, match="cannot be opened: the store cannot serve this now"):
        open_table("s3://lake/table", delta)
