"""One run of a pipeline: what is stale is made, step by step, and a record is left, whatever came of it."""

from __future__ import annotations

import importlib
import platform
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING

from sparkdl.compat.interrupts import interrupts_between_calls, interrupts_wait
from sparkdl.compat.spark_errors import java_error
from sparkdl.errors import ConfigError, DataError
from sparkdl.observe import emit, logger
from sparkdl.pipeline.check import check_source, places_written
from sparkdl.pipeline.code import code_folder
from sparkdl.pipeline.session import code_for_workers, open_session, start_torch_daemon, torch_for_workers
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.cleanup import clean_up
from sparkdl.pipeline.state.evaluator import Stale, Step, nothing_new, stale_of
from sparkdl.pipeline.state.lease import lease
from sparkdl.pipeline.state.receipts import StepNote
from sparkdl.pipeline.state.record import Outcome, RunRecord
from sparkdl.pipeline.state.results import Published
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.state.runs import add_run
from sparkdl.pipeline.steps import STEPS, steps_asked_for
from sparkdl.pipeline.steps.ingest import check_columns, source_windows, tell_deleted
from sparkdl.pipeline.steps.learning import parts_to_learn
from sparkdl.pipeline.steps.publish import PublishStep
from sparkdl.storage import Storage, check_places, outage_error
from sparkdl.storage.session import default_filesystem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOADING_SECONDS = 30.0
_OF_PYSPARK = "pandas", "pyspark.sql.functions"
"""What pyspark imports once Java answers: before that there is time for it."""
_HEAVY = "sparkdl.pipeline.work.search", "sparkdl.pipeline.work.evaluate"
"""What makes models and predictions; torch comes with it, and Java would wait for its imports while a session opens."""
_LIBRARIES = ("sparkdl", "pyspark", "torch", "horovod", "pyarrow", "deltalake", "numpy")


def execute(run: Run, spark: SparkSession | None = None) -> RunRecord:
    """Do what is due.

    Args:
        run: what is asked for, and of which pipeline.
        spark: the session; None opens one by the file, once there is something to do.

    Raises:
        LeaseTakenError: another run of the pipeline is active.
        LeaseLostError: another run took over while this one stood still.
        StoreUnavailableError: a store that the run reads or writes does not answer.
        ClusterError: Spark's Java has ended, or ranks could not be started, or failed.
        SparkdlError: what else was refused or failed; the record says so, too.
    """
    steps = steps_asked_for(run.request.until, train=run.request.train)
    spec, record, started = run.spec, run.record, time.perf_counter()
    try:
        check_places(places_written(spec))
        check_champion(run)
        if nothing_new(steps, run):
            tell_deleted(run)
            record.end("nothing new", "source, file, code and champion are as they were")
        else:
            if spark is None:  # else ingestion does, with what Spark knows
                check_source(run.project, run.snapshot)
            with lease(run.project.runs.child("leases"), run.run_id) as run_lease:
                filesystem = default_filesystem()
                with _loading(*_OF_PYSPARK):
                    session = spark or open_session(spec, run.snapshot.bytes)
                with _loading(*_HEAVY), interrupts_between_calls(session), code_for_workers(session, spec):
                    check_plain_paths(spec, filesystem)
                    run.hold(run_lease)
                    if any(step.loads_torch for step in steps):
                        start_torch_daemon(session)
                    check_places({"places.tables": Storage.of(str(spec.places.tables))}, session)
                    record.model["before"] = run.champion_version()
                    _make_what_is_stale(steps, run, session)
                    record.model["champion"] = run.champion_version()
                    _end(run)
                clean_up(run)
    except BaseException as error:
        nobody_answers = outage_error(error) or java_error(error)
        record.fail(nobody_answers or error)
        if nobody_answers is not None:
            raise nobody_answers from error
        raise
    finally:
        run.release()
        record.seconds = time.perf_counter() - started
        leave(run)
    return record


def _make_what_is_stale(steps: Sequence[Step], run: Run, spark: SparkSession) -> None:
    """Make the first step that is stale, until none is, and tell the record of each step that is passed.

    What a step makes may be why one before it is stale again, as where a part turns out to have no label yet: the list
    is walked from its start each time.
    """
    passed: dict[str, tuple[str, ...]] = {}
    attempts: set[tuple[str | None, ...]] = set()
    while True:
        run.look_again()
        for step in steps:
            if step.looks and step.name in passed:  # once a run, whatever it has seen
                continue
            stale = stale_of(step, run)
            if stale:
                break
            # Told once, and once more where other windows are learnt from, for want of a label.
            if passed.get(step.name) != tuple(stale.fresh):
                _pass(stale, run, spark)
                passed[step.name] = tuple(stale.fresh)
        else:
            return
        attempt = (step.name, *sorted(stale.keys), *stale.keys.values())
        if attempt in attempts:  # a fault of the step's, which would be made for ever
            raise RuntimeError(f"the step {step.name} was made, and is stale again: {list(stale.keys)[:3]}")
        attempts.add(attempt)
        _make(stale, run, spark)
        if step.looks:
            passed[step.name] = tuple(stale.keys)


