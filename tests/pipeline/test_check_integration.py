"""The SQL of a pipeline file is analysed before a run: by the session that there is, or by one of its own."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.errors import PipelineFileError
from sparkdl.pipeline import Pipeline, analysis

WRONG = (
    ("SELECT *, lenght(t) AS n FROM source", r"4: transform.sql: Cannot resolve routine `lenght`"),
    ("SELECT *, xx + 1 AS n FROM source", r"4: transform.sql: A column, .* `xx` cannot be resolved\. Did .* \[`x`, "),
    ("SELECT x,, t FROM source", r"4: transform.sql: .*[Ss]yntax error"),
    ("SELECT x + t['a'] AS x, y FROM source", r"4: transform.sql: "),
    (
        "SELECT x FROM source JOIN nowhere.none USING (x)",
        r"4: transform.sql: The table or view `nowhere`",
    ),
    ("SELECT x, t FROM {source}", r"3: label.y is no column of the transform: choose one of x, t"),
    ("SELECT x, y, t AS z FROM source", r"5: expect.known.check=.* reads 't'|5: expect.known: "),
    ("SELECT t AS x, t, y FROM source", r"2: features.x is a column of string, and numbers are needed"),
)


def written(folder, sql):
    """A pipeline file whose transform is ``sql``, beside its table."""
    table = {"x": np.arange(20.0), "t": ["a", "b"] * 10, "y": [0, 1] * 10}
    pq.write_table(pa.table(table), folder / "rows.parquet")
    file = folder / "p.yaml"
    file.write_text(
        "source: {kind: parquet, path: rows.parquet}\nfeatures: {x: number}\nlabel: {y: binary}\n"
        f'transform: {{sql: "{sql}"}}\nexpect: {{known: "t IS NOT NULL"}}\n'
    )
    return file


def test_what_spark_cannot_analyse_is_told_with_its_line(spark, tmp_path):
    for sql, said in WRONG:
        with pytest.raises(PipelineFileError, match=said) as refused:
            Pipeline.check_file(written(tmp_path, sql))
        assert "\n" not in str(refused.value), refused.value
        assert "_window" not in str(refused.value)
    for sql in ("SELECT * FROM source", "SELECT x, y, upper(t) AS t FROM {source} WHERE t RLIKE '^[a-z]{{1}}$'"):
        assert Pipeline.check_file(written(tmp_path, sql)) == ""


@pytest.mark.slow
def test_without_a_session_another_process_analyses_and_no_spark_is_left_here(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "spark_session", lambda: None)
    assert Pipeline.check_file(written(tmp_path, "SELECT * FROM source")) == ""
    with pytest.raises(PipelineFileError, match=WRONG[1][1]):
        Pipeline.check_file(written(tmp_path, WRONG[1][0]))
    unknown = Pipeline.check_file(written(tmp_path, "SELECT s.* FROM source s JOIN theirs.table USING (x)"))
    assert unknown.startswith("transform.sql was not analysed to its end: The table or view `theirs`.`table`")
