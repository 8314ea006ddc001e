"""The run of one rank, wherever its process came from: register, wait for all, run the function, report."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from sparkdl import observe
from sparkdl.compat.environment import environment
from sparkdl.launch import addresses
from sparkdl.launch.rank import resources
from sparkdl.launch.rank.capture import Capture, RateLimit
from sparkdl.launch.rank.link import ConnectionInfo, Link, Stopped
from sparkdl.launch.rank.process_memory import look
from sparkdl.launch.store import Service, StoreClient, offered
from sparkdl.launch.wire import WireError, dump_value, load_value
from sparkdl.world import World

RETIRED = threading.Event()
"""Set by a function after which this process shall not be used again, because it has left traces in it."""

_BURST_BYTES = 4 << 20
_RESERVE_BYTES = 4 << 20
_MAX_TRACEBACK_CHARACTERS = 64 << 10
_MAX_EXCEPTION_BYTES = 1 << 20
_COMPARED = ("sparkdl", "torch", "horovod")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place a rank runs in.

    Attributes:
        number: position among the slots of the job (a barrier task's partition).
        host: name or address under which other hosts reach this one.
        found_size: number of slots as seen from here.
        peers: ``host`` of every slot, as far as it is known here.
        gpus: GPU addresses assigned here, as Spark names them.
        cpus: CPUs assigned here.
        keep_output: whether the process's own output gets the lines as well.
    """

    number: int
    host: str
    found_size: int
    peers: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    cpus: int = 1
    keep_output: bool = False


@functools.cache
def facts() -> dict[str, str]:
    """Return the versions that must agree between the driver and every rank; ``""`` for what is not installed."""
    versions = {"python": platform.python_version().rpartition(".")[0]}
    for name in _COMPARED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def run_rank(info: ConnectionInfo, slot: Slot) -> bool:
    """Take part in a run as one of its ranks, from the first word to the last; return whether the function succeeded.

    Where it did not, the driver has the reason already, and this process is not to be used again.

    Environment, output streams, threads and torch's settings are left as they were, for the worker is used again.

    Raises:
        UnreachableError: the driver cannot be reached.
    """
    link = Link(info)
    succeeded = False
    with ExitStack() as stack:
        stack.callback(link.leave)
        try:
            link.register(registration(slot, info.interface))
            preload(info.preload, slot)
            plan, function = link.wait_for_plan()
            store = StoreClient(info.address, info.secret)
            stack.callback(store.close)
            succeeded = perform(link, Assignment(slot, plan, store, info.services), function)
        except (Stopped, KeyboardInterrupt):
            link.send({"kind": "stopped"})
        except Exception as error:
            _report(link, error, [])
    return succeeded


def preload(names: Sequence[str], slot: Slot) -> None:
    """Import ``names`` while there is nothing else to do; the function that needs one that fails will say so itself."""
    missing = [name for name in names if name not in sys.modules]
    if missing:
        with environment(resources.thread_variables(_threads(slot), os.environ)):
            for name in missing:
                with suppress(Exception):
                    importlib.import_module(name)


class Reporter(Protocol):
    """The receiver of a rank's reports: the link to the driver, or rows to be."""

    @property
    def stopped(self) -> bool:
        """Whether the driver has ended the run."""
        ...

    def send(self, message: Mapping[str, Any]) -> None:
        """Report ``message``."""
        ...

    def send_value(self, message: Mapping[str, Any], parts: list[memoryview]) -> None:
        """Report ``message`` with a value that ``dump_value`` took apart."""
        ...

    def interruptible(self) -> AbstractContextManager[None]:
        """The block within which the driver may interrupt this rank."""
        ...


