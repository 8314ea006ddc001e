"""Rows of the registry's table become events that fit together, or one error that names the column."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from sparkdl.errors import IntegrityError
from sparkdl.models.registry.events import SIGNED_EVENTS, Event, State

NOW = datetime.now(UTC)


def rows():
    events = [
        Event(kind="published", name="m", version=1, artifact="a" * 64, metrics={"mae": float("nan")}, publication="p"),
        Event(kind="aliased", name="m", alias="champion", version=1),
    ]
    return [event.stamped(position, NOW).to_row() for position, event in enumerate(events)]


def fold(rows):
    """What rows add up to, each of them looked at."""
    table = pa.Table.from_pylist(rows, schema=SIGNED_EVENTS)
    state = State(table, str)
    for name in state.names():
        state.versions(name)
        state.events(name)
    return state


def test_rows_come_back_as_events():
    state = State(pa.Table.from_pylist(rows(), schema=SIGNED_EVENTS).append_column("later", pa.nulls(2)), str)
    assert state.get("m", "champion").artifact == "a" * 64
    assert state.get("m", 1).metrics["mae"] != state.get("m", 1).metrics["mae"]
    assert [Event.from_row(row).to_row() for row in rows()] == rows()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"artifact": "../../outside"}, r"in \$.artifact"),
        ({"artifact": "/etc"}, r"in \$.artifact"),
        ({"artifact": None}, "has no artifact or time"),
        ({"time": None}, "has no artifact or time"),
        ({"kind": "renamed"}, r"in \$.kind"),
        ({"version": -1}, r"in \$.version"),
        ({"version": None}, r"in \$.version"),
        ({"metrics": '{"mae": "good"}'}, r"in \$.metrics"),
        ({"metrics": "[" * 100_000}, "nested|no JSON"),
        ({"parameters": '{"a": NaN}'}, "NaN is no number"),
        ({"version": 2}, "'aliased' of 'm' 1, which does not exist"),
    ],
)
def test_a_row_that_no_registry_writes_is_refused(change, message):
    first, second = rows()
    with pytest.raises(IntegrityError, match=f"^the registry's table of events cannot be read: .*({message})"):
        fold([first | change, second])


def test_events_that_contradict_each_other_are_refused():
    first, second = rows()
    deleted = Event(kind="deleted", name="m", version=1).stamped(2, NOW).to_row()
    for log, message in [
        ([first, first], "which exists"),
        ([second], "does not exist"),
        ([first, second, deleted], r"is what \['champion'\] point to"),
        ([first, second | {"alias": None}], "is given to no alias"),
        ([first, second | {"kind": "rolled_back"}], "which 'champion' never pointed to"),
    ]:
        with pytest.raises(IntegrityError, match=message):
            fold(log)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("name", pa.array([5, 5]), r"in \$.name, it is a int64"),
        ("version", pa.array([1, 1], pa.float32()), r"in \$.version, it is a float"),
        ("lineage", pa.array([7, 7]), r"in \$.lineage"),
        ("time", pa.array([1, 2]), r"in \$.time"),
        ("time", pa.array([0, 2**60], pa.timestamp("us", "UTC")), r"in \$.time, it is in no year from 1 to 9999"),
        ("reason", pa.array([b"\xff", b""]).view(pa.string()), "UTF8"),
    ],
)
def test_a_table_that_no_registry_writes_is_refused(name, column, message):
    table = pa.Table.from_pylist(rows(), schema=SIGNED_EVENTS)
    with pytest.raises(IntegrityError, match=message):
        State(table.set_column(table.column_names.index(name), name, column), str)
    if name != "reason":
        with pytest.raises(IntegrityError, match=f"has no columns .'{name}'"):
            State(table.drop_columns([name]), str)
