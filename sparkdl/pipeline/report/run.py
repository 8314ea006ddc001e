"""How a run went: steps and their times, places, settings, versions.

Enters: a record. Leaves: sections of the report.
"""

from __future__ import annotations

import json

from sparkdl.pipeline.report.charts import bar
from sparkdl.pipeline.report.html import Html, tag
from sparkdl.pipeline.report.tables import facts, number, section, table
from sparkdl.pipeline.state.record import RunRecord

__all__ = ["environment", "places", "steps"]


def steps(record: RunRecord) -> Html | None:
    """Each step with its time; what was kept of earlier runs is said to be."""
    spent: dict[str, float] = {}
    count: dict[str, int] = {}
    kept: dict[str, int] = {}
    for note in record.steps:
        if note.name == "run":
            continue
        spent[note.name] = max(spent.get(note.name, 0.0), note.seconds)  # windows are scored together
        count[note.name] = count.get(note.name, 0) + 1
        kept[note.name] = kept.get(note.name, 0) + note.kept
    if not spent:
        return None
    most = max(spent.values()) or 1.0
    lines = [
        (name, _state(count[name], kept[name]), f"{seconds:.1f} s", bar(seconds / most))
        for name, seconds in spent.items()
    ]
    other = record.seconds - sum(spent.values())
    if other >= 0.05:
        words = "Spark's start, looking around, records"
        lines.append(("everything else", words, f"{other:.1f} s", bar(other / most)))
    return section("Steps", table(("step", "", "time", ""), lines))


def _state(count: int, kept: int) -> str:
    if kept == count:
        return "kept from an earlier run"
    return "done" if not kept else f"{count - kept:,} of {count:,} done, the others kept"


def places(record: RunRecord) -> Html | None:
    """What lies where."""
    return section("Places", facts(record.places.items())) if record.places else None


def environment(record: RunRecord) -> Html | None:
    """Settings as they held, without secrets, and versions of the code."""
    parts = []
    for name, content in (("Settings", record.settings), ("Versions", record.versions)):
        if content:
            text = json.dumps(content, indent=1, default=str, ensure_ascii=False)
            parts.append(tag("details", tag("summary", name), tag("pre", text)))
    code = f"exit code {number(record.exit_code)}"
    return section("Settings and versions", tag("p", f"The run ended as {record.outcome!r}, {code}."), parts)
