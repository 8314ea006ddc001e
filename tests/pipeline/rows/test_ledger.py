"""The books of windows balance, and are found again as they were written."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from sparkdl.errors import DataError, IntegrityError
from sparkdl.pipeline.rows.ledger import Ledger, WindowBooks, transformed
from sparkdl.tables.table import Table

BOOKS = WindowBooks(
    window="2026-03-02", fingerprint="f1", rules="r1", read=10, kept=6, quarantined=3, duplicates=1, source_rows=12,
    outcomes={"fare: positive": 3}, content="c1", unlabelled="u1", version=0, run_id="run",
)  # fmt: skip


@pytest.fixture
def ledger(tmp_path):
    return Ledger(Table(str(tmp_path / "ledger")))


def test_there_is_nothing_before_the_first_window(ledger):
    assert ledger.windows() == {}


def test_windows_come_back_in_order_and_are_replaced_one_by_one(ledger):
    later = replace(BOOKS, window="2026-03-03")
    ledger.write([later, BOOKS])
    assert list(ledger.windows().values()) == [BOOKS, later]
    again = replace(BOOKS, fingerprint="f2", read=11, kept=7)
    ledger.write([again])
    assert list(ledger.windows().values()) == [again, later]


@pytest.mark.parametrize("read", [9, 11])
def test_books_that_do_not_balance_are_refused_whole(ledger, read):
    with pytest.raises(DataError, match=rf"2026-03-02 has {read} rows that were read, and 10 of them"):
        ledger.write([replace(BOOKS, window="2026-03-03"), replace(BOOKS, read=read)])
    assert ledger.windows() == {}


def test_a_row_that_somebody_altered_is_refused(ledger):
    ledger.write([BOOKS])
    row = ledger.table.rows().to_pylist()[0] | {"kept": -1}
    ledger.table.merge(pa.Table.from_pylist([row], schema=ledger.table.rows().schema), on=["window"])
    with pytest.raises(IntegrityError, match=r"the ledger cannot be read.*kept"):
        ledger.windows()


def test_a_ledger_of_an_earlier_sparkdl_is_read_and_written_on(ledger):
    ledger.write([BOOKS])
    earlier = ledger.table.rows().drop_columns(["source_rows", "unlabelled"])
    older = Ledger(Table(f"{ledger.table.uri}-of-an-earlier-sparkdl"))
    older.table.append(earlier)
    assert list(older.windows().values()) == [replace(BOOKS, source_rows=None, unlabelled="c1")]
    later = replace(BOOKS, window="2026-03-03")
    older.write([later])
    assert list(older.windows().values()) == [replace(BOOKS, source_rows=None, unlabelled="c1"), later]


def test_what_a_transform_left_out_or_added_is_said_of_all_windows_that_were_counted():
    uncounted, same = replace(BOOKS, source_rows=None), replace(BOOKS, source_rows=10)
    assert transformed([]) is None
    assert transformed([uncounted, same]) is None
    assert transformed([BOOKS, uncounted, same]) == (22, 20)
    assert transformed([replace(BOOKS, source_rows=4)]) == (4, 10)
    assert transformed([replace(BOOKS, source_rows=9), replace(BOOKS, source_rows=11)]) == (20, 20)  # not the same rows
