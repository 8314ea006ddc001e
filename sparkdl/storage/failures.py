"""What a filesystem raises, as one sentence with a remedy.

Enters: a block that touches files. Leaves: a ``StorageError`` instead of whatever was raised in it. Of S3, fsspec's
client, delta-rs and Spark's each have words of their own for the same few refusals, which become one sentence here.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.errors import SparkdlError, StorageError
from sparkdl.storage.session import connected

__all__ = ["http_status", "lacks_bucket", "one_line", "storage_errors", "store_refuses"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_BUCKET = r"NoSuchBucket|UnknownStoreException|bucket does not exist"
_SAID_WHERE = "fs.s3a.* of the session, fsspec's configuration or AWS_* variables"
_REFUSALS = (  # what clients of S3 say, the same for each row, and what it means
    (
        _NO_BUCKET,
        "there is no such bucket",
        "create it, or check its name and the endpoint",
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|ExpiredToken|Access Key Id you provided|"
        r"signature we calculated|token is (?:malformed|expired)",
        "the store does not take these credentials",
        f"check key, secret and token in {_SAID_WHERE}",
    ),
    (
        r"Unable to locate credentials|NoAuthWithAWS|NoAwsCredentials|[Nn]o AWS [Cc]redentials|IMDS|169\.254\.169\.254|"
        r"Unable to load credentials",
        "there are no credentials for it",
        f"give some in {_SAID_WHERE}",
    ),
    (
        r"Could not connect to the endpoint|tcp connect error|dns error|ConnectException|UnknownHostException|"
        r"ConnectTimeout|Connect to .* failed",
        "nobody answers there",
        "check the endpoint and the network",
    ),
    (
        r"Status Code: 403|\(403\)|403 Forbidden|AccessDenied|lacked the necessary privileges",
        "access is denied",
        f"check the credentials in {_SAID_WHERE}, and grant them the right",
    ),
)


@contextmanager
def storage_errors(uri: str, action: str) -> Iterator[None]:
    """Turn whatever a filesystem raises inside the block into ``StorageError("cannot <action> <uri>: ...")``."""
    try:
        yield
    except SparkdlError:
        raise
    except Exception as cause:
        raise StorageError(f"cannot {action} {uri}: {store_refuses(cause, uri) or _explain(cause)}") from cause


def lacks_bucket(cause: FileNotFoundError) -> bool:
    """Whether a file is absent because the bucket is that it would lie in."""
    return re.search(_NO_BUCKET, _said_by(cause)) is not None


def store_refuses(cause: BaseException, uri: str) -> str:
    """What S3 refuses, with what to do, whichever client reports it; empty where it is something else.

    Args:
        cause: what fsspec's client, delta-rs or Spark raised.
        uri: what was to be reached.
    """
    text = _said_by(cause) if uri.startswith(("s3://", "s3a://")) else ""
    for words, meaning, remedy in _REFUSALS:
        if found := re.search(words, text):
            hidden = "; of Spark Connect's server only what spark.conf shows is known here" if connected() else ""
            return f"{meaning} ({found[0].strip('()')}): {remedy}{hidden}"
    return ""


def _said_by(cause: BaseException) -> str:
    return f"{cause.__cause__ or ''} {cause}"  # s3fs puts what the store said, with its code, below Python's error


def _explain(cause: Exception) -> str:
    said = one_line(cause)
    code = getattr(cause, "errno", None)
    if code in _FULL:
        return f"the device or quota is full ({said}): free space there or choose another target"
    if isinstance(cause, PermissionError) or code in _DENIED:
        return f"access is denied ({said}): grant this user the right or choose another place"
    if isinstance(cause, FileNotFoundError):
        return "it does not exist: check the path, or write it first"
    if isinstance(cause, NotADirectoryError | FileExistsError):
        return f"a file stands where a directory is needed ({said}): choose another path"
    return f"{type(cause).__name__}: {said}: check the address, the network and the credentials"


def one_line(cause: BaseException) -> str:
    """What an error says, without the Java frames that a server sends along; those stay in ``__cause__``."""
    text = re.split(r"(?:\s|\\n|\\t)+at [\w$./]+\(", str(cause), maxsplit=1)[0]
    return " ".join(re.sub(r"\x1b\[\d*m|↳", "", text).split())  # delta-rs draws its chain of causes as a tree


def http_status(cause: BaseException | None) -> int | None:
    """The status of the object store's answer behind an exception (412: the condition of a write does not hold)."""
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        cause = cause.__cause__
    return None
