"""The report of a run stands alone, says first what came of it, and shows what the record holds."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from sparkdl.documents.typed import encode
from sparkdl.errors import DataError
from sparkdl.pipeline.report import report_html, write_report
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.storage import Storage

HOSTILE = "</td></table><script>alert(1)</script><img src=x onerror=alert(2)>\" ' & \u202e"


class Page(HTMLParser):
    """What a browser sees of a page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts, self.unclosed = [], set(), [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
@pytest.mark.parametrize("theirs", [None, 0.3])
def test_a_report_is_one_whole_page_that_loads_nothing(record_of_task, task, theirs):
    page = Page(report_html(record_of_task(task, theirs=theirs)))
    assert not page.open
    assert not page.tags & {"script", "img", "link", "iframe", "object", "embed", "form", "base", "a"}
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "style", "action", "srcdoc"}
    assert not [name for name in names if name.startswith("on")]


def test_the_policy_lets_the_pages_own_style_in_and_nothing_else(record_of_task):
    text = report_html(record_of_task())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#x27;", "'")
    style = re.search(r"<style>(.*)</style>", text, re.DOTALL)[1]
    wanted = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{wanted}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style
    assert "@import" not in style


def poisoned(value):
    """The same JSON value with the hostile text in every text and every free key."""
    if isinstance(value, dict):
        return {key: poisoned(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) else value


def test_no_text_of_a_record_becomes_markup(record_of_task):
    record = record_of_task("binary", theirs=0.3)
    plain = Page(report_html(record))
    kept = {"outcome": record.outcome}
    fields = {name: poisoned(value) for name, value in vars(record).items() if isinstance(value, str | dict | list)}
    for name, value in {**fields, **kept}.items():
        setattr(record, name, value)
    slices = record.evaluated.slices["shop"]
    record.evaluated = replace(
        record.evaluated,
        label=HOSTILE,
        decision=replace(record.evaluated.decision, reason=HOSTILE),
        slices={HOSTILE: {f"{name}{HOSTILE}": one for name, one in slices.items()}},
    )
    record.trained = replace(record.trained, backend=HOSTILE, history=({HOSTILE: 1.0, f"val_{HOSTILE}": 2.0},))
    record.books = [replace(each, window=HOSTILE, outcomes={HOSTILE: 3}) for each in record.books]
    record.predictions, record.places = {HOSTILE: 3}, {HOSTILE: HOSTILE}
    page = Page(report_html(record))
    assert page.tags <= plain.tags
    assert {name for name, _ in page.attributes} <= {name for name, _ in plain.attributes}
    assert page.text.count("<script>alert(1)</script>") > 10
    assert "\u202e" not in page.text


def test_the_verdict_comes_first(record_of_task):
    record = record_of_task(theirs=0.3)
    page = Page(report_html(record))
    said = page.text
    assert said.index("Version 2 is the champion now") < said.index("Challenger and champion") < said.index("Steps")
    metric = record.evaluated.decision.challenger.values["rmse"]
    assert f"{metric:,.4g}" in said
    assert "95 % confidence" in said


def test_a_model_that_was_not_promoted_says_who_stays(record_of_task):
    said = Page(report_html(record_of_task(mine=0.3, theirs=0.8))).text
    assert "Version 2 was not promoted" in said
    assert "The champion is version 1, as before." in said


def test_a_run_that_failed_tells_the_error_and_how_far_it_came(record_of_task):
    record = record_of_task()
    record.trained = record.evaluated = None
    record.predictions, record.model = {}, {"champion": 1}
    record.fail(DataError("no row is left"))
    said = Page(report_html(record)).text
    for text in ("The run was refused", "DataError: no row is left.", "It came as far as features, train", "version 1"):
        assert text in said


def test_a_run_that_ended_at_once_has_a_report(record_of_task):
    record = RunRecord(pipeline="shop", run_id="r", started="2026-03-20T12:00:00+00:00")
    record.fail(KeyboardInterrupt())
    said = Page(report_html(record)).text
    assert "The run was interrupted" in said
    assert "It ended before any step was done" in said


def test_rows_are_shown_by_window_and_reasons_largest_first(record_of_task):
    said = Page(report_html(record_of_task())).text
    assert "770 rows read = 700 kept + 49 quarantined + 21 duplicates, in 7 windows." in said
    assert said.index("positive") < said.index("known")
    assert "2026-03-05" in said
    assert "late" in said


def test_of_many_windows_the_newest_are_shown_and_the_others_counted(record_of_task):
    record = record_of_task()
    record.books = [replace(record.books[0], window=f"2026-03-01T{n:04d}") for n in range(1000)]
    record.windows["ingested"] = [each.window for each in record.books]
    text = report_html(record)
    assert "960 earlier windows are not shown." in text
    assert "T0999" in text
    assert len(text) < 100_000


def test_steps_that_were_kept_are_shown_as_kept(record_of_task):
    said = Page(report_html(record_of_task())).text
    assert re.search(r"features\s+kept from an earlier run", said)
    assert re.search(r"train\s+done\s+4.0 s", said)


def test_a_record_that_an_older_version_wrote_is_shown(record_of_task, tmp_path):
    record = record_of_task("binary")
    old = json.loads(encode(record))
    for name in ("books", "versions"):
        del old[name]
    file = Storage.of(tmp_path).child("record.json")
    file.write_atomic(json.dumps(old).encode())
    write_report(RunRecord.load(file), Storage.of(tmp_path).child("report.html"))
    said = Page((tmp_path / "report.html").read_text()).text
    assert "770 rows read" in said
    assert "Version 2 is the champion now, the first one" in said
