"""Output capture: everything written to descriptors 1 and 2, in lines, bounded, and undone afterwards."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.launch.rank.capture import TAIL_LINES, Capture, LineSplitter, RateLimit


def wide():
    return RateLimit(1 << 30, 1 << 20)


@given(st.lists(st.text(alphabet="abc\n", max_size=20)))
def test_lines_do_not_depend_on_how_the_stream_was_cut(chunks):
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk.encode())] + splitter.flush()
    whole = "".join(chunks)
    expected = whole.split("\n")
    assert lines == expected[:-1] + ([expected[-1]] if expected[-1] else [])


def test_of_a_progress_bar_the_last_state_is_kept():
    splitter = LineSplitter()
    assert splitter.feed(b"\r 10%\r 50%") == []
    assert splitter.flush() == [" 50%"]
    assert splitter.feed(b"\r 90%\r100%\r\n") == ["100%"]


def test_a_flood_is_cut_and_counted(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = RateLimit(burst_bytes=100, bytes_per_second=10)
    assert len(limit.pass_through(["x" * 9] * 50)) == 10
    now[0] += 2.0
    passed = limit.pass_through(["y" * 9])
    assert passed[0].startswith("(40 lines dropped")
    assert passed[1] == "y" * 9


def test_python_c_and_children_are_captured_and_the_streams_restored(capfd):
    lines = []
    before = sys.stdout, sys.stderr
    with Capture(lambda new, _: lines.extend(new), keep=False, limit=wide()) as capture:
        print("python")
        ctypes.CDLL(None).puts(b"from c")
        os.write(2, b"descriptor\n")
        subprocess.run(["echo", "child"], check=True)
        for number in range(200):
            print(number)
    assert (sys.stdout, sys.stderr) == before
    print("afterwards")
    assert {"python", "from c", "descriptor", "child"} <= set(lines)
    assert list(capture.tail)[-1] in ("199", "from c")
    assert len(capture.tail) == TAIL_LINES
    assert capfd.readouterr().out == "afterwards\n"


def test_keep_copies_to_the_original_streams(capfd):
    with Capture(lambda *_: None, keep=True, limit=wide()):
        print("both")
    assert capfd.readouterr().err == "both\n"


def test_a_logging_handler_made_inside_still_works_outside():
    with Capture(lambda *_: None, keep=False, limit=wide()):
        handler = logging.StreamHandler(sys.stderr)
    errors = []
    handler.handleError = errors.append
    handler.emit(logging.LogRecord("x", 30, "f", 1, "later", None, None))
    assert errors == []


def test_a_line_without_an_end_is_shown_while_the_function_still_runs():
    lines = []
    with Capture(lambda new, _: lines.extend(new), keep=False, limit=wide()):
        os.write(1, b"waiting for input")
        while not lines:
            time.sleep(0.05)
        assert lines == ["waiting for input"]


def test_no_descriptor_is_left_open():
    def count():
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(5):
        with Capture(lambda *_: None, keep=False, limit=wide()):
            print("x")
    assert count() == before


def test_the_two_streams_are_told_apart_where_that_is_asked_for():
    lines = []
    with Capture(
        lambda new, stream: lines.extend((stream, line) for line in new), keep=False, limit=wide(), apart=True
    ) as capture:
        print("out")
        print("wrong", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo child; echo its error >&2"], check=True)
        os.write(2, b"without an end")
    assert [line for stream, line in lines if stream == "stdout"] == ["out", "child"]
    assert [line for stream, line in lines if stream == "stderr"] == ["wrong", "its error", "without an end"]
    assert sorted(capture.tail) == sorted(line for _, line in lines)
