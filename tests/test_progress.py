"""What a person sees of a run: lines in a file, a bar in a terminal, one cell in a notebook."""

from __future__ import annotations

import io
import os
import pty
import threading
from contextlib import suppress

import pytest

from sparkdl.errors import ConfigError
from sparkdl.progress import Progress, View

START = {
    "kind": "fit_start",
    "backend": "horovod, gradients in shared memory",
    "world_size": 2,
    "epochs": 3,
    "steps_per_epoch": 782,
    "parameters": 1300,
    "precision": "fp32",
    "resumed_step": None,
}
STEP = {
    "kind": "progress",
    "phase": "train",
    "epoch": 1,
    "epochs": 3,
    "batch": 391,
    "batches": 782,
    "step": 1173,
    "loss": 0.123456,
    "lr": 0.1,
    "rows": 5,
    "rows_per_second": 52345.6,
    "eta_seconds": 61.2,
}
EPOCH = {
    "kind": "epoch",
    "best": True,
    "epochs": 3,
    "metrics": {"epoch": 1, "step": 1564, "loss": 0.5, "val_loss": None, "lr": 0.1, "seconds": 2.04, "rows": 9},
}
END = {"kind": "fit_end", "steps": 2346, "rows": 600000, "seconds": 12.34, "reason": None}


def test_lines_where_output_is_no_terminal():
    out = io.StringIO()
    with Progress(stream=out, line_seconds=0) as progress:
        for event in (START, STEP, {"kind": "span", "name": "fit", "seconds": 1.0}, EPOCH, END):
            progress(event)
    assert out.getvalue().splitlines() == [
        "training 1,300 parameters on 2 ranks (horovod, gradients in shared memory), 3 epochs of 782 batches",
        "epoch 2/3  391/782  loss 0.1235  52,346 rows/s  0:01:02 left",
        "epoch 2/3  loss 0.5  val_loss not finite  2.0 s  (best so far)",
        "trained 2,346 steps on 600,000 rows in 12.3 s",
    ]


def test_lines_are_rare():
    out = io.StringIO()
    progress = Progress(stream=out, line_seconds=3600)
    for _ in range(100):
        progress(STEP)
    assert out.getvalue() == ""


def drain(terminal, parts):
    with suppress(OSError):  # EIO: the other side is closed
        while part := os.read(terminal, 65536):
            parts.append(part)


def test_a_bar_in_a_terminal_gives_the_screen_back():
    ours, theirs = pty.openpty()
    parts = []
    reader = threading.Thread(target=drain, args=(ours, parts))
    reader.start()
    with os.fdopen(theirs, "w") as stream, Progress(stream=stream) as progress:
        for event in (START, STEP, EPOCH, {**STEP, "phase": "validate", "batch": 3, "batches": 9}):
            progress(event)
    reader.join()
    os.close(ours)
    seen = b"".join(parts).decode()
    assert "epoch 2/3" in seen
    assert "391/782" in seen
    assert "epoch 2/3 validation" in seen
    assert "(best so far)" in seen
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1  # the cursor was hidden, and is shown again


def test_a_resumed_run_says_so():
    assert View().take(START | {"resumed_step": 1200}).endswith("resumed at step 1,200")


def test_a_run_that_stopped_early_says_why():
    assert View().take(END | {"reason": "enough"}).endswith("12.3 s: enough")


def test_silence_can_be_had_and_nonsense_not():
    out = io.StringIO()
    Progress("off", stream=out)(EPOCH)
    assert out.getvalue() == ""
    with pytest.raises(ConfigError, match="progress mode 'loud' is unknown"):
        Progress("loud")


def test_one_cell_of_a_notebook_is_redrawn():
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    source = f"""
from sparkdl.progress import Progress
progress = Progress()
for event in ({START!r}, {STEP!r}, {EPOCH!r}, {END!r}):
    progress(event)
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=240).execute()
    (output,) = notebook.cells[0].outputs
    page = output["data"]["text/html"]
    assert "training 1,300 parameters" in page
    assert "trained 2,346 steps" in page
    assert "<progress" not in page  # the run is over


def test_runs_side_by_side_can_be_told_apart():
    stream = io.StringIO()
    event = {"kind": "epoch", "best": False, "epochs": 2, "metrics": {"epoch": 0, "loss": 2.0, "seconds": 1.0}}
    Progress("lines", stream=stream, name="fold-1")(event)
    assert stream.getvalue() == "fold-1: epoch 1/2  loss 2  1.0 s\n"
