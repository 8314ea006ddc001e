"""A pipeline for a table that nobody has described: every choice, its reason, and a file that is valid as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from sparkdl.cli import main
from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.features.spec import Category, DateParts, Ids, Image, Number, Text, Vector
from sparkdl.pipeline import Pipeline
from sparkdl.pipeline.init import init
from sparkdl.pipeline.recipe import with_recipe
from sparkdl.pipeline.sources.files import partition_types
from sparkdl.pipeline.spec import HashSplit, TimeSplit
from sparkdl.tables.table import Table
from tests.tables import delta_log

NOW = datetime(2026, 6, 1, tzinfo=UTC)
ROWS = 400


def png(value):
    import io

    from PIL import Image as Pictures

    stream = io.BytesIO()
    Pictures.fromarray(np.full((12, 10), value, np.uint8)).save(stream, format="PNG")
    return stream.getvalue()


def customers(rows=ROWS):
    """A column of every kind, some of which tell nothing or too much."""
    random = np.random.default_rng(0)
    days = np.datetime64("2026-03-01T08") + (np.arange(rows) * 60 // rows * 24).astype("timedelta64[h]")
    churned = random.random(rows) < 0.3
    words = np.array(["the", "service", "was", "slow", "and", "good", "very", "bad", "fine", "thanks"])
    return {
        "customer_id": np.arange(rows) + 1000,
        "age": pa.array([None if n % 50 == 0 else float(n % 60 + 18) for n in range(rows)]),
        "account_age": random.lognormal(4, 1.5, rows).astype(np.int64),
        "country": random.choice(["DE", "FR", "PT"], rows, p=[0.8, 0.15, 0.05]),
        "store_id": random.integers(0, 12, rows),
        "zip_code": random.integers(10, 20, rows),
        "is_member": random.random(rows) < 0.5,
        "bought": [[int(n) for n in random.integers(0, 90, random.integers(0, 6))] for _ in range(rows)],
        "place": [[float(n) for n in random.normal(size=3)] for _ in range(rows)],
        "picture": [png(n % 250) for n in range(rows)],
        "review": [" ".join(random.choice(words, 7)) for _ in range(rows)],
        "seen_at": pa.array(days.astype("datetime64[us]"), pa.timestamp("us", "UTC")),
        "token": [f"t{n:x}x{n * 7919 % 1009}" for n in range(rows)],
        "paid_on": [f"{1 + day % 28:02d}.{1 + day % 12:02d}.2026 08:30" for day in range(rows)],
        "source": ["web"] * rows,
        "nothing": pa.nulls(rows, pa.string()),
        "nested": [{"a": 1}] * rows,
        "churn_text": np.where(churned, "left", "stayed"),
        "left_because": pa.array([random.choice(["price", "move"]) if gone else None for gone in churned]),
        "churned": churned.astype(np.int64),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The pipeline of all kinds of columns, and the text of its file."""
    folder = tmp_path_factory.mktemp("init")
    pq.write_table(pa.table(customers()), folder / "customers.parquet")
    done = init(str(folder / "churn"), str(folder / "customers.parquet"), now=NOW)
    return done, (folder / "churn" / "churn.yaml").read_text()


def features_of(done):
    return done.file.spec.features


def test_every_kind_of_column_becomes_a_feature_of_its_type(written):
    found = features_of(written[0])
    assert found["age"] == Number(fill="mean", missing_indicator=True)
    assert found["account_age"] == Number(log=True)
    assert found["country"] == found["store_id"] == found["zip_code"] == found["is_member"] == Category()
    assert found["bought"] == Ids(max_length=8)
    assert found["place"] == Vector(size=3)
    assert found["picture"] == Image(height=12, width=10, channels=1)
    assert found["review"] == Text(max_length=8)
    assert found["seen_at"] == DateParts(parts=("weekday", "hour"))


def test_columns_that_tell_nothing_are_left_out_and_those_that_tell_too_much_are_marked_with_the_reason(written):
    done, text = written
    assert list(done.suspects) == ["churn_text", "left_because"]
    assert ("WARNING", "churn_text, left_because tell the label nearly alone: take out of the file what is known only "
            "afterwards") in done.lines()  # fmt: skip
    left = ["customer_id", "token", "paid_on", "source", "nothing", "nested"]
    assert not set(left) & set(features_of(done))
    for name, reason in {
        "customer_id": "the key",
        "token": "nearly every row has its own, 400 values in 400 rows: an id",
        "paid_on": "dates as text, such as 01.01.2026: with source.kind=sql, to_timestamp(`paid_on`, ...) makes a "
        "column for source.time",
        "source": "one value, 'web', in every row with a label that was looked at",
        "nothing": "missing in every row with a label that was looked at",
        "nested": "struct<a: int64>: take what you need of it in transform",
    }.items():
        assert any(line.startswith(f"  # {name}  # {reason}") for line in text.splitlines()), (name, text)
    for name in done.suspects:
        assert "# WARNING, predicts churned alone (auc 1): is it the answer in other words, or known only" in text
        assert features_of(done)[name] == Category()


def test_key_time_label_and_split_are_found_and_explained(written):
    done, text = written
    spec = done.file.spec
    assert spec.source.key == ("customer_id",)
    assert "key: customer_id  # counted: 400 rows, 400 different values, none missing" in text
    assert spec.source.time == "seen_at"
    assert isinstance(spec.split, TimeSplit)
    assert (spec.split.validate, spec.split.score) == ("7 days", "3 days")
    assert spec.label["churned"].type == "binary"
    assert set(spec.expect) == {"key is there"}
    assert spec.report.slices == ("country", "is_member")
    assert "account_age: {type: number, log: true}  # " in text
    assert "skewed (" in text


def test_what_was_written_is_sound_and_is_planned_without_a_change(written, capsys):
    done, _ = written
    file = f"{done.folder}/churn.yaml"
    assert main(["check", file]) == 0
    assert main(["plan", file]) == 0
    assert "note" not in capsys.readouterr().out
    assert sorted(path.name for path in Path(done.folder).iterdir()) == sorted(done.files)


def test_the_stub_works_as_it_is_and_its_test_passes(written):
    done, _ = written
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", done.folder]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=done.folder)
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout
    Pipeline.load(f"{done.folder}/churn.yaml", ["model=churn_model:network"])


def test_an_address_is_no_folder_that_init_writes(written):
    table = f"{written[0].folder}/../customers.parquet"
    with pytest.raises(ConfigError, match=r"s3://bucket/churn is no folder of this machine, where init writes"):
        init("s3://bucket/churn", table)


def test_nothing_that_is_there_is_touched(written, tmp_path, capsys):
    (tmp_path / "churn").mkdir()
    table = f"{written[0].folder}/../customers.parquet"
    assert main(["init", str(tmp_path / "churn"), "--from", table]) == 1
    assert "is there already, and init overwrites nothing" in capsys.readouterr().err
    assert list((tmp_path / "churn").iterdir()) == []
    for name in ("no name", "..", "-x"):
        with pytest.raises(ConfigError, match=r"cannot be the name|is there already"):
            init(str(tmp_path / name), table)


HOSTILE = [
    "a: b", "- x", "#c", "ü ö", "key", "y", "no", "1e3", "null", "a, b", "I1..I3", "`tick`", 'q"uote', "it's",
    "new\nline", "${HOME}", "{x: 1}", "a.b", "\\", "  padded", "@at", "numbers", "x] }\nmodel: os:system", "%TAG",
    "!!python/name:a", "emoji 🙂", "tab\tbed", "\u2028",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["parquet", "csv", "delta", "json"])
