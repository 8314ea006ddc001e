"""The progress bar of a run, drawn on the driver from the events of its leader."""

from __future__ import annotations

import html
import importlib
import math
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO

from sparkdl.errors import ConfigError
from sparkdl.observe import Event

Mode = Literal["auto", "terminal", "notebook", "lines", "off"]
_HIDDEN = {"epoch", "step", "seconds", "rows", "lr"}  # of an epoch's row: not shown as metrics


@dataclass
class View:
    """What there is to show, as of the newest event.

    Attributes:
        epochs: epochs of the run.
        epoch: the current one, from 0.
        phase: ``"train"`` or ``"validate"``.
        batch: batches of the phase that are done.
        batches: batches of the phase.
        step: optimizer steps so far.
        loss: the newest one; None if unknown or not finite.
        rows_per_second: of all ranks; None until it can be told.
        eta_seconds: to the end of the last epoch; None until it can be told.
        finished: lines on the epochs that are done, newest last.
        running: whether training has started and not ended.
    """

    epochs: int = 0
    epoch: int = 0
    phase: str = "train"
    batch: int = 0
    batches: int = 0
    step: int = 0
    loss: float | None = None
    rows_per_second: float | None = None
    eta_seconds: float | None = None
    finished: list[str] = field(default_factory=list)
    running: bool = False

    def take(self, event: Event) -> str | None:
        """Take in one event; return a line that is worth keeping, if it makes one."""
        kind = event.get("kind")
        if kind == "progress":
            for name in (
                "epochs",
                "epoch",
                "phase",
                "batch",
                "batches",
                "step",
                "loss",
                "rows_per_second",
                "eta_seconds",
            ):
                setattr(self, name, event.get(name))
            self.running = True
            return None
        if kind == "fit_start":
            return self._start(event)
        if kind == "epoch":
            line = _epoch_line(event)
            self.finished.append(line)
            return line
        if kind == "fit_end":
            self.running = False
            reason = f": {event['reason']}" if event.get("reason") else ""
            return f"trained {event['steps']:,} steps on {event['rows']:,} rows in {event['seconds']:.1f} s{reason}"
        if kind == "log":
            return str(event.get("message", ""))
        return None

    def _start(self, event: Event) -> str:
        self.running, self.epochs, self.batches = True, int(event["epochs"]), int(event["steps_per_epoch"])
        ranks, epochs = _count(event["world_size"], "rank"), _count(self.epochs, "epoch")
        line = f"training {event['parameters']:,} parameters on {ranks} ({event['backend']}), {epochs} of "
        line += "1 batch" if self.batches == 1 else f"{self.batches:,} batches"
        resumed = event.get("resumed_step")
        return line if resumed is None else f"{line}, resumed at step {resumed:,}"

    @property
    def title(self) -> str:
        """The position of the run: ``epoch 2/5``, or ``epoch 2/5 validation``."""
        return f"epoch {self.epoch + 1}/{self.epochs}" + (" validation" if self.phase == "validate" else "")

    @property
    def numbers(self) -> str:
        """Loss, rows per second and time left, as far as they are known."""
        parts = []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if self.rows_per_second is not None:
            parts.append(f"{self.rows_per_second:,.0f} rows/s")
        if self.eta_seconds is not None:
            parts.append(f"{_clock(self.eta_seconds)} left")
        return "  ".join(parts)


class _Renderer(Protocol):
    def draw(self, view: View) -> None: ...
    def keep(self, line: str) -> None: ...
    def close(self, view: View) -> None: ...


