"""What a run leaves, whatever its end, holds neither what came from the environment nor what its options say."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime

import pytest

from sparkdl.errors import SparkdlError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest

SECRET = "correct-horse-battery"
FILE = """
name: quiet
root: {root}
source: {{kind: function, function: "rows_of_secrets:rows", arguments: {{pat: "${{DOOR}}", fail: {fail}}}, key: id}}
transform: {{sql: "SELECT *, length('${{DOOR}}') AS n, length('written-{secret}') AS m FROM source"}}
features: {{x: number}}
label: {{y: regression}}
spark: {{conf: {{spark.own.header: "Bearer written-{secret}"}}}}
notify: {{command: "sh -c 'cat > {root}/told.json'", when: [stopped, refused]}}
"""
CODE = """
def rows(spark, window, pat, fail):
    assert pat == "correct-horse-battery"
    if fail:
        raise OSError("401 for " + pat + " and Bearer written-" + pat)
    return spark.range(100).selectExpr("id", "id * 1.0 AS x", "id * 2.0 AS y")
"""


@pytest.mark.parametrize("fail", [False, True])
def test_no_file_of_a_run_holds_a_secret(spark, tmp_path, monkeypatch, fail):
    (tmp_path / "rows_of_secrets.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    root = tmp_path / "made"
    root.mkdir()
    text = FILE.format(root=root, fail=str(fail).lower(), secret=SECRET)
    run = Run(
        Project(loads(text, (), {"DOOR": SECRET}, folder=tmp_path)), RunRequest(now=datetime.now(UTC), until="ingest")
    )
    if fail:
        with pytest.raises(SparkdlError, match="401 for"):
            execute(run, spark)
        assert run.record.message.endswith("401 for ${DOOR} and (hidden)")
    else:
        assert execute(run, spark).rows["kept"] == 100
    assert (root / "told.json").exists()
    files = [file for file in root.rglob("*") if file.is_file()]
    assert len(files) > 4
    for file in files:
        data = file.read_bytes()
        assert SECRET.encode() not in (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data), file