def test_names_that_a_stranger_chose_stay_names(tmp_path, kind):
    random = np.random.default_rng(1)
    own = [name for name in HOSTILE if not (kind == "delta" and set(name) & set(" ,;{}()\n\t="))]
    own = own if kind != "csv" else [name for name in own if "\n" not in name and name != "  padded"]
    columns = {name: random.normal(size=120).round(3) for name in own}
    columns["${la'b`el: x}" if kind != "delta" else "${la'b`el}"] = random.normal(size=120)
    label = list(columns)[-1]
    place = str(tmp_path / f"rows.{kind}")
    if kind == "parquet":
        pq.write_table(pa.table(columns), place)
    elif kind == "csv":
        pd.DataFrame(columns).to_csv(place, index=False)
    elif kind == "json":
        rows = pd.DataFrame(columns).to_dict("records")
        Path(place).write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    else:
        Table(place).append(pa.table(columns))
    done = init(str(tmp_path / "hostile"), place, label)
    spec = done.file.spec
    assert {options.source(name) for name, options in spec.features.items()} == set(own)
    assert list(spec.label) == [label]
    assert spec.model.factory is None
    text = (tmp_path / "hostile" / "hostile.yaml").read_text()
    assert yaml.safe_load(text).keys() <= {
        "name", "root", "source", "expect", "features", "label", "split", "train", "publish", "score", "report",
    }  # fmt: skip
    assert Pipeline.load(tmp_path / "hostile" / "hostile.yaml").check() == ""
    assert "label is a number" not in spec.expect, "Spark puts its own variables in the place of ${...}"


@pytest.mark.parametrize(
    ("values", "kind", "options"),
    [
        ([True, False], "binary", {}),
        ([0, 1], "binary", {}),
        ([1, 2], "binary", {"positive": 2}),
        (["yes", "no"], "binary", {"positive": "yes"}),
        (["a", "b", "a"], "binary", {"positive": "b"}),
        ([0, 1, 2], "multiclass", {"classes": (0, 1, 2)}),
        (["a", "b", "c"], "multiclass", {"classes": ("a", "b", "c")}),
        ([3, 5, 9, 11], "regression", {}),
        ([0.25, 1.5, 2.5], "regression", {}),
        ([0.0, 1.0], "binary", {}),
    ],
)
def test_the_type_of_a_label_is_that_of_its_values(tmp_path, values, kind, options):
    rows = (values * 200)[:300]
    pq.write_table(pa.table({"x": np.random.default_rng(0).normal(size=300), "result": rows}), tmp_path / "t.parquet")
    spec = init(str(tmp_path / "p"), str(tmp_path / "t.parquet")).file.spec
    label = spec.label["result"]
    assert label.type == kind
    for name, value in options.items():
        assert getattr(label, name) == value
    assert (spec.transform is not None) == (kind == "binary" and isinstance(values[0], float))


def test_a_label_is_guessed_by_name_then_by_place_and_what_is_said_wins(tmp_path):
    random = np.random.default_rng(0)
    columns = {name: random.normal(size=50) for name in ("a", "Target", "b")}
    pq.write_table(pa.table({**columns, "id": np.arange(50)}), tmp_path / "t.parquet")
    table = str(tmp_path / "t.parquet")
    assert list(init(str(tmp_path / "p1"), table).file.spec.label) == ["Target"]
    assert list(init(str(tmp_path / "p2"), table, "b").file.spec.label) == ["b"]
    with pytest.raises(SchemaError, match="--label targt: there is no such column: write Target"):
        init(str(tmp_path / "p3"), table, "targt")
    del columns["Target"]
    pq.write_table(pa.table({**columns, "id": np.arange(50)}), tmp_path / "t.parquet")
    assert list(init(str(tmp_path / "p4"), table).file.spec.label) == ["b"]
    pq.write_table(pa.table({**columns, "y": [1] * 50}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="the label 'y' is 1 in every row"):
        init(str(tmp_path / "p5"), table, "y")
    assert not list(tmp_path.glob("p[35]"))


def test_names_that_predictions_have_are_neither_key_nor_kept(tmp_path):
    random = np.random.default_rng(0)
    columns = {"run_id": np.arange(300) * 7, "a": random.normal(size=300), "prediction": random.normal(size=300)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    spec = init(str(tmp_path / "p1"), str(tmp_path / "t.parquet"), "prediction").file.spec
    assert (spec.source.key, spec.score.keep) == ((), ())
    pq.write_table(pa.table({**columns, "order_id": np.arange(300) * 9}), tmp_path / "t.parquet")
    assert init(str(tmp_path / "p2"), str(tmp_path / "t.parquet"), "a").file.spec.source.key == ("order_id",)


def test_a_label_with_the_name_of_an_input_is_refused_before_anything_is_written(tmp_path):
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=300), "categories": random.choice(["red", "green"], 300)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert list(init(str(tmp_path / "p1"), str(tmp_path / "t.parquet"), "categories").file.spec.label) == ["categories"]
    pq.write_table(pa.table({**columns, "z": random.choice(["a", "b", "c"], 300)}), tmp_path / "t.parquet")
    with pytest.raises(SchemaError, match="the label 'categories' has the name of an input of the model, in which"):
        init(str(tmp_path / "p2"), str(tmp_path / "t.parquet"), "categories")
    assert not (tmp_path / "p2").exists()


@pytest.mark.parametrize("turned", [False, True])
def test_a_column_that_is_named_like_a_part_of_a_date_is_a_feature_of_its_own(tmp_path, turned):
    random, rows = np.random.default_rng(0), 600
    days = np.datetime64("2025-01-01") + np.arange(rows) % 500
    columns = {
        "order_date": pa.array(days.astype("datetime64[D]")),
        "order_date_weekday": random.choice(["Mon", "Tue", "Wed"], rows),
        "y": random.normal(size=rows),
    }
    names = sorted(columns, reverse=turned)
    pq.write_table(pa.table({name: columns[name] for name in names}), tmp_path / "t.parquet")
    features = init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), "y", now=NOW).file.spec.features
    given = {name: options.column for name, options in features.items()}
    second = "order_date" if turned else "order_date_weekday"
    first = "order_date_weekday" if turned else "order_date"
    assert given == {first: None, f"{second}_1": second}


def test_a_key_is_counted_over_all_rows_and_not_guessed_from_a_sample(tmp_path, monkeypatch):
    from sparkdl.pipeline.init import count, table

    monkeypatch.setattr(table, "SAMPLE_ROWS", 100)
    monkeypatch.setattr(count, "_AT_ONCE", 256)  # several turns over the rows
    rows = {"order_id": np.arange(1000), "x": np.random.default_rng(0).normal(size=1000), "y": np.arange(1000) % 2}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    done = init(str(tmp_path / "p1"), str(tmp_path / "t.parquet"))
    assert done.file.spec.source.key == ("order_id",)
    assert done.coverage == "89 of 1,000 rows, from 1 place all over 1 file"
    rows["order_id"][999] = 998  # a sample does not see it
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    done = init(str(tmp_path / "p2"), str(tmp_path / "t.parquet"))
    assert done.file.spec.source.key == ()
    text = (tmp_path / "p2" / "p2.yaml").read_text()
    assert "# no key: order_id has 999 different values in 1,000 rows: without a key no row is a duplicate" in text
    monkeypatch.setattr(table, "COUNTED_ROWS", 500)
    done = init(str(tmp_path / "p3"), str(tmp_path / "t.parquet"))
    assert done.file.spec.source.key == ()
    assert "there are too many to count them all" in (tmp_path / "p3" / "p3.yaml").read_text()


@pytest.mark.parametrize("kind", ["csv", "json", "decimal", "text"])
def test_ids_beyond_64_bits_are_the_key_and_no_numbers(tmp_path, kind):
    ids = [98765432109876500000 + 7 * n for n in range(200)]
    file = tmp_path / f"t.{kind if kind in ('csv', 'json') else 'parquet'}"
    rows = [{"order_id": number, "x": n % 9 / 2, "y": n % 2} for n, number in enumerate(ids)]
    if kind == "csv":
        csv_of(file, [list(rows[0]), *(row.values() for row in rows)])
    elif kind == "json":
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        typed = pa.array(ids, pa.decimal128(38, 0)) if kind == "decimal" else pa.array(map(str, ids))
        pq.write_table(pa.table({**pa.Table.from_pylist([{**row, "order_id": 0} for row in rows]).to_pydict(),
                                 "order_id": typed}), file)  # fmt: skip
    done = init(str(tmp_path / "p"), str(file), now=NOW)
    assert done.file.spec.source.key == ("order_id",)
    assert list(features_of(done)) == ["x"]
    assert done.file.spec.transform is None


