"""Opening, comparing and committing a Delta table; delta-rs's words stay in here. No Spark, no torch."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from sparkdl.config import require
from sparkdl.errors import ConflictError, SchemaError, StorageError, first_line
from sparkdl.storage import (
    RemoteStorage,
    Storage,
    delta_s3_options,
    one_line,
    options_for,
    options_of_delta,
    store_error,
    store_refuses,
)
from sparkdl.tables.engine import AppTransaction
from sparkdl.tables.features import refused_at_opening

T = TypeVar("T")

_S3 = ("s3://", "s3a://", "s3n://")
_PRIMITIVES = (
    *("string", "long", "integer", "short", "byte", "float", "double", "boolean", "binary", "date"),
    *("timestamp", "timestamp_ntz"),
)


def delta_options(uri: str, options: Mapping[str, str] | None) -> dict[str, str] | None:
    """The options delta-rs connects with: those given, and what else the storage room says of the same store.

    So one configuration serves the files and the log of a table: for S3 fsspec's, the environment's or the session's,
    in this order; for HDFS what comes with the session's Hadoop configuration.

    Raises:
        ConfigError: the session's credentials for S3 come from where only Spark can ask.
        StorageError: nobody answers at the endpoint.
    """
    if uri.startswith(_S3):
        return delta_s3_options(uri, options) or None
    if options is None and uri.startswith("hdfs://"):
        return {name: str(value) for name, value in options_for("hdfs", uri).items()} or None
    return dict(options) if options is not None else None


def storage_of(uri: str, options: Mapping[str, str] | None) -> Storage:
    """What a user's text means: the files of a table as ``Storage``, reached with the same rights as its log."""
    if options is not None and uri.startswith(_S3):
        return Storage.of(uri, options_of_delta(uri, options))
    storage = Storage.of(uri)
    if options is None or not isinstance(storage, RemoteStorage) or storage.protocol not in ("hdfs", "s3"):
        return storage
    return replace(storage, options=dict(options)) if storage.protocol == "hdfs" else storage_of(storage.uri, options)


def delta_address(uri: str) -> str:
    """The address as delta-rs takes it: of this machine, a plain path.

    Raises:
        ConfigError: delta-rs would keep the log elsewhere than the files, for it takes the address for a URL.
    """
    path = uri.removeprefix("file://")
    if "://" not in path:
        path = os.path.realpath(path)  # as delta-rs follows links before it makes a URL of it
    url_part = re.search(r"[#?%]" if "://" in path else r"%[0-9A-Fa-f]{2}|\\", path)
    require(
        url_part is None,
        f"{uri} has {url_part and url_part[0]!r}, which delta-rs takes for a part of a URL and not of the folder's "
        "name: give the table another address",
    )
    return uri.removeprefix("file://")


def open_table(uri: str, options: Mapping[str, str] | None, version: int | None = None) -> DeltaTable | None:
    """Open a table at ``version`` (None: the newest), or return None where there is none.

    Raises:
        ConfigError: delta-rs would look for the table at another address.
        StorageError: the table cannot be read, or has no such version.
    """
    table_options, address = delta_options(uri, options), delta_address(uri)
    if version is not None and version < 0:
        raise StorageError(f"version {version} of the Delta table {uri} does not exist: versions begin at 0")
    try:
        return DeltaTable(address, version=version, storage_options=table_options)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError, ValueError) as cause:
        if version is not None:
            newest = open_table(uri, options)
            if newest is not None and version > newest.version():
                raise StorageError(
                    f"version {version} of the Delta table {uri} does not exist, the newest is {newest.version()}: "
                    "ask for that one or an older one"
                ) from cause
        reason = store_refuses(cause, uri) or f"{one_line(cause)}; check the path and the rights"
        broken = f"the Delta table {uri} cannot be opened: {reason}"
        raise refused_at_opening(cause, uri) or store_error(cause, broken) from cause


