"""An S3 server of its own process on the loopback interface."""

import os
import re
import subprocess
import sys
import uuid

import pytest

OPTIONS = {"key": "testing", "secret": "testing", "client_kwargs": {"region_name": "us-east-1"}}


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    log = tmp_path_factory.mktemp("moto") / "log"
    command = [sys.executable, "-c", "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"]
    with log.open("wb") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ})
    try:
        address = None
        while address is None and server.poll() is None:
            address = re.search(rb"http://127\.0\.0\.1:\d+", log.read_bytes())
        assert address is not None, log.read_text()
        yield address[0].decode()
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture
def s3_root(s3_endpoint):
    """The storage of a fresh bucket's ``set`` prefix."""
    from sparkdl.storage import Storage

    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    root = Storage.of(f"s3://{bucket}/set", {**OPTIONS, "endpoint_url": s3_endpoint})
    root._fs.call_s3("create_bucket", Bucket=bucket)  # s3fs adds a location constraint that us-east-1 refuses
    return root