@pytest.mark.parametrize("sample_rows", [100, 1000])
def test_a_delta_table_is_looked_at_without_its_deleted_rows_and_by_its_own_names(tmp_path, monkeypatch, sample_rows):
    monkeypatch.setattr("sparkdl.pipeline.init.table.SAMPLE_ROWS", sample_rows)
    table = Table(str(tmp_path / "t"))
    ids = np.where(np.isin(np.arange(300), delta_log.HIDDEN), 299, np.arange(300))  # twice, until rows are deleted
    x = np.random.default_rng(0).normal(size=300)
    lists = pa.array([[n % 5] for n in range(300)])
    table.append(pa.table({"id": ids, "x": x, "lists": lists, "day": ["2026-01-01"] * 300, "y": ids % 2}))
    renamed = delta_log.edited_metadata(
        table.uri, lambda metadata: delta_log.map_columns(metadata, renamed={"x": "amount", "y": "target"})
    )
    delta_log.commit(table.uri, 1, delta_log.protocol(["deletionVectors", "columnMapping"], []), renamed)
    delta_log.hide_rows(table.uri, 2)
    done = init(str(tmp_path / "p"), table.uri, now=NOW)
    assert ("294 of 294" if sample_rows > 294 else " of 294 rows") in done.coverage.replace("all 294", "294 of 294")
    assert (done.file.spec.source.key, *done.file.spec.label, *features_of(done)) == (("id",), "target", "amount")
    text = (tmp_path / "p" / "p.yaml").read_text()
    assert "key: id  # counted: 294 rows, 294 different values" in text
    assert "# not looked at, since Spark alone reads what it maps inside: lists" in text
    assert Pipeline.load(done.path).check() == ""


def test_two_columns_tell_rows_apart_together(tmp_path):
    days = np.repeat(np.arange("2026-01-01", "2026-03-02", dtype="datetime64[D]"), 5)
    rows = {"customer_id": np.tile(np.arange(5), 60), "day": days, "x": np.random.default_rng(0).normal(size=300)}
    pq.write_table(pa.table({**rows, "y": rows["x"] * 2 + rows["customer_id"]}), tmp_path / "t.parquet")
    spec = init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), now=NOW).file.spec
    assert spec.source.key == ("customer_id", "day")
    assert spec.source.time == "day"
    assert "customer_id" not in spec.features


@pytest.mark.parametrize(
    ("first", "last", "split"),
    [
        ("2026-01-01", "2026-01-03", HashSplit),  # too few days
        ("1950-01-01", "2020-01-01", HashSplit),  # far too many
        ("2026-05-20", "2027-05-20", HashSplit),  # most of them in the future
        ("2026-01-01", "2026-05-20", TimeSplit),
    ],
)
def test_the_split_is_by_time_only_where_windows_fit_the_span(tmp_path, first, last, split):
    days = np.linspace(np.datetime64(first, "s").astype(float), np.datetime64(last, "s").astype(float), 3000)
    when = days.astype("datetime64[s]").astype("datetime64[D]")
    x = np.random.default_rng(0).normal(size=3000)
    pq.write_table(pa.table({"day": when, "x": x, "y": x > 0}), tmp_path / "t.parquet")
    assert isinstance(init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), now=NOW).file.spec.split, split)


def test_the_training_rows_that_the_recipe_goes_by_are_those_of_the_split(tmp_path):
    """50 days of 120 rows, of which 7 validate, 7 test and 2 are scored."""
    rows = np.arange(6000)
    at = np.datetime64("2026-01-01", "us") + rows * np.timedelta64(12, "m")
    pq.write_table(pa.table({"id": rows, "at": at, "x": np.sin(rows), "y": np.cos(rows)}), tmp_path / "t.parquet")
    split = init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), "y", now=NOW).file.spec.split
    assert split == TimeSplit(train="all", validate="7 days", test="7 days", score="2 days")
    assert "by the number of training rows; of about 4,080 as here" in (tmp_path / "p" / "p.yaml").read_text()


def test_a_row_a_month_holds_back_years_not_days(tmp_path):
    months = np.arange("1967-07", "2015-05", dtype="datetime64[M]").astype("datetime64[D]")
    x = np.random.default_rng(0).normal(size=len(months))
    pq.write_table(pa.table({"month": months, "x": x, "y": x**2}), tmp_path / "t.parquet")
    found = init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), "y", now=NOW)
    assert found.file.spec.split == TimeSplit(train="all", validate="2618 days", score="852 days")  # 86 months, and 28
    assert found.file.spec.publish.gate.min_rows == 43


def test_a_sample_of_a_large_table_sees_all_of_its_time(tmp_path, monkeypatch):
    from sparkdl.pipeline.init import table

    monkeypatch.setattr(table, "SAMPLE_ROWS", 500)
    monkeypatch.setattr(table, "_PARTS", 4)
    at = np.datetime64("2026-01-01", "us") + np.arange(20_000) * np.timedelta64(10, "m")
    rows = {"at": at, "x": np.random.default_rng(0).normal(size=20_000), "y": np.arange(20_000) % 2}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet", row_group_size=500)
    done = init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), now=NOW)
    assert "from 4 places all over 1 file" in done.coverage
    assert isinstance(done.file.spec.split, TimeSplit)
    text = (tmp_path / "p" / "p.yaml").read_text()
    assert "time: at  # 139 days with rows, 2026-01-01 to 2026-05-19" in text
    assert "(50" in text.partition("label:")[2]  # every second row is of one class, which a sample by steps would miss


def test_times_that_are_texts_divide_the_rows_and_a_running_number_is_their_key_also_in_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("sparkdl.pipeline.init.table.SAMPLE_ROWS", 2_000)
    rows = np.arange(20_000)
    hours = np.datetime64("2026-03-01T00", "h") + rows // 50
    table = pa.table({
        "line": rows + 7, "at": [str(hour).replace("T", " ") + ":15:00" for hour in hours],
        "x": np.random.default_rng(0).normal(size=len(rows)), "y": rows % 9 + 0.5,
    })  # fmt: skip
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=500)
    spec = init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), "y", now=NOW).file.spec
    assert (spec.source.key, spec.source.time, spec.source.every) == (("line",), "at", "day")
    assert isinstance(spec.split, TimeSplit)
    assert list(spec.features) == ["x"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["2026-02-28", "2026-02-30"], pa.string()),
        (["2026-01-01 10%3A00%3A00", "2026-01-02 10%3A00%3A00"], pa.timestamp("us", "UTC")),
        (["3", "__HIVE_DEFAULT_PARTITION__"], pa.int64()),
    ],
)
@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_names_of_partition_folders_are_dates_times_numbers_or_texts(tmp_path, values, kind, format):
    for value in values:
        folder = tmp_path / "t" / f"part={value}"
        folder.mkdir(parents=True)
        rows = pa.table({"x": np.random.default_rng(0).normal(size=200), "y": np.arange(200) % 2})
        write = pq.write_table if format == "parquet" else pa.csv.write_csv
        write(rows, folder / f"rows.{format}")
    init(str(tmp_path / "p"), str(tmp_path / "t"), "y", now=NOW)
    assert partition_types([str(path) for path in tmp_path.glob("t/*/*")], str(tmp_path)) == {"part": kind}


@pytest.mark.parametrize(
    ("times", "hint"),
    [
        (
            [20260101 + n % 28 for n in range(200)],
            "created_at looks like yyyymmdd: with source.kind=sql, to_date(cast(`",
        ),
        (
            [1767225600 + 8640 * n for n in range(200)],
            "created_at looks like seconds since 1970: with source.kind=sql, times",
        ),
        ([1767225600000 + 8640 * n for n in range(200)], "created_at looks like milliseconds since 1970"),
        ([20260000 + n % 28 for n in range(200)], "no column says when a row happened"),
    ],
)
def test_times_as_whole_numbers_are_told_with_what_makes_times_of_them(tmp_path, times, hint):
    rows = {"created_at": times, "x": [n % 9 / 2 for n in range(200)], "y": [n % 2 for n in range(200)]}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), label="y", now=NOW)
    assert f"  # no time: {hint}" in (tmp_path / "p" / "p.yaml").read_text()


def test_folders_of_year_month_and_day_are_told_with_what_makes_a_date_of_them(tmp_path):
    for day in range(1, 8):
        folder = tmp_path / "t" / "year=2026" / "month=03" / f"day={day:02d}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"x": [day / 2] * 9, "y": [n % 2 for n in range(9)]}), folder / "rows.parquet")
    init(str(tmp_path / "p"), str(tmp_path / "t"), label="y", now=NOW)
    said = "no time: year, month and day are folders: with source.kind=sql, make_date(`year`, `month`, `day`) makes a"
    assert said in (tmp_path / "p" / "p.yaml").read_text()


