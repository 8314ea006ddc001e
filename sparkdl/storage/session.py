"""The session's word on addresses: the meaning of plain paths, and the way to HDFS and S3."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sparkdl.errors import ConfigError, first_line
from sparkdl.storage.s3 import S3A_SETTINGS

LOCAL = "file:///"
_CLIENT = ("dfs.", "fs.defaultFS", "fs.viewfs.", "ha.", "hadoop.rpc.", "hadoop.security.", "ipc.client.")
_connect: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_hadoop: weakref.WeakKeyDictionary[Any, _Hadoop] = weakref.WeakKeyDictionary()
_S3A = "fs.s3a."
_COUNTS = rf"(bucket\..+\.)?({'|'.join(map(re.escape, S3A_SETTINGS))})"
_lent: dict[str, str] = {}
_lent_default = LOCAL
_unlogged = threading.local()
_parent = os.getpid()  # a forked child holds the parent's socket to the JVM, and must leave it alone


def default_filesystem() -> str:
    """The address of the filesystem that plain paths belong to: ``LOCAL`` for this machine's, without a session, too.

    For the disk of a Spark Connect server's machine ``file://`` and its host; empty where that cannot be told. Without
    a session, what was lent for the one to come.

    No pyspark is imported: a process that has not imported it has no session, and a plain path means this machine,
    unless somebody lends it what the session to come will say (``configured_on_disk``).
    """
    context = _context()
    if context is not None:
        default = _hadoop_of(context).default()
        return LOCAL if default.startswith("file:") else default
    session = _connect_session()
    if session is None:
        return _lent_default
    default = _default_of_server(session)
    if not default.startswith("file:"):
        return default
    return LOCAL if is_here(session.client.host) else f"file://{session.client.host}"


def qualified_by_session(path: str) -> str | None:
    """The address that the session takes for a path, or None where a plain path means this machine.

    Raises:
        ConfigError: the session cannot tell, or takes it for one of another machine's disk.
    """
    default = default_filesystem()
    if default == LOCAL:
        return None
    if not default:
        raise ConfigError(
            f"{path} is a plain path, and neither Hadoop's files here nor a Spark Connect server tell of which "
            "filesystem: write the whole address, such as hdfs://host/data or file:///data"
        )
    if default.startswith("file:"):
        raise ConfigError(
            f"{path} is a path on the disk of the Spark Connect server {default.removeprefix('file://')}, which this "
            "machine does not have: write an address that both reach, such as s3://bucket/data, or "
            f"file://{os.path.abspath(path)} where both have one disk mounted"
        )
    if path.startswith("~"):
        raise ConfigError(
            f"{path} means a folder of this machine, and plain paths mean {default} here: write the whole address, "
            f"such as file://{os.path.expanduser(path)}"
        )
    context = _context()
    if context is not None:
        return _qualified(context, path, default)
    if not path.startswith("/"):
        raise ConfigError(
            f"{path} is relative to a folder that only the Spark {'Connect server' if connected() else 'session'} "
            f"knows: write the whole address, such as {default.rstrip('/')}/data/{path}"
        )
    return default.rstrip("/") + os.path.normpath(path)


def hadoop_settings() -> dict[str, str]:
    """What a client of HDFS needs of the session's Hadoop configuration, defaults left out; empty without a session.

    Names, addresses and security settings, from core-site.xml, hdfs-site.xml and ``spark.hadoop.*`` alike.
    """
    context = _context()
    return {} if context is None else dict(_hadoop_of(context).settings())


def s3a_settings() -> dict[str, str]:
    """What Spark is told of S3, by names without ``fs.s3a.``; it may hold secrets.

    Of the session's Hadoop configuration, from core-site.xml, ``spark.hadoop.*``, ``spark.conf.set("fs.s3a...")`` and
    Hadoop's files of credentials alike; of a Spark Connect server, what ``spark.conf`` shows. Where there is no
    session, what was lent, else what one will find in this machine's ``SPARK_CONF_DIR`` and ``HADOOP_CONF_DIR``.
    """
    context = _context()
    if context is not None:
        return dict(_hadoop_of(context).s3a())
    session = _connect_session()
    if session is not None:
        return s3a_settings_of(_shown_by_server(session))
    # Hadoop alone fills in what stands in ${...}.
    configured = {name: value for name, value in configured_on_disk().items() if "${" not in value}
    return dict(_lent) or s3a_settings_of(configured)


@contextmanager
def s3a_settings_lent(settings: Mapping[str, str]) -> Iterator[None]:
    """Let this process, while it has no session, take these for its session's during the block."""
    previous = dict(_lent)
    _lent.update(settings)
    try:
        yield
    finally:
        _lent.clear()
        _lent.update(previous)


