"""The way to a filesystem that is not this machine's: its package, its options, its name in fsspec."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from sparkdl.errors import ConfigError, StorageError, StoreUnavailableError
from sparkdl.storage.s3 import S3Access, bucket_of
from sparkdl.storage.session import connected, hadoop_settings, s3a_settings

HADOOP = ("hdfs", "viewfs")
OBJECT_STORES = ("s3", "gcs", "abfs")
_PATIENCE = {"dfs.client.failover.max.attempts": "6"}  # half a minute for a NameNode to answer; 15 take minutes
_SAME_AS = {"s3a": "s3", "s3n": "s3", "gs": "gcs", "wasb": "abfs", "wasbs": "abfs", "abfss": "abfs"}
# A forked child makes fsspec forget its filesystems, and hdfs-native's client then waits for ever for threads that only
# the parent has: so that no child lets go of a parent's client, all are kept. Connections to DataNodes are shared all
# the same: a child that reads within 3 s of its parent waits 60 s, once. Seen with hdfs-native 0.14.
_kept: dict[tuple[int, str], Any] = {}
_answered: set[tuple[str, int]] = set()
_CONNECT_SECONDS, _CONNECT_TRIES = 5.0, 3
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


def options_for(protocol: str, uri: str, own_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options of fsspec's filesystem for an address.

    Args:
        protocol: fsspec's name of it.
        uri: the address.
        own_options: options that came with the address; None: fsspec's configuration says, and below it the session's
            Hadoop configuration. For S3 these fill in what is not given, see ``s3.py``.

    Raises:
        ConfigError: the session's credentials for S3 come from where only Spark can ask.
    """
    if protocol == "s3":
        options = {**_configured(), **(own_options or {})}
        return _s3_access(uri, S3Access.of_fsspec(own_options or {})).to_fsspec(options)
    if own_options is not None:
        return dict(own_options)
    import fsspec.config

    options = dict(fsspec.config.conf.get(protocol, {}))
    return {**hadoop_settings(), **options} if protocol in HADOOP else options


def delta_s3_options(uri: str, own_options: Mapping[str, str] | None) -> dict[str, str]:
    """The options for S3 in the words of delta-rs, over the options that were given to it.

    Raises:
        ConfigError: as ``options_for``; or there is no such profile of AWS's files.
        StorageError: nobody answers at the endpoint.
    """
    bucket = bucket_of(uri)
    access = _s3_access(uri, S3Access.of_delta(own_options or {}, bucket))
    check_answers(access, uri)
    return access.to_delta(own_options or {}, bucket)


def options_of_delta(uri: str, own_options: Mapping[str, str]) -> dict[str, Any]:
    """What delta-rs was given for an address of S3, in the words of fsspec's client."""
    return S3Access.of_delta(own_options, bucket_of(uri)).to_fsspec({})


def check_spark_reaches(uri: str) -> None:
    """Refuse an address of S3 where nobody answers to Spark, whose own client says so after four minutes or more.

    Raises:
        StorageError: names the endpoint.
    """
    if uri.startswith("s3a://") and not connected():  # whose server may be in another network than this process
        nobody = S3Access(anonymous=True)  # whatever Spark's credentials are: what they are is not for here
        check_answers(nobody.over_s3a(s3a_settings(), bucket_of(uri)), uri)


def check_answers(access: S3Access, uri: str) -> None:
    """Refuse an endpoint where nobody listens: once it has answered, a process takes it for there.

    Clients go on trying for 10 s to several minutes, each in its own way, and a wrong address is the commonest reason.

    Args:
        access: whose endpoint is tried, unless it is AWS's own, or behind a proxy.
        uri: what is to be reached, for the message.

    Raises:
        StoreUnavailableError: three tries of 5 s each failed.
    """
    parts = urlsplit(access.endpoint)
    host_and_port = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))
    if not host_and_port[0] or host_and_port in _answered:
        return
    if access.proxied or (parts.scheme in getproxies() and not proxy_bypass(host_and_port[0])):
        return
    for tried in range(_CONNECT_TRIES):
        try:
            socket.create_connection(host_and_port, _CONNECT_SECONDS).close()
            _answered.add(host_and_port)
            return
        except OSError as cause:
            if tried + 1 == _CONNECT_TRIES:
                raise StoreUnavailableError(
                    f"cannot reach {uri}: nobody answers at {access.endpoint} ({cause}): check the endpoint "
                    "(fs.s3a.endpoint of the session, endpoint_url of fsspec, AWS_ENDPOINT_URL) and the network"
                ) from cause
            time.sleep(1)


def _configured() -> dict[str, Any]:
    """What fsspec's configuration says of S3, under both of its names."""
    import fsspec.config

    return {**fsspec.config.conf.get("s3", {}), **fsspec.config.conf.get("s3a", {})}


def _s3_access(uri: str, own_access: S3Access) -> S3Access:
    return own_access.over(S3Access.of_fsspec(_configured())).over_s3a(s3a_settings(), bucket_of(uri))


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
    if protocol == "s3":
        check_answers(S3Access.of_fsspec(options), uri)
    # without a listing cache, which would hide what other processes write
    return fsspec.filesystem(protocol, **{"use_listings_cache": False, **options})
