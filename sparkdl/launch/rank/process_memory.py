"""The memory that a process holds and its host or container has left: it explains a killed rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OLD_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NEW_FILES = ("memory.max", "memory.current", "inactive_file")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TIGHT_SHARE = 1 / 16


def look() -> dict[str, int]:
    """Return ``held``, ``free`` and ``limit``, bytes, and ``kills``, all far below a millisecond's work; {} if unknown.

    ``held`` is resident in this process; ``limit`` is what its container or host has, ``free`` what could still be had
    of it; ``kills`` is how often this kernel has ended a process for want of memory.

    Figures come from the kernel's own files (Linux; elsewhere nothing is known).
    """
    try:
        held = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
        host = _table(Path("/proc/meminfo").read_text().replace(":", ""))
        limit, free = host["MemTotal"] * 1024, host["MemAvailable"] * 1024
        kills = _table(Path("/proc/vmstat").read_text()).get("oom_kill", 0)
    except (OSError, ValueError, KeyError, IndexError):
        return {}
    for folder, files in _groups():
        bound, used = _container(folder, *files)
        if 0 < bound < limit:
            limit, free = bound, min(free, max(bound - used, 0))
    return {"held": held, "free": free, "limit": limit, "kills": kills}


def is_tight(memory: Mapping[str, int]) -> bool:
    """Whether little is left."""
    return bool(memory) and memory["free"] < memory["limit"] * _TIGHT_SHARE


def explain(first: Mapping[str, int], last: Mapping[str, int], after: Mapping[str, int], age_seconds: float) -> str:
    """Say what is known of a dead process's memory; ``""`` if nothing is.

    Args:
        first: what ``look`` returned in the process as it began.
        last: what it returned there ``age_seconds`` before the end.
        after: what it returned in another process of the same host after the end, {} if there is none.
        age_seconds: between the last look and the end.
    """
    if not last:
        return ""
    free_text = f"{_size(last['free'])} of {_size(last['limit'])} were free there"
    text = f"{age_seconds:.1f} s before, it held {_size(last['held'])}, and {free_text}"
    if first and after and after["kills"] > first["kills"]:
        return f"{text}; since it began the kernel has killed a process there for want of memory"
    return f"{text}: it ran out of memory, most likely" if is_tight(last) else text


def _groups() -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the folders in which the kernel accounts for the memory of this process's container, and their files."""
    groups = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                top, files = (_CGROUPS / "memory", _OLD_FILES) if controllers else (_CGROUPS, _NEW_FILES)
                # Inside of a container the path may be the host's, and the top its own.
                own_folder = top / path.lstrip("/")
                groups.append((own_folder if own_folder.is_dir() else top, files))
    return groups


def _container(folder: Path, limit: str, usage: str, cache: str) -> tuple[int, int]:
    """Return the limit of this container and what it uses apart from files it could drop; (0, 0) without a limit."""
    try:
        bound = int((folder / limit).read_text())
        used, stat = int((folder / usage).read_text()), _table((folder / "memory.stat").read_text())
        return bound, used - stat.get(cache, 0)
    except (OSError, ValueError):  # no such file, or "max"
        return 0, 0


def _table(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
