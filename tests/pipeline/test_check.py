"""What ends a run is told by ``check``, all of it at once."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.cli import main
from sparkdl.errors import PipelineFileError
from sparkdl.pipeline import Pipeline, analysis
from sparkdl.pipeline.file.conditions import sql_problem
from sparkdl.tables.table import Table


def written(folder, text, columns=None, kind="parquet"):
    """A pipeline file beside its table."""
    columns = columns or {"x": np.random.default_rng(0).normal(size=50), "y": [0, 1] * 25}
    table, place = pa.table(columns), folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, place)
    elif kind == "csv":
        table.to_pandas().to_csv(place, index=False)
    elif kind == "json":
        place.write_text("\n".join(json.dumps(row) for row in table.to_pylist()))
    else:
        Table(str(place)).append(table)
    source = f"{{kind: {kind}, {'table' if kind == 'delta' else 'path'}: ./rows.{kind}}}"
    file = folder / "p.yaml"
    file.write_text(f"source: {source}\n{text}\n")
    return file


def test_every_mistake_is_told_at_once_whoever_finds_it(tmp_path, capsys):
    (tmp_path / "file").touch()
    text = (
        "root: file/below\nfeatures:\n  a: number\n  x: {type: number, lg: true}\nlabel: {y: binary}\n"
        "split: {by: hush}\nmodel: nowhere:network\nexpect: {sound: 'xx > 0'}"
    )
    file = written(tmp_path, text, {"x": [1.0, 2.0] * 25, "y": [1] * 50})
    assert main(["check", str(file)]) == 1
    error = capsys.readouterr().err
    for number, said in (
        (2, "root='"), (4, "features.a is no column of the source"), (5, "lg is not a key"),
        (6, "label.y is 1 in every row that has one, so that there is nothing to learn: name another column"),
        (7, "split.by='hush' is not known"), (8, "model"), (9, "reads 'xx', which is no column"),
    ):  # fmt: skip
        assert any(line.strip().startswith(f"p.yaml:{number}: ") and said in line for line in error.splitlines()), error
    assert "p.yaml has 7 mistakes" in error
    assert main(["check", "--offline", str(file)]) == 1
    assert "has 3 mistakes" in capsys.readouterr().err


def test_a_section_that_is_wrong_as_a_whole_hides_no_other_mistake(tmp_path):
    file = written(tmp_path, "features: {a: number}\nlabel: {y: binry}\nweight: w")
    with pytest.raises(PipelineFileError) as refused:
        Pipeline.check_file(file)
    said = str(refused.value)
    assert all(
        word in said for word in ("label.y.type='binry'", "features.a is no column", "weight='w' is no column")
    ), said
    assert "has 3 mistakes" in said
    file.write_text(file.read_text().replace("{a: number}", "{}"))
    with pytest.raises(PipelineFileError, match="has 3 mistakes"):
        Pipeline.check_file(file)


@pytest.mark.parametrize("kind", ["parquet", "csv", "json", "delta"])
@pytest.mark.parametrize(
    ("values", "said"),
    [([2] * 50, "'?2'? in every row that has one"), ([1, None] * 25, "in every row that has one"), ([1, 2] * 25, "")],
)
def test_a_label_with_one_value_is_told_before_a_run(tmp_path, kind, values, said):
    columns = {"x": np.random.default_rng(0).normal(size=50), "y": pa.array(values, pa.int64())}
    file = written(tmp_path, "features: {x: number}\nlabel: {y: multiclass}", columns, kind)
    if not said:
        assert Pipeline.check_file(file) == ""
        return
    with pytest.raises(PipelineFileError, match=said):
        Pipeline.check_file(file)


@pytest.mark.parametrize(
    ("select", "said"),
    [
        ("SELECT * FROM source", ""),
        ("select a FROM {source} -- (", ""),
        ("WITH a AS (SELECT '(' AS b FROM `source`) SELECT * FROM a", ""),
        ("SELECT * FROM sorce", "reads 'sorce' and never reads the rows: write FROM source"),
        ("SELECT (a FROM source", "a parenthesis has no partner"),
        ("SELECT a) FROM source", "a parenthesis has no partner"),
        ("SELECT 'a FROM source", "a quotation mark has no partner"),
        ("DELETE FROM source", "is no SELECT"),
        ("", "is no SELECT"),
    ],
)
def test_a_text_that_is_no_select_from_the_source_is_seen_without_spark(select, said):
    found = sql_problem(select)
    assert said in found
    assert bool(found) == bool(said)


def test_where_spark_cannot_be_started_it_is_said_that_the_sql_was_only_read(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis.shutil, "which", lambda name: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(analysis, "spark_session", lambda: None)
    text = "features: {x: number}\nlabel: {y: binary}\ntransform: {sql: 'SELECT * FROM source'}"
    assert Pipeline.check_file(written(tmp_path, text)).startswith("transform.sql was read and not analysed")
    file = written(tmp_path, text.replace("source", "sorce"))
    with pytest.raises(PipelineFileError, match=r"p.yaml:4: transform.sql: reads 'sorce'"):
        Pipeline.check_file(file)


def test_where_the_source_is_out_of_reach_its_sql_is_read_all_the_same(tmp_path):
    text = "features: {x: number}\nlabel: {y: binary}\ntransform: {sql: 'SELECT * FROM source'}"
    file = written(tmp_path, text)
    file.write_text(file.read_text().replace("./rows", "./none"))
    unknown = Pipeline.check_file(file)
    assert "the columns of the source were not looked at" in unknown
    assert "transform.sql was read and not analysed" in unknown
    file.write_text(file.read_text().replace("FROM source", "FROM sorce"))
    with pytest.raises(PipelineFileError, match=r"p.yaml:4: transform.sql: reads 'sorce'"):
        Pipeline.check_file(file)


def test_an_empty_text_is_a_class_but_in_csv_where_nothing_is_told_from_it(tmp_path, capsys):
    columns = {"x": [1.0, 2.0] * 25, "y": ["a", ""] * 25}
    text = "features: {x: number}\nlabel: {y: {type: binary, positive: a}}"
    assert main(["check", str(written(tmp_path, text, columns))]) == 0
    capsys.readouterr()
    assert main(["check", str(written(tmp_path, text, columns, "csv"))]) == 1
    assert "label.y is 'a' in every row that has one" in capsys.readouterr().err
