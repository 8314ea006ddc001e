"""The progress events of rank 0 while it trains, and TensorBoard files if asked for."""

from __future__ import annotations

import bisect
import importlib.util
import math
import time
from collections.abc import Mapping
from typing import Any

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.observe import emit
from sparkdl.train.callbacks import Run
from sparkdl.train.telemetry.window import LossWindow

_RECENT_SECONDS = 5.0  # rows/s is that of about the last five seconds


class Reporter:
    """Emits ``progress`` events of rank 0, at most one in ``TrainConfig.progress_seconds``.

    An event holds ``phase`` (``"train"`` or ``"validate"``), ``epoch`` (from 0), ``epochs``, ``batch`` and ``batches``
    (of the epoch or the validation), ``step``, ``loss`` (of the newest window, else of the newest batch on rank 0),
    ``lr``, ``rows``, ``rows_per_second`` (all ranks) and ``eta_seconds`` (to the end of the last epoch).

    Attributes:
        look_at: the optimizer step after which to call ``look``; None on other ranks than 0.
    """

    def __init__(self, run: Run, window: LossWindow) -> None:
        self._run, self._window = run, window
        self._interval = run.config.progress_seconds
        self._active = run.world.is_leader
        self._next = 0.0
        self._marks: list[tuple[float, int, int]] = []
        self._seen = (0.0, 0)
        self.look_at: int | None = None

    def epoch_starts(self) -> None:
        """Tell of an epoch, or of the rest of one, before its first step."""
        if self._active:
            self._seen = (time.perf_counter(), self._run.step)
            self.look_at = self._run.step + 1

    def look(self) -> None:
        """Emit if it is time, at the step ``look_at``; decide, by how long the last steps took, at which to look next.

        Asking for the time after every step would cost small steps more than all the rest of the reporting.
        """
        now, step = time.perf_counter(), self._run.step
        if now >= self._next:
            self._emit("train", self._run.batch, self._run.steps_per_epoch)
        (seen_at, seen_step), self._seen = self._seen, (now, step)
        stride = max(1, step - seen_step)
        steps_until_due = (self._next - now) * stride / max(now - seen_at, 1e-9)
        self.look_at = step + max(1, min(int(steps_until_due), 2 * stride))  # doubled at most: steps may become slower

    def validation_done(self, batch: int, batches: int) -> None:
        """Tell of each validation batch behind it."""
        if self._active and time.perf_counter() >= self._next:
            self._emit("validate", batch, batches)

    def epoch_done(self) -> None:
        """Tell of the end of an epoch's training: the bar is full, whatever the interval."""
        if self._active:
            self._emit("train", self._run.batch, self._run.steps_per_epoch)

    def _emit(self, phase: str, batch: int, batches: int) -> None:
        now, run = time.perf_counter(), self._run
        self._next = now + self._interval
        finished_batches = run.epoch * run.steps_per_epoch + run.batch
        if phase == "train":
            self._marks.append((now, run.rows, finished_batches))
            while len(self._marks) > 2 and now - self._marks[1][0] > _RECENT_SECONDS:
                self._marks.pop(0)
        rate = eta = None
        if len(self._marks) > 1:
            (first, rows, batches_done), (last, rows_now, done_now) = self._marks[0], self._marks[-1]
            seconds = max(last - first, 1e-9)
            rate = (rows_now - rows) / seconds
            remaining_batches = run.config.epochs * run.steps_per_epoch - finished_batches
            eta = remaining_batches * seconds / (done_now - batches_done) if done_now > batches_done else None
        loss = self._window.newest if self._window.newest is not None else run.loss
        emit(
            "progress",
            phase=phase,
            epoch=run.epoch,
            epochs=run.config.epochs,
            batch=batch,
            batches=batches,
            step=run.step,
            loss=loss if math.isfinite(loss) else None,
            lr=run.lr,
            rows=run.rows,
            rows_per_second=rate,
            eta_seconds=eta,
        )


class ScalarWriter:
    """Writes the history to TensorBoard event files as it grows; does nothing on other ranks than 0.

    A run that goes on goes on where the files are: what was trained after the last epoch that its history holds is
    written anew, and hidden where an attempt before has written it. A warm start stands behind the run that it starts
    from.

    Args:
        config: names the folder; None writes nothing.
        run: whose history is written.
        offset: steps of the run that a warm start took its weights from.

    Raises:
        ConfigError: a folder is named, and TensorBoard is not installed; on every rank.
    """

    def __init__(self, config: TrainConfig, run: Run, offset: int = 0) -> None:
        self._run, self._offset = run, offset
        self._writer: Any = None
        steps, epochs = run.history.steps["step"], run.history.epochs
        newest_step = int(epochs[-1]["step"]) if epochs else 0
        self._written = bisect.bisect_right(steps, newest_step)
        if config.tensorboard_dir is None:
            return
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                f"tensorboard_dir={config.tensorboard_dir!r} needs the package tensorboard, which is not installed: "
                "pip install 'sparkdl[tensorboard]', or leave tensorboard_dir out"
            )
        if run.world.is_leader:
            from torch.utils.tensorboard import SummaryWriter

            purge = offset + newest_step + 1
            _wait_for_a_second_of_its_own()
            self._writer = SummaryWriter(config.tensorboard_dir, purge_step=purge if purge > 1 or run.step else None)

    def steps(self) -> None:
        """Write the step rows that are new."""
        if self._writer is None:
            return
        columns = self._run.history.steps
        for index in range(self._written, len(columns["step"])):
            step = self._offset + int(columns["step"][index])
            for name in ("loss", "lr", "grad_norm"):
                if not math.isnan(columns[name][index]):
                    self._writer.add_scalar(f"step/{name}", columns[name][index], step)
        self._written = len(columns["step"])

    def epoch(self, row: Mapping[str, float]) -> None:
        """Write one epoch's row."""
        if self._writer is not None:
            for name, value in row.items():
                if name not in ("epoch", "step"):
                    self._writer.add_scalar(f"epoch/{name}", value, self._offset + int(row["step"]))
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_newest_event_file = 0  # the second, since 1970, in which this process began its newest event file


def _wait_for_a_second_of_its_own() -> None:
    """Wait, less than a second, where this process has begun an event file within this one.

    TensorBoard reads a folder's files by name, ``events.out.tfevents.SECOND.HOST.PROCESS.NUMBER``, and compares the
    number as text: within one second the tenth file of a process would stand before its ninth.
    """
    global _newest_event_file
    while int(time.time()) == _newest_event_file:
        time.sleep(0.01)
    _newest_event_file = int(time.time())
