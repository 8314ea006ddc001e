"""What is left of a run, whatever its end: its report and its record.

Enters: the context of a run that is over. Leaves: the files, and a line in the log for each that could not be written:
nothing here changes what came of the run.
"""

from __future__ import annotations

import platform
from importlib import metadata

from sparkdl.observe import logger
from sparkdl.pipeline.state.context import Context

__all__ = ["leave"]

_LIBRARIES = ("sparkdl", "pyspark", "torch", "horovod", "pyarrow", "deltalake", "numpy")


def leave(context: Context) -> None:
    """Write the report and the record of a run.

    Args:
        context: of the run; its record is complete but for places and versions.
    """
    record, folder = context.record, context.runs.child(context.record.run_id)
    record.places["record"] = folder.child("record.json").uri
    record.versions = _versions()
    if record.outcome != "nothing new":
        try:
            from sparkdl.pipeline.report import write_report

            report = folder.child("report.html")
            record.places["report"] = report.uri
            write_report(record, report)
        except Exception as error:  # whatever is wrong with a report, the run is as good as it was
            del record.places["report"]
            logger.error("the report of this run was not written: %s: %s", type(error).__name__, error)
    try:
        record.write(folder.child("record.json"))
    except Exception as error:
        logger.error("the record of this run was not written: %s: %s", type(error).__name__, error)


def _versions() -> dict[str, str]:
    """Of Python and of the libraries that decide results, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
