"""Makes the helpers of this room importable, and lends tests the driver's clock and what the driver has heard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))  # for hosts and launch_helpers

from launch_helpers import Clock

from sparkdl.launch.driver import supervisor
from sparkdl.launch.driver.channel import Channel


@pytest.fixture
def clock(monkeypatch):
    """The clock by which the driver sees that ranks are late: set forward, it makes them late at once."""
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "_ANSWER_SECONDS", 60.0)  # late ranks are asked where they are
    return clock


@pytest.fixture
def heard(monkeypatch, tmp_path):
    """A folder with a file for each slot and kind of report that the driver has had: see ``until_heard``."""
    folder = tmp_path / "heard"
    folder.mkdir()
    following = Channel.next

    def noting(channel, timeout_seconds):
        report = following(channel, timeout_seconds)
        if report is not None and report.slot is not None:
            (folder / f"{report.slot}-{report.kind}").touch()
        return report

    monkeypatch.setattr(Channel, "next", noting)
    return folder