@contextmanager
def default_filesystem_lent(default: str | None) -> Iterator[None]:
    """Let plain paths of this process, while it has no session, belong to this filesystem during the block."""
    global _lent_default
    previous, _lent_default = _lent_default, _lent_default if default is None else default
    try:
        yield
    finally:
        _lent_default = previous


def connected() -> bool:
    """Whether the session of this process is one of Spark Connect, whose Hadoop configuration stays on the server."""
    return _context() is None and _connect_session() is not None


class _Hadoop:
    """The Hadoop configuration of one Spark context, which lies in its JVM.

    Each question takes a fraction of a millisecond, the settings some. So answers are kept for as long as
    ``fs.defaultFS`` stays, or all of ``fs.s3a.``: what is asked for each time, as a program may change it. Where the
    JVM is gone, as after a signal to the group of processes, the last answers hold: a run has its end to write yet.
    """

    def __init__(self, context: Any) -> None:
        self._jvm, self._conf = context._jvm, context._jsc.hadoopConfiguration()
        self._known: tuple[str | None, str] = (LOCAL, LOCAL)
        self._settings: dict[str, str] | None = None
        self._s3a: tuple[Any, dict[str, str]] = (None, {})
        self._sessions = self._jvm.org.apache.spark.sql.classic.SparkSession

    def default(self) -> str:
        """The address of the default filesystem."""
        try:
            named = self._conf.get("fs.defaultFS")
        except Exception as error:
            if not _is_gone(error):
                raise
            return self._known[1]
        if named != self._known[0]:
            uri = self._jvm.org.apache.hadoop.fs.FileSystem.getDefaultUri(self._conf)
            self._known, self._settings = (named, str(uri.toString())), None
        return self._known[1]

    def qualified(self, path: str) -> str:
        """A path with scheme and host, and absolute."""
        try:
            hadoop_path = self._jvm.org.apache.hadoop.fs.Path(path)
            return str(hadoop_path.getFileSystem(self._conf).makeQualified(hadoop_path).toString())
        except Exception as error:
            if not _is_gone(error) or not path.startswith("/"):
                raise
            return self._known[1].rstrip("/") + os.path.normpath(path)

    def settings(self) -> dict[str, str]:
        """What a client of HDFS needs, see ``hadoop_settings``."""
        default = self.default()
        if self._settings is None:
            conf = self._conf
            named = conf.get("dfs.nameservices") or conf.get("hadoop.security.authentication", "simple") != "simple"
            local = default.startswith("file:")
            self._settings = {} if local and not named else self._dumped()  # a host and a port say all there is
        return self._settings

    def s3a(self) -> dict[str, str]:
        """What Spark's client of S3 is told, see ``s3a_settings``."""
        try:
            return self._asked_s3a()
        except Exception as error:
            if not _is_gone(error):
                raise
            return self._s3a[1]

    def _asked_s3a(self) -> dict[str, str]:
        conf = self._conf
        with suppress(Exception), _not_logged():  # there is a context, and no session yet
            conf = self._sessions.active().sessionState().newHadoopConf()  # with what was set on the session alone
        with _not_logged():
            properties = conf.getPropsWithPrefix(_S3A)
            if self._s3a[0] is None or not properties.equals(self._s3a[0]):
                text = self._jvm.com.fasterxml.jackson.databind.ObjectMapper().writeValueAsString(properties)
                settings = {f"{_S3A}{name}": value for name, value in json.loads(text).items()}
                self._s3a = properties, s3a_settings_of({**settings, **self._from_files(conf, settings)})
        return self._s3a[1]

    def _from_files(self, conf: Any, settings: Mapping[str, str]) -> dict[str, str]:
        """Secrets that lie in Hadoop's files of credentials (JCEKS)."""
        general = "hadoop.security.credential.provider.path"
        paths = [settings.get(f"{_S3A}security.credential.provider.path"), conf.get(general)]
        if not any(paths):
            return {}
        conf = self._jvm.org.apache.hadoop.conf.Configuration(conf)
        conf.set(general, ",".join(filter(None, paths)))
        files = self._jvm.org.apache.hadoop.security.alias.CredentialProviderFactory.getProviders(conf)
        names = {str(name) for file in files for name in file.getAliases() if str(name).startswith(_S3A)}
        return {name: "".join(conf.getPassword(name)) for name in names}

    def _dumped(self) -> dict[str, str]:
        text = self._jvm.java.io.StringWriter()
        self._jvm.org.apache.hadoop.conf.Configuration.dumpConfiguration(self._conf, text)
        properties = json.loads(text.toString())["properties"]
        return {
            entry["key"]: str(entry["value"])
            for entry in properties
            if entry["key"].startswith(_CLIENT) and not str(entry["resource"]).endswith("-default.xml")
        }


