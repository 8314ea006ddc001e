"""What events add up to: at once, or one after the other, the same."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.models.registry.events import SIGNED_EVENTS, Event, State

NOW = datetime.now(UTC)


def rows_of(events):
    return pa.Table.from_pylist([event.to_row() for event in events], schema=SIGNED_EVENTS)


def fold(events):
    return State(rows_of(events), str)


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
    state = fold(events)
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
    return {"names": state.names(), "count": state.count, "models": repr(found)}


KINDS = ("published", "published", "published", "aliased", "aliased", "rolled_back", "deleted")
CHOICES = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("mmn"), st.integers(0, 5)), max_size=40)


def plain_answers(events, name):
    """Versions and aliases by the plainest rules, for what no fold is needed."""
    numbers = [event.version for event in events if event.name == name and event.kind == "published"]
    deleted = {event.version for event in events if event.name == name and event.kind == "deleted"}
    pointing = {event.alias: event.version for event in events if event.name == name and event.alias}
    return [number for number in numbers if number not in deleted], pointing, max(numbers, default=0) + 1


@settings(max_examples=100, deadline=None)
@given(choices=CHOICES)
def test_a_state_that_grew_event_by_event_answers_as_one_of_all_events_in_any_order(choices):
    events, grown = [], fold([])
    for choice in choices:
        event = possible(choice, events)
        if event is not None:
            events.append(event)
            grown.add(rows_of([event]))
    assert answers(grown) == answers(fold(events[::-1]))
    for name in "mn":
        versions, aliases, following = plain_answers(events, name)
        assert [version.version for version in grown.versions(name)] == versions
        assert (grown.aliases(name), grown.next_version(name)) == (aliases, following)
        assert [event.sequence for event in grown.events(name)] == [
            event.sequence for event in events if event.name == name
        ]


def test_a_rollback_goes_back_as_far_as_the_moves_do():
    events = [published("m", number, number) for number in range(1, 400)]
    events += [
        Event(kind="aliased", name="m", alias="a", version=n, sequence=1000 + n, time=NOW) for n in range(1, 400)
    ]
    events += [Event(kind="rolled_back", name="m", alias="a", version=2, sequence=2000, time=NOW)]
    assert fold(events).aliases("m") == {"a": 2}
    assert fold(events).before("m", "a") == 1


def test_of_thousands_of_versions_and_models_a_refusal_names_a_few():
    whole = fold([published(f"m{n:04}", 1, n) for n in range(1000)])
    with pytest.raises(Exception, match="and 990 more: name one"):
        whole.get("other", 1)
    many = fold([published("m", n + 1, n) for n in range(1000)])
    with pytest.raises(Exception, match="only 1,000 of them up to 1000"):
        many.get("m", 2000)
