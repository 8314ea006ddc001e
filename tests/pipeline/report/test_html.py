"""Whatever a text holds, it does not become markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.pipeline.report.html import shown, tag


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


@given(st.text())
def test_a_text_stays_a_text_between_tags_and_in_attributes(text):
    seen = Seen(tag("p", text, title=text).text)
    assert seen.tags == ["p"]
    assert [name for name, _ in seen.attributes] == ["title"]
    if text.isprintable():
        assert "".join(seen.texts) == text
        assert seen.attributes[0][1] == text


@given(st.text(alphabet=st.characters(codec=None)))
def test_every_text_can_be_written(text):
    tag("p", text).text.encode()


@pytest.mark.parametrize("hidden", ["\u202e", "\x00", "\x1b", "\ud800", "\u2066"])
def test_characters_that_hide_or_turn_around_are_shown_by_their_codes(hidden):
    assert tag("td", f"a{hidden}b").text == f"<td>a\\u{ord(hidden):04x}b</td>"


def test_what_is_cut_is_said():
    assert shown("x" * 300).endswith("… (300 characters)")
    assert shown("short") == "short"


def test_what_is_none_is_left_out():
    assert tag("p", None, ["a", None, [1, 2.5]], title=None).text == "<p>a12.5</p>"
