"""The one absolute address that a user's text means, made once, where the text enters."""

from __future__ import annotations

import os
import re

from sparkdl.errors import ConfigError
from sparkdl.storage.session import LOCAL, default_filesystem, qualified_by_session

_CATALOG = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*){2}")
_LOCAL = ("file://", "local://")
_STORE = re.compile(r"(?:s3[an]?|gs|gcs|abfss?|wasbs?|https?):/(?!/)")


def resolved_address(text: str) -> str:
    """Return the absolute address that ``text`` means in this process.

    A plain path belongs to the filesystem that Spark's session takes by default (``fs.defaultFS``), and to this machine
    where there is no session.

    It is an absolute path of this machine, or a whole URI: what the user can paste, here and into Spark, and what
    another process takes for the same place.

    Raises:
        ConfigError: it is empty, the name of a table in a catalog, or of another machine, or a scheme without a place.
    """
    if not text.strip():
        raise ConfigError(f"the storage URI {text!r} is empty: give a path such as /data/set or s3://bucket/set")
    if text.startswith("dbfs:/"):
        text = f"file:///dbfs/{text.removeprefix('dbfs:/').lstrip('/')}"
    text = re.sub(r"^(hdfs|viewfs):/(?!/)", r"\1:///", text)  # as Hadoop writes a path of its default host
    if _STORE.match(text):
        raise ConfigError(
            f"{text} has one slash behind its scheme: write {text.replace(':/', '://', 1)}, or ./{text} for a folder "
            "of this machine"
        )
    scheme, separator, host_and_path = text.partition("://")
    if text.startswith("file:") or scheme in ("file", "local"):
        return _local(_path_behind(text, host_and_path if separator else text.removeprefix("file:")))
    if separator and not host_and_path.strip("/"):
        raise ConfigError(
            f"{text} names no bucket, host or path: write the whole address, such as {scheme}://name/data"
        )
    if separator:  # hdfs:///x leaves its host to Hadoop's configuration
        hostless = scheme in ("hdfs", "viewfs") and host_and_path.startswith("/")
        has_default_host = hostless and default_filesystem().startswith(f"{scheme}://")
        return (qualified_by_session(host_and_path) if has_default_host else None) or _named_as_s3(text.rstrip("/"))
    if _CATALOG.fullmatch(text):
        raise ConfigError(
            f"{text} looks like the name of a table in a catalog, and a path is needed here: write ./{text} if it is a "
            "file or folder"
        )
    qualified = qualified_by_session(text)
    if qualified is None:
        return os.path.abspath(os.path.expanduser(text))
    if qualified.startswith("dbfs:/"):
        return f"file:///dbfs/{qualified.removeprefix('dbfs:/').lstrip('/')}"
    return _named_as_s3(qualified)


def looks_like_a_table(text: str) -> bool:
    """Whether a text is a name such as ``catalog.schema.table``, and not a path."""
    return _CATALOG.fullmatch(text) is not None


def is_local(address: str) -> bool:
    """Whether a resolved address lies on this machine."""
    return "://" not in address or address.startswith(_LOCAL)


def local_path_of(address: str) -> str:
    """The path behind a resolved address of this machine."""
    return address.removeprefix("file://")


def spark_address(address: str) -> str:
    """A resolved address as Spark takes it: Hadoop's client for S3 has the name ``s3a`` alone."""
    return re.sub(r"^s3://", "s3a://", address)


def _path_behind(text: str, rest: str) -> str:
    if text.startswith("file://") and not rest.startswith(("/", "~")):
        host, slash, path = rest.partition("/")
        if host != "localhost" or not slash:
            raise ConfigError(
                f"{text} names a file of the host {host!r}: write file:///{rest} for a path of this machine"
            )
        return f"/{path}"
    return rest


def _named_as_s3(address: str) -> str:
    """Hadoop's names of its clients for S3 stand for what everybody else calls ``s3``."""
    return re.sub(r"^s3[an]://", "s3://", address)


def _local(path: str) -> str:
    """A path of this machine, with its scheme where a plain path would be taken for another filesystem's."""
    absolute = os.path.abspath(os.path.expanduser(path))
    return absolute if default_filesystem() == LOCAL else f"file://{absolute}"
