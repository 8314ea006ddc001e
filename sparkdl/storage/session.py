"""What the Spark session of this process says of addresses: which filesystem a plain path means, how HDFS is reached.

Enters: a path without a scheme. Leaves: the whole address that Spark would take for it, and the Hadoop settings that a
client of HDFS needs. No pyspark is imported: a process that has not imported it has no session, and a plain path means
this machine.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
import weakref
from typing import Any

from sparkdl.errors import ConfigError

__all__ = ["hadoop_settings", "qualified_by_session"]

_CLIENT = ("dfs.", "fs.defaultFS", "fs.viewfs.", "ha.", "hadoop.rpc.", "hadoop.security.", "ipc.client.")
_connect: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_parent = os.getpid()  # a forked child holds the parent's socket to the JVM, and must leave it alone


def qualified_by_session(path: str) -> str | None:
    """The address that the session takes for a path, or None where a plain path means this machine.

    Raises:
        ConfigError: the session cannot tell.
    """
    context, remote = _context(), None
    if context is None:
        remote = _connect_session()
    if context is None and remote is None:
        return None
    default = _default(context) if context is not None else _default_of_server(remote, path)
    if default.startswith("file:"):
        return None
    if path.startswith("~"):
        raise ConfigError(
            f"{path} means a folder of this machine, and plain paths mean {default} here: write the whole address, "
            f"such as file://{os.path.expanduser(path)}"
        )
    if context is not None:
        return _qualified(context, path, default)
    if not path.startswith("/"):
        raise ConfigError(
            f"{path} is relative to a folder that only the Spark Connect server knows: write the whole address, such "
            f"as {default.rstrip('/')}/data/{path}"
        )
    return default.rstrip("/") + os.path.normpath(path)


def hadoop_settings() -> dict[str, str]:
    """What a client of HDFS needs of the session's Hadoop configuration, defaults left out; empty without a session.

    Names, addresses and security settings, from core-site.xml, hdfs-site.xml and ``spark.hadoop.*`` alike.
    """
    context = _context()
    if context is None:
        return {}
    jvm, conf = context._jvm, context._jsc.hadoopConfiguration()
    named = conf.get("dfs.nameservices") or conf.get("hadoop.security.authentication", "simple") != "simple"
    if _default(context).startswith("file:") and not named:
        return {}  # a host and a port say all there is
    text = jvm.java.io.StringWriter()
    jvm.org.apache.hadoop.conf.Configuration.dumpConfiguration(conf, text)
    found = json.loads(text.toString())["properties"]
    return {
        one["key"]: str(one["value"])
        for one in found
        if one["key"].startswith(_CLIENT) and not str(one["resource"]).endswith("-default.xml")
    }


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


def _default(context: Any) -> str:
    conf = context._jsc.hadoopConfiguration()
    return str(context._jvm.org.apache.hadoop.fs.FileSystem.getDefaultUri(conf).toString())


def _qualified(context: Any, path: str, default: str) -> str:
    try:
        made = context._jvm.org.apache.hadoop.fs.Path(path)
        return str(made.getFileSystem(context._jsc.hadoopConfiguration()).makeQualified(made).toString())
    except Exception as cause:  # py4j's, with the JVM's trace
        reason = str(getattr(cause, "java_exception", None) or cause).splitlines()[0]
        raise ConfigError(
            f"{path} cannot be completed to an address of {default} ({reason}): write the whole address, such as "
            f"{default.rstrip('/')}/data/set"
        ) from cause


def _default_of_server(session: Any, path: str) -> str:
    """The default filesystem of a Spark Connect server: it names the whole address of a path that is not there."""
    if session not in _connect:
        probe = f"/sparkdl-{uuid.uuid4().hex}"
        whole = ""
        try:
            session.read.text(probe).schema  # noqa: B018
        except Exception as absent:
            parameters: dict[str, Any] = getattr(absent, "getMessageParameters", dict)() or {}
            whole = str(parameters.get("path", ""))
        if not whole.endswith(probe):
            raise ConfigError(
                f"{path} is a path of the Spark Connect server, and this one does not tell which filesystem that is: "
                "write the whole address, such as hdfs://host/data or file:///data"
            )
        _connect[session] = whole.removesuffix(probe) or "file:"
    return _connect[session]