def _make(stale: Stale, run: Run, spark: SparkSession) -> None:
    """Make what is stale of a step, and note what it took."""
    step, keys, started = stale.step, list(stale.keys.values()), time.perf_counter()
    if step.listed:
        emit("step", name=step.name, state="started")
    if step.loads_torch:
        torch_for_workers(spark)
    worked = step.make(run, spark, stale)
    if not step.notes_itself:
        key, seconds = keys[0] if len(keys) == 1 else None, time.perf_counter() - started
        run.note(StepNote(name=step.name, key=key or "", kept=not worked, seconds=seconds))
    if step.looks:
        step.tell(run)


def _pass(stale: Stale, run: Run, spark: SparkSession) -> None:
    """Note that a step is as it should be, unless this run has made it, and tell the record what it has come to."""
    step, noted = stale.step, any(note.name == stale.step.name for note in run.record.steps)
    if step.name == "ingest" and not noted:
        check_columns(spark, run)
    if step.listed and not step.looks and not noted and (stale.fresh or step.name == "ingest"):
        key = stale.fresh[0] if len(stale.fresh) == 1 and step.learns else ""
        run.note(StepNote(name=step.name, key=key, kept=True, seconds=0.0))
    step.tell(run)


def _end(run: Run) -> None:
    """Say what came of it: the last that this run itself has done tells."""
    record, until = run.record, run.request.until
    producing_steps = [step.name for step in STEPS if step.name in run.made and not step.looks]
    stop_text = "" if until is None else f"stopped after {until}, as asked"
    parts, waits = parts_to_learn(run) if until != "ingest" else (None, "")
    published: Published | None = None
    if parts is not None and "publish" in run.made:
        published = PublishStep().kept(run, parts)
    if published is not None:
        outcome: Outcome = "promoted" if published.promoted else "not promoted"
        record.end(outcome, "; ".join(filter(None, [published.reason, stop_text])))
    elif record.predictions:
        text = f"version {record.model['champion']} scored {sum(record.predictions.values())} rows"
        record.end("scored", "; ".join(filter(None, [text, waits])))
    elif producing_steps or run.compares_anew or (stop_text and run.made):
        text = f"did {', '.join(producing_steps or run.made)}, from which neither a model nor predictions followed"
        record.end("stopped", stop_text or "; ".join(filter(None, [text, waits])))
    elif not waits and not source_windows(run) and not run.windows():
        raise DataError("the source has no rows: wait for data, or correct source")
    else:
        upto = "" if until is None else f" up to {until}"
        record.end("nothing new", waits or f"every step{upto} had been done before")
    if waits:
        logger.warning("%s", waits)


def leave(run: Run) -> None:
    """Write report, record and row of a run, and notify whom the file names.

    What cannot be written is a line in the log: nothing here changes what came of the run.

    Args:
        run: whose record is complete but for places, versions and, if it was cut short, the champion.
    """
    project, spec, record = run.project, run.spec, run.record
    folder = project.runs.child(record.run_id)
    record.places["record"] = folder.child("record.json").uri
    record.message = project.file.redacted(record.message)
    record.versions = _versions()
    with interrupts_wait():  # else a run that has moved the champion could be none that anybody knows of
        with _tried("champion of this run was not found out"):
            if "champion" not in record.model:
                record.model["champion"] = run.champion_version()
        with _tried("report of this run was not written"):
            if record.outcome != "nothing new":  # what writes it need not be loaded then
                from sparkdl.pipeline.report import has_report, write_report

                record.versions |= _commit(spec.code)
                if has_report(record):
                    write_report(record, folder.child("report.html"))
        with _tried("record of this run was not written"):
            record.write(folder.child("record.json"))
        with _tried("row of this run was not written"):
            add_run(project.table("runs"), record)
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


@contextmanager
def _loading(*modules: str) -> Iterator[threading.Thread]:
    """Import modules beside the block.

    An interrupt that comes while this thread imports something can leave Python's import lock taken, and the other one
    waiting for it: so that is waited for only so long, and does not keep the interpreter from ending.
    """
    thread = threading.Thread(target=lambda: [importlib.import_module(name) for name in modules], daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(_LOADING_SECONDS)


def check_plain_paths(spec: PipelineSpec, before: str) -> None:
    """Refuse places without a scheme where they mean something else now that Spark has started.

    Args:
        spec: what the file says.
        before: the filesystem that they belonged to when this run first looked at them.

    Raises:
        ConfigError: names the first, and both filesystems.
    """
    filesystem, places, source = default_filesystem(), spec.places, spec.source
    addresses = {"root": spec.root, **{f"places.{name}": getattr(places, name) for name in places.__struct_fields__}}
    addresses |= {f"source.{name}": getattr(source, name) for name in ("path", "table") if getattr(source, name, None)}
    plain = [(name, address) for name, address in addresses.items() if str(address).startswith(("/", "~"))]
    if filesystem.rstrip("/") != before.rstrip("/") and plain:
        name, path = plain[0]
        raise ConfigError(
            f"{name}={path} lies in {filesystem} to this Spark, and was looked for in {before} before Spark started: "
            f"write the whole address, {filesystem.rstrip('/')}{path} or file://{path}"
        )


def check_champion(run: Run) -> None:
    """Refuse to score only where there is nobody to predict.

    Raises:
        ConfigError: this run learns nothing, and there is no champion.
    """
    if not run.request.train and run.request.until != "ingest" and run.champion() is None:
        publish, registry = run.spec.publish, run.registry
        raise ConfigError(
            f"{publish.name} has no {publish.alias} in {registry.uri}, and this run learns nothing, so nobody can "
            "predict: run it once with training"
        )