def test_folders_by_day_become_windows(tmp_path):
    for day in range(1, 21):
        (tmp_path / "t" / f"day=2026-03-{day:02d}").mkdir(parents=True)
        rows = pa.table({"x": np.random.default_rng(day).normal(size=20), "y": np.arange(20) % 2})
        pq.write_table(rows, tmp_path / "t" / f"day=2026-03-{day:02d}" / "rows.parquet")
    file = init(str(tmp_path / "p"), str(tmp_path / "t"), now=NOW).file
    assert (file.spec.source.partition, file.spec.source.time) == ("day", None)
    assert (file.spec.split.validate, file.spec.split.score) == ("3 days", "1 day")
    file.check_columns({"x": pa.float64(), "y": pa.int64(), "day": pa.date32()})


def test_a_csv_file_is_read_as_it_is_written(tmp_path):
    lines = ["id;zip;amount;when;said;y"]
    for n in range(200):
        amount = "NA" if n % 10 == 0 else f"{n * 1.5}"
        day = f"2026-03-{n % 28 + 1:02d} 10:00:00"
        lines.append(f'{n};0{n % 7}123;{amount};{day};"good; ""fine"" Gr\xf6\xdfe {n % 9}";{n % 3}')
    (tmp_path / "t.csv").write_bytes("\n".join(lines).encode("latin-1"))
    done = init(str(tmp_path / "p"), str(tmp_path / "t.csv"), now=NOW)
    source = done.file.spec.source
    assert source.options == {
        "sep": ";", "enforceSchema": False, "encoding": "ISO-8859-1", "escape": '"', "nullValue": "NA",
        "emptyValue": "NA",
    }  # fmt: skip
    assert source.schema == "`id` BIGINT, `zip` STRING, `amount` DOUBLE, `when` TIMESTAMP, `said` STRING, `y` BIGINT"
    assert features_of(done)["zip"] == Category()
    assert features_of(done)["amount"] == Number(missing_indicator=True)
    assert source.time == "when"


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize("at", ["2026-03-{:02d}T05:00Z", "2026-03-{:02d} 05:00+01:00"])
def test_times_with_a_zone_and_no_seconds_are_texts_since_spark_reads_none(tmp_path, kind, at):
    rows = [{"id": n, "at": at.format(n % 28 + 1), "x": n % 7 / 2, "y": n % 2} for n in range(200)]
    lines = [",".join(map(str, row)) for row in [list(rows[0]), *(row.values() for row in rows)]]
    (tmp_path / f"t.{kind}").write_text("\n".join(lines if kind == "csv" else map(json.dumps, rows)))
    done = init(str(tmp_path / "p"), str(tmp_path / f"t.{kind}"), now=NOW)
    assert "`at` STRING" in done.file.spec.source.schema
    assert done.file.spec.source.time == "at"


@pytest.mark.parametrize(
    ("text", "kind"), [("NaN", "DOUBLE"), ("nan", "STRING"), ("NAN", "STRING"), ("-nan(ind)", "STRING")]
)
def test_a_nan_that_spark_does_not_read_makes_texts(tmp_path, text, kind):
    rows = [[n, "NA" if n % 9 == 0 else n % 5, "NA" if n % 8 == 0 else n % 7, n % 2] for n in range(200)]
    rows = [[*row[:-1], text if n % 7 == 0 else n / 8, row[-1]] for n, row in enumerate(rows)]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["id", "a", "b", "c", "y"], *rows]), now=NOW)
    assert f"`c` {kind}" in done.file.spec.source.schema
    assert done.file.spec.source.options["nullValue"] == "NA"


def csv_of_towns(file, encode):
    rows = [f"{n},{encode('Köln') if n > 40_000 else encode('Jena')},{n % 2}" for n in range(50_000)]
    file.write_bytes("\n".join(["id,town,y", *rows]).encode("utf-8", errors="surrogateescape"))
    return str(file)


def test_the_encoding_of_a_csv_file_follows_from_all_that_is_looked_at(tmp_path):
    late = csv_of_towns(tmp_path / "late.csv", lambda text: text.encode("latin-1").decode(errors="surrogateescape"))
    source = init(str(tmp_path / "late"), late, now=NOW).file.spec.source
    assert source.options["encoding"] == "ISO-8859-1"
    readable = init(str(tmp_path / "whole"), csv_of_towns(tmp_path / "whole.csv", str), now=NOW)
    assert "encoding" not in readable.file.spec.source.options
    (expectation,) = (e for e in readable.file.spec.expect.values() if e.action == "warn")
    assert expectation.check == "NOT contains(concat_ws(' ', `town`), '\ufffd')"


def test_a_byte_that_is_no_utf_8_does_not_change_the_encoding_of_the_others(tmp_path):
    file = csv_of_towns(tmp_path / "t.csv", str)
    with open(file, "ab") as out:
        out.write(b"\n50000,K\xf6ln,1")
    done = init(str(tmp_path / "p"), file, now=NOW)
    assert "encoding" not in done.file.spec.source.options
    assert "1 character not of UTF-8 read as \ufffd" in (tmp_path / "p" / "p.yaml").read_text()


@pytest.mark.parametrize(
    ("note", "options", "skipped"),
    [
        (r'"size {0} \"big, red\" one"', {"enforceSchema": False}, 0),
        (r'"C:\data{0}\"', {"enforceSchema": False, "escape": '"'}, 0),
        ('"a ""b, c"" {0}"', {"enforceSchema": False, "escape": '"'}, 0),
        ("plain {0}", {"enforceSchema": False}, 3),
    ],
)
def test_backslashes_in_quotes_are_escapes_only_where_lines_need_them(tmp_path, note, options, skipped):
    rows = [[n, note.format(n % 5), n % 7 / 2, n % 2] for n in range(200)]
    file = csv_of(tmp_path / "t.csv", [["id", "note", "x", "y"], *rows, *[[1, 2, 3, 4, 5]] * skipped])
    done = init(str(tmp_path / "p"), file, now=NOW)
    assert done.file.spec.source.options == options
    assert done.file.spec.source.key == ("id",)
    assert done.coverage == "all 200 rows" + ("; 3 lines of another number of cells passed over" if skipped else "")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_in_one_sentence(tmp_path, encoding):
    (tmp_path / "t.csv").write_bytes("id,x,y\n1,2,0\n2,3,1\n".encode(encoding))
    with pytest.raises(DataError, match=r"t\.csv is written in UTF-16: save it as CSV in UTF-8"):
        init(str(tmp_path / "p"), str(tmp_path / "t.csv"), label="y", now=NOW)
    assert not (tmp_path / "p").exists()


def csv_of(file, lines, sep=","):
    file.write_text("\n".join(sep.join(map(str, line)) for line in lines))
    return str(file)


ROWS = [["id", "town", "age", "y"], *([n, ["Ulm", "Bonn"][n % 2], n % 60, n * 0.5] for n in range(2000))]


@pytest.mark.parametrize(
    ("lines", "stray"),
    [
        ([ROWS[0], ["-", "-", "years", "EUR"], *ROWS[1:]], "age is 'years', y is 'EUR'"),
        ([*ROWS, ["Total", "", 59_000, 999_500]], "id is 'Total'"),
        ([*ROWS, [-1, "", "Total", 9]], "age is 'Total'"),
    ],
)
def test_a_line_of_units_or_a_total_makes_no_texts_of_numbers(tmp_path, lines, stray):
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", lines), now=NOW)
    assert done.file.spec.source.schema == "`id` BIGINT, `town` STRING, `age` BIGINT, `y` DOUBLE"
    assert done.file.spec.source.key == ("id",)
    assert f"a row that does not fit is put aside, such as those where {stray}" in (tmp_path / "p/p.yaml").read_text()
    assert done.file.spec.label["y"].type == "regression"


@pytest.mark.parametrize("strftime", ["%Y-%m-%d", "%m/%d/%Y"])
def test_a_total_makes_no_texts_of_dates(tmp_path, strftime):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [[(start + timedelta(days=n % 60)).strftime(strftime), n % 7, n % 50 / 2] for n in range(600)]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["sold", "x", "y"], *rows, ["Total", 9, 9]]), now=NOW)
    assert done.file.spec.source.schema == "`sold` DATE, `x` BIGINT, `y` DOUBLE"
    assert done.file.spec.source.time == "sold"
    assert "such as those where sold is 'Total'" in (tmp_path / "p/p.yaml").read_text()


