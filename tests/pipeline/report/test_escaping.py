"""Whatever a text holds, it does not become markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.pipeline.report import report_html
from sparkdl.pipeline.report.report import shown
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Trained


class Seen(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.attributes = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def page_with(text):
    """A page with a text in a paragraph, in a table, in a figure's title, legend and attributes, and as a setting."""
    record = RunRecord(pipeline="shop", run_id="r", started="2026-03-20T12:00:00+00:00")
    record.end("stopped", "done")
    record.places, record.settings = {text: text}, {text: text}
    history = ({"epoch": 1, text: 1.0, f"val_{text}": 2.0},)
    record.trained = Trained(
        bundle="b", content_hash="c", history=history, metrics={}, epochs=1, best_epoch=None, steps=1, rows=1, ranks=1,
        backend=text,
    )  # fmt: skip
    return report_html(record)


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1, max_size=80))
def test_a_text_stays_a_text_between_tags_and_in_attributes(text):
    plain, seen = Seen(page_with("plain")), Seen(page_with(text))
    assert seen.tags == plain.tags
    assert [name for name, _ in seen.attributes] == [name for name, _ in plain.attributes]
    if text.isprintable():
        assert "".join(seen.texts).count(text) >= 4
        assert ("aria-label", f"{text} by epoch") in seen.attributes


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.characters(codec=None)))
def test_every_text_can_be_written(text):
    page_with(text).encode()


@pytest.mark.parametrize("hidden", ["\u202e", "\x00", "\x1b", "\ud800", "\u2066"])
def test_characters_that_hide_or_turn_around_are_shown_by_their_codes(hidden):
    page = page_with(f"a{hidden}b")
    assert hidden not in page
    assert f"<td>a\\u{ord(hidden):04x}b</td>" in page
    assert f'aria-label="a\\u{ord(hidden):04x}b by epoch"' in page


def test_what_is_cut_is_said():
    assert shown("x" * 300).endswith("… (300 characters)")
    assert shown("short") == "short"


def test_what_is_none_is_left_out():
    page = page_with("plain")
    assert "None" not in page
    assert "role=" in page  # of the figure; a bar in a table has none
    assert all(value is not None for _, value in Seen(page).attributes)
