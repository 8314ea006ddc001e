"""Error mapping: the ``SparkdlError`` of a Spark task or a rank, raised on the driver as that type."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sparkdl import errors

OTHER_PYTHON = "the workers run another Python version than the driver: set PYSPARK_PYTHON to the same version on both"

_F = TypeVar("_F", bound=Callable[..., Any])

_RAISED = re.compile(
    r"^sparkdl\.errors\.(\w+): (.+?)(?=\n\s*\n|\n\s+at |\nTraceback|\n\s*SQLSTATE: |\Z)", re.MULTILINE | re.DOTALL
)
_FOREIGN = re.compile(
    r"(?:java\.lang\.)?(?:IncompatibleClassChange|NoSuch(?:Method|Field)|AbstractMethod|NoClassDefFound|Verify|"
    r"UnsupportedClassVersion|ExceptionInInitializer)Error\b[^\n]*|(?:java\.lang\.)?ClassNotFoundException: \S+|"
    r"Cannot find catalog plugin class for catalog [^\n]*?(?=\.?(?:\n|$))"
)
_NO_PYTHON = re.compile(r'Cannot run program "([^"\n]+)": (?:error=\d+, )?([^\n]+)\n[^\0]{0,600}?PythonWorkerFactory')
_DYING_SECONDS = 2.0
"""In which a Java that answers no more has ended: its sockets are closed a little before."""
_CHAINED = re.compile(
    r"^(?:The above exception was the direct cause of|During handling of the above exception, another)", re.MULTILINE
)


@contextmanager
def unlogged_queries() -> Iterator[None]:
    """Keep pyspark from writing what is wrong with a query to standard error, as JSON, beside the error it raises.

    For a block whose errors become sentences of ours. Of pyspark 4.1 and later; it can go when pyspark only raises.
    """
    logger_class = sys.modules["pyspark.logger"].PySparkLogger  # as pyspark.errors has loaded it
    loggers = [logger_class.getLogger(f"{kind}QueryContextLogger") for kind in ("SQL", "DataFrame")]
    were_disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, were_disabled, strict=True):
            logger.disabled = disabled


def unlogged_tasks(session: Any) -> None:
    """Keep Java from writing each task that fails to standard error, with its trace, beside the error that is raised.

    For a session of ours; ``java_trace`` gives the trace.
    """
    log4j = session._jvm.org.apache.logging.log4j
    for name in ("executor.Executor", "scheduler.TaskSetManager"):
        log4j.core.config.Configurator.setLevel(f"org.apache.spark.{name}", log4j.Level.OFF)


def task_error(raised: BaseException) -> errors.SparkdlError | None:
    """The error of ours that a task or a rank raised; None if ``raised`` has another reason."""
    if isinstance(raised, errors.RankFailedError):
        original = raised.__cause__
        if isinstance(original, errors.SparkdlError):
            raised.__cause__ = (
                original.__cause__
            )  # the rank's traceback; the original will have ``raised`` as its cause
            return original
        return None if type(original).__module__ != errors.__name__ else _in_text(raised.rank_traceback)
    if isinstance(raised, errors.SparkdlError):
        return raised
    text = str(raised) if type(raised).__module__.startswith(("pyspark.", "py4j.")) else ""
    if "PYTHON_VERSION_MISMATCH" in text:
        return errors.PreflightError(OTHER_PYTHON)
    if "Error from python worker" in text or _NO_PYTHON.search(text):  # which did not come so far as to run a task
        return worker_python_error(raised)
    error = _in_text(text)
    return None if isinstance(error, errors.ClusterError) else error  # a launch reads those itself, and more in them


def _in_text(text: str) -> errors.SparkdlError | None:
    """The error that a traceback ends with, if it is ours."""
    for name, message in reversed(_RAISED.findall(_CHAINED.split(text)[-1])):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.SparkdlError) and kind is not errors.RankFailedError:
            return kind(message.strip())
    return None


def worker_python_error(raised: BaseException) -> errors.ClusterError | None:
    """The error for workers whose Python is not there, or has not what their tasks, or their daemon, import.

    Args:
        raised: of a Spark job that runs nothing of the user's; a function of his may fail at any import.
    """
    no_python = _NO_PYTHON.search(str(raised))
    if no_python is not None:
        return errors.ClusterError(
            f"the workers cannot run {no_python[1]} ({no_python[2]}): set PYSPARK_PYTHON to a Python that they have"
        )
    lacking = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", str(raised))
    if lacking is None:
        return None
    return errors.ClusterError(
        f"the workers' Python has no module {lacking[1]!r}: install it there, or set PYSPARK_PYTHON to an environment "
        "that has it"
    )


@contextmanager
def task_errors() -> Iterator[None]:
    """Raise what a task or a rank raised, instead of what wraps it, which stays attached as the cause.

    An action that is ours stands in this block. The typed error has one sentence, with what came in as its
    ``__cause__``. Everything else passes as it is: a user's own exception stays a ``RankFailedError``.
    """
    try:
        yield
    except Exception as raised:
        error = task_error(raised)
        if error is None or error is raised:
            raise
        raise error from raised.with_traceback(None)  # our own frames, or Spark's copy of what its text says anyway


def told_by_java(raised: BaseException) -> str:
    """All that Java told of an error of Spark's, with what caused it; empty of any other error.

    Of a database that cannot be reached Spark's own sentence says no more than that; the reason is a cause.
    """
    if not type(raised).__module__.startswith(("pyspark.", "py4j.")):
        return ""
    return f"{raised}\n{java_trace(raised)}"


def java_trace(raised: BaseException) -> str:
    """Java's trace of an error of Spark's, as far as its own text lacks it; empty of any other error.

    It is a private attribute of pyspark 4.2; without it that text is all there is.
    """
    return str(getattr(raised, "_stackTrace", None) or "")


def foreign_jar(text: str) -> str:
    """What of Java's words tells that a JAR is missing, or was built for another Spark; empty where nothing does."""
    match = _FOREIGN.search(text)
    return " ".join(match[0].split()).removeprefix("java.lang.") if match else ""


