"""The way for Spark Connect, where executors may not reach the client: all travels as rows of the stage."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
import secrets
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow

from sparkdl.config import LaunchConfig
from sparkdl.errors import ClusterError, LaunchTimeoutError, RankFailedError
from sparkdl.launch.driver.launch_plan import check_size, make_plan
from sparkdl.launch.driver.supervisor import is_follow_up, is_waiting, load_or_name, print_lines
from sparkdl.launch.rank.capture import TAIL_LINES
from sparkdl.launch.rank.link import Stopped, stack_of
from sparkdl.launch.rank.rank import Assignment, Slot, perform, preload, registration
from sparkdl.launch.store import KeyValueStore, Service, StoreClient
from sparkdl.launch.wire import Listener, authenticated
from sparkdl.observe import Event

ROW_SCHEMA = "rank int, kind string, part int, piece binary"
_SCHEMA = pyarrow.schema(
    [("rank", pyarrow.int32()), ("kind", pyarrow.string()), ("part", pyarrow.int32()), ("piece", pyarrow.binary())]
)
_PIECE_BYTES = 4 << 20
_MAX_MESSAGES = 20_000
_FOLLOW_UP_SECONDS = 2.0
_MAX_TAIL_CHARACTERS = 48 << 10
_MARK = re.compile(r"\[sparkdl-failure:([A-Za-z0-9+/=]+)\]")


class Gathering(Protocol):
    """What of a barrier task's context is used here."""

    def allGather(self, message: str = "") -> list[str]:
        """Exchange a message with every task."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherJob:
    """What travels to every task.

    Attributes:
        num_proc: number of ranks.
        function: as ``dump_value`` took it apart.
        services: what each rank enters while its function runs.
        preload: modules to import while the others are on their way.
        versions: what the client has installed.
        config: the launch settings, without streams, which stay on the client.
        tell_streams_apart: whether standard output and standard error travel by themselves.
        secret: of this run, by which its ranks know each other.
    """

    num_proc: int
    function: list[bytearray]
    services: Sequence[Service]
    preload: Sequence[str]
    versions: Mapping[str, str]
    config: LaunchConfig
    tell_streams_apart: bool = False
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


class _Rows:
    """Stands where a link to the driver would: it keeps what the rank reports until the task may hand out rows.

    Args:
        limit_seconds: after which the function is interrupted; None lets it run.
    """

    def __init__(self, limit_seconds: float | None) -> None:
        self._limit_seconds = limit_seconds
        self.messages: deque[Mapping[str, Any]] = deque(maxlen=_MAX_MESSAGES)
        self.error: Mapping[str, Any] | None = None
        self.parts: list[memoryview] = []
        self.where: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the function was interrupted."""
        return self.where is not None

    @property
    def tail(self) -> list[str]:
        """The last lines of output."""
        lines = [line for message in self.messages if message["kind"] == "log" for line in message["lines"]]
        return lines[-TAIL_LINES:]

    def send(self, message: Mapping[str, Any]) -> None:
        """Keep a log or event message; the oldest go first when there are too many."""
        if message["kind"] == "error":
            self.error = message
        else:
            self.messages.append(message)

    def send_value(self, message: Mapping[str, Any], parts: list[memoryview]) -> None:
        """Keep the value, or the error."""
        if message["kind"] == "error":
            self.error = message
        else:
            self.parts = parts

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Interrupt the function when its time is up, within the block.

        Raises:
            Stopped: it was.
        """
        if self._limit_seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        over = threading.Event()
        watch = threading.Thread(target=self._interrupt, args=(over, self._limit_seconds), daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
        if self.stopped:
            raise Stopped

    def _interrupt(self, over: threading.Event, limit_seconds: float) -> None:
        if over.wait(limit_seconds):
            return
        main = threading.main_thread().ident or 0
        where = stack_of(main)
        # Spark names the first task that fails: a rank that waits for others lets the one they wait for be it.
        if not over.wait(_FOLLOW_UP_SECONDS if is_waiting(where) else 0.0):
            self.where = where
            signal.pthread_kill(main, signal.SIGINT)


def run_gathered_rank(job: GatherJob, slot: Slot, context: Gathering) -> Iterator[pyarrow.RecordBatch]:
    """Be the rank of this barrier task; yield its rows.

    Rows of ``(rank, kind, part, piece)`` hold values in chunks of 4 MiB, output lines and events; ``values_of`` puts
    them together again at the client. One allGather, a second long, carries what ranks say of themselves and where
    their store is, which the task of slot 0 holds: it lets in those that have the secret which came with the job. What
    is different from the channel: output and events arrive when the job ends; a failure is told by the text of the
    exception that fails its task, and so is a rank's own look at the clock when its time is up; Spark, not the client,
    ends the other ranks, within about three seconds. A rank that nothing interrupts, or a frozen one, is ended, not
    named.

    Raises:
        ClusterError: the function failed here; the text carries the whole report for the client.
    """
    check_size(slot.number, slot.found_size, job.num_proc)
    rows = _Rows(job.config.timeout_seconds)
    with ExitStack() as stack:
        own_facts = registration(slot, job.config.interface)
        if slot.number == 0 and "problem" not in own_facts:
            own_facts["store"] = _hold_store(job, own_facts["address"], stack)
        preload(job.preload, slot)
        registered = [json.loads(text) for text in context.allGather(json.dumps(own_facts))]
        problem = next((rank_facts["problem"] for rank_facts in registered if "problem" in rank_facts), None)
        if problem:
            raise ClusterError(problem)
        plan = make_plan(registered, job.versions, job.config)
        plan["settings"]["tell_streams_apart"] = job.tell_streams_apart
        rank = plan["worlds"][slot.number]["rank"]
        host, port = registered[0]["store"]
        store = StoreClient((host, port), job.secret)
        stack.callback(store.close)
        _run(rows, rank, Assignment(slot, plan, store, job.services), job)
        # Slot 0 holds the store until the last rank is done with it; Spark's own barrier would cost a second more.
        finished = [f"sparkdl/finished/{number}" for number in range(job.num_proc)]
        with contextlib.suppress(ClusterError):  # Where slot 0 has failed, its own error is the one to tell.
            store.set(finished[slot.number], b"")
            if slot.number == 0:
                store.wait(finished, math.inf)
    for message in rows.messages:
        yield _batch(rank, str(message["kind"]), 0, json.dumps(message, default=str).encode())
    for number, part in enumerate(rows.parts):
        flat = part.cast("B")
        for start in range(0, max(flat.nbytes, 1), _PIECE_BYTES):
            yield _batch(rank, "result", number, flat[start : start + _PIECE_BYTES])


def _hold_store(job: GatherJob, address: str, stack: ExitStack) -> tuple[str, int]:
    store = KeyValueStore()
    listener = Listener(address, authenticated(job.secret), store.serve, backlog=job.num_proc)
    stack.callback(listener.close)
    stack.callback(store.close)
    return listener.address


def _run(rows: _Rows, rank: int, assigned: Assignment, job: GatherJob) -> None:
    """Run the function; raise what the client is to know of its failure."""
    try:
        succeeded = perform(rows, assigned, job.function)
    except Stopped:
        limit = job.config.timeout_seconds
        late = {"cause": f"it did not return within {limit:g} s", "limit": limit, "tail": rows.tail}
        raise ClusterError(_failure_text(rank, {**late, "traceback": rows.where})) from None
    if not succeeded:
        if is_follow_up(str((rows.error or {}).get("cause", ""))):
            time.sleep(_FOLLOW_UP_SECONDS)  # Spark names the first task that fails: let the one at fault be it.
        raise ClusterError(_failure_text(rank, rows.error or {}))


def _batch(rank: int, kind: str, part: int, piece: bytes | memoryview) -> pyarrow.RecordBatch:
    return pyarrow.RecordBatch.from_pydict(
        {"rank": [rank], "kind": [kind], "part": [part], "piece": [bytes(piece)]}, schema=_SCHEMA
    )


def _failure_text(rank: int, error: Mapping[str, Any]) -> str:
    """Return a text that a person can read, and from which ``failure_in`` takes the whole report."""
    tail: list[str] = []
    room = _MAX_TAIL_CHARACTERS
    for line in reversed(error.get("tail", [])):
        room -= len(line)
        if room < 0:
            break
        tail.insert(0, line)
    cause = str(error.get("cause", "unknown"))
    report = {**error, "rank": rank, "cause": cause, "traceback": error.get("traceback", ""), "tail": tail}
    packed = base64.b64encode(zlib.compress(json.dumps(report).encode())).decode()
    return f"rank {rank} failed: {cause[:500]} [sparkdl-failure:{packed}]"


def failure_in(text: str) -> ClusterError | None:
    """Return the failure that a task's exception carries in its ``text``, if it carries one."""
    for mark in _MARK.finditer(text):
        with contextlib.suppress(ValueError, zlib.error):  # a user's own words may look like one
            report = json.loads(zlib.decompress(base64.b64decode(mark[1])))
            break
    else:
        return None
    rank, details = report["rank"], (report["traceback"], tuple(report["tail"]))
    if "limit" not in report:
        return RankFailedError(rank, report["cause"], *details)
    message = (
        f"rank {rank} did not return within {report['limit']:g} s, and every rank was ended: raise timeout, or find "
        f"out what rank {rank} waits for"
    )
    return LaunchTimeoutError(message, rank, *details)


