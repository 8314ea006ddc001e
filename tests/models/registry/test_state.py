"""What events add up to: from all of them, or from a checkpoint and the rest, the same."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.documents.typed import Source, convert, encode, parse
from sparkdl.models.registry import model as module
from sparkdl.models.registry.event_log import Event
from sparkdl.models.registry.model import UnusableError
from sparkdl.models.registry.state import State, fold
from sparkdl.storage import sha256_hex

NOW = datetime.now(UTC)


class Memory:
    """Pages in memory, encoded as on a disk."""

    def __init__(self):
        self.pages, self.read = {}, []

    def get(self, page, kind):
        self.read.append(page)
        return convert(parse(self.pages[page], Source(page), nan=True), kind, Source(page))

    def put(self, value):
        data = encode(value, nan=True)
        self.pages[sha256_hex(data)] = data
        return sha256_hex(data)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    monkeypatch.setattr(module, "_KEPT_MOVES", 3)


def published(name, version, sequence, publication=None):
    publication = publication or f"{name}-{version}"
    return Event(
        kind="published", name=name, version=version, artifact=f"{version % 10}" * 64,
        metrics={"mae": float("nan") if version % 3 == 0 else 1.0 / version}, publication=publication,
        sequence=sequence, time=NOW,
    )  # fmt: skip


def possible(choice, events):
    """One more event that a registry could commit after others; None where the choice asks for what cannot be."""
    kind, name, number = choice
    state = fold([event.to_row() for event in events], str)
    there = [each.version for each in state.versions(name)]
    here = {"name": name, "sequence": len(events), "time": NOW}
    if kind == "published":
        return published(name, state.next_version(name), len(events), f"p{number}")
    if not there:
        return None
    version = there[number % len(there)]
    aliases = state.aliases(name)
    if kind == "aliased":
        return Event(kind=kind, alias="ab"[number % 2], version=version, **here)
    if kind == "deleted":
        return None if version in aliases.values() else Event(kind=kind, version=version, **here)
    alias = "ab"[number % 2]
    before = state.before(name, alias)
    return None if before is None else Event(kind=kind, alias=alias, version=before, **here)


def answers(state):
    """All that can be asked."""
    found = {}
    for name in "mn":
        versions = [(each.version, each.artifact, each.publication, each.aliases) for each in state.versions(name)]
        found[name] = {
            "versions": versions,
            "next": state.next_version(name),
            "aliases": state.aliases(name),
            "before": {alias: state.before(name, alias) for alias in state.aliases(name)},
            "moves": {alias: state.move(name, alias) for alias in state.aliases(name)},
            "publications": [
                (made := state.by_publication(name, f"p{number}")) and made.version for number in range(6)
            ],
            "summary": state.summary(name),
        }
    return {"names": state.names(), "count": state.count, "artifacts": state.artifacts(), "models": repr(found)}


KINDS = ("published", "published", "published", "aliased", "aliased", "rolled_back", "deleted")
CHOICES = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("mmn"), st.integers(0, 5)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(choices=CHOICES, every=st.integers(1, 9))
def test_a_state_that_went_through_checkpoints_answers_as_the_events_do(choices, every):
    events, pages, stored, count = [], Memory(), {}, 0
    for choice in choices:
        event = possible(choice, events)
        if event is not None:
            events.append(event)
    whole = fold([event.to_row() for event in events], str)
    state = State(str, pages)
    for position, event in enumerate(events):
        state.add(event)
        if position % every == every - 1:  # as those who commit do
            try:
                stored, count = state.save(), position + 1
            except UnusableError:
                stored, count = (
                    fold([each.to_row() for each in events[: position + 1]], str, pages).save(),
                    position + 1,
                )
            state = State(str, pages, count, stored)
    try:
        found = answers(state)
    except UnusableError:  # a rollback goes back behind what a checkpoint keeps
        assert max(len(model.aliases[alias].moves) for model in whole._models.values() for alias in model.aliases) > 3
        return
    assert found == answers(whole)


def saved(events):
    pages = Memory()
    state = fold([event.to_row() for event in events], str, pages)
    return pages, state.save(), len(events)


def test_of_many_versions_one_page_is_read_for_one_of_them():
    pages, stored, count = saved([published("m", number, number - 1) for number in range(1, 100)])
    for question, most in [
        (lambda state: state.get("m", 50), 2),
        (lambda state: state.next_version("m"), 1),
        (lambda state: state.get("m", 99), 1),
        (lambda state: state.by_publication("m", "m-70"), 3),
        (lambda state: state.by_publication("m", "none"), 2),
        (State.names, 0),
    ]:
        pages.read.clear()
        question(State(str, pages, count, stored))
        assert len(pages.read) <= most


def test_only_what_has_changed_is_written_again():
    pages, stored, count = saved([published(name, number, 0) for name in "mn" for number in range(1, 31)])
    before = set(pages.pages)
    state = State(str, pages, count, stored)
    state.add(published("m", 31, count))
    changed = state.save()
    assert changed["n"] == stored["n"]
    assert len(set(pages.pages) - before) == 1  # the head, with the newest versions
    state.add(published("m", 32, count + 1))
    state.add(published("m", 33, count + 2))
    state.save()
    assert len(set(pages.pages) - before) == 4  # another head, the newest versions before, their names


def test_a_rollback_behind_what_a_checkpoint_keeps_is_left_to_the_events():
    events = [published("m", number, number) for number in range(1, 9)]
    events += [Event(kind="aliased", name="m", alias="a", version=n, sequence=20 + n, time=NOW) for n in range(1, 9)]
    pages, stored, count = saved(events)
    state = State(str, pages, count, stored)
    assert state.aliases("m") == {"a": 8}
    assert state.before("m", "a") == 7
    for version in (7, 6):
        state.add(Event(kind="rolled_back", name="m", alias="a", version=version, sequence=30, time=NOW))
    assert state.aliases("m") == {"a": 6}
    with pytest.raises(UnusableError, match="last 3 moves"):
        state.before("m", "a")
    state.add(Event(kind="rolled_back", name="m", alias="a", version=2, sequence=31, time=NOW))
    with pytest.raises(UnusableError, match="last 3 moves"):
        state.aliases("m")


def test_pages_that_fit_nothing_are_not_believed():
    events = [published("m", number, number - 1) for number in (1, 2, 3)]
    events.append(Event(kind="aliased", name="m", alias="a", version=1, sequence=3, time=NOW))
    pages, stored, count = saved(events)
    head = json.loads(pages.pages[stored["m"][0]])

    def refused(question, **changes):
        other = pages.put({**head, **changes})
        with pytest.raises(UnusableError):
            question(State(str, pages, count, {"m": (other, 3)}))

    alias = head["aliases"]["a"]
    refused(lambda state: state.aliases("m"), name="n")
    refused(lambda state: state.aliases("m"), aliases={"b": alias})
    refused(lambda state: state.aliases("m"), aliases={"a": {**alias, "moves": [2]}})
    refused(lambda state: state.get("m", "a"), chunks=[])
    refused(lambda state: state.get("m", 1), chunks=[[0, 3, head["chunks"][0][2]]])
    refused(lambda state: state.get("m", 6), chunks=[[2, 2, head["chunks"][0][2]]])
    refused(lambda state: state.get("m", 3), newest=[json.loads(encode(published("m", 4, 0), nan=True))] * 2)
    other = pages.put([json.loads(encode(published("n", number, 0), nan=True)) for number in (1, 2)])
    refused(lambda state: state.get("m", 1), chunks=[[0, 2, other]])


def test_of_thousands_of_versions_and_models_a_refusal_names_a_few():
    whole = fold([published(f"m{n:04}", 1, n).to_row() for n in range(1000)], str)
    with pytest.raises(Exception, match="and 990 more: name one"):
        whole.get("other", 1)
    many = fold([published("m", n + 1, n).to_row() for n in range(1000)], str)
    with pytest.raises(Exception, match="only 1,000 of them up to 1000"):
        many.get("m", 2000)
