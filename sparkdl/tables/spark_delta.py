"""The engine of a session with Delta's extension: Spark reads and writes tables by name or by address."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake.exceptions import CommitFailedError

from sparkdl.columns.names import quoted
from sparkdl.compat.spark_errors import foreign_jar, task_errors, told_by_java
from sparkdl.errors import ConfigError, ConflictError, DataError, SchemaError, SparkdlError, StorageError, first_line
from sparkdl.storage import check_spark_reaches, store_error, store_refuses
from sparkdl.tables.delta import check_same_schema, open_table, optimistic, schema_of_rows
from sparkdl.tables.engine import AppTransaction, WriteRequest, WriteResult
from sparkdl.tables.record import check_inside, partition_predicate, path_in_log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, DataFrameWriter, SparkSession

_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]+)(?:\.[A-Z0-9_]+)?\]")
_NO_LOG = re.compile(r"java\.io\.FileNotFoundException: .*_delta_log/?(\s|$)")
"""What is said of a version of a table that is not there; where a file of the log is lost, the path goes on."""
_MISSING = {
    *("TABLE_OR_VIEW_NOT_FOUND", "DELTA_TABLE_NOT_FOUND", "DELTA_MISSING_DELTA_TABLE", "DELTA_TABLE_ONLY_OPERATION"),
    *("DELTA_PATH_DOES_NOT_EXIST", "PATH_NOT_FOUND", "SCHEMA_NOT_FOUND", "REQUIRES_SINGLE_PART_NAMESPACE"),
}
_CREATED = {"TABLE_OR_VIEW_ALREADY_EXISTS", "DELTA_PATH_EXISTS", "DELTA_TABLE_ALREADY_EXISTS"}
_DATA = (
    "DELTA_VIOLATE_CONSTRAINT",
    "DELTA_NOT_NULL_CONSTRAINT",
    "DELTA_REPLACE_WHERE_MISMATCH",
    "DELTA_MULTIPLE_SOURCE",
)
_SCHEMA = ("DELTA_METADATA_MISMATCH", "DELTA_FAILED_TO_MERGE_FIELDS", "DELTA_UNSUPPORTED_DATA_TYPE")
_FILLED = {"generatedColumns", "identityColumns", "allowColumnDefaults"}
"""Features of tables that fill columns which the rows lack."""


@dataclass(frozen=True)
class SparkDelta:
    """One table of a session.

    What Spark reports of Delta is raised as our own error, in one sentence. What Delta lets through silently (columns
    that are missing, types that it casts) is refused as by the other engine.

    Attributes:
        spark: the session.
        uri: name or address, for messages.
        address: as Spark takes it; empty for a name.
        allow_folders: addresses of further folders that files of the table may lie in.
    """

    spark: SparkSession = field(repr=False)
    uri: str
    address: str = ""
    allow_folders: Sequence[str] = ()

    def exists(self) -> bool:
        """Whether a table is there."""
        if not self.address:
            with self._errors("read"):
                return bool(self.spark.catalog.tableExists(self._name))
        try:
            self._last()
        except _MissingTableError:
            return False
        return True

    def version(self) -> int:
        """The newest version."""
        return int(self._last()["version"])

    def table_id(self) -> str:
        """What tells the table from any other, also from one that is made anew at its address."""
        return str(self._detail()["id"])

    def schema_json(self, version: int | None) -> str:
        """The schema of a version as JSON."""
        with self._errors("read"):
            return str(self._load(version).schema.json())

    def check_readable(self) -> None:
        """Refuse a table that Spark does not open."""
        self.schema_json(None)

    def partition_columns(self) -> list[str]:
        """The partition columns' names in order."""
        return list(self._detail()["partitionColumns"])

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """The commits, newest first, in the words of the other engine: what the writer added beside, time in ms."""
        rows = self._described(f"HISTORY {self._name}{'' if limit is None else f' LIMIT {limit:d}'}")
        for row in rows:
            row["timestamp"] = int(row["timestamp"].timestamp() * 1000)
            row |= _added(row)
        return rows

    def transaction_version(self, application: str) -> int | None:
        """The last version that an application committed, from the table's log, which Spark's SQL does not tell."""
        if not self.exists():
            return None
        table = open_table(str(self._detail()["location"]).replace("file:/", "/", 1), None)
        return None if table is None else table.transaction_version(application)

    def read(self, spark: SparkSession, version: int | None = None) -> DataFrame:
        """The rows of a version, pinned."""
        pinned = self.version() if version is None else version
        with self._errors("read"):
            frame = self._load(pinned, spark)
            frame.schema  # noqa: B018  analyses the frame now, so that a missing version is told here
            self.check_files(frame)
            return frame

    def write(self, frame: DataFrame, request: WriteRequest) -> WriteResult:
        """One commit by Spark's Delta, tried anew where another one came first."""
        request, write_id = request.spelled(frame.schema.json()), uuid.uuid4().hex[:12]

        def attempt() -> WriteResult:
            existing = self._detail() if self.exists() else None
            layout = request.layout(self.uri, None if existing is None else existing["partitionColumns"], frame.columns)
            if existing is None:
                self._check_inside(frame, request, layout)
                self._save(frame, request, layout, {}, write_id, "errorifexists")
                return self._result(write_id, created=True)
            if not request.overwrite_schema:
                self._check_columns(frame.schema.json(), existing)
            stated_layout = layout if request.overwrite_schema else ()  # or Delta would drop it with the schema
            self._save(frame, request, stated_layout, _options(request), write_id, _mode(request))
            return self._result(write_id)

        result = optimistic(self.uri, attempt, tries=5)
        if not result.committed:
            self._check_fence(request.transaction)
        return result

    def append(
        self,
        rows: pa.Table,
        *,
        expected_version: int | None = None,
        transaction: AppTransaction | None = None,
        metadata: Mapping[str, str] | None = None,
        new_columns: bool = False,
    ) -> int:
        """Append a small table; return the version that holds it."""
        if expected_version is not None:
            raise ConfigError(
                f"expected_version is given for {self.uri}, and Spark's Delta writes it, which appends to whatever "
                "version is the newest: give the table's address and engine='delta-rs'"
            )
        schema_of_rows(rows)  # which refuses what Delta cannot hold
        frame = self.spark.createDataFrame(rows)
        request = WriteRequest(mode="append", transaction=transaction, metadata=metadata or {})
        write_id = uuid.uuid4().hex[:12]
        options = {"mergeSchema": "true"} if new_columns else {}
        created = not self.exists()
        if not new_columns and not created:
            self._check_columns(frame.schema.json(), self._detail())
        optimistic(self.uri, lambda: self._save(frame, request, (), options, write_id, "append"), tries=5)
        result = self._result(write_id, created=created)
        if not result.committed:
            self._check_fence(transaction)
        return result.version

    def claim(self, transaction: AppTransaction) -> None:
        """Commit a transaction without rows, if there is a table."""
        if not self.exists():
            return
        request, write_id = WriteRequest(mode="append", transaction=transaction), uuid.uuid4().hex[:12]

        def attempt() -> None:
            self._save(self._load(None).limit(0), request, (), {}, write_id, "append")

        optimistic(self.uri, attempt, tries=5)
        if not self._result(write_id).committed:
            self._check_fence(transaction)

    def merge(self, rows: pa.Table, on: Sequence[str], transaction: AppTransaction | None = None) -> int:
        """Update the rows that agree in the columns ``on`` and insert the others; return the version."""
        if transaction is not None:
            raise ConfigError(
                f"a transaction is given for the merge into {self.uri}, and Spark's Delta writes it, whose merges "
                "carry none: give the table's address and engine='delta-rs'"
            )
        schema_of_rows(rows)
        match = " AND ".join(f"old.{quoted(name)} = new.{quoted(name)}" for name in on)
        statement = (
            f"MERGE INTO {self._name} AS old USING {{rows}} AS new ON {match} "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )

        def attempt() -> int:
            self._check_columns(self.spark.createDataFrame(rows).schema.json(), self._detail())
            with self._errors("write"):
                self.check_files(self._load(None))
                self.spark.sql(statement, rows=self.spark.createDataFrame(rows)).collect()
            return self.version()

        return optimistic(self.uri, attempt, tries=5)

    def rows(
        self, columns: Sequence[str] | None = None, where: str | None = None, version: int | None = None
    ) -> pa.Table:
        """A small table, or a small part of one."""
        from pyspark.errors import AnalysisException

        with self._errors("read"):
            frame = self._load(version)
            self.check_files(frame)
            try:
                frame = frame.where(where) if where else frame
                return frame.select(*(quoted(name) for name in columns or frame.columns)).toArrow()
            except AnalysisException as refused:
                raise StorageError(
                    f"cannot read from the Delta table {self.uri}: {first_line(refused)}; check columns and predicate"
                ) from refused

    @property
    def _name(self) -> str:
        if self.address:
            return f"delta.{quoted(self.address)}"
        return ".".join(quoted(part) for part in self.uri.split("."))

    def _load(self, version: int | None, spark: SparkSession | None = None) -> DataFrame:
        reader: DataFrameReader = (spark or self.spark).read
        if version is not None:
            reader = reader.option("versionAsOf", version)
        return reader.format("delta").load(self.address) if self.address else reader.table(self._name)

    def check_files(self, frame: DataFrame) -> None:
        """Refuse rows of the table that come from files outside of its folder: Spark reads whatever the log names.

        Raises:
            IntegrityError: names the file.
        """
        folder = self.address
        if not folder:
            try:
                folder = str(self._detail()["location"])
            except StorageError:  # a view of the catalog, which has no folder
                return
        check_inside(path_in_log(folder), frame.inputFiles(), self.allow_folders)

    def _last(self) -> dict[str, Any]:
        return self.history(1)[0]

    def _detail(self) -> dict[str, Any]:
        return self._described(f"DETAIL {self._name}")[0]

    def _described(self, what: str) -> list[dict[str, Any]]:
        """The rows of a statement that Delta's own parser knows, and Spark's does not."""
        from pyspark.errors import ParseException

        with self._errors("read"):
            try:
                return [row.asDict(recursive=True) for row in self.spark.sql(f"DESCRIBE {what}").collect()]
            except ParseException as error:
                raise self._no_jar("read", "its parser is not there") from error

    def _check_columns(self, data: str, detail: Mapping[str, Any]) -> None:
        fills = bool(_FILLED & set(detail["tableFeatures"] or ()))
        have = {field["name"] for field in json.loads(data)["fields"]}
        table = json.loads(self.schema_json(None))
        if fills:
            table["fields"] = [field for field in table["fields"] if field["name"] in have]
        check_same_schema(self.uri, json.dumps(table), data)

    def _check_inside(self, frame: DataFrame, request: WriteRequest, layout: Sequence[str]) -> None:
        """Refuse rows outside of the partitions to replace, as Delta does where there is a table."""
        from pyspark.sql import functions as F

        if request.partitions is None:
            return
        inside = F.coalesce(F.expr(partition_predicate(request.partitions)), F.lit(False))
        with task_errors(), self._errors("write"):
            outside = frame.where(~inside).select(*(quoted(name) for name in layout)).head(1)
        if outside:
            partitions = [dict(partition) for partition in request.partitions]
            raise DataError(
                f"rows lie in the partition {outside[0].asDict()}, only {partitions} are to be replaced: "
                "filter the rows, or name that partition too"
            )

    def _save(
        self,
        frame: DataFrame,
        request: WriteRequest,
        layout: Sequence[str],
        options: Mapping[str, str],
        write_id: str,
        mode: str,
    ) -> None:
        facts = {**request.metadata, "sparkdl.write": write_id, "sparkdl.mode": request.mode}
        writer: DataFrameWriter = frame.write.format("delta").mode(mode).options(**options)
        writer = writer.option("userMetadata", json.dumps(facts)).option("compression", request.compression)
        if request.transaction is not None:
            writer = writer.option("txnAppId", request.transaction.application)
            writer = writer.option("txnVersion", request.transaction.version)
        if layout:
            writer = writer.partitionBy(*layout)
        with task_errors(), self._errors("write"):
            if self.address:
                writer.save(self.address)
            else:
                writer.saveAsTable(self._name)

    def _result(self, write_id: str, *, created: bool = False) -> WriteResult:
        """What the history says of a write; nothing, where its transaction had committed before."""
        history = self.history(50)
        commit = next((row for row in history if row.get("sparkdl.write") == write_id), None)
        if commit is None and created:
            commit = history[-1]  # a catalog's creation of a table keeps no metadata of the writer's
        if commit is None:
            return WriteResult(version=history[0]["version"], rows=0, files=0, bytes=0, partitions=(), committed=False)
        numbers = commit.get("operationMetrics") or {}
        rows, files, size = (int(numbers.get(f"num{counter}", 0)) for counter in ("OutputRows", "Files", "OutputBytes"))
        return WriteResult(version=commit["version"], rows=rows, files=files, bytes=size, partitions=(), committed=True)

    def _check_fence(self, transaction: AppTransaction | None) -> None:
        """Refuse a write that Delta has passed over, since a later one of the application has committed.

        Raises:
            FencedError: it is fenced.
        """
        if transaction is None or not transaction.fenced:
            return
        if not transaction.committed(self.uri, self.transaction_version(transaction.application)):
            raise ConflictError(f"Spark's Delta has committed nothing to {self.uri}, and does not say why: run again")

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        check_spark_reaches(self.address)
        try:
            yield
        except SparkdlError:
            raise
        except Exception as error:
            raise self._ours(error, action) or error from error

    def _ours(self, error: Exception, action: str) -> Exception | None:
        """What Spark says of Delta as an error of ours; None for what a task of the user raised."""
        text = told_by_java(error) or str(error)
        match = _CONDITION.search(text)
        condition = match[1] if match else ""
        first = text[match.start() :].partition("\n")[0] if match else text.partition("\n")[0]
        if "CONCURRENT" in condition or condition in _CREATED or "delta.exceptions.Concurrent" in text:
            return CommitFailedError(first)
        if condition in _MISSING or _NO_LOG.search(text):
            return _MissingTableError(
                f"there is no Delta table {self.uri} that Spark can reach: check the name, or write the table first"
            )
        if condition == "DELTA_VERSION_NOT_FOUND":
            return StorageError(f"the Delta table {self.uri} has no such version: {first}")
        foreign = foreign_jar(text)
        if foreign or condition == "DATA_SOURCE_NOT_FOUND":
            return self._no_jar(action, foreign or first)
        if condition.startswith(_DATA):
            return DataError(f"the Delta table {self.uri} refuses these rows: {first}")
        if condition.startswith(_SCHEMA):
            return SchemaError(f"the Delta table {self.uri} refuses these columns: {first}")
        refused = store_refuses(error, self.address or "s3a://") if (self.address or "s3a://") in text else ""
        if refused:  # of the table's own address: rows may come from another one
            return store_error(error, f"cannot {action} the Delta table {self.uri}: {refused}")
        if condition.startswith("DELTA_"):
            return StorageError(f"cannot {action} the Delta table {self.uri}: {first}")
        return None

    def _no_jar(self, action: str, reason: str) -> StorageError:
        return StorageError(
            f"cannot {action} the Delta table {self.uri}: the session's settings name Delta's extension, and its JAR "
            f"is missing or of another Spark ({reason}): add io.delta:delta-spark of Spark {self.spark.version}"
        )


class _MissingTableError(StorageError):
    """There is no table of that name or address."""


def _mode(request: WriteRequest) -> str:
    return "append" if request.mode == "append" else "overwrite"


def _options(request: WriteRequest) -> dict[str, str]:
    """Options that say what of an existing table is replaced, whatever the session's own settings are."""
    if request.mode == "append":
        return {}
    if request.mode == "overwrite":
        return {"partitionOverwriteMode": "static", "overwriteSchema": str(request.overwrite_schema).lower()}
    if request.partitions is None:
        return {"partitionOverwriteMode": "dynamic"}
    return {"partitionOverwriteMode": "static", "replaceWhere": partition_predicate(request.partitions)}


def _added(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a writer kept in a commit's metadata; what the log says of the commit itself is not for him to say."""
    try:
        metadata = json.loads(row.get("userMetadata") or "{}")
    except ValueError:
        return {}
    return (
        {name: fact for name, fact in metadata.items() if row.get(name) is None} if isinstance(metadata, dict) else {}
    )
