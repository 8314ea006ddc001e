"""The servers that ranks meet at, such as torch's store or Horovod's rendezvous: up before any rank looks for them.

Enters: the services that a collective names, and an address. Leaves: the variables by which ranks find them, for as
long as a block lasts; and a guess which modules the ranks will need, to be loaded while they wait for each other.
"""

from __future__ import annotations

import importlib
import re
import select
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, Protocol

from sparkdl.errors import ClusterError

__all__ = ["LateService", "Service", "hosted", "likely"]

_LARGEST_GUESS_BYTES = 1 << 20
_POLL_SECONDS = 0.002


class Service(Protocol):
    """A server that ranks meet at, such as torch's store or Horovod's rendezvous."""

    def start(self, bind_host: str, world_size: int) -> dict[str, str]:
        """Listen on ``bind_host`` and no other interface; return the variables by which ranks find the server."""
        ...

    def stop(self) -> None:
        """Close the server; idempotent."""
        ...


@dataclass(kw_only=True, slots=True)
class LateService:
    """A server that nothing is imported for: a bound socket, and who serves on it once this process has what it takes.

    The launcher holds it beside rank 0, which loads ``needs`` itself if the server is used at all. This class does not:
    two threads that import a package and one of its modules at once may end in a deadlock error of Python's own.

    Attributes:
        module: where the server's class is.
        name: of the class, which takes no arguments, and serves from ``adopt(listener)`` to ``stop()``.
        address: variable that tells ranks where the server is.
        port: variable that tells its port.
        needs: modules that must have been loaded by others before ``module`` is.
        variables: further ones that its clients read.
    """

    module: str
    name: str
    address: str
    port: str
    needs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    _waiting: _Waiting | None = field(default=None, init=False, repr=False)

    def start(self, bind_host: str, world_size: int) -> dict[str, str]:
        """Bind a socket; return the variables by which it is found.

        Raises:
            ClusterError: the address cannot be bound.
        """
        self.stop()
        self._waiting = _Waiting(self, _listen(bind_host, 4 * world_size + 16))
        return {**self.variables, self.address: bind_host, self.port: str(self._waiting.port)}

    def stop(self) -> None:
        """Close the server, or the socket that nobody came to; idempotent."""
        if self._waiting is not None:
            self._waiting.end()
            self._waiting = None


class _Waiting:
    """A thread that waits for a listening socket's first connection, and then starts the server on it."""

    def __init__(self, service: LateService, listener: socket.socket) -> None:
        self._service, self._listener = service, listener
        self.port = int(listener.getsockname()[1])
        self._server: Any = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="sparkdl-late-service", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        select.select([self._listener, self._wake], [], [])
        while not all(_is_loaded(name) for name in self._service.needs):
            if self._ended.wait(_POLL_SECONDS):
                break
        if not self._ended.is_set():
            server = getattr(importlib.import_module(self._service.module), self._service.name)()
            with self._lock:
                if not self._ended.is_set():
                    server.adopt(self._listener)
                    self._server = server
        self._wake.close()

    def end(self) -> None:
        with self._lock:
            self._ended.set()
        self._waker.close()
        self._thread.join()
        if self._server is not None:
            self._server.stop()
        self._listener.close()


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _listen(bind_host: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
    try:
        return socket.create_server((bind_host, 0), family=family, backlog=backlog)
    except OSError as error:
        raise ClusterError(
            f"no service can listen on {bind_host} ({error}): name an address or an interface of this host"
        ) from error


def likely(preload: Sequence[str], pickled: memoryview) -> tuple[str, ...]:
    """Return those of the modules ``preload`` that a function, ``pickled``, seems to use.

    It seems to use a package that it names, or that a module it refers to has loaded here. A guess in either direction
    costs time and nothing else: a module that was not loaded early is loaded when the function imports it.
    """
    if pickled.nbytes > _LARGEST_GUESS_BYTES:
        return tuple(preload)
    words = {word.decode() for word in re.findall(rb"[A-Za-z_][\w.]*", pickled)}
    tops = {word.partition(".")[0] for word in words}
    modules = [sys.modules[word] for word in words if word in sys.modules]
    return tuple(
        name
        for name in preload
        if (top := name.partition(".")[0]) in tops or any(_refers(module, top) for module in modules)
    )


def _refers(module: ModuleType, top: str) -> bool:
    for value in list(vars(module).values()):
        kind = type(value)  # isinstance would ask the value, and some warn when they are looked at
        if issubclass(kind, ModuleType):
            home = value.__name__
        else:
            home = str(value.__module__) if issubclass(kind, type | FunctionType) else ""
        if home.partition(".")[0] == top:
            return True
    return False


@contextmanager
def hosted(services: Sequence[Service], bind_host: str, world_size: int) -> Iterator[dict[str, str]]:
    """Run ``services`` for the block; yield what they want ranks to have in their environment."""
    variables: dict[str, str] = {}
    with ExitStack() as stack:
        for service in services:
            stack.callback(service.stop)
            variables.update(service.start(bind_host, world_size))
        yield variables