def values_of(
    table: pyarrow.Table, num_proc: int, config: LaunchConfig, on_event: Callable[[Event], None] | None
) -> list[Any]:
    """Put the rows of all tasks together: print the output, hand out the events, return the values in rank order.

    Raises:
        ClusterError: the value of a rank is missing.
        RankFailedError: a value cannot be rebuilt here.
    """
    chunks: dict[int, dict[int, list[pyarrow.Buffer]]] = {rank: {} for rank in range(num_proc)}
    for batch in table.to_batches():
        ranks, kinds, parts = (batch.column(number).to_pylist() for number in range(3))
        for row, (rank, kind, part) in enumerate(zip(ranks, kinds, parts, strict=True)):
            buffer = batch.column(3)[row].as_buffer()
            if kind == "result":
                chunks[rank].setdefault(part, []).append(buffer)
                continue
            message = json.loads(buffer.to_pybytes())
            if kind == "log":
                print_lines(rank, message, config)
            elif kind == "event" and on_event is not None:
                on_event(message["event"])
    values = []
    for rank, parts_of in chunks.items():
        if not parts_of:
            raise ClusterError(f"rank {rank} sent no value, though its task ended: look at the executors' logs")
        joined = [bytearray().join(memoryview(chunk) for chunk in parts_of[part]) for part in sorted(parts_of)]
        values.append(load_or_name(rank, joined))
        parts_of.clear()
    return values


class StartWatch:
    """Knows from Spark's progress reports whether all tasks have started, once."""

    def __init__(self, num_proc: int) -> None:
        self._num_proc = num_proc
        self.started = False

    def __call__(self, stages: Any = (), inflight_tasks: int = 0, **_: Any) -> None:
        """Take in one report; the names are Spark's."""
        completed_tasks = sum(stage.num_completed_tasks for stage in stages or ())
        self.started = self.started or (inflight_tasks or 0) + completed_tasks >= self._num_proc
