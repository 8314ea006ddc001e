"""Spark's errors in our words, and failures that travel in the text of an exception."""

from __future__ import annotations

import pytest

from sparkdl.errors import CancelledError, ClusterError, PreflightError, RankFailedError, UnreachableError
from sparkdl.launch.driver.cluster import as_cluster_error, cluster_facts
from sparkdl.launch.driver.stage_rows import _failure_text, failure_in
from sparkdl.launch.driver.supervisor import is_follow_up


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("[SPARK-24819]: Barrier execution mode does not allow run ...", PreflightError, "lower num_proc"),
        ("[SPARK-24942]: Barrier execution mode does not support dynamic", PreflightError, "dynamicAllocation"),
        ("... sparkdl.errors.UnreachableError: h does not reach the driver at d:1\n", UnreachableError, "at d:1"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different", PreflightError, "PYSPARK_PYTHON"),
        ("ModuleNotFoundError: No module named 'sparkdl'\n", ClusterError, "no module 'sparkdl'"),
        ("[SPARK_JOB_CANCELLED] Job 3 cancelled part of group", CancelledError, "was cancelled"),
        ("bigger than spark.driver.maxResultSize (1024.0 MiB)", ClusterError, "driver_host"),
    ],
)
def test_known_messages_become_typed_errors_with_a_remedy(text, kind, words):
    original = Exception(text)
    error = as_cluster_error(original)
    assert type(error) is kind
    assert words in str(error)
    assert error.__cause__ is original


def test_dynamic_allocation_matters_only_where_spark_heeds_it():
    class Settings(dict):
        def get(self, name, default=None):
            return super().get(name, default)

    Session = type("Session", (), {"__module__": "pyspark.sql.connect.session"})
    for master, heeded in (("local[2]", False), ("local-cluster[2,1,512]", True), ("yarn", True)):
        session = Session()
        session.conf = Settings({"spark.master": master, "spark.dynamicAllocation.enabled": "true"})
        assert cluster_facts(session).dynamic_allocation is heeded


def test_what_is_not_sparks_stays_as_it_is():
    for error in (ValueError("x"), KeyboardInterrupt(), PreflightError("y")):
        assert as_cluster_error(error) is error


def test_a_failure_survives_its_journey_in_a_text():
    tail = [f"line {number} " + "x" * 2000 for number in range(100)]
    text = (
        "Job aborted ... "
        + _failure_text(3, {"cause": "ValueError: ]", "traceback": "t\n", "tail": tail})
        + "\n\tat java"
    )
    failure = failure_in(text)
    assert isinstance(failure, RankFailedError)
    assert (failure.rank, failure.cause, failure.rank_traceback) == (3, "ValueError: ]", "t\n")
    assert 10 < len(failure.log_tail) < 100
    assert failure.log_tail[-1] == tail[-1]
    assert failure_in("nothing of ours") is None


@pytest.mark.parametrize("words", ["sparkdl-failure:abc", "[sparkdl-failure:abc]", "[sparkdl-failure:YWJj]"])
def test_words_that_look_like_a_failure_do_not_hide_it(words):
    failure = failure_in(f"Job aborted ... {_failure_text(1, {'cause': words})}")
    assert isinstance(failure, RankFailedError)
    assert (failure.rank, failure.cause) == (1, words)
    assert failure_in(words) is None


def test_a_peers_complaint_is_known_for_what_it_is():
    assert is_follow_up("RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    assert is_follow_up("UnreachableError: rank 1 is gone: the rank that failed first says why")
    assert is_follow_up("HorovodInternalError: Horovod has been shut down")
    assert not is_follow_up("ValueError: no good")
