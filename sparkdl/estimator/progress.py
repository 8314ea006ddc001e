"""What a fit shows on the driver while it runs.

Enters: the events of the ranks. Leaves: one line an epoch; on a terminal, a line in between that is written over.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

__all__ = ["Progress"]


class Progress:
    """Prints epochs and the progress within them.

    Args:
        verbose: 0 prints nothing.
        name: of the run, in front of each line, so that fits side by side can be told apart.
        stream: where to; standard error by default, as progress bars do.
    """

    def __init__(self, verbose: int, name: str, stream: TextIO | None = None) -> None:
        self._on, self._name = verbose > 0, name
        self._stream = stream or sys.stderr
        self._live = self._on and self._stream.isatty()
        self._width = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of one rank."""
        if not self._on:
            return
        if event.get("kind") == "progress" and self._live:
            self._show(event)
        elif event.get("kind") == "epoch":
            self._line(event)
        elif event.get("kind") == "log":
            self._print(f"{self._name}: {event['message']}")

    def _show(self, event: Mapping[str, Any]) -> None:
        loss = "-" if event["loss"] is None else f"{event['loss']:.4f}"
        rate = "" if not event["rows_per_second"] else f", {event['rows_per_second']:,.0f} rows/s"
        left = "" if not event["eta_seconds"] else f", {event['eta_seconds']:.0f} s left"
        text = (
            f"{self._name}: epoch {event['epoch'] + 1}/{event['epochs']}, {event['phase']} "
            f"{event['batch']}/{event['batches']}, loss {loss}{rate}{left}"
        )
        print("\r" + text.ljust(self._width), end="", file=self._stream, flush=True)
        self._width = len(text)

    def _line(self, event: Mapping[str, Any]) -> None:
        row = dict(event["metrics"])
        epoch = int(row.pop("epoch", 0)) + 1
        skipped = {"step", "rows", "lr", "seconds"}
        values = ", ".join(
            f"{name} {value:.4g}" for name, value in row.items() if name not in skipped and value is not None
        )
        seconds = f" ({row['seconds']:.1f} s)" if row.get("seconds") is not None else ""
        self._print(
            f"{self._name}: epoch {epoch}/{event['epochs']}: {values}{seconds}{', the best so far' * event['best']}"
        )

    def _print(self, text: str) -> None:
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream)
            self._width = 0
        print(text, file=self._stream, flush=True)
