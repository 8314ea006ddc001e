"""Workers of a session that was there before find the modules that a file names."""

from __future__ import annotations

from sparkdl.pipeline.file import loads
from sparkdl.pipeline.session import code_for_workers

FILE = """
source: {kind: csv, path: wine.csv}
transform: cellar_of_workers:better
features: {alcohol: number}
label: {quality: regression}
"""


def test_workers_import_from_the_folder_of_the_file_for_the_time_of_a_run(spark, tmp_path):
    (tmp_path / "cellar_of_workers.py").write_text("BOTTLES = 7\n")
    spec = loads(FILE, folder=tmp_path).spec

    def bottles(batches):
        import cellar_of_workers
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"bottles": [cellar_of_workers.BOTTLES]})

    before = dict(spark.sparkContext.environment)
    with code_for_workers(spark, spec):
        assert spark.range(1).mapInArrow(bottles, "bottles long").first().bottles == 7
    assert spark.sparkContext.environment == before
