"""The pre-flight check over plain facts: what is refused, in which words, and what is let through."""

from __future__ import annotations

import pytest

from sparkdl.config import LaunchConfig
from sparkdl.errors import PreflightError
from sparkdl.launch.driver import barrier
from sparkdl.launch.driver.preflight import ClusterFacts, check_versions, crowded_hosts, job_problems

LOCAL = ClusterFacts(master="local[2]", slots=2, total_slots=2, executors=1)
STANDALONE = ClusterFacts(master="spark://h:7077", slots=4, total_slots=8, executors=2, task_cpus=2, task_gpus=1.0)


@pytest.mark.parametrize(("facts", "num_proc", "gpus"), [(LOCAL, 2, None), (LOCAL, 1, 0), (STANDALONE, 4, 1)])
def test_what_fits_is_let_through(facts, num_proc, gpus):
    assert job_problems(num_proc, gpus, facts) == []


def test_what_a_session_does_not_tell_is_let_through():
    assert job_problems(64, None, ClusterFacts()) == []


@pytest.mark.parametrize(
    ("facts", "num_proc", "gpus", "words"),
    [
        (LOCAL, 3, None, ("num_proc=3", "2 task slots", "local[3]")),
        (LOCAL, 0, None, ("num_proc=0", "at least 1")),
        (LOCAL, 2, 1, ("1 GPUs", "local master", "num_proc below 0")),
        (STANDALONE, 5, 1, ("num_proc=5", "4 task slots with 1 GPUs", "8 by CPUs", "spark.task.resource.gpu.amount")),
        (STANDALONE, 9, None, ("num_proc=9", "4 task slots", "2 executors", "2 CPUs a task", "spark.cores.max")),
        (STANDALONE, 2, 2, ("2 GPUs", "gives a task 1", "spark.task.resource.gpu.amount=2")),
        (
            ClusterFacts(master="yarn", slots=9, dynamic_allocation=True),
            2,
            None,
            ("spark.dynamicAllocation.enabled=true", "set it to false"),
        ),
    ],
)
def test_what_cannot_run_is_refused_with_both_values_and_the_remedy(facts, num_proc, gpus, words):
    problem = job_problems(num_proc, gpus, facts)[0]
    for word in words:
        assert word in problem


def test_every_problem_is_listed():
    facts = ClusterFacts(master="local[2]", slots=2, dynamic_allocation=True)
    assert len(job_problems(3, 1, facts)) == 3


@pytest.mark.parametrize("name", ["python", "torch", "horovod", "sparkdl"])
def test_a_worker_with_another_version_is_named(name):
    here = {"python": "3.11", "torch": "2.13.0", "horovod": "0.28.1", "sparkdl": "1.0.0"}
    check_versions(here, [("a", here), ("b", here)])
    with pytest.raises(PreflightError, match=rf"{name} is 0\.1 on b but {here[name]} on the driver: install"):
        check_versions(here, [("a", here), ("b", {**here, name: "0.1"})])
    with pytest.raises(PreflightError, match=f"{name} is not installed on b"):
        check_versions(here, [("b", {**here, name: ""})])


def test_a_host_with_more_threads_than_cores_is_named_once():
    registrations = [{"host": "a", "cores": 2, "threads": 2}, {"host": "a", "cores": 2, "threads": 2}]
    assert len(crowded_hosts([*registrations, {"host": "b", "cores": 2, "threads": 2}], None)) == 1
    assert crowded_hosts(registrations, 1) == []


@pytest.fixture
def cluster(monkeypatch):
    """Let a launch see a cluster that tells one thing after the other; the last one stays."""

    def tells(*facts):
        told = iter(facts)
        latest = []

        def cluster_facts(*_):
            latest[:] = [next(told, *latest)]
            return latest[0]

        monkeypatch.setattr(barrier, "cluster_facts", cluster_facts)
        monkeypatch.setattr(barrier, "is_local", lambda _: False)
        monkeypatch.setattr(barrier, "use_drivers_python", lambda _: None)
        return lambda num_proc, timeout: barrier._preflight(
            None, num_proc, LaunchConfig(start_timeout_seconds=timeout), None
        )

    return tells


def test_a_launch_waits_for_an_executor_that_is_being_replaced(cluster):
    whole, half = ClusterFacts(slots=2, executors=2), ClusterFacts(slots=1, executors=1)
    lost = ClusterFacts(slots=1, executors=1, lost_slots=1)
    launch = cluster(half, lost, half, half, whole)  # Spark tells of the loss late, and forgets it with time
    launch(2, timeout=60)


def test_a_launch_waits_no_longer_than_its_timeout_for_an_executor(cluster):
    launch = cluster(ClusterFacts(slots=1, executors=1, lost_slots=1))
    with pytest.raises(PreflightError, match="num_proc=2 ranks do not fit the cluster's 1 task slots"):
        launch(2, timeout=0.3)


def test_a_launch_that_all_executors_could_not_run_is_refused(cluster):
    launch = cluster(ClusterFacts(slots=1, executors=1, lost_slots=1))
    with pytest.raises(PreflightError, match="num_proc=3 ranks do not fit"):
        launch(3, timeout=3600)