def test_codes_of_which_some_are_no_numbers_stay_codes(tmp_path):
    lines = [ROWS[0], *([n, f"{n % 60}" if n % 300 else f"A{n % 50}", n % 60, n * 0.5] for n in range(2000))]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", lines), now=NOW)
    assert done.file.spec.source.schema == "`id` BIGINT, `town` STRING, `age` BIGINT, `y` DOUBLE"


@pytest.mark.parametrize(
    ("lines", "cells", "length"),
    [([["sep=;"], *ROWS], "1 cell", 4), ([["Export, of 2026"], *ROWS], "2 cells", 4),
     ([ROWS[0], *([*row, ""] for row in ROWS[1:])], "4 cells", 5)],
)  # fmt: skip
def test_what_stands_above_the_names_of_columns_is_told(tmp_path, lines, cells, length):
    file = csv_of(tmp_path / "t.csv", lines)
    number = f"{len(lines) - 1:,}"
    with pytest.raises(DataError, match=rf"t\.csv has {cells}, and {number} others have {length}: remove what stands"):
        init(str(tmp_path / "p"), file, label="y", now=NOW)


@pytest.mark.parametrize(
    ("first", "names"),
    [
        ("id,x,label,", ["id", "x", "label", "_c3"]),
        ("id,x,label,2020", ["id", "x", "label", "2020"]),
        ("7,0.5,no,", ["_c0", "_c1", "_c2", "_c3"]),
        ("7,NA,no,1", ["_c0", "_c1", "_c2", "_c3"]),
    ],
)
def test_a_number_or_nothing_among_the_names_makes_no_file_without_names(tmp_path, first, names):
    rows = [f"{n},{n / 8},{['no', 'yes'][n % 2]},{n % 5}" for n in range(200)]
    (tmp_path / "t.csv").write_text("\n".join([first, *rows]))
    done = init(str(tmp_path / "p"), str(tmp_path / "t.csv"), label=names[2], now=NOW)
    assert [part.split("`")[1] for part in done.file.spec.source.schema.split(", ")] == names
    by_place = done.file.spec.source.options.get("enforceSchema")
    assert by_place == (None if first[0] == "7" else "_c3" in names)


def test_times_beyond_the_year_9999_are_missing(tmp_path):
    at = pa.array([253402300800000000 if n == 3 else 1767225600000000 + n * 10**10 for n in range(200)])
    rows = {
        "at": at.cast(pa.timestamp("us", "UTC")),
        "x": [n % 9 / 2 for n in range(200)],
        "y": [n % 2 for n in range(200)],
    }
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    done = init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), label="y", now=NOW)
    assert done.file.spec.source.time == "at"
    assert "days with rows, 2026-01-01 to 2026-01-24, 0.5 % missing" in (tmp_path / "p" / "p.yaml").read_text()


@pytest.mark.parametrize("others", [{}, {200: "unknown"}])
def test_texts_that_are_no_days_are_in_no_window(tmp_path, monkeypatch, others):
    """Nor are those of which the sample shows none."""
    monkeypatch.setattr("sparkdl.pipeline.init.table.SAMPLE_ROWS", 100 if others else 1000)
    monkeypatch.setattr("sparkdl.pipeline.init.table._PARTS", 2)
    days = [others.get(n // 3, f"2026-02-{n % 30 + 1:02d}" if not others else f"2026-02-{n % 28 + 1:02d}")
            for n in range(900)]  # fmt: skip
    rows = {"at": days, "x": [n % 7 / 2 for n in range(900)], "y": [n % 2 for n in range(900)]}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet", row_group_size=100)
    assert init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), label="y", now=NOW).file.spec.source.time == "at"
    assert "time: at  # 28 days with rows, 2026-02-01 to 2026-02-28" in (tmp_path / "p" / "p.yaml").read_text()


@pytest.mark.parametrize("empty", ["", "id,x,y\n"])
def test_an_empty_file_among_others_has_no_rows(tmp_path, empty):
    (tmp_path / "t").mkdir()
    csv_of(tmp_path / "t" / "a.csv", [["id", "x", "y"], *([n, n % 7 / 2, n % 2] for n in range(200))])
    (tmp_path / "t" / "b.csv").write_text(empty)
    done = init(str(tmp_path / "p"), str(tmp_path / "t"), now=NOW)
    assert (done.coverage, done.file.spec.source.key) == ("all 200 rows", ("id",))


def test_a_row_that_is_put_aside_is_not_counted_against_the_key(tmp_path):
    lines = [ROWS[0], ["", "", "years", "EUR"], *ROWS[1:]]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", lines), now=NOW)
    assert done.file.spec.source.key == ("id",)
    assert "key: id  # counted: 2,000 rows, 2,000 different values" in (tmp_path / "p" / "p.yaml").read_text()


def test_a_key_with_a_byte_that_is_no_utf_8_is_counted(tmp_path):
    rows = [f"Köln{n},{n % 7},{n % 2}".encode() for n in range(200)]
    (tmp_path / "t.csv").write_bytes(b"\n".join([b"id,x,y", *rows, b"K\xf6ln,1,0"]))
    assert init(str(tmp_path / "p"), str(tmp_path / "t.csv"), now=NOW).file.spec.source.key == ("id",)


def test_blanks_behind_commas_and_between_columns_are_no_part_of_values(tmp_path):
    padded = init(str(tmp_path / "padded"), csv_of(tmp_path / "a.csv", ROWS, ", "), now=NOW).file.spec.source
    assert padded.options == {"enforceSchema": False, "ignoreLeadingWhiteSpace": True}
    blank = init(str(tmp_path / "blank"), csv_of(tmp_path / "b.csv", ROWS, " "), now=NOW).file.spec.source
    assert blank.options == {"sep": " ", "enforceSchema": False}
    assert padded.schema == blank.schema == "`id` BIGINT, `town` STRING, `age` BIGINT, `y` DOUBLE"


def test_blanks_before_quotes_are_no_part_of_values(tmp_path, monkeypatch):
    monkeypatch.setattr("sparkdl.pipeline.init.text._LINES", 50)
    rows = [[f'"{n}"', f'"{n / 2}"', f'"{n % 3}, odd"', '"yes"' if n % 2 else '"no"'] for n in range(200)]
    file = csv_of(tmp_path / "t.csv", [["id", "x", "n", "y"], *rows], ", ")
    done = init(str(tmp_path / "p"), file, now=NOW)
    assert done.file.spec.source.schema == "`id` BIGINT, `x` DOUBLE, `n` STRING, `y` STRING"
    assert done.file.spec.label["y"].positive == "yes"
    assert "key: id  # counted: 200 rows, 200 different values" in (tmp_path / "p" / "p.yaml").read_text()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "large.parquet"])
def test_numbers_that_stand_as_texts_are_cast(tmp_path, kind):
    """Of large strings, too, which Polars writes."""
    rows = [
        {"id": n, "x": f"{7 * n % 50}", "z": f"{n / 8}" if n % 5 else "", "code": f"0{n}", "y": f"{n % 3}.0"}
        for n in range(99)
    ]
    file = tmp_path / f"t.{kind}"
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        table = pa.Table.from_pylist(rows)
        kinds = [
            pa.large_string() if kind == "large.parquet" and pa.types.is_string(t) else t for t in table.schema.types
        ]
        pq.write_table(table.cast(pa.schema(zip(table.column_names, kinds, strict=True))), file)
    done = init(str(tmp_path / "p"), str(file), label="y", label_type="multiclass", now=NOW)
    if kind == "jsonl":
        assert done.file.spec.source.schema == "`id` BIGINT, `x` STRING, `z` STRING, `code` STRING, `y` STRING"
    assert done.file.spec.transform.sql == (
        "SELECT * EXCEPT (`x`, `z`, `y`), try_cast(`x` AS BIGINT) AS `x`, try_cast(`z` AS DOUBLE) AS `z`, "
        "try_cast(try_cast(`y` AS DOUBLE) AS BIGINT) AS `y` FROM source"
    )
    assert features_of(done)["x"] == Number()
    assert features_of(done)["z"].missing_indicator
    expected = done.file.spec.expect["numbers can be read"]  # of z some rows have none
    assert (expected.check, expected.action) == ("`x` IS NOT NULL AND `y` IS NOT NULL", "warn")


