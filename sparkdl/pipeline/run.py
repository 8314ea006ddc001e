"""One run of a pipeline, and its end: a record, whatever came of it.

Enters: a pipeline, a Spark session or the word to open one. Leaves: a ``RunRecord``, beside what ``work/`` made. A
run with nothing to do sees that here, without Spark and without torch.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.errors import ConfigError
from sparkdl.pipeline.check import check_source, places_written
from sparkdl.pipeline.ending import leave
from sparkdl.pipeline.state.cleanup import clean_up
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.keys import predictions_are_there
from sparkdl.pipeline.state.lease import lease
from sparkdl.pipeline.state.record import Finished, RunRecord
from sparkdl.pipeline.state.steps import content_key
from sparkdl.pipeline.work.ingest import due_windows
from sparkdl.storage import Storage, check_places, outage_error
from sparkdl.storage.session import default_filesystem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["run"]

_LOADING_SECONDS = 30.0


def run(context: Context, spark: SparkSession | None = None) -> RunRecord:
    """Do what is due.

    Args:
        context: of this run.
        spark: the session; None opens one by the file, once there is something to do.

    Raises:
        LeaseTakenError: another run of the pipeline is active.
        LeaseLostError: another run took over while this one stood still.
        StoreUnavailableError: a store that the run reads or writes does not answer.
        SparkdlError: what else was refused or failed; the record says so, too.
    """
    started, record = time.perf_counter(), context.record
    try:
        check_places(places_written(context))
        check_champion(context)
        if nothing_new(context):
            record.end("nothing new", "source, file, code and champion are as they were")
        else:
            if spark is None:  # else ingestion does, with what Spark knows
                check_source(context)
            from sparkdl.pipeline.session import code_for_workers, open_session

            leases = context.runs.child("leases")
            with _loading("sparkdl.pipeline.work.work") as loading, lease(leases, record.run_id) as mine:
                before = default_filesystem()
                session = spark or open_session(context.spec, context.snapshot.bytes)
                check_plain_paths(context, before)
                context.hold(mine)
                loading.join()
                from sparkdl.pipeline.work.work import work

                with code_for_workers(session, context.spec):
                    check_places({"places.tables": Storage.of(context.tables.folder)}, session)
                    work(context, session)
                clean_up(context)
    except BaseException as error:
        outage = outage_error(error)
        record.fail(outage or error)
        if outage is not None:
            raise outage from error
        raise
    finally:
        record.seconds, record.steps = time.perf_counter() - started, context.steps.notes
        leave(context)
    return record


@contextmanager
def _loading(module: str) -> Iterator[threading.Thread]:
    """Import a module, torch with it, beside the block, in which Java starts.

    An interrupt that comes while this thread imports something can leave Python's import lock taken, and the other one
    waiting for it: so that is waited for only so long, and does not keep the interpreter from ending.
    """
    thread = threading.Thread(target=importlib.import_module, args=(module,), daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(_LOADING_SECONDS)


def check_plain_paths(context: Context, before: str) -> None:
    """Refuse places without a scheme where they mean something else now that Spark has started.

    Args:
        context: of the run.
        before: the filesystem that they belonged to when this run first looked at them.

    Raises:
        ConfigError: names the first, and both filesystems.
    """
    now, places = default_filesystem(), context.spec.places
    named = {"root": context.spec.root, **{f"places.{one}": getattr(places, one) for one in places.__struct_fields__}}
    source = context.spec.source
    named |= {f"source.{one}": getattr(source, one) for one in ("path", "table") if getattr(source, one, None)}
    plain = [(name, place) for name, place in named.items() if str(place).startswith(("/", "~"))]
    if now.rstrip("/") != before.rstrip("/") and plain:
        name, place = plain[0]
        raise ConfigError(
            f"{name}={place} lies in {now} to this Spark, and was looked for in {before} before Spark started: write "
            f"the whole address, {now.rstrip('/')}{place} or file://{place}"
        )


def nothing_new(context: Context) -> bool:
    """Whether an earlier run has done everything that is asked already, as far as can be told without Spark."""
    inputs = None if context.again else context.whole()
    key, now = content_key("run", inputs or {}), f"{context.now:%Y-%m-%dT%H}"
    for asked in () if inputs is None else ({}, context.asked):  # who did all has done a part as well
        done = context.steps.find("run", asked, Finished)
        if done is not None and done.inputs == key and not any(name <= now for name in done.ahead):
            if context.asks_for("score") and not predictions_are_there(context):
                return False
            known = context.tables.windows()
            whole = all(books.rules for books in known.values())
            return whole and not due_windows(context.spec, context.snapshot, known, context.now)
    return False


def check_champion(context: Context) -> None:
    """Refuse to score only where there is nobody to predict.

    Raises:
        ConfigError: this run learns nothing, and there is no champion.
    """
    if not context.train and context.until != "ingest" and context.champion() is None:
        name, alias = context.spec.publish.name, context.spec.publish.alias
        raise ConfigError(
            f"{name} has no {alias} in {context.registry.uri}, and this run learns nothing, so nobody can predict: "
            "run it once with training"
        )
