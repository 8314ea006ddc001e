"""The driver's watch over one run, to the last rank's value or to an error that names the one at fault."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkdl.config import LaunchConfig
from sparkdl.errors import CancelledError, ClusterError, LaunchTimeoutError, RankFailedError, WorldSizeError
from sparkdl.launch.driver.channel import Channel, Report
from sparkdl.launch.driver.launch_plan import check_size, make_plan
from sparkdl.launch.rank.capture import TAIL_LINES
from sparkdl.launch.rank.process_memory import explain
from sparkdl.launch.rank.rank import facts
from sparkdl.launch.wire import load_value
from sparkdl.observe import Event

_TICK_SECONDS = 0.25
_SECOND_LOOK_SECONDS = 1.5
_ANSWER_SECONDS = 1.0
_COLLECTIVES = ("/torch/distributed/", "/horovod/torch/", "/sparkdl/collective/")
_FOLLOW_UP = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "read error",
    "write error",
    "horovod has been shut down",
    "horovodinternalerror",
    "nccl communicator was aborted",
    "connection was likely closed",
    "stop_waiting response is expected",
    "remote process exited",
    "unreachableerror:",
)


class Host(Protocol):
    """Whatever runs the ranks' processes: Spark, or this machine."""

    def cancel(self) -> None:
        """End every rank's process now; idempotent."""
        ...

    def post_mortem(self, slot: int) -> str:
        """Say how the process in ``slot`` ended, in a few words; ``""`` where that is not known."""
        ...


@dataclass(slots=True)
class _Rank:
    """What the driver knows of one slot."""

    registration: Mapping[str, Any] = field(default_factory=dict)
    rank: int = -1
    value: list[bytearray] | None = None
    failure: Report | None = None
    where: str = ""
    memory: Mapping[str, int] | None = None
    beat: Report | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))


