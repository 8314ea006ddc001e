"""Spark's batches without the 40 ms that TCP adds to a task."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from typing import TypeVar

_Batch = TypeVar("_Batch")
_FDS = "/proc/self/fd"
_QUICKACK = getattr(socket, "TCP_QUICKACK", None)  # Linux alone has it, and alone needs it


def promptly(batches: Iterable[_Batch]) -> Iterator[_Batch]:
    """Yield the batches; have the kernel acknowledge each as it comes.

    Outside of a Spark worker, over Unix sockets and off Linux it only passes them on.

    Spark's JVM talks to a Python worker over a loopback socket with Nagle's algorithm on (RFC 896): what does not fill
    a segment, and on loopback one holds 64 KiB, waits until everything before it is acknowledged. Linux puts
    acknowledgements off by 40 ms (RFC 1122, 4.2.3.2). So every task idles at its start, and now and then between
    batches. The remedy is on the receiving side: TCP_QUICKACK. An empty task of Spark 4.2 takes 20 ms with it, 60 ms
    without.
    """
    jvm = _jvm_socket()
    try:
        source = iter(batches)
        while True:
            if jvm is not None and _QUICKACK is not None:
                # Not kept by the kernel: it goes back to delaying once this side has answered.
                jvm.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
            try:
                batch = next(source)
            except StopIteration:
                return
            yield batch
    finally:
        if jvm is not None:
            jvm.close()


def _jvm_socket() -> socket.socket | None:
    """A duplicate of this worker's connection to its JVM: the first that it opened to its own host."""
    if _QUICKACK is None or "PYTHON_WORKER_FACTORY_SECRET" not in os.environ:
        return None
    for fd in sorted(map(int, os.listdir(_FDS))):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(fd))
        except OSError:  # the listing's own descriptor, closed by now
            continue
        if _is_loopback(connection):
            return connection
        connection.close()
    return None


def _is_loopback(found: socket.socket) -> bool:
    if found.type != socket.SOCK_STREAM or found.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        host = str(found.getpeername()[0])
    except OSError:  # it listens
        return False
    return host.startswith("127.") or host == "::1"
