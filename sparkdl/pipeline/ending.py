"""What is left of a run, whatever its end: its report, its record, its row in the table of runs, and who hears of it.

Enters: the record of a run that is over. Leaves: the files, and a line in the log for each that could not be written:
nothing here changes what came of the run.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from sparkdl.errors import ConfigError
from sparkdl.observe import logger
from sparkdl.pipeline.code import code_folder
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.run import State
from sparkdl.pipeline.state.runs import add_run

__all__ = ["leave"]

_LIBRARIES = ("sparkdl", "pyspark", "torch", "horovod", "pyarrow", "deltalake", "numpy")


def leave(project: Project, state: State, record: RunRecord) -> None:
    """Write report, record and row of a run, and notify whom the file names.

    Args:
        project: the pipeline.
        state: what there is of it.
        record: complete but for places, versions and, if the run was cut short, the champion.
    """
    spec, folder = project.spec, project.runs.child(record.run_id)
    record.places["record"] = folder.child("record.json").uri
    record.message = project.file.redacted(record.message)
    record.versions = _versions()
    with _tried("champion of this run was not found out"):
        if "champion" not in record.model:
            champion = state.champion()
            record.model["champion"] = champion.version if champion is not None else None
    with _tried("report of this run was not written"):
        if record.outcome != "nothing new":  # what writes it need not be loaded then
            from sparkdl.pipeline.report import has_report, write_report

            record.versions |= _commit(spec.code)
            if has_report(record):
                write_report(record, folder.child("report.html"))
    with _tried("record of this run was not written"):
        record.write(folder.child("record.json"))
    with _tried("row of this run was not written"):
        add_run(project.tables.table("runs"), record)
    if spec.notify is not None:
        with _tried("notice of this run was not given"):
            from sparkdl.pipeline.notify import notify

            notify(spec.notify, record)


@contextmanager
def _tried(what: str) -> Iterator[None]:
    """Log what goes wrong in the block; the run is as good, or as bad, as it was."""
    try:
        yield
    except Exception as error:
        logger.error("the %s: %s: %s", what, type(error).__name__, error)


def _versions() -> dict[str, str]:
    """The versions of Python and of the libraries that decide results, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _commit(code: str) -> dict[str, str]:
    """What git calls the state of the folder that the file's modules lie in; nothing outside of a repository."""
    try:
        folder = code_folder(code)
        if folder is None:
            return {}
        command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12"]
        git = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=5)
    except (ConfigError, OSError, subprocess.SubprocessError):
        return {}
    return {"code": git.stdout.strip()}