class Supervisor:
    """Watches over one run.

    Args:
        channel: through which the ranks report.
        host: what runs their processes.
        config: the launch settings.
        on_event: called on this thread with every event of every rank.
    """

    def __init__(
        self,
        channel: Channel,
        host: Host,
        config: LaunchConfig,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._channel, self._host, self._config = channel, host, config
        self._on_event = on_event
        self._num_proc = channel.connection_info.num_proc
        self._ranks: dict[int, _Rank] = {}
        self._ended: Report | None = None

    def run(self, function: list[memoryview]) -> list[Any]:
        """Run ``function``, as ``dump_value`` took it apart, on every rank; return the values in rank order.

        Raises:
            RankFailedError: a rank raised or died; every other rank was ended.
            LaunchTimeoutError: ranks did not start, or did not return, in time.
            WorldSizeError: more or fewer ranks run than were asked for.
            PreflightError: a worker has other versions than the driver.
        """
        try:
            self._gather()
            self._begin(function)
            self._watch()
        except BaseException:
            self._end()
            raise
        return self._values()

    def _gather(self) -> None:
        """Wait until every slot has registered."""
        deadline = time.monotonic() + self._config.start_timeout_seconds
        while len(self._ranks) < self._num_proc:
            if time.monotonic() > deadline:
                raise LaunchTimeoutError(
                    f"{len(self._ranks)} of {self._num_proc} ranks started within "
                    f"{self._config.start_timeout_seconds:.0f} s: free slots on the cluster, lower num_proc, or raise "
                    f"start_timeout"
                )
            self._take(self._channel.next(_TICK_SECONDS))
            self._raise_failure()

    def _begin(self, parts: list[memoryview]) -> None:
        """Check what the ranks said of themselves, tell each its place, and let them start."""
        slots = [self._ranks[slot] for slot in range(self._num_proc)]
        plan = make_plan([rank.registration for rank in slots], facts(), self._config)
        for slot, rank in enumerate(slots):
            rank.rank = plan["worlds"][slot]["rank"]
            self._channel.send(slot, plan, parts)

    def _watch(self) -> None:
        """Wait until every rank has returned its value."""
        start = time.monotonic()
        while any(rank.value is None for rank in self._ranks.values()):
            self._take(self._channel.next(_TICK_SECONDS))
            self._raise_failure()
            now = time.monotonic()
            limit = self._config.timeout_seconds
            waiting = any(rank.value is None for rank in self._ranks.values())
            if limit is not None and now - start > limit and waiting:
                raise self._overdue(limit)
            for slot, rank in self._ranks.items():
                if rank.value is None and self._channel.silence(slot) > self._config.silence_seconds:
                    why = f"gave no sign of life for {self._config.silence_seconds:g} s"
                    rank.failure = Report(kind="silent", message={"why": why})
                    raise self._error(rank)

    def _overdue(self, limit: float) -> LaunchTimeoutError:
        """Ask the ranks that are still at work where they are; name the first that does not wait for another one."""
        slots = [slot for slot, rank in self._ranks.items() if rank.value is None]
        self._ask(slots)
        late = sorted((self._ranks[slot] for slot in slots), key=lambda rank: rank.rank)
        first = min(late, key=lambda rank: (is_waiting(rank.where), rank.rank))
        ranks = "rank " if len(late) == 1 else "ranks "
        ranks += ", ".join(str(rank.rank) for rank in late)
        return LaunchTimeoutError(
            f"{ranks} of {self._num_proc} did not return within {limit:g} s and had to be ended: raise timeout, or "
            f"find out what rank {first.rank} waits for",
            first.rank,
            first.where,
            tuple(first.tail),
        )

    def _ask(self, slots: Sequence[int]) -> None:
        """Ask the ranks in ``slots`` where they are and what they hold, and wait a moment for their answers."""
        for slot in slots:
            self._ranks[slot].memory = None
            self._channel.send(slot, {"kind": "where"})
        until = time.monotonic() + _ANSWER_SECONDS
        while any(self._ranks[slot].memory is None for slot in slots if self._channel.hears(slot)):
            if time.monotonic() > until:
                return
            self._take(self._channel.next(0.05))

    def _take(self, report: Report | None) -> None:
        """Note one report."""
        if report is None:
            return
        if report.slot is None:
            self._ended = report
            return
        if report.kind == "registration":
            self._register(report)
        rank = self._ranks.get(report.slot)
        if rank is None:
            return
        if report.kind == "log":
            self._print(rank, report.message)
        elif report.kind == "event":
            if self._on_event is not None:
                self._on_event(report.message["event"])
        elif report.kind == "result":
            rank.value = report.parts
        elif report.kind == "beat":
            rank.beat = report
        elif report.kind == "where":
            rank.where, rank.memory = str(report.message["traceback"]), report.message["memory"]
        elif report.kind == "error" or (report.kind in ("lost", "silent", "stopped") and rank.value is None):
            rank.failure = rank.failure or report

    def _register(self, report: Report) -> None:
        slot = -1 if report.slot is None else report.slot
        check_size(slot, int(report.message["found_size"]), self._num_proc)
        if "problem" in report.message:
            raise ClusterError(str(report.message["problem"]))
        if slot in self._ranks:
            raise WorldSizeError(f"two ranks say that they are slot {slot} of {self._num_proc}: the stage ran twice")
        self._ranks[slot] = _Rank(registration=report.message, rank=slot)

    def _print(self, rank: _Rank, message: Mapping[str, Any]) -> None:
        rank.tail.extend(message["lines"])
        print_lines(rank.rank, message, self._config)

    def _raise_failure(self) -> None:
        """Raise what went wrong, if anything did; look twice where it may be the echo of another rank's failure."""
        failed = [rank for rank in self._ranks.values() if rank.failure is not None]
        if not failed and self._ended is None:
            return
        why = self._ended.message.get("error") if self._ended is not None else None
        if isinstance(why, CancelledError):
            raise why
        until = time.monotonic() + _SECOND_LOOK_SECONDS
        while not any(_is_cause(rank.failure) for rank in failed) and time.monotonic() < until:
            self._take(self._channel.next(0.05))
            failed = [rank for rank in self._ranks.values() if rank.failure is not None]
            if len(failed) == self._num_proc or (not failed and not self._open()):
                break
        if failed:
            first = min(
                failed, key=lambda rank: (not _is_cause(rank.failure), rank.failure.time if rank.failure else 0)
            )
            raise self._error(first)
        if self._ended is not None and self._open():
            why = self._ended.message.get("error")
            if isinstance(why, BaseException):
                raise why
            raise ClusterError("the job that hosted the ranks ended before they did: look at its log")

    def _open(self) -> bool:
        return len(self._ranks) < self._num_proc or any(rank.value is None for rank in self._ranks.values())

    def _error(self, rank: _Rank) -> ClusterError:
        report = rank.failure
        if report is None:
            raise AssertionError("only a rank with a failure is asked for its error")
        if report.kind == "error":
            tail = report.message["tail"] or list(rank.tail)
            trace = str(report.message["traceback"])
            if "\n  File " not in trace and rank.beat is not None:  # no memory was left to note where it happened
                trace += f"(at its last sign of life it was here)\n{rank.beat.message['where']}"
            error = RankFailedError(rank.rank, report.message["cause"], trace, tuple(tail))
            original = _original(report.parts)
            if original is not None:
                original.__cause__, error.__cause__ = error.__cause__, original
            return error
        process = f"the process (pid {rank.registration['pid']} on {rank.registration['host']})"
        why = str(report.message.get("why", "its process ended"))
        if report.kind == "silent":
            cause = (
                f"{process} {why}: it is stopped, starved of CPU or memory, or cut off; silence_seconds sets the limit"
            )
        else:
            slot = next(number for number, peer in self._ranks.items() if peer is rank)
            cause = f"{process} died without an exception: {self._host.post_mortem(slot) or why}"
        memory, where = self._last_words(rank, report.time)
        return RankFailedError(rank.rank, f"{cause}; {memory}" if memory else cause, where, tuple(rank.tail))

    def _last_words(self, rank: _Rank, time_of_end: float) -> tuple[str, str]:
        """Return what is known of the memory of a rank that cannot say it any more, and where it was."""
        if rank.beat is None:
            return "", ""
        host = rank.registration["host"]
        beside = [slot for slot, peer in self._ranks.items() if peer is not rank and peer.registration["host"] == host]
        self._ask(beside)
        looks = [memory for slot in beside if (memory := self._ranks[slot].memory)]
        after = max(looks, key=lambda memory: memory["kills"], default={})
        age = max(time_of_end - rank.beat.time, 0.0)
        where = str(rank.beat.message["where"])
        explanation = explain(rank.registration.get("memory", {}), rank.beat.message["memory"], after, age)
        return explanation, f"(where it was {age:.1f} s before)\n{where}" if where else ""

    def _end(self) -> None:
        """End every rank, gently for the length of the grace, then for good."""
        for slot, rank in self._ranks.items():
            if rank.failure is not None and rank.failure.kind == "silent":
                self._channel.hang_up(slot)  # It would not hear it.
        grace = self._config.stop_grace_seconds
        self._channel.stop_all(grace)
        until = time.monotonic() + grace + 1.0
        while self._channel.connected and time.monotonic() < until:
            report = self._channel.next(0.05)
            if report is not None and report.kind == "log" and report.slot in self._ranks:
                self._print(self._ranks[report.slot], report.message)
        self._host.cancel()

    def _values(self) -> list[Any]:
        values: list[Any] = []
        for rank in sorted(self._ranks.values(), key=lambda rank: rank.rank):
            values.append(load_or_name(rank.rank, rank.value or []))
            rank.value = []
        return values


def print_lines(rank: int, message: Mapping[str, Any], config: LaunchConfig) -> None:
    """Write a rank's output where the settings say, each line with its rank."""
    stream: str = message["stream"]
    target = {"stdout": config.stdout, "stderr": config.stderr}.get(stream)
    timestamp = time.asctime() if config.timestamps else ""
    if target is not None:
        prefix = f"{timestamp}[{rank}]<{stream}>:"  # as Horovod writes it (safe_shell_exec.prefix_connection)
    elif config.log_to_driver:
        target, prefix = sys.stdout, f"{timestamp} [rank {rank}] ".lstrip()
    else:
        return
    text = "".join(f"{prefix}{line}\n" for line in message["lines"])
    try:
        target.write(text)
    except UnicodeEncodeError:  # of a terminal or file that is no UTF-8: no reason to end a run
        target.write(text.encode("ascii", "backslashreplace").decode())
    target.flush()


def load_or_name(rank: int, parts: list[bytearray]) -> Any:
    """Rebuild the value of ``rank``.

    Raises:
        RankFailedError: it needs something that is not on the driver.
    """
    try:
        return load_value(parts)
    except Exception as error:
        why = f"its value cannot be rebuilt on the driver ({type(error).__name__}: {error}): return plain data"
        raise RankFailedError(rank, why) from error


def is_waiting(where: str) -> bool:
    """Whether a rank whose stack is ``where`` waits for other ranks: the one they all wait for is elsewhere."""
    files = re.findall(r'^  File "([^"]+)"', where, re.MULTILINE)
    return any(part in file for file in files[-3:] for part in _COLLECTIVES)


def is_follow_up(cause: str) -> bool:
    """Whether ``cause`` is what a rank says when another one is gone: not a headline while there is a better one."""
    lower = cause.lower()
    return any(sign in lower for sign in _FOLLOW_UP)


def _is_cause(report: Report | None) -> bool:
    if report is None or report.kind == "stopped":
        return False
    return report.kind in ("lost", "silent") or not is_follow_up(str(report.message.get("cause", "")))


def _original(parts: list[bytearray]) -> BaseException | None:
    if not parts:
        return None
    try:
        error = load_value(parts)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