class Progress:
    """Shows a run; a context manager and a sink of events.

    It draws a bar in a terminal, a table in a notebook, or a line every few seconds where output goes to a file. Pass
    it as a launcher's ``on_event``, or to ``observe.set_sink`` where training runs in this process.

    Args:
        mode: ``"terminal"``, ``"notebook"``, ``"lines"``, ``"off"``, or ``"auto"``: a notebook if this process is a
            kernel, a terminal if the stream is one, else lines.
        stream: where terminal and lines go; standard error by default.
        console: a ``rich.console.Console`` to use instead of a stream.
        line_seconds: at most one line in this time, seconds.
        name: of the run, in front of each line, so that runs side by side can be told apart.

    Raises:
        ConfigError: the mode is unknown.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        stream: TextIO | None = None,
        console: Any | None = None,
        line_seconds: float = 5.0,
        name: str = "",
    ) -> None:
        if console is not None:
            stream = console.file
        stream = stream if stream is not None else sys.stderr
        chosen = _mode(stream) if mode == "auto" else mode
        makers: Mapping[str, Any] = {
            "terminal": lambda: _Terminal(stream, console),
            "notebook": _Notebook,
            "lines": lambda: _Lines(stream, line_seconds),
            "off": lambda: None,
        }
        if chosen not in makers:
            raise ConfigError(f"progress mode {mode!r} is unknown: use one of auto, {', '.join(makers)}")
        self.view = View()
        self._prefix = f"{name}: " if name else ""
        self._renderer: _Renderer | None = makers[chosen]()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Take in one event, on any thread."""
        with self._lock:
            line = self.view.take(event)
            if self._renderer is None:
                return
            if line:
                self._renderer.keep(self._prefix + line)
            if event.get("kind") == "progress":
                self._renderer.draw(self.view)
            elif event.get("kind") == "fit_end":
                self._renderer.close(self.view)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the screen as it is; needed where a run ended by an error."""
        with self._lock:
            if self._renderer is not None:
                self._renderer.close(self.view)


class _Lines:
    """The renderer for files and pipes: a line every few seconds."""

    def __init__(self, stream: TextIO, seconds: float) -> None:
        self._stream, self._seconds = stream, seconds
        self._next = time.monotonic() + seconds

    def draw(self, view: View) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._seconds
        self.keep(f"{view.title}  {view.batch:,}/{view.batches:,}  {view.numbers}".rstrip())

    def keep(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self, view: View) -> None:
        """Every line is out already."""


class _Terminal:
    """One live bar at the bottom; lines that are kept, and whatever else is printed, scroll above it."""

    def __init__(self, stream: TextIO, console: Any | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        self._console = console if console is not None else Console(file=stream)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        self._bars = Bars(*columns, console=self._console, transient=True, auto_refresh=False)
        self._task: Any = None

    def draw(self, view: View) -> None:
        if self._task is None:
            self._bars.start()
            self._task = self._bars.add_task("", total=None, numbers="")
        self._bars.update(
            self._task, description=view.title, completed=view.batch, total=view.batches, numbers=view.numbers
        )
        self._bars.refresh()

    def keep(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def close(self, view: View) -> None:
        if self._task is not None:
            self._bars.stop()
            self._bars.remove_task(self._task)
            self._task = None


class _Notebook:
    """One output cell that is redrawn: a bar, the numbers, and the lines on the last epochs."""

    _SHOWN = 12

    def __init__(self) -> None:
        self._handle: Any = None
        self._kept: list[str] = []

    def draw(self, view: View) -> None:
        display = importlib.import_module("IPython.display")  # there, since this is a notebook's kernel
        page = display.HTML(self._page(view))
        if self._handle is None:
            self._handle = display.display(page, display_id=True)
        else:
            self._handle.update(page)

    def keep(self, line: str) -> None:
        self._kept.append(line)

    def close(self, view: View) -> None:
        if self._handle is not None or self._kept:
            self.draw(view)

    def _page(self, view: View) -> str:
        bar = ""
        if view.running:
            bar = (
                f"{html.escape(view.title)} <progress value='{view.batch}' max='{max(view.batches, 1)}'></progress> "
                f"{view.batch:,}/{view.batches:,} &nbsp; {html.escape(view.numbers)}<br>"
            )
        lines = "\n".join(html.escape(line) for line in self._kept[-self._SHOWN :])
        return f"{bar}<pre style='margin:0'>{lines}</pre>"


def _mode(stream: TextIO) -> str:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and hasattr(shell, "kernel"):
        return "notebook"
    return "terminal" if stream.isatty() else "lines"


def _epoch_line(event: Event) -> str:
    row: Mapping[str, Any] = event["metrics"]
    numbers = [f"{name} {_number(value)}" for name, value in row.items() if name not in _HIDDEN]
    mark = "  (best so far)" if event.get("best") else ""
    seconds = row.get("seconds")
    time_text = f"  {seconds:.1f} s" if isinstance(seconds, int | float) else ""
    return f"epoch {int(row['epoch']) + 1}/{event['epochs']}  {'  '.join(numbers)}{time_text}{mark}"


def _number(value: Any) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def _clock(seconds: float) -> str:
    whole_seconds = math.ceil(seconds)
    return f"{whole_seconds // 3600}:{whole_seconds // 60 % 60:02}:{whole_seconds % 60:02}"
