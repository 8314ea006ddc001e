"""The events of a run: log lines, metrics and spans of every rank, as one stream."""

from __future__ import annotations

import html
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_SHOWN = 6
_COUNTS = {"epoch", "step", "rows", "lr", "seconds"}

Event = Mapping[str, Any]
"""``{"kind": str, "time": unix seconds, ...}`` of JSON-able values; a launcher adds ``"rank"``."""

Sink = Callable[[Event], None]

logger = logging.getLogger("sparkdl")
"""The one logger of the library; applications configure it as any other."""

_sink: Sink | None = None


def set_sink(sink: Sink | None) -> Sink | None:
    """Send this process's events to ``sink`` (None drops them); return the sink before.

    A launcher sets the sink of a rank so that events travel to the driver; without a launcher they are dropped, and log
    lines go to ``logging`` as usual.
    """
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


def shortened(names: Sequence[object]) -> str:
    """The first of many names, and how many more there are."""
    more = f", and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(str, names[:_SHOWN])) + more


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """The first of many metrics, without what an epoch says of itself besides."""
    numbers = {name: value for name, value in metrics.items() if name not in _COUNTS and isinstance(value, int | float)}
    return shortened([f"{name} {value:.4g}" for name, value in numbers.items()])


def facts_table(title: str, facts: Mapping[str, str]) -> str:
    """Facts by name as HTML for a notebook; no text of them becomes markup."""

    def plain(text: str) -> str:
        return html.escape("".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text))

    rows = "".join(f"<tr><th>{plain(name)}</th><td>{plain(text)}</td></tr>" for name, text in facts.items())
    return f"<table><caption>{plain(title)}</caption>{rows}</table>"
