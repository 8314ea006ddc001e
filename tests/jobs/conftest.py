"""The jobs are scripts beside the library, not a part of it: put the folder that holds them on the path."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture
def small(tmp_path):
    """Settings for five small days, of which the second arrives as CSV: two train, one validates, one is scored."""
    from jobs.settings import EtlSettings, EventSettings, PathSettings, Settings

    return Settings(
        paths=PathSettings(root=str(tmp_path / "data")),
        events=EventSettings(rows=2000, days=4, late_day=1),
        etl=EtlSettings(training_days=2),
    )


@pytest.fixture
def with_events():
    """Return ``with_events(settings, rows=..., ...)``: the same settings, another section ``events``."""

    def changed(settings, **changes):
        return replace(settings, events=replace(settings.events, **changes))

    return changed
