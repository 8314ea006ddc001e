"""Fixtures that every test can ask for: one Spark session per test process, a clean environment around each test."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkdl.compat.java_classes import java_options
from sparkdl.storage import Storage

sys.path.insert(0, str(Path(__file__).parent / "ranks"))  # for rank_pool and run_store
sys.path.insert(0, str(Path(__file__).parent / "servers"))  # for postgres_server

S3_OPTIONS = {"key": "testing", "secret": "testing", "client_kwargs": {"region_name": "us-east-1"}}

# Spark's workers take the first python3 on the PATH unless they are told.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARKDL_PRELOAD", "torch,torch.distributed,horovod.torch,sparkdl.launch.rank.rank")


LONGEST = ("test_readme", "test_contract_integration", "test_ingest_integration", "test_runners_integration")
LONGEST += ("test_estimator_integration", "test_local_integration", "test_spoiled", "test_fit_integration")


def pytest_collection_modifyitems(items):
    """Begin with the files that take longest: the short ones then fill what is left of each test process's time."""

    def place(item):
        name = item.path.name
        return not name.startswith(LONGEST), not name.endswith("_integration.py")

    items.sort(key=place)


def pytest_collection_finish():
    """Let the garbage collector pass over what all tests have imported: it would look for half a second each time."""
    gc.freeze()


DRIVERS = Path(__file__).resolve().parents[2] / "shared" / "jars" / "jdbc"


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """A local Spark session with two slots, and with PostgreSQL's driver where that lies beside the project."""
    pyspark_sql = pytest.importorskip("pyspark.sql")
    warehouse = tmp_path_factory.mktemp("warehouse")
    session = (
        pyspark_sql.SparkSession.builder.master("local[2]")
        .appName("sparkdl-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.driver.memory", "1g")
        # Short jobs: the optimising compiler costs more than it gains.
        .config(
            "spark.driver.extraJavaOptions",
            f"-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC {java_options()}",
        )
        .config("spark.sql.warehouse.dir", str(warehouse))
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        # Spark ends a Python worker whose rows nobody wants any more: the next one has torch when it is born.
        .config("spark.python.daemon.module", "sparkdl.launch.daemon")
        .config("spark.jars", ",".join(map(str, sorted(DRIVERS.glob("*.jar")))))
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server of its own, as Debian packages it, see ``Postgres``."""
    from postgres_server import Postgres

    if not list(DRIVERS.glob("postgresql-*.jar")):
        pytest.skip("needs PostgreSQL's driver: ../shared/jars/jdbc does not lie beside the project")
    server = Postgres.programs()
    if server is None:
        pytest.skip("needs PostgreSQL's server: Debian's package postgresql is not installed")
    with Postgres(server) as running:
        yield running


@pytest.fixture(scope="session")
def ranks():
    """Real ranks, with torch and what else they have needed loaded: one pool per test process, see ``Ranks``."""
    from rank_pool import Ranks

    pool = Ranks()
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    """An S3 server of its own process on the loopback interface."""
    with _s3_server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@pytest.fixture(scope="session")
def guarded_s3(tmp_path_factory):
    """One that lets a single user in: its URL, his key, his secret."""
    boto3 = pytest.importorskip("boto3")
    with _s3_server(tmp_path_factory.mktemp("moto") / "log") as url:
        iam = boto3.client(
            "iam", endpoint_url=url, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
        )
        iam.create_user(UserName="user")
        every = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [every]})
        iam.put_user_policy(UserName="user", PolicyName="all", PolicyDocument=policy)
        made = iam.create_access_key(UserName="user")["AccessKey"]
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{url}/moto-api/reset-auth", b"0", plain)  # from now on it looks at keys
        urllib.request.urlopen(request).close()
        yield url, made["AccessKeyId"], made["SecretAccessKey"]


@pytest.fixture
def lost_answers(monkeypatch):
    """A folder of ``memory://``, whose client waits in vain for the first answer to each write, and sends it again."""
    from fsspec.implementations.memory import MemoryFileSystem

    send = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem, "pipe_file", lambda *given, **more: send(*given, **more) or send(*given, **more)
    )
    yield f"memory://lost-{os.getpid()}"
    MemoryFileSystem.store.clear()


@contextmanager
def _s3_server(log: Path) -> Iterator[str]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
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
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    root = Storage.of(f"s3://{bucket}/set", {**S3_OPTIONS, "endpoint_url": s3_endpoint})
    root._fs.call_s3("create_bucket", Bucket=bucket)  # s3fs adds a location constraint that us-east-1 refuses
    return root


@pytest.fixture(scope="session")
def hadoop(tmp_path_factory):
    """The folder with Hadoop's configuration of an HDFS that was started for the tests; skips where there is none."""
    tools = Path(__file__).resolve().parents[2] / "shared" / "yarn"
    if not (tools / "start.sh").exists():
        pytest.skip("needs HDFS: ../shared/yarn/start.sh does not lie beside the project")
    pytest.importorskip("hdfs_native")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder above is that of all processes of this test run
        folder = folder.parent
    base = folder / "hadoop"
    users = base / "users" / str(os.getpid())
    users.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _alone(base):
            users.touch()
            if not (base / "ready").exists():
                _start_hadoop(tools, base)
        yield base / "conf"
    finally:
        with _alone(base):
            users.unlink()
            if not list(users.parent.iterdir()):
                subprocess.run([str(tools / "stop.sh"), str(base)], check=False, capture_output=True)
                (base / "ready").unlink(missing_ok=True)


@contextmanager
def _alone(base: Path) -> Iterator[None]:
    """Keep the other processes of this test run out: the one cluster of ``base`` serves them all."""
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start_hadoop(tools: Path, base: Path) -> None:
    # the script itself gives up after a minute, the server it started may need longer on a busy machine
    subprocess.run(
        [str(tools / "start.sh"), str(base), "1", "1024", "1"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        check=False,
    )
    while not (base / "ready").exists():
        os.kill(int((base / "pid").read_text()), 0)
        time.sleep(0.2)


@pytest.fixture(scope="session")
def hdfs(hadoop):
    """The address of that HDFS, such as ``hdfs://localhost:8020``."""
    text = (hadoop / "core-site.xml").read_text()
    return re.search(r"<name>fs.defaultFS</name><value>([^<]+)", text)[1]


@pytest.fixture(autouse=True)
def _environment_is_left_as_it_was():
    """A test that leaves variables behind changes the next one: fail the one that does."""
    before = dict(os.environ)
    yield
    watched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HOROVOD_RANK", "CUDA_VISIBLE_DEVICES")
    changed = {name for name in watched if os.environ.get(name) != before.get(name)}
    os.environ.clear()
    os.environ.update(before)
    assert not changed, f"the test left {sorted(changed)} changed in the environment"
