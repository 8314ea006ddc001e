"""The error mapping, by the texts that Spark and ranks hand over."""

import pickle
import traceback

import pytest

from sparkdl import errors
from sparkdl.compat.spark_errors import task_error, task_errors

TRACE = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in loss\n    return (y - x).nope()\n'


class PythonException(Exception):
    """As pyspark's."""


PythonException.__module__ = "pyspark.errors.exceptions.captured"


def test_an_error_of_a_task_is_raised_as_what_it_is_with_sparks_own_as_its_cause():
    text = (
        f"\n  An exception was thrown from the Python worker.\n{TRACE}sparkdl.errors.DataError: 2 rows have a null\n\n"
    )
    spark = PythonException(text + "\tat org.apache.spark.X(X.scala:1)\nCaused by: org.apache.spark.Y: again")
    with pytest.raises(errors.DataError) as caught, task_errors():
        raise spark
    assert str(caught.value) == "2 rows have a null"
    assert caught.value.__cause__ is spark


@pytest.mark.parametrize(
    "text",
    [
        f"{TRACE}ValueError: no good\n",
        f"{TRACE}pandas.errors.DataError: not ours\n",
        f"{TRACE}sparkdl.errors.DataError: nulls\n\nDuring handling of the above exception, another exception occurred:"
        f"\n\n{TRACE}KeyError: 'mine'\n",
        f"{TRACE}sparkdl.errors.ClusterError: rank 1 failed: x [sparkdl-failure:abc]\n",
    ],
)
def test_what_is_not_ours_passes_as_it_is(text):
    raised = PythonException(text)
    with pytest.raises(PythonException) as caught, task_errors():
        raise raised
    assert caught.value is raised
    assert task_error(ValueError("sparkdl.errors.DataError: quoted")) is None


def test_workers_that_cannot_start_for_want_of_a_module_are_told_by_its_name():
    daemon = "python: Error while finding module specification for 'sparkdl.launch.daemon' (ModuleNotFoundError: No "
    raised = PythonException(f"Error from python worker:\n  {daemon}module named 'sparkdl')\nPYTHONPATH was:\n  /x\n")
    words = "the workers' Python has no module 'sparkdl': install it there"
    with pytest.raises(errors.ClusterError, match=words), task_errors():
        raise raised
    of_the_user = PythonException(f"{TRACE}ModuleNotFoundError: No module named 'mine'\n")
    assert task_error(of_the_user) is None


def test_workers_whose_python_is_not_there_are_told_which_it_is():
    java = "\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)\n"
    failed = 'java.io.IOException: Cannot run program "{}": error=2, No such file or directory\n' + java
    worker = (
        failed.format("/no/python") + "\tat org.apache.spark.api.python.PythonWorkerFactory.startDaemon(P.scala:346)"
    )
    words = r"^the workers cannot run /no/python \(No such file or directory\): set PYSPARK_PYTHON"
    with pytest.raises(errors.ClusterError, match=words), task_errors():
        raise PythonException(worker)
    assert task_error(PythonException(failed.format("nvidia-smi"))) is None


def test_a_rank_that_refuses_is_told_by_the_type_it_raised_and_one_that_fails_by_one_sentence():
    failed = errors.RankFailedError(1, "DataError: nulls", f"{TRACE}sparkdl.errors.DataError: nulls\n", ("said",))
    original = errors.DataError("nulls")
    original.__cause__, failed.__cause__ = failed.__cause__, original
    with pytest.raises(errors.DataError) as caught, task_errors():
        raise failed
    assert caught.value is original
    assert original.__cause__ is failed
    assert isinstance(failed.__cause__, errors.RemoteTraceback)
    told = errors.RankFailedError(1, "DataError: nulls", failed.rank_traceback)  # Spark Connect brings the text alone
    with pytest.raises(errors.DataError, match=r"^nulls$"), task_errors():
        raise told
    users = errors.RankFailedError(1, "AttributeError: nope", f"{TRACE}AttributeError: nope\n", ("said",))
    with pytest.raises(errors.RankFailedError, match=r"^rank 1 failed: AttributeError: nope$"), task_errors():
        raise users


def test_a_script_prints_the_ranks_traceback_once_and_the_sentence_last():
    error = errors.RankFailedError(1, "AttributeError: nope", f"{TRACE}AttributeError: nope\n", ("said",))
    for one in (error, pickle.loads(pickle.dumps(error))):
        printed = "".join(traceback.format_exception(one))
        assert printed.count("in loss") == 1
        assert "Last 1 lines of rank 1:\nsaid" in printed
        assert printed.rstrip().endswith("sparkdl.errors.RankFailedError: rank 1 failed: AttributeError: nope")
