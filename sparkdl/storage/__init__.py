"""Files behind addresses: the only room that touches a filesystem API.

Enters: a user's text (a plain path, ``file:///data/set``, ``s3://bucket/set``, ``hdfs://host/set``), or a name that a
document holds. Leaves: a ``Storage``, the one value for an address, which reads, lists and commits whole files; a
failure is a ``StorageError`` that names the remedy. Start reading in ``files.py``.
"""

from sparkdl.storage.configuration import Configuration
from sparkdl.storage.connect import check_spark_reaches, delta_s3_options, options_for, options_of_delta
from sparkdl.storage.failures import one_line, outage_error, storage_errors, store_error, store_refuses
from sparkdl.storage.files import TEMPORARY, LocalStorage, RemoteStorage, Storage
from sparkdl.storage.hashes import sha256_hex, xxh3_hex
from sparkdl.storage.places import check_places
from sparkdl.storage.remote import RangeReader
from sparkdl.storage.sizes import Entry, size_text

__all__ = [
    "TEMPORARY",
    "Configuration",
    "Entry",
    "LocalStorage",
    "RangeReader",
    "RemoteStorage",
    "Storage",
    "check_places",
    "check_spark_reaches",
    "delta_s3_options",
    "options_for",
    "one_line",
    "options_of_delta",
    "sha256_hex",
    "size_text",
    "outage_error",
    "storage_errors",
    "store_error",
    "store_refuses",
    "xxh3_hex",
]
