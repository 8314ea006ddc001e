"""What docs/distribute.md says was measured is what docs/distribute.json holds; its pictures are there and small."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/bench"))
    import pages

    yield pages
    del sys.modules["pages"]


def test_no_figure_of_a_table_was_typed(pages):
    lines = json.loads(pages.RESULTS.read_text())
    page = pages.PAGE.read_text()
    assert pages.filled(page, lines) == page
    assert {name for _, name, _ in pages.MARKED.findall(page)} == pages.TABLES.keys()


def test_another_result_changes_the_page(pages):
    lines = json.loads(pages.RESULTS.read_text())
    page = pages.PAGE.read_text()
    for workload in pages.WORKLOADS:
        name = {"distribute": "rows_per_second", "slow_link": "steps", "compile": "compilation_seconds"}
        figure = name.get(workload, "seconds")
        own = [line for line in lines if line["workload"] == workload]
        changed = [line | {figure: 123456} if figure in line else line for line in own]
        assert pages.filled(page, pages.taken_over(lines, changed)) != page


def test_its_pictures_are_small():
    names = re.findall(r"\]\((\w+\.png)\)", (DOCS / "distribute.md").read_text())
    assert len(names) == 3
    for name in names:
        assert 10_000 < (DOCS / name).stat().st_size < 100_000
