"""The names that processes leave in a shared folder, and whether a process is known to have ended."""

from __future__ import annotations

import contextlib
import os
import platform
import uuid
from pathlib import Path

import psutil


def place() -> str:
    """What process numbers count in: this machine since it was started, or a container on it."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{platform.node()} {uuid.getnode():x}"


def started(process: int) -> int | None:
    """When a process of this place began, to compare; None if there is none.

    On Linux in ticks since the machine did, which no clock moves.

    Raises:
        OSError: another user's process that this one may not look at.
    """
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    try:
        return int(psutil.Process(process).create_time() * 1_000_000)
    except psutil.NoSuchProcess:
        return None
    except psutil.Error as error:
        raise OSError(str(error)) from error


def ended(where: str, process: int, since: int) -> bool:
    """Whether a process is known to have ended; False of other places.

    The number of a dead process is given to another one, and containers number their own: the other two facts tell
    those apart.

    Args:
        where: its ``place()``.
        process: its number there.
        since: when it ``started()``.
    """
    try:
        return where == place() and started(process) != since
    except OSError:
        return False
