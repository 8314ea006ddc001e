"""How a filesystem that is not this machine's is reached: its package, its options, its name in fsspec.

Enters: a scheme. Leaves: fsspec's filesystem for it, made with the options that the user configured, or one sentence
that names the package to install.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from sparkdl.errors import ConfigError, StorageError
from sparkdl.storage.session import hadoop_settings

__all__ = ["HADOOP", "OBJECT_STORES", "filesystem_of", "options_for", "protocol_of"]

HADOOP = ("hdfs", "viewfs")
OBJECT_STORES = ("s3", "gcs", "abfs")
_PATIENCE = {"dfs.client.failover.max.attempts": "6"}  # half a minute for a NameNode to answer; 15 take minutes
_SAME_AS = {"s3a": "s3", "s3n": "s3", "gs": "gcs", "wasb": "abfs", "wasbs": "abfs", "abfss": "abfs"}
# A forked child makes fsspec forget its filesystems, and hdfs-native's client then waits for ever for threads that only
# the parent has: so that no child lets go of a parent's client, all are kept. Connections to DataNodes are shared all
# the same: a child that reads within 3 s of its parent waits 60 s, once. Seen with hdfs-native 0.14.
_kept: dict[tuple[int, str], Any] = {}
_PACKAGES = {
    "hdfs": ("hdfs_native", "sparkdl[hdfs]"),
    "viewfs": ("hdfs_native", "sparkdl[hdfs]"),
    "s3": ("s3fs", "sparkdl[s3]"),
    "gcs": ("gcsfs", "gcsfs"),
    "abfs": ("adlfs", "adlfs"),
}


def protocol_of(uri: str) -> str:
    """The name in fsspec of the scheme of a URI.

    Raises:
        ConfigError: nothing answers to it.
    """
    import fsspec  # which looks for plugins everywhere: local sets do without

    scheme = uri.partition("://")[0]
    protocol = _SAME_AS.get(scheme, scheme)
    if protocol not in _PACKAGES and protocol not in fsspec.available_protocols():
        raise ConfigError(f"the scheme {scheme!r} of {uri} is unknown: use a path, or s3, gs, abfs or hdfs")
    return protocol


def options_for(protocol: str) -> dict[str, Any]:
    """What fsspec's configuration says of a protocol, for HDFS on top of the session's Hadoop configuration."""
    import fsspec.config

    known = dict(fsspec.config.conf.get(protocol, {}))
    return {**hadoop_settings(), **known} if protocol in HADOOP else known


def filesystem_of(protocol: str, uri: str, options: Mapping[str, Any]) -> Any:
    """The filesystem of fsspec behind a URI.

    Raises:
        StorageError: its package is not installed, or cannot name the file.
    """
    package, extra = _PACKAGES.get(protocol, ("", ""))
    if package and find_spec(package) is None:
        raise StorageError(f"{uri} needs the package {package}, which is not installed here: pip install '{extra}'")
    if protocol in HADOOP and ("?" in uri or "#" in uri):  # what follows is for its client no part of the path
        raise StorageError(f"{uri} holds a '?' or '#', which the client of HDFS cannot name: choose another name")
    import fsspec

    if protocol in HADOOP:  # its client takes settings of Hadoop, all text
        where = fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(uri)
        settings = {name: str(value) for name, value in options.items()}
        files = fsspec.filesystem(protocol, **where, **{**_PATIENCE, **settings})
        _kept[os.getpid(), files._fs_token] = files
        return files
    # without a listing cache, which would hide what other processes write
    return fsspec.filesystem(protocol, **{"use_listings_cache": False, **options})