def commit_properties(transaction: AppTransaction | None = None, /, **metadata: Any) -> CommitProperties:
    """Properties of a commit that succeeds on the version it was made for, or fails."""
    marks = [Transaction(transaction.application, transaction.version)] if transaction else None
    return CommitProperties(custom_metadata=metadata or None, max_commit_retries=0, app_transactions=marks)


@contextmanager
def creating(uri: str, options: Mapping[str, str] | None) -> Iterator[None]:
    """Let the creation of a table inside the block, where somebody else has created it meanwhile, be a lost race.

    Raises:
        CommitFailedError: there is a table now (delta-rs's own error, for ``optimistic``).
    """
    try:
        yield
    except DeltaError as cause:
        if open_table(uri, options) is None:
            raise
        raise CommitFailedError(f"the Delta table {uri} was created meanwhile") from cause


def optimistic(uri: str, attempt: Callable[[], T], *, tries: int = 60) -> T:
    """Call ``attempt`` until it meets no competing commit.

    Commits are optimistic with a single lock, the next version number: delta-rs is told never to rebase
    (``max_commit_retries=0``), so that a commit succeeds only on the version that was looked at. Whoever loses looks
    again, and decides again with what the winner wrote. That makes replacements of the same partition serial even where
    neither writer found a file to remove, which delta-rs's own conflict check does not see.

    Args:
        uri: the table, for the message.
        attempt: opens the table, decides, commits; called anew after each lost race.
        tries: how many lost races are enough; the wait between them grows from 2 ms to 100 ms and is random.

    Raises:
        ConflictError: every try was lost.
        StorageError: the commit failed for another reason.
    """
    lost: Exception
    for turn in range(tries):
        try:
            return attempt()
        except CommitFailedError as cause:
            lost = cause
        except (DeltaError, OSError) as cause:
            if isinstance(cause, StorageError):
                raise
            reason = store_refuses(cause, uri) or f"{one_line(cause)}; check rights and space"
            raise store_error(cause, f"cannot commit to the Delta table {uri}: {reason}") from cause
        time.sleep(random.uniform(0.5, 1.0) * min(0.1, 0.002 * 2 ** min(turn, 10)))
    raise ConflictError(
        f"{tries} commits to the Delta table {uri} lost against other writers: let fewer write at once, or try again"
    ) from lost


def delta_schema(spark_schema_json: str) -> Schema:
    """The Delta schema of a Spark schema; every column may be null, as Spark's own writers make it.

    Args:
        spark_schema_json: ``df.schema.json()``.

    Raises:
        SchemaError: a column has a type that Delta cannot hold.
    """
    fields = [
        {"name": field["name"], "type": _delta_type(field["type"], field["name"]), "nullable": True, "metadata": {}}
        for field in json.loads(spark_schema_json)["fields"]
    ]
    try:
        return Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
    except ValueError as refused:  # two names that differ in case alone
        raise SchemaError(f"the rows cannot be those of a Delta table ({refused}): rename columns") from refused


def schema_of_rows(rows: pa.Table) -> Schema:
    """The Delta schema of a small table.

    Raises:
        SchemaError: a column has a type or times that Delta cannot hold, or its name is there twice.
    """
    columns = pa.schema([field.with_type(_as_stored(field.type)) for field in rows.schema])
    try:
        if columns != rows.schema:
            rows.cast(columns)  # which refuses nanoseconds that delta-rs would cut off
        return Schema.from_arrow(columns)
    except Exception as refused:  # of no type of its own, with the frames of delta-rs behind the first line
        raise SchemaError(
            f"the rows cannot be those of a Delta table ({first_line(refused)}): rename or cast columns"
        ) from refused