def jar_error(raised: BaseException) -> errors.ConfigError | None:
    """The error for a session whose JARs do not fit its Spark; None if ``raised`` has another reason."""
    foreign = foreign_jar(told_by_java(raised))
    if not foreign:
        return None
    return errors.ConfigError(
        f"a JAR of this session is missing, or was built for another Spark than {sys.modules['pyspark'].__version__} "
        f"({foreign}): look at spark.jars, spark.jars.packages and what spark.sql.extensions and catalogs name"
    )


def java_error(raised: BaseException) -> errors.ClusterError | None:
    """The error for a Spark whose Java has ended under this process; None where it runs, or if ``raised`` says why.

    py4j then raises what its socket does, a refused connection most often, which names neither Java nor Spark. Under
    spark-submit this process ends with Java, and Spark Connect has none here. It can go once pyspark says it.
    """
    context: Any = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    java: subprocess.Popen[bytes] | None = getattr(getattr(context, "_gateway", None), "proc", None)
    if java is None or not isinstance(raised, Exception) or isinstance(raised, errors.SparkdlError):
        return None
    cut_off = isinstance(raised, ConnectionError) or type(raised).__module__.startswith("py4j.")
    try:
        code = java.wait(_DYING_SECONDS if cut_off else 0.0)
    except subprocess.TimeoutExpired:
        return None
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return errors.ClusterError(
        f"Spark's Java process on this machine has ended, {how}: it crashed, was killed, or ran out of memory; look "
        "at what the system says of it, free memory or lower spark.driver.memory if that is the reason, and run again"
    )


def map_task_errors_of_actions() -> None:
    """Let every later action of this process raise what a task of ours raised; idempotent.

    A prediction is computed later, by an action of the user's (``model.transform(df).collect()``), which only a change
    in pyspark reaches: this wraps the two functions where pyspark turns what the JVM or a Connect server reports into
    exceptions, and passes on whatever is not ours. Of pyspark 4.2 and 4.3; it can go when Spark lets Python exceptions
    name their class. Without it the same sentence arrives at the end of a ``PythonException``.
    """
    captured: Any = sys.modules.get("pyspark.errors.exceptions.captured")
    gateway: Any = sys.modules.get("py4j.java_gateway")
    if captured is not None and gateway is not None and not hasattr(captured.capture_sql_exception, "__wrapped__"):
        original = captured.capture_sql_exception
        # Each new session asks for it again, to wrap py4j's function anew.
        captured.capture_sql_exception = functools.wraps(original)(lambda function: _mapped(original(function)))
        gateway.get_return_value = _mapped(gateway.get_return_value)
    connect: Any = sys.modules.get("pyspark.sql.connect.client.core")
    if connect is not None and not hasattr(connect.SparkConnectClient._handle_error, "__wrapped__"):
        connect.SparkConnectClient._handle_error = _mapped(connect.SparkConnectClient._handle_error)


def _mapped(function: _F) -> _F:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with task_errors():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]