def registration(slot: Slot, interface: str | None) -> dict[str, Any]:
    """Return what the rank in ``slot`` has to say of itself before it is told its place.

    Where the rank cannot take part, ``problem`` says why.
    """
    message: dict[str, Any] = {
        "kind": "registration",
        "slot": slot.number,
        "host": slot.host,
        "found_size": slot.found_size,
        "pid": os.getpid(),
        "facts": facts(),
        "memory": look(),
    }
    try:
        gpus = resources.physical_gpus(slot.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        message |= {"gpus": gpus, "cores": len(os.sched_getaffinity(0)), "threads": _threads(slot)}
        if slot.number == 0:
            message["address"] = addresses.meeting_address(slot.host, slot.peers, interface)
            message["port"] = addresses.free_port(message["address"])
    except Exception as error:
        message["problem"] = f"the rank on {slot.host} cannot take part ({type(error).__name__}): {error}"
    return message


def _threads(slot: Slot) -> int:
    users_threads = resources.threads_of(os.environ.get("OMP_NUM_THREADS", ""))
    return users_threads if users_threads is not None and slot.cpus == 1 else slot.cpus


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank was told once all had registered.

    Attributes:
        slot: the place it runs in.
        plan: the launch plan, as ``make_plan`` returned it.
        store: where the ranks of the run meet.
        services: what to enter while the function runs.
    """

    slot: Slot
    plan: Mapping[str, Any]
    store: StoreClient
    services: Sequence[Service]


def perform(link: Reporter, assigned: Assignment, function: list[bytearray]) -> bool:
    """Run the function as planned and send its value, or its error; return whether it succeeded.

    Raises:
        Stopped: the driver ended the run.
    """
    settings = assigned.plan["settings"]
    capture = None
    reserve = bytearray(_RESERVE_BYTES)  # given up when memory runs out, for the report to have some
    try:
        with ExitStack() as stack:
            variables = _variables(assigned)
            world = World.from_env(variables)
            limit = RateLimit(_BURST_BYTES, settings["log_kib_per_second"] * 1024)
            lines = functools.partial(_send_lines, link)
            capture = stack.enter_context(
                Capture(lines, keep=assigned.slot.keep_output, limit=limit, apart=bool(settings["tell_streams_apart"]))
            )
            stack.enter_context(offered(assigned.store))
            for service in assigned.services:
                variables = {**stack.enter_context(service(assigned.store)), **variables}
            stack.enter_context(environment(variables))
            stack.enter_context(resources.intra_op_threads(resources.threads_of(variables["OMP_NUM_THREADS"])))
            stack.enter_context(resources.torch_settings())
            stack.enter_context(_events_to(link, world.rank))
            with link.interruptible():
                value = load_value(function)(world)
                parts = _taken_apart(value)
    except (Stopped, KeyboardInterrupt):
        # Nobody but the driver interrupts a rank; a user's own KeyboardInterrupt is an error like any other.
        if link.stopped:
            raise Stopped from None
        _report(link, KeyboardInterrupt("raised in the rank itself"), list(capture.tail) if capture else [])
        return False
    except BaseException as error:
        reserve.clear()
        _report(link, error, list(capture.tail) if capture else [])
        return False
    link.send_value({"kind": "result"}, parts)
    return True


def _variables(assigned: Assignment) -> dict[str, str]:
    """Return everything that the environment of this rank is to hold; the user's own ``env`` wins."""
    slot, plan = assigned.slot, assigned.plan
    hosts, settings = plan["hosts"], plan["settings"]
    everybody = [World(**world) for world in plan["worlds"]]
    user: dict[str, str] = settings["env"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    variables = addresses.variables(everybody[slot.number], everybody, slot.host)
    variables |= plan["variables"]
    gpus = plan["gpus"][slot.number]
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    initialized = bool(cuda is not None and cuda.is_initialized())
    variables |= resources.device_variables(gpus, plan["gpus_of_host"][slot.host], visible, initialized)
    away = next((host for host in hosts if host != slot.host), None)
    name = settings["interface"] or ("lo" if away is None else addresses.interface_to(away))
    variables |= addresses.interface_variables(name, {**os.environ, **user})
    variables |= resources.thread_variables(settings["threads"] or _threads(slot), {})
    return variables | user


@contextmanager
def _events_to(link: Reporter, rank: int) -> Iterator[None]:
    previous_sink = observe.set_sink(lambda event: link.send({"kind": "event", "event": {**event, "rank": rank}}))
    try:
        yield
    finally:
        observe.set_sink(previous_sink)


def _send_lines(link: Reporter, lines: list[str], stream: str) -> None:
    for start in range(0, len(lines), 200):
        link.send({"kind": "log", "stream": stream, "lines": lines[start : start + 200]})


def _taken_apart(value: Any) -> list[memoryview]:
    try:
        return dump_value(value)
    except Exception as error:
        raise TypeError(
            f"the value returned, a {type(value).__module__}.{type(value).__qualname__}, cannot be pickled ({error}): "
            f"return plain data, such as a state_dict or numbers"
        ) from error


def _report(link: Reporter, error: BaseException, tail: list[str]) -> None:
    """Send ``error`` with its traceback and, where it can be pickled, itself."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)  # What the function holds is what the report needs.
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # The user's own frames are what helps the user.
    text = "".join(traceback.format_exception(type(error), error, trace))
    message = {
        "kind": "error",
        "cause": f"{type(error).__name__}: {error}"[:_MAX_TRACEBACK_CHARACTERS],
        "traceback": text[-_MAX_TRACEBACK_CHARACTERS:],
        "tail": tail,
    }
    try:
        parts = dump_value(error)
    except Exception:
        parts = []
    if not 0 < sum(part.nbytes for part in parts) <= _MAX_EXCEPTION_BYTES:
        parts = []
    try:
        _send_error(link, message, parts)
    except WireError:  # as JSON a hundred long lines of emojis are too much; the driver has seen them
        _send_error(link, {**message, "tail": []}, parts)


def _send_error(link: Reporter, message: Mapping[str, Any], parts: list[memoryview]) -> None:
    if parts:
        link.send_value(message, parts)
    else:
        link.send(message)
