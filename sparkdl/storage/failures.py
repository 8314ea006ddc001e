"""One sentence with a remedy for whatever a filesystem raises."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.compat.spark_errors import told_by_java
from sparkdl.errors import SparkdlError, StorageError, StoreUnavailableError
from sparkdl.storage.session import connected

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
        r"Status Code: 403|\(403\)|403 Forbidden|AccessDenied|lacked the necessary privileges",
        "access is denied",
        f"check the credentials in {_SAID_WHERE}, and grant them the right",
    ),
)
_OUTAGES = (  # what clients of S3, HDFS and the like say once they have tried for as long as they do
    (
        r"Could not connect to the endpoint|tcp connect error|dns error|ConnectException|UnknownHostException|"
        r"NoRouteToHostException|ConnectTimeout|Connect to .* failed|Connection refused|failed on connection exception",
        "nobody answers there",
        "check the endpoint and the network",
    ),
    (
        r"SlowDown|Slow Down|[Tt]hrottl\w+|TooManyRequests|ServiceUnavailable|Service Unavailable|"
        r"[(>]InternalError[)<]|RequestTimeout|(?i:status code:? ?)(?:429|50[0234])|\((?:429|50[0234])\)|"
        r"AWSStatus500Exception|StandbyException|SafeModeException|in safe mode|RetriableException|"
        r"BlockMissingException|could only be written to 0 of",
        "the store cannot serve this now",
        "wait until it can, and try again",
    ),
    (
        r"SocketTimeout\w*|ApiCall(?:Attempt)?Timeout\w*|[Rr]ead timeout|ReadTimeout|[Oo]peration timed out|"
        r"Connection timed out|[Ss]ocket timeout|Connection reset|[Cc]onnection (?:was )?closed before|"
        r"ServerDisconnected|Server disconnected|error sending request|ConnectionClosed|Broken pipe",
        "the connection to the store was lost",
        "try again, and check the network if it is lost once more",
    ),
)
_NO_ANSWER = {429, 500, 502, 503, 504}
_OF_A_STORE = re.compile(
    r"org\.apache\.hadoop\.(?:fs|hdfs|ipc|net)\.|software\.amazon\.awssdk\.|com\.google\.cloud\.hadoop\."
)
_ADDRESS = re.compile(r"\b(?:s3[an]?|hdfs|abfss?|gs|https?)://[\w.:/%=+@-]+")
_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "fsspec", "s3fs", "gcsfs", "adlfs", "azure", "google")


@contextmanager
def storage_errors(uri: str, action: str) -> Iterator[None]:
    """Turn whatever a filesystem raises inside the block into ``StorageError("cannot <action> <uri>: ...")``."""
    try:
        yield
    except SparkdlError:
        raise
    except Exception as cause:
        raise store_error(cause, f"cannot {action} {uri}: {store_refuses(cause, uri) or _explain(cause)}") from cause


def store_error(cause: BaseException, message: str) -> StorageError:
    """The error for what a client of a store raised: a ``StoreUnavailableError`` where the store does not answer.

    Of S3, fsspec's client, delta-rs and Spark's each have words of their own for the same few refusals, which become
    one sentence here. A store that does not answer, as in an outage, is told from one that refuses.
    """
    return (StoreUnavailableError if _outage(cause) else StorageError)(message)


def outage_error(raised: BaseException) -> StoreUnavailableError | None:
    """The error of ours for a store that Spark or a client of it did not reach; None if ``raised`` is another's.

    Args:
        raised: what came up outside of ``storage_errors``, such as from Spark's own reading.
    """
    if isinstance(raised, SparkdlError):
        return None
    java, client = told_by_java(raised), type(raised).__module__.partition(".")[0]
    outage = _outage(raised) if _OF_A_STORE.search(java) or client in _CLIENTS else ""
    address = _ADDRESS.search(java or str(raised))
    store = address[0] if address else "a store that this needs"
    return StoreUnavailableError(f"{store} cannot be reached: {outage}") if outage else None


def _outage(cause: BaseException) -> str:
    """What an error says of a store that does not answer, with what to do; empty where it refuses, or answers."""
    if isinstance(cause, FileNotFoundError | PermissionError | NotADirectoryError | FileExistsError):
        return ""
    text = _said_by(cause)
    if any(re.search(words, text) for words, *_ in _REFUSALS):
        return ""
    if getattr(cause, "errno", None) in _FULL | _DENIED:
        return ""
    nameless = re.sub(r"'[^'\n]*/[^'\n]*'", "", _ADDRESS.sub("", text))  # a folder may be called SlowDown
    for words, meaning, remedy in _OUTAGES:
        if match := re.search(words, nameless):
            return f"{meaning} ({match[0].strip('()')}): {remedy}"
    if http_status(cause) in _NO_ANSWER or isinstance(cause, TimeoutError | ConnectionError):
        return f"{_OUTAGES[1][1]} ({one_line(cause) or type(cause).__name__}): {_OUTAGES[1][2]}"
    return ""


def lacks_bucket(cause: FileNotFoundError) -> bool:
    """Whether a file is absent because the bucket is that it would lie in."""
    return re.search(_NO_BUCKET, _said_by(cause)) is not None


def store_refuses(cause: BaseException, uri: str) -> str:
    """What a store refuses, or that it does not answer, with what to do; empty where it is something else.

    Args:
        cause: what fsspec's client, delta-rs or Spark raised.
        uri: what was to be reached.
    """
    text = _said_by(cause) if uri.startswith(("s3://", "s3a://")) else ""
    for words, meaning, remedy in _REFUSALS:
        if match := re.search(words, text):
            hidden = "; of Spark Connect's server only what spark.conf shows is known here" if connected() else ""
            return f"{meaning} ({match[0].strip('()')}): {remedy}{hidden}"
    return _outage(cause)


def _said_by(cause: BaseException) -> str:
    # s3fs puts what the store said, with its code, below Python's error
    text = f"{cause.__cause__ or ''} {type(cause).__name__} {told_by_java(cause) or cause}"
    return re.sub(r"\n\s+at [^\n]+", "", text)  # what Java's frames are called says nothing of this failure


def _explain(cause: Exception) -> str:
    cause_line = one_line(cause)
    code = getattr(cause, "errno", None)
    if code in _FULL:
        return f"the device or quota is full ({cause_line}): free space there or choose another target"
    if isinstance(cause, PermissionError) or code in _DENIED:
        return f"access is denied ({cause_line}): grant this user the right or choose another place"
    if isinstance(cause, FileNotFoundError):
        return "it does not exist: check the path, or write it first"
    if isinstance(cause, IsADirectoryError):
        return f"a file is needed there ({cause_line}): name one in it, or choose another path"
    if isinstance(cause, NotADirectoryError | FileExistsError):
        return f"a file stands where a directory is needed ({cause_line}): choose another path"
    return f"{type(cause).__name__}: {cause_line}: check the address, the network and the credentials"


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