@pytest.mark.parametrize(("times", "is_feature"), [(3, False), (12, True)])
def test_an_id_of_which_no_value_is_in_enough_rows_is_left_out(tmp_path, times, is_feature):
    """Of 12,000 rows values in 5 of the training rows count: with fewer there would be nothing to fit."""
    rows = {"child_id": [n // times for n in range(12_000)], "x": [n % 7 / 3 for n in range(12_000)]}
    pq.write_table(pa.table({**rows, "y": [n * n % 5 % 2 for n in range(12_000)]}), tmp_path / "t.parquet")
    done = init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), label="y", now=NOW)
    assert ("child_id" in features_of(done)) == is_feature
    assert (
        "an id by its name: none is in 5 of the training rows or more" in (tmp_path / "p/p.yaml").read_text()
    ) != is_feature


@pytest.mark.parametrize(
    ("text", "is_number"),
    [
        ("${:,.2f}", True),
        ("{:,.0f}", True),
        ("{:.1f} %", True),
        ("{:,.2f} €", True),
        ("-€{:.0f}", True),
        ("{:04.0f}", False),
        ("{:.0f} kg", False),
    ],
)
def test_numbers_with_units_and_commas_are_numbers(tmp_path, text, is_number):
    rows = [[n, ["Ulm", "Bonn"][n % 2], f'"{text.format(37.5 * n)}"' if n % 7 else "", n % 2] for n in range(500)]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["id", "town", "price", "y"], *rows]), now=NOW)
    sql = done.file.spec.transform.sql if done.file.spec.transform else ""
    assert ("try_cast(regexp_replace(`price`, '[$€£¥,% ]', '') AS DOUBLE) AS `price`" in sql) == is_number
    assert isinstance(features_of(done).get("price"), Number) == is_number


@pytest.mark.parametrize("nothing", ["n/a", "na", "none", "#N/A", "<NA>", "."])
def test_texts_for_missing_numbers_make_no_texts_of_the_others(tmp_path, nothing):
    rows = [[n, nothing if n % 7 == 0 else n / 8, n % 2] for n in range(200)]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["id", "x", "y"], *rows]), now=NOW)
    assert done.file.spec.source.options["nullValue"] == nothing
    assert features_of(done)["x"] == Number(fill="mean", missing_indicator=True)


def test_numbers_among_other_texts_are_called_so_and_no_id(tmp_path):
    rows = [[n, f"{n / 8}" if n % 9 else f"over {n}", n % 5 / 2, n % 2] for n in range(200)]
    init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["id", "dose", "x", "y"], *rows]), now=NOW)
    said = "dose  # numbers, but for such texts as 'over 0', 'over 9', 'over 18': make numbers of them in transform"
    assert said in (tmp_path / "p" / "p.yaml").read_text()


def test_objects_and_values_of_several_types_of_json_are_in_the_schema(tmp_path):
    rows = [
        {"id": n, "to": {"city": f"c{n % 5}", "zip`s": [n]}, "paid": [f"{n}", n, 0.5][n % 3], "x": n % 7, "y": n % 2}
        for n in range(100)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = init(str(tmp_path / "p"), str(tmp_path / "t.jsonl"), label="y", now=NOW)
    assert done.file.spec.source.schema == (
        "`id` BIGINT, `to` STRUCT<`city`: STRING, `zip``s`: ARRAY<BIGINT>>, `paid` STRING, `x` BIGINT, `y` BIGINT"
    )
    assert "try_cast(`paid` AS DOUBLE) AS `paid`" in done.file.spec.transform.sql


def test_decimal_commas_in_a_table_of_texts_are_none_between_thousands(tmp_path):
    rows = {"x": [f"{n % 9},{n % 1000:03d}" for n in range(500)], "k": [n % 7 for n in range(500)]}
    pq.write_table(pa.table({**rows, "y": [n % 2 for n in range(500)]}), tmp_path / "t.parquet")
    done = init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), label="y", now=NOW)
    assert done.file.spec.transform is None


def test_decimal_commas_with_exponents_are_numbers(tmp_path):
    rows = [[n, f"{n},5", f"{n % 9},25e-0{n % 7 + 1}" if n % 5 else "0", n % 2] for n in range(200)]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["id", "x", "p", "y"], *rows], ";"), now=NOW)
    assert "try_cast(replace(`p`, ',', '.') AS DOUBLE) AS `p`" in done.file.spec.transform.sql
    assert isinstance(features_of(done)["p"], Number)


def test_amounts_in_two_currencies_are_no_numbers(tmp_path):
    rows = [[n, f"{'$€'[n % 2]}{3 * n}", n % 9, n % 2] for n in range(500)]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["id", "price", "x", "y"], *rows]), now=NOW)
    assert not isinstance(features_of(done).get("price"), Number)


@pytest.mark.parametrize(
    ("strftime", "option", "spark"),
    [("%m/%d/%Y", "dateFormat", "M/d/yyyy"), ("%d.%m.%Y", "dateFormat", "d.M.yyyy"),
     ("%d-%m-%Y %H:%M", "timestampFormat", "d-M-yyyy H:mm"),
     ("%m/%d/%Y %H:%M:%S", "timestampFormat", "M/d/yyyy H:mm:ss")],
)  # fmt: skip
def test_dates_with_the_day_or_the_month_first_divide_the_rows(tmp_path, strftime, option, spark):
    start = datetime(2026, 1, 1, 10, 30, tzinfo=UTC)
    rows = [[n, (start + timedelta(days=n % 60)).strftime(strftime), n % 7, n % 2] for n in range(600)]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["id", "sold", "x", "y"], *rows]), now=NOW)
    source = done.file.spec.source
    assert source.options[option] == spark
    assert ("`sold` DATE" if option == "dateFormat" else "`sold` TIMESTAMP") in source.schema
    assert source.time == "sold"
    assert "60 days with rows, 2026-01-01 to 2026-03-01" in (tmp_path / "p" / "p.yaml").read_text()


@pytest.mark.parametrize("other", ["{:02d}/{:02d}/2026", "2026-{:02d}-{:02d}"])
def test_dates_that_nobody_can_tell_or_that_are_written_in_two_ways_stay_texts(tmp_path, other):
    """Days up to the 12th; and a second column of dates, which Spark would read by the same option."""
    first = [
        f"{n % 12 + 1:02d}/{n % 11 + 1:02d}/2026" if "/2026" in other else f"{n % 12 + 1}/{n % 28 + 1}/2026"
        for n in range(400)
    ]
    rows = [[n, first[n], other.format(n % 12 + 1, n % 12 + 1), n % 7, n % 2] for n in range(400)]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["id", "a", "b", "x", "y"], *rows]), now=NOW)
    assert "dateFormat" not in done.file.spec.source.options
    assert "`a` STRING" in done.file.spec.source.schema


def test_lines_of_json_are_read_with_types(tmp_path):
    rows = [
        {
            "id": n,
            "day": f"2026-03-{n % 28 + 1:02d}",
            "tags": ["a", "b"][: n % 3],
            "odd": n if n % 2 else "x",
            "y": n % 2,
        }
        for n in range(100)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = init(str(tmp_path / "p"), str(tmp_path / "t.jsonl"), now=NOW)
    assert done.file.spec.source.schema == "`id` BIGINT, `day` DATE, `tags` ARRAY<STRING>, `odd` STRING, `y` BIGINT"
    assert features_of(done)["tags"] == Ids(max_length=4)
    assert features_of(done)["odd"] == Category()
    assert done.file.spec.source.key == ("id",)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "is not there"),
        ({"a.txt": b"x"}, "1 of a kind that is not known"),
        ({"a.csv": b"x,y\n1,2\n", "b.parquet": b""}, "1 of csv, 1 of parquet"),
        ({"a.csv.lz4": b"x,y\n1,2\n"}, "1 of a kind that is not known"),
        ({"a.parquet": b"no"}, "cannot be read as Parquet"),
        ({"a.csv": b""}, "has no line"),
        ({"a.csv": b"x,y\n"}, "has no rows"),
        ({"a.json": b"[1, 2]\n"}, "no JSON object"),
        ({"a.csv": b"a,A,y\n1,2,3\n2,3,4\n"}, ""),
    ],
)
def test_what_is_no_table_is_refused_in_one_sentence(tmp_path, capsys, files, said):
    for name, data in files.items():
        (tmp_path / "t").mkdir(exist_ok=True)
        (tmp_path / "t" / name).write_bytes(data)
    code = main(["init", str(tmp_path / "p"), "--from", str(tmp_path / "t")])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == ((1, 1) if said else (0, 0)), error
    assert said in error
    assert (tmp_path / "p").exists() == (not said)


