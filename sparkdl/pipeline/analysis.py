"""What Spark's analyser says of the SQL of a pipeline file, over columns without a row.

The active session is asked; without one, a Spark that starts on this machine for the purpose, as a process of its own,
so that the session of a later run has the settings of its file; without Java, the text alone is looked at.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.compat.java_classes import java_options
from sparkdl.errors import ConfigError
from sparkdl.pipeline.file.conditions import sql_problem
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.tables.engine import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SECONDS = 180
"""Until a Spark that does not come up is given up."""
_ELSEWHERE = ("TABLE_OR_VIEW_NOT_FOUND", "UNRESOLVED_ROUTINE", "SCHEMA_NOT_FOUND")
"""What a session of the user's may have, and a bare one has not."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What was found.

    Attributes:
        problems: a path of the file and a sentence each.
        transformed: type of each column that the transform leaves, None where it cannot be told; None without one, or
            where nobody was asked.
        unknown: what could not be told, in words; empty where all could.
    """

    problems: tuple[tuple[tuple[str, ...], str], ...] = ()
    transformed: Mapping[str, pa.DataType | None] | None = None
    unknown: str = ""


def analysed(spec: PipelineSpec, columns: Mapping[str, pa.DataType | None]) -> Analysis:
    """Analyse the transform, and with it the expectations.

    Args:
        spec: what the file says.
        columns: type of each column of the source; None where it cannot be told.
    """
    sql = None if spec.transform is None else spec.transform.sql
    session = spark_session()
    if sql is not None and (plain := sql_problem(sql)):
        return Analysis(problems=((("transform", "sql"), plain),))
    if (sql is None and session is None) or (spec.transform is not None and sql is None):
        return Analysis()
    question = {
        "sql": sql,
        "expect": {name: expectation.check for name, expectation in spec.expect.items()},
        "schema": pa.schema([(name, kind or pa.string()) for name, kind in columns.items()]).serialize().hex().decode(),
        "sure": None not in columns.values(),
    }
    if session is not None:
        answer = _asked_of(session, question, bare=False)
    elif (shutil.which("java") or "JAVA_HOME" in os.environ) and importlib.util.find_spec("pyspark"):
        answer = _asked_of_a_process(question)
    else:
        return Analysis(unknown="transform.sql was read and not analysed: Spark needs Java, which is not here")
    encoded_schema = answer.get("transformed")
    schema = None if encoded_schema is None else pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(encoded_schema)))
    types = None if schema is None else {field.name: field.type if question["sure"] else None for field in schema}
    return Analysis(
        problems=tuple((tuple(path), sentence) for path, sentence in answer.get("problems", ())),
        transformed=types,
        unknown=answer.get("unknown", ""),
    )


def _asked_of_a_process(asked: dict[str, Any]) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_REMOTE"}
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "sparkdl.pipeline.analysis"]
    try:
        process = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=_SECONDS,
            env=environment,
        )  # fmt: skip
        return dict(json.loads(process.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, ValueError, IndexError):
        return {"unknown": "transform.sql was read and not analysed: no Spark could be started here"}


def _asked_of(spark: SparkSession, asked: dict[str, Any], *, bare: bool) -> dict[str, Any]:
    from pyspark.errors import AnalysisException, PySparkTypeError
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StringType, StructField, StructType

    from sparkdl.pipeline.rows.expect import condition_of
    from sparkdl.pipeline.rows.transform import arrow_types, select_from_source, sql_refused
    from sparkdl.pipeline.windows import WINDOW

    fields, sure = [StructField(WINDOW, StringType())], bool(asked["sure"])
    for field in pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(asked["schema"]))):
        try:
            fields.append(StructField(field.name, from_arrow_type(field.type)))
        except PySparkTypeError:
            fields.append(StructField(field.name, StringType()))
            sure = False
    frame = spark.createDataFrame([], StructType(fields))
    problems, transformed = [], None
    if asked["sql"] is not None:
        try:
            frame = select_from_source(spark, asked["sql"], frame)
        except AnalysisException as error:
            condition = (error.getCondition() or "").partition(".")[0]
            if (bare and condition in _ELSEWHERE) or (not sure and condition == "DATATYPE_MISMATCH"):
                return {"unknown": f"transform.sql was not analysed to its end: {sql_refused(error)}"}
            return {"problems": [[["transform", "sql"], f": {sql_refused(error)}"]]}
        transformed = pa.schema(arrow_types(frame)).serialize().hex().decode()
    for name, check in asked["expect"].items() if sure else ():
        try:
            condition_of(frame, name, check)
        except ConfigError as refused:
            if not (bare and any(word in str(refused) for word in _ELSEWHERE)):
                problems.append([["expect", name], str(refused).removeprefix(f"expect.{name}")])
    return {"problems": problems, "transformed": transformed}


def _main() -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").appName("sparkdl-check").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.defaultJavaOptions", f"-XX:TieredStopAtLevel=1 {java_options()}")
    session = builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    try:
        answer = _asked_of(session, json.load(sys.stdin), bare=True)
    finally:
        session.stop()
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