def s3a_settings_of(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings of a session that say how S3 is reached; what it was started with has a longer name."""
    s3a: dict[str, str] = {}
    for prefix in (f"spark.hadoop.{_S3A}", _S3A):
        for name, value in settings.items():
            setting = name.removeprefix(prefix)
            if name != setting and re.fullmatch(_COUNTS, setting):
                s3a[setting] = value
    return s3a


def default_filesystem_of(settings: Mapping[str, str]) -> str:
    """What ``default_filesystem`` will say of a session with these settings; empty where only Hadoop can tell."""
    named = ("spark.hadoop.fs.defaultFS", "spark.hadoop.fs.default.name", "fs.defaultFS", "fs.default.name")
    default = next((settings[name] for name in named if settings.get(name)), LOCAL)
    if "${" in default:  # which Hadoop fills in
        return ""
    scheme, separator, host_and_path = default.partition("://")
    if scheme in ("file", "local") or default.startswith("file:"):
        return LOCAL
    return f"{scheme}://{host_and_path.partition('/')[0]}" if separator else f"hdfs://{default}"


def hadoop_client_settings_of(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings of a session that a client of HDFS needs, see ``hadoop_settings``."""
    hadoop = {name.removeprefix("spark.hadoop."): value for name, value in settings.items()}
    return {name: value for name, value in hadoop.items() if name.startswith(_CLIENT) and "${" not in value}


def configured_on_disk() -> dict[str, str]:
    """What files say to every session that starts here: core-site.xml, hdfs-site.xml, spark-defaults.conf.

    Of files of one name in ``SPARK_CONF_DIR``, ``HADOOP_CONF_DIR`` and ``YARN_CONF_DIR`` Java takes the first.
    """
    configured: dict[str, str] = {}
    folders = [
        _spark_conf(),
        *(Path(os.environ.get(name) or "/nowhere") for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR")),
    ]
    for name in ("core-site.xml", "hdfs-site.xml"):
        file = next((folder / name for folder in folders if (folder / name).is_file()), None)
        with suppress(OSError, ElementTree.ParseError):
            for element in ElementTree.parse(file).iter("property") if file else ():
                configured[(element.findtext("name") or "").strip()] = (element.findtext("value") or "").strip()
    return {**configured, **spark_defaults()[1]}


def spark_defaults() -> tuple[str, dict[str, str]]:
    """The path of spark-defaults.conf, and its settings; empty where it is not there."""
    file = _spark_conf() / "spark-defaults.conf"
    try:
        text = re.sub(r"(?<!\\)\\\r?\n[ \t]*", "", file.read_text(encoding="utf-8"))  # a line that goes on
    except (OSError, UnicodeDecodeError):
        return "", {}
    split = (re.split(r"\s*[=:]\s*|\s+", line.strip(), maxsplit=1) for line in text.splitlines())
    defaults = {name: value for name, value in (parts for parts in split if len(parts) == 2) if name[:1] not in "#!"}
    return str(file), defaults


def _spark_conf() -> Path:
    """The folder that Spark takes its own configuration from."""
    if os.environ.get("SPARK_CONF_DIR"):
        return Path(os.environ["SPARK_CONF_DIR"])
    if os.environ.get("SPARK_HOME"):
        return Path(os.environ["SPARK_HOME"]) / "conf"
    package = find_spec("pyspark")
    return Path(package.origin).parent / "conf" if package is not None and package.origin else Path("/nowhere")


def _shown_by_server(session: Any) -> dict[str, str]:
    with suppress(Exception):  # a server may keep its settings to itself
        return dict(session.conf.getAll)
    return {}


@contextmanager
def _not_logged() -> Iterator[None]:
    """Keep what this thread asks the JVM during the block out of py4j's log, which at DEBUG holds every answer."""
    for name in ("py4j.java_gateway", "py4j.clientserver"):
        logging.getLogger(name).addFilter(_may_be_logged)
    _unlogged.by_me = True
    try:
        yield
    finally:
        _unlogged.by_me = False


def _may_be_logged(_: logging.LogRecord) -> bool:
    return not getattr(_unlogged, "by_me", False)


def _is_gone(error: BaseException) -> bool:
    """Whether a question failed since the JVM answers no more; with an error of its own, py4j gives its trace."""
    kind = type(error).__name__
    cut_off = kind == "Py4JNetworkError" or (kind == "Py4JError" and "Trace:" not in str(error))
    return cut_off or isinstance(error, OSError)


def _hadoop_of(context: Any) -> _Hadoop:
    if context not in _hadoop:
        _hadoop[context] = _Hadoop(context)
    return _hadoop[context]


def _context() -> Any:
    """The Spark context that runs in this process; its session's configuration is the one that counts."""
    if os.getpid() != _parent:
        return None
    pyspark: Any = sys.modules.get("pyspark")
    return getattr(getattr(pyspark, "SparkContext", None), "_active_spark_context", None)


def _connect_session() -> Any:
    module: Any = sys.modules.get("pyspark.sql.connect.session")
    if module is None:
        return None
    return module.SparkSession.getActiveSession() or module.SparkSession._default_session


def _qualified(context: Any, path: str, default: str) -> str:
    try:
        return _hadoop_of(context).qualified(path)
    except Exception as cause:  # py4j's, with the JVM's trace
        reason = first_line(getattr(cause, "java_exception", None) or cause)
        raise ConfigError(
            f"{path} cannot be completed to an address of {default} ({reason}): write the whole address, such as "
            f"{default.rstrip('/')}/data/set"
        ) from cause


def _default_of_server(session: Any) -> str:
    """The default filesystem of a Spark Connect server: it names the whole address of a path that is not there."""
    if session not in _connect:
        probe = f"/sparkdl-{uuid.uuid4().hex}"
        answer = ""
        try:
            session.read.text(probe).schema  # noqa: B018
        except Exception as absent:
            parameters: dict[str, Any] = getattr(absent, "getMessageParameters", dict)() or {}
            answer = str(parameters.get("path", ""))
        if not answer.endswith(probe):
            return ""
        _connect[session] = answer.removesuffix(probe) or LOCAL
    return _connect[session]


def is_here(host: str) -> bool:
    """Whether a host is this machine: only an address of its own can be listened on."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
    except OSError:
        return False
    return True
