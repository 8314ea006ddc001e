"""Receipts come back as they were written, and nobody believes one whose place is being overwritten."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa
import pytest

from sparkdl.documents.typed import encode
from sparkdl.errors import IntegrityError
from sparkdl.pipeline.rows.window_receipt import WindowReceipt, transformed
from sparkdl.pipeline.spec import Transform
from sparkdl.pipeline.state.receipts import AssumedReceipts, Receipt, ReceiptTable, content_key, replacing
from sparkdl.storage import Storage
from sparkdl.tables.table import Table


@dataclass(frozen=True, kw_only=True)
class Made:
    rows: int


@pytest.fixture
def receipts_of(tmp_path):
    def make():
        return ReceiptTable(Table(str(tmp_path / "receipts")), Storage.of(tmp_path / "steps"), "run")

    return make


@pytest.mark.parametrize("other", [("shards", {"a": 2}), ("train", {"a": 1}), ("shards", {"a": 1, "b": None})])
def test_another_step_or_input_has_another_key(other):
    assert content_key("shards", {"a": 1}) != content_key(*other)


def test_keys_do_not_depend_on_the_order_of_names_at_any_depth():
    assert content_key("s", {"x": {"a": 1, "b": {"c": 1, "d": 2}}}) == content_key(
        "s", {"x": {"b": {"d": 2, "c": 1}, "a": 1}}
    )
    transforms = [Transform(function="m:f", arguments=arguments) for arguments in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert content_key("s", transforms[0]) == content_key("s", transforms[1])
    assert content_key("s", {"a": {"x", "y", "z"}}) == content_key("s", {"a": ["x", "y", "z"]})


def test_a_value_that_is_no_json_has_no_key():
    with pytest.raises(TypeError):
        content_key("s", {"a": object()})
    with pytest.raises(ValueError, match="not JSON"):
        content_key("s", {"a": float("nan")})


def test_receipts_come_back_in_order_and_are_replaced_one_by_one(receipts_of):
    receipts = receipts_of()
    assert receipts.of("score") == {}
    with replacing(receipts, "score", ["b", "a"]) as made:
        made |= {"b": ("1", Made(rows=1)), "a": ("2", Made(rows=2))}
    with replacing(receipts, "score", ["b"]) as made:
        made["b"] = ("3", Made(rows=3))
    for known in (receipts, receipts_of()):
        assert [(name, one.key, one.read(Made).rows) for name, one in known.of("score").items()] == [
            ("a", "2", 2), ("b", "3", 3),
        ]  # fmt: skip
        assert {one.run_id for one in known.of("score").values()} == {"run"}
        assert known.of("ingest") == {}


def test_receipts_that_are_assumed_are_known_to_nobody_else(receipts_of):
    receipts = receipts_of()
    receipts.keep("shards", "key", Made(rows=1))
    assumed = AssumedReceipts(receipts)
    before = assumed.of("shards")
    assumed.write([Receipt(step="shards", partition="a", key="1"), Receipt(step="train", partition="b", key="2")])
    assert [*assumed.of("shards")] == ["a", "key"]
    assert assumed.of("shards") is not before, "whoever keeps what follows from a mapping sees that it is another"
    assert assumed.result("shards", "key", Made) == Made(rows=1)
    for known in (receipts, receipts_of()):
        assert ([*known.of("shards")], known.of("train")) == (["key"], {})


def test_a_partition_that_is_cut_short_has_no_key_until_it_is_made_again(receipts_of):
    receipts = receipts_of()
    with replacing(receipts, "score", ["a", "b"]) as made:
        made |= {"a": ("1", Made(rows=1)), "b": ("2", Made(rows=2))}

    def killed():
        with replacing(receipts, "score", ["a", "c"]):
            assert [one.key for one in receipts_of().of("score").values()] == ["", "2"], "invalidated before the block"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    for known in (receipts, receipts_of()):
        assert [one.key for one in known.of("score").values()] == ["", "2"]
        assert known.of("score")["a"].read(Made) == Made(rows=1), "what was there is still told"


def test_what_was_made_for_a_key_is_found_again_and_a_damaged_document_is_not(receipts_of, caplog):
    receipts = receipts_of()
    assert receipts.result("train", "k", Made) is None
    receipts.keep("train", "k", Made(rows=1))
    assert receipts.result("train", "k", Made) == receipts_of().result("train", "k", Made) == Made(rows=1)
    receipts.document("train", "k").write_atomic(b'{"rows": "many"}')
    assert receipts_of().result("train", "k", Made) is None
    assert "the step is done again" in caplog.text
    again = receipts_of()
    again.keep("train", "k", Made(rows=2))
    assert again.result("train", "k", Made) == Made(rows=2)
    again.document("train", "k").delete()
    assert receipts_of().result("train", "k", Made) is None


def test_a_document_without_a_receipt_is_not_believed(receipts_of):
    receipts_of().document("train", "k").write_atomic(encode(Made(rows=1)))
    assert receipts_of().result("train", "k", Made) is None


def test_a_receipt_that_somebody_altered_is_refused(receipts_of, tmp_path):
    receipts_of().write([Receipt(step="ingest", partition="a", key="k", facts='{"rows": 1}')])
    table = Table(str(tmp_path / "receipts"))
    row = table.rows().to_pylist()[0] | {"facts": '{"rows": "none"}'}
    table.merge(pa.Table.from_pylist([row], schema=table.rows().schema), on=["step", "partition"])
    with pytest.raises(IntegrityError, match=r"the receipt of ingest a cannot be read.*rows"):
        receipts_of().of("ingest")["a"].read(Made)


def test_a_table_that_another_sparkdl_wrote_is_refused(receipts_of, tmp_path):
    Table(str(tmp_path / "receipts")).append(pa.table({"step": ["run"], "document": ["{}"]}))
    with pytest.raises(IntegrityError, match=r"have the columns step, document, and not step, partition, .*delete the"):
        receipts_of().of("ingest")


BOOKS = WindowReceipt(
    window="2026-03-02", fingerprint="f1", rules="r1", read=10, kept=6, quarantined=3, duplicates=1, source_rows=12,
    outcomes={"fare: positive": 3}, content="c1", unlabelled="u1", version=0, run_id="run",
)  # fmt: skip


def test_rows_of_a_window_come_back_as_they_were_counted(receipts_of):
    with replacing(receipts_of(), "ingest", [BOOKS.window]) as made:
        made[BOOKS.window] = ("k", BOOKS)
    assert receipts_of().of("ingest")[BOOKS.window].read(WindowReceipt) == BOOKS


def test_what_a_transform_left_out_or_added_is_said_of_all_windows_that_were_counted():
    uncounted, same = replace(BOOKS, source_rows=None), replace(BOOKS, source_rows=10)
    assert transformed([]) is None
    assert transformed([uncounted, same]) is None
    assert transformed([BOOKS, uncounted, same]) == (22, 20)
    assert transformed([replace(BOOKS, source_rows=4)]) == (4, 10)
    assert transformed([replace(BOOKS, source_rows=9), replace(BOOKS, source_rows=11)]) == (20, 20)  # not the same rows
