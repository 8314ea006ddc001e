"""What a run says about itself: log lines, metrics and spans of every rank, as one stream of events.

Enters: calls of any stage on any rank. Leaves: events at a sink. A launcher sets the sink of a rank so that events
travel to the driver; without a launcher they are dropped, and log lines go to ``logging`` as usual.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["Event", "Sink", "emit", "logger", "set_sink", "span"]

Event = Mapping[str, Any]
"""``{"kind": str, "time": unix seconds, ...}`` of JSON-able values; a launcher adds ``"rank"``."""

Sink = Callable[[Event], None]

logger = logging.getLogger("sparkdl")
"""The one logger of the library; applications configure it as any other."""

_sink: Sink | None = None


def set_sink(sink: Sink | None) -> Sink | None:
    """Send this process's events to ``sink`` (None drops them); return the sink before."""
    global _sink
    previous, _sink = _sink, sink
    return previous


def emit(kind: str, **fields: Any) -> None:
    """Send one event, ``{"kind": kind, "time": now, **fields}``; values must be JSON-able."""
    if _sink is not None:
        _sink({"kind": kind, "time": time.time(), **fields})


@contextmanager
def span(name: str, into: dict[str, float] | None = None) -> Iterator[None]:
    """Time the block under ``name``: emits ``{"kind": "span", "name", "seconds"}`` and adds the seconds to ``into``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        if into is not None:
            into[name] = into.get(name, 0.0) + seconds
        emit("span", name=name, seconds=seconds)