def test_types_that_spark_does_not_read_are_refused_before_anything_is_written(tmp_path):
    rows = {"t": pa.array([1, 2], pa.time64("us")), "y": [0, 1]}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    with pytest.raises(SchemaError, match=r"'t' of .* is time64\[us\], which Spark does not read: write it in another"):
        init(str(tmp_path / "p"), str(tmp_path / "t.parquet"))
    pq.write_table(pa.table({"a": [1, 2], "A": [1, 2], "y": [0, 1]}), tmp_path / "t.parquet")
    with pytest.raises(SchemaError, match=r"\['a', 'A'\] differ by case alone"):
        init(str(tmp_path / "p"), str(tmp_path / "t.parquet"))
    for name in ("_window", "_slot"):
        pq.write_table(pa.table({name: [1, 2], "y": [0, 1]}), tmp_path / "t.parquet")
        with pytest.raises(SchemaError, match=f"'{name}', a name that pipelines use themselves"):
            init(str(tmp_path / "p"), str(tmp_path / "t.parquet"))
    assert not (tmp_path / "p").exists()


def test_rows_of_few_kinds_are_dealt_one_by_one(tmp_path):
    random = np.random.default_rng(0)
    few = {"class": random.choice(["1st", "2nd", "crew"], 2200), "adult": random.random(2200) < 0.9}
    few["survived"] = random.random(2200) < 0.3
    for name, more in (("few", {}), ("many", {"fare": random.random(2200)})):
        pq.write_table(pa.table(few | more), tmp_path / f"{name}.parquet")
        found = init(str(tmp_path / name), str(tmp_path / f"{name}.parquet"), "survived")
        assert found.file.spec.split.copies == ("spread" if name == "few" else "together")
        assert ("copies of others but for the label" in Path(found.path).read_text()) == (name == "few")


def test_no_spark_is_started_for_files(written, tmp_path):
    program = (
        "import sys, sparkdl.cli; code = sparkdl.cli.main(sys.argv[1:]); "
        "print([m for m in ('torch', 'pyspark') if m in sys.modules]); sys.exit(code)"
    )
    table = f"{written[0].folder}/../customers.parquet"
    command = [sys.executable, "-c", program, "init", str(tmp_path / "p"), "--from", table, "--label", "age"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def made(folder, columns, label, **more):
    """The pipeline for some columns: what init says, its spec, the text of its file."""
    pq.write_table(pa.table(columns), folder / "t.parquet")
    done = init(str(folder / "p"), str(folder / "t.parquet"), label, now=NOW, **more)
    return done, done.file.spec, (folder / "p" / "p.yaml").read_text()


def line_of(text, name):
    """The line of a feature, with the comment above it where the two do not fit in one."""
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(f"  {name}: "))
    return lines[at - 1] + lines[at] if lines[at - 1].startswith("  # ") else lines[at]


def test_columns_that_are_missing_where_the_label_is_missing_are_features_like_others(tmp_path):
    random, rows = np.random.default_rng(0), 900
    known = random.random(rows) < 0.7
    strong = [random.normal(size=rows) for _ in range(3)]
    y = (sum(strong) + random.normal(size=rows) * 2 > 0).astype(int)
    columns = {
        f"x{n}": pa.array([v if k else None for v, k in zip(x, known, strict=True)]) for n, x in enumerate(strong)
    }
    columns |= {
        "z": random.normal(size=rows),
        "y": pa.array([int(v) if k else None for v, k in zip(y, known, strict=True)]),
    }
    done, spec, text = made(tmp_path, columns, "y")
    assert (list(done.suspects), set(spec.features)) == ([], {"x0", "x1", "x2", "z"})
    assert "WARNING" not in text


def test_a_leak_is_said_by_its_strength_and_stays_for_the_user_to_decide(tmp_path):
    random, rows = np.random.default_rng(0), 2000
    population, rate = random.lognormal(10, 1, rows), random.gamma(3, 2, rows)
    columns = {
        "cases": population * rate / 1000, "population": population, "noise": random.normal(size=rows),
        "grade": np.digitize(rate, np.quantile(rate, [0.2, 0.4, 0.6, 0.8])), "in other words": np.exp(rate / 3),
        "logpop": np.log(population), "rate": rate,
    }  # fmt: skip
    done, spec, text = made(tmp_path, columns, "rate")
    assert set(spec.features) == set(columns) - {"rate"}
    assert list(done.suspects) == ["cases", "population", "in other words"]
    assert "WARNING, cases / population predicts rate (R2 1): is rate made of the two?" in line_of(text, "cases")
    assert "WARNING, predicts rate alone (R2 0.99" in line_of(text, "in other words")
    assert "nearly the same as population" in line_of(text, "logpop")
    assert "WARNING" not in line_of(text, "noise") + line_of(text, "grade")


def test_chance_in_a_few_rows_is_no_leak(tmp_path):
    random = np.random.default_rng(0)
    for rows in (30, 100, 300):
        columns = {f"x{n}": random.normal(size=rows) for n in range(12)}
        columns["word"] = random.choice(list("abcdefgh"), rows)
        (tmp_path / str(rows)).mkdir()
        for label in (random.random(rows) < 0.3, random.normal(size=rows)):
            pq.write_table(pa.table({**columns, "y": label}), tmp_path / "t.parquet")
            place = tmp_path / str(rows) / label.dtype.name
            assert list(init(str(place), str(tmp_path / "t.parquet"), "y").suspects) == []


def test_whole_numbers_that_are_names_are_categories_and_amounts_are_numbers(tmp_path):
    random, rows = np.random.default_rng(0), 24_000
    effect = {name: random.normal(size=count) for name, count in (("works", 15), ("place", 56), ("who", 3000))}
    codes = {name: random.integers(0, len(each), rows) for name, each in effect.items()}
    age, children = random.integers(18, 80, rows), random.poisson(1.5, rows)
    y = sum(effect[name][codes[name]] for name in effect) - (age / 30 - 1.5) ** 2 + children / 2
    scattered = np.sort(random.choice(90_000, 3000, replace=False))
    columns = {
        "works": codes["works"], "place": codes["place"], "who": scattered[codes["who"]], "age": age,
        "children": children, "year": 2000 + random.integers(0, 20, rows), "department": random.integers(1, 12, rows),
        "y": y + random.normal(size=rows) * 2,
    }  # fmt: skip
    for label, column in (("y", columns["y"]), ("late", columns["y"] > 0)):
        (tmp_path / label).mkdir()
        table = {name: values for name, values in columns.items() if name != "y"} | {label: column}
        _, spec, text = made(tmp_path / label, table, label)
        kinds = {name: type(one) for name, one in spec.features.items()}
        names = dict.fromkeys(("works", "place", "who", "department"), Category)
        assert kinds == names | dict.fromkeys(("age", "children", "year"), Number), text
        assert "codes, of which each tells" in line_of(text, "works")
        assert "and numbers are left out" in line_of(text, "who")