def _as_stored(kind: pa.DataType) -> pa.DataType:
    """A type with its times as delta-rs writes them: in microseconds, and of a zone in UTC."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_stored(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_as_stored(kind.key_type), _as_stored(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_as_stored(kind.value_type)))
    return kind


def _delta_type(kind: Any, column: str) -> Any:
    if isinstance(kind, str):
        if kind in _PRIMITIVES or kind.startswith("decimal("):
            return kind
    elif kind["type"] == "array":
        return {**kind, "elementType": _delta_type(kind["elementType"], column), "containsNull": True}
    elif kind["type"] == "map":
        key, value = _delta_type(kind["keyType"], column), _delta_type(kind["valueType"], column)
        return {**kind, "keyType": key, "valueType": value, "valueContainsNull": True}
    elif kind["type"] == "struct":
        fields = [
            {**field, "type": _delta_type(field["type"], column), "nullable": True, "metadata": {}}
            for field in kind["fields"]
        ]
        return {"type": "struct", "fields": fields}
    name = kind if isinstance(kind, str) else kind.get("class", kind["type"])
    remedy = "use pyspark.ml.functions.vector_to_array" if "Vector" in str(name) else "cast it to a plain type"
    raise SchemaError(f"column {column!r} has the type {name}, which a Delta table cannot hold: {remedy}")


def check_same_schema(uri: str, table: str, data: str, *, shared: bool = False) -> None:
    """Refuse data whose columns are not the table's, in any order.

    Args:
        uri: the table, for the message.
        table: its schema as JSON.
        data: that of the data.
        shared: look at the columns alone that both have.

    Raises:
        SchemaError: names the first column that differs, with both types.
    """
    table_types = {field["name"]: field["type"] for field in json.loads(table)["fields"]}
    data_types = {field["name"]: field["type"] for field in json.loads(data)["fields"]}
    for name in [name for name in data_types if name in table_types] if shared else [*data_types, *table_types]:
        remedy = "change the data, or overwrite with overwrite_schema=True"
        if name not in table_types:
            raise SchemaError(f"column {name!r} ({data_types[name]}) is not in the Delta table {uri}: {remedy}")
        if name not in data_types:
            raise SchemaError(f"column {name!r} ({table_types[name]}) of the Delta table {uri} is missing: {remedy}")
        if _loose(data_types[name]) != _loose(table_types[name]):
            raise SchemaError(
                f"column {name!r} has the type {data_types[name]}, in the Delta table {uri} it is {table_types[name]}: "
                f"{remedy}"
            )


def merged_schema(uri: str, table: str, data: str, remedy: str = "change the data, or their names") -> Schema:
    """The columns of a table, and behind them those that only the data have.

    Args:
        uri: the table, for the message.
        table: its schema as JSON.
        data: that of the data.
        remedy: what can be done where one table cannot hold both.

    Raises:
        SchemaError: a column has another type in each, differs in case alone, or is missing and may not be null.
    """
    table_fields, data_fields = (json.loads(schema)["fields"] for schema in (table, data))
    table_by_name, data_by_name = ({field["name"]: field for field in fields} for fields in (table_fields, data_fields))
    alike = {name.lower(): name for name in table_by_name}
    for name, field in data_by_name.items():
        if name in table_by_name and _loose(field["type"]) != _loose(table_by_name[name]["type"]):
            raise SchemaError(
                f"column {name!r} is {_shown(field['type'])} now, and {_shown(table_by_name[name]['type'])} in the "
                f"Delta table {uri}: {remedy}"
            )
        if name not in table_by_name and name.lower() in alike:
            raise SchemaError(
                f"column {name!r} is called {alike[name.lower()]!r} in the Delta table {uri}, which knows no capitals: "
                f"{remedy}"
            )
    for name, field in table_by_name.items():
        if name not in data_by_name and not field["nullable"]:
            raise SchemaError(f"column {name!r} of the Delta table {uri} forbids nulls, and is missing: {remedy}")
    return Schema.from_json(
        json.dumps(
            {
                "type": "struct",
                "fields": [*table_fields, *(field for field in data_fields if field["name"] not in table_by_name)],
            }
        )
    )


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else json.dumps(kind)


def _loose(kind: Any) -> Any:
    """A type without what may differ between two equal ones: nullability and metadata of nested fields."""
    if not isinstance(kind, dict):
        return kind
    if kind["type"] == "struct":
        return [(field["name"], _loose(field["type"])) for field in kind["fields"]]
    return {key: _loose(value) for key, value in kind.items() if key not in ("containsNull", "valueContainsNull")}
