"""What a task raises reaches whoever runs the action, and a notebook shows one sentence."""

import nbformat
import pytest
from nbclient import NotebookClient
from pyspark.errors import PythonException
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.errors import DataError
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.score import score


class Echo(nn.Module):
    def forward(self, x):
        return x[:, 0]


@pytest.mark.slow
def test_nulls_in_a_prediction_are_a_data_error_also_in_a_session_made_later(spark):
    signature = Signature(
        inputs=(TensorField(name="x", shape=(2,), columns=("a", "b")),), outputs=(TensorField(name="y"),)
    )
    scored = score(spark.sql("select 1.0 a, cast(null as double) b"), Echo(), signature=signature)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^1 rows have a null among \['a', 'b'\]") as caught:
            scored.collect()
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value.__cause__, PythonException)
        SparkSession(spark.sparkContext)  # asks pyspark to install its own handler again
    with pytest.raises(DataError, match=r"^1 rows have a null among \['a', 'b'\].*before$"):  # no SQLSTATE behind
        scored.toPandas()
    with pytest.raises(PythonException, match="ZeroDivisionError"):
        spark.range(1).mapInPandas(lambda frames: (1 / 0 for _ in frames), "id long").collect()


class HalfACharacter(nn.Module):
    def forward(self, x):
        raise OSError("no file caf\udce9")


@pytest.mark.timeout(120)
def test_a_text_that_no_utf8_holds_arrives_instead_of_a_job_that_never_ends(spark):
    signature = Signature(inputs=(TensorField(name="x", shape=(1,), columns=("a",)),), outputs=(TensorField(name="y"),))
    with pytest.raises(PythonException, match=r"OSError: no file caf\\udce9"):
        score(spark.sql("select 1.0 a"), HalfACharacter(), signature=signature).collect()


CELLS = [
    "import sparkdl\ndef train(scale):\n    return scale / 0",
    "value = 1\nsparkdl.run(train, (value,), num_proc=-1)",
    "from sparkdl.errors import DataError\ndef refuse():\n    raise DataError('column x holds 3 nulls: fill them')",
    "sparkdl.run(refuse, num_proc=-1)",
]


def test_a_notebook_shows_the_sentence_and_the_line_of_the_cell():
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=240, allow_errors=True).execute()
    users, ours = (cell.outputs[-1]["traceback"] for cell in (cells[1], cells[3]))
    assert users == [
        "RankFailedError: rank 0 failed: ZeroDivisionError: division by zero",
        "  in the cell, line 2: sparkdl.run(train, (value,), num_proc=-1)",
        "  on rank 0 in the cell, line 3: return scale / 0",
        "  the rest: import sys, traceback; traceback.print_exception(sys.last_value)",
    ]
    assert ours[0] == "DataError: column x holds 3 nulls: fill them"
    assert len(ours) == 3