def test_a_label_of_few_whole_numbers_is_asked_about(tmp_path, capsys):
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=600), "answer": random.integers(1, 6, 600), "rating": random.integers(1, 6, 600)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    for name, label, word, kind in (
        ("a", "answer", None, "multiclass"), ("b", "rating", None, "regression"), ("c", "answer", "regression", ""),
        ("d", "rating", "multiclass", ""),
    ):  # fmt: skip
        words = ["init", str(tmp_path / name), "--from", str(tmp_path / "t.parquet"), "--label", label]
        assert main([*words, *(["--label-type", word] if word else [])]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert (f"QUESTION {label} is 1..5 in 5 steps: regression where 4 is twice 2" in said) == (word is None)
        assert Pipeline.load(tmp_path / name / f"{name}.yaml").spec.label[label].type == (word or kind)
    for word, said in (
        ("binary", "has 5 values, and cannot be binary"),
        ("ordinal", "is not known: write one"),
    ):
        assert main([*words[:1], str(tmp_path / "e"), *words[2:], "--label-type", word]) != 0
        assert said in capsys.readouterr().err
    assert not (tmp_path / "e").exists()


def test_days_whose_labels_are_yet_to_come_are_scored_and_rows_that_chose_nothing_judge(tmp_path):
    random, rows = np.random.default_rng(0), 12_000
    day = np.arange(rows) * 60 // rows
    columns = {"x": random.normal(size=rows), "day": np.datetime64("2026-03-01") + day}
    columns["y"] = pa.array([None if at >= 53 else float(random.random() < 0.5) for at in day])
    _, spec, text = made(tmp_path, columns, "y")
    assert (spec.split.validate, spec.split.test, spec.split.score) == ("7 days", "7 days", "7 days")
    assert "labels of the newest 7 days are yet to come" in text
    (tmp_path / "b").mkdir()
    columns["y"] = pa.array([None if at >= 47 else float(random.random() < 0.5) for at in day])
    assert made(tmp_path / "b", columns, "y")[1].split.score == "13 days"


@pytest.mark.parametrize(("rows", "test"), [(300, 0), (900, 0.15), (6000, 0.1)])
def test_a_test_part_is_written_where_rows_allow_it_and_training_stops_early(tmp_path, rows, test):
    random = np.random.default_rng(0)
    _, spec, text = made(tmp_path, {"x": random.normal(size=rows), "y": random.normal(size=rows)}, "y")
    assert spec.split.test == test
    assert ("too few rows for a test part, so those that choose the epoch judge, too" in text) == (not test)
    recipe = with_recipe(spec.train, rows, default_network=True)
    assert recipe.early_stopping_patience == max(4, recipe.epochs // 4)
    assert "  # early_stopping_patience: " in text


def test_only_a_column_that_is_near_is_suggested(tmp_path):
    random = np.random.default_rng(0)
    names = ["house", "order_id", "Hourly Wage", "tenure", "amount"]
    pq.write_table(pa.table({name: random.normal(size=60) for name in names}), tmp_path / "t.parquet")
    for said, near in (
        ("hours", None), ("orderid", "order_id"), ("hourly_wage", "Hourly Wage"), ("tenrue", "tenure"),
        ("amuont", "amount"), ("wage", None),
    ):  # fmt: skip
        with pytest.raises(SchemaError, match=f"write {near}$" if near else f"choose one of {', '.join(names)}$"):
            init(str(tmp_path / "p"), str(tmp_path / "t.parquet"), said)


def test_decimal_commas_are_numbers(tmp_path):
    lines = ["id;price;pieces;share;text;y"]
    for n in range(200):
        lines.append(f"{n};{n},5;{n % 9 + 1}.{n:03d},5;{'NA' if n % 8 == 0 else f'0,{n:03d}'};{n % 7},a;{n % 2}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    done = init(str(tmp_path / "p"), str(tmp_path / "t.csv"))
    source = done.file.spec.source
    assert source.options == {
        "sep": ";", "enforceSchema": False, "nullValue": "NA", "emptyValue": "NA", "locale": "de-DE",
    }  # fmt: skip
    assert source.schema == (
        "`id` BIGINT, `price` DECIMAL(38,18), `pieces` DECIMAL(38,18), `share` DECIMAL(38,18), `text` STRING, "
        "`y` BIGINT"
    )
    assert isinstance(features_of(done)["price"], Number)
    assert features_of(done)["share"].missing_indicator
    english = [f'{n},"{n % 50 + 1},000",{n % 2}' for n in range(200)]
    (tmp_path / "e.csv").write_text("\n".join(["id,paid,y", *english]))
    source = init(str(tmp_path / "q"), str(tmp_path / "e.csv")).file.spec.source
    assert "locale" not in source.options
    assert "`paid` STRING" in source.schema


@pytest.mark.parametrize(
    ("price", "kind"),
    [
        ("{},5", "DECIMAL(38,18)"),
        ("10000000000000000{:03d},5", "DECIMAL(38,18)"),
        ("0,00000000000115683010706{:03d}", "DECIMAL(38,26)"),
        ("100000000000000000{:03d},5", "STRING"),
        ("-10000000000{:03d},00000000000115683010706{:03d}", "STRING"),
    ],
)
def test_decimal_commas_have_room_for_the_places_of_rows_not_seen_or_stay_texts(tmp_path, price, kind):
    rows = [[n, price.format(n, n), f"{n},5", n % 2] for n in range(200)]
    done = init(str(tmp_path / "p"), csv_of(tmp_path / "t.csv", [["id", "price", "x", "y"], *rows], ";"), now=NOW)
    assert f"`price` {kind}, `x` DECIMAL(38,18)" in done.file.spec.source.schema
    assert "rounded to 18 places" in (tmp_path / "p" / "p.yaml").read_text()


@pytest.mark.parametrize(
    ("sep", "pair", "weight", "weights"),
    [
        (",", '"{},{}"', "{}.470", "DOUBLE"),  # commas part cells
        (";", "{},{}", "0.{:03d}", "DOUBLE"),
        (";", "{},{}", "{}.25", "DOUBLE"),
        (";", "{},{}", "{}.470", "DOUBLE"),
        (";", "{},{}", "{}.470,5", "DECIMAL(38,18)"),
    ],
)
def test_dots_part_thousands_only_where_nothing_says_that_they_are_decimal_points(tmp_path, sep, pair, weight, weights):
    rows = [[n, pair.format(n % 9, n % 7), weight.format(n % 8 + 1), n % 2] for n in range(200)]
    file = csv_of(tmp_path / "t.csv", [["id", "seats", "weight", "y"], *rows], sep)
    done = init(str(tmp_path / "p"), file, now=NOW)
    assert f"`weight` {weights}" in done.file.spec.source.schema
    said = "the dots of weight are read as decimal points" in (tmp_path / "p" / "p.yaml").read_text()
    assert said == (sep == ";" and weight == "{}.470")


def test_the_default_network_is_written_out_and_named_by_the_file(tmp_path):
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=300), "kind": random.choice(["a", "b", "c"], 300), "y": random.normal(size=300)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert (
        main(["init", str(tmp_path / "own"), "--from", str(tmp_path / "t.parquet"), "--label", "y", "--with-model"])
        == 0
    )
    folder = tmp_path / "own"
    spec = Pipeline.load(folder / "own.yaml").spec
    assert spec.model.factory == "own_model:network"
    assert (spec.train.learning_rate, spec.train.num_proc, spec.train.epochs) == (0.005, 1, None)
    program = (
        "import torch, own_model\n"
        "from sparkdl.models.networks import TabularEnsemble\n"
        "from sparkdl.pipeline import Pipeline\n"
        "example = Pipeline.load('own.yaml').example(rows=4)\n"
        "torch.manual_seed(0)\nours = own_model.network(example.features).eval()\n"
        "torch.manual_seed(0)\ntheirs = TabularEnsemble(example.features).eval()\n"
        "assert type(ours) is not TabularEnsemble and type(ours).__module__ == 'own_model'\n"
        "assert torch.equal(ours(example.inputs), theirs(example.inputs))\n"
        "assert ours.bundle_arguments() == theirs.bundle_arguments()\n"  # dropout, which evaluation does not show
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_columns_are_judged_by_the_rows_that_have_a_label(tmp_path):
    """A forecast stands where what happened does not yet: training has no row with a value of it."""
    random = np.random.default_rng(0)
    numbers, is_past = random.normal(size=400), np.arange(400) < 300
    columns = {
        "x": numbers,
        "forecast": pa.array(numbers, mask=is_past),
        "shop": np.where(is_past, "all", random.choice(["n", "s", "e"], 400)),
        "sold": pa.array(numbers + random.normal(size=400), mask=~is_past),
    }
    _, spec, text = made(tmp_path, columns, "sold")
    assert list(spec.features) == ["x"]
    assert "missing in every row with a label that was looked at" in text
    assert "one value, 'all', in every row with a label that was looked at" in text


def test_texts_of_which_none_occurs_twice_are_no_category(tmp_path):
    columns = {"x": [0.5, 1.5, 2.5, 3.5], "artist": ["a", "b", "c", None], "weeks": [3, 5, 8, 13]}
    _, spec, text = made(tmp_path, columns, "weeks")
    assert list(spec.features) == ["x"]
    assert "none is in 2 of the training rows or more" in text
