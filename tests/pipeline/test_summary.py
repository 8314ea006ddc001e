"""Windows in a few words."""

from __future__ import annotations

import pytest

from sparkdl.pipeline.summary import _span


@pytest.mark.parametrize(
    ("windows", "text"),
    [
        ([], "no window"),
        (["all"], "window all"),
        (["2026-03-01", "2026-03-02", "2026-03-04"], "3 windows 2026-03-01 to 2026-03-04"),
        (["2026-03-01", "2026-03-02", "none"], "2 windows 2026-03-01 to 2026-03-02 and rows without a time"),
        (["2026-03-01", "none"], "window 2026-03-01 and rows without a time"),
        (["none"], "rows without a time"),
    ],
)
def test_windows_in_a_few_words(windows, text):
    assert _span(windows) == text
