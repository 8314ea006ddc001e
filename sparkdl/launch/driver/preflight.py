"""The checks before a job starts, pure functions: a refusal after milliseconds, not a wait of minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import PreflightError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """What a session tells of its cluster; None where it does not.

    Attributes:
        master: Spark's master URL.
        slots: tasks of this job that the cluster can run at once, by all the resources a task asks for.
        total_slots: tasks it could run if they asked for CPUs alone.
        executors: executors registered now, the driver of a local master counting as one.
        may_grow: whether executors of the application are still being started.
        lost_slots: tasks that executors could run which the cluster has lost of late and not yet replaced.
        dynamic_allocation: whether Spark adds and removes executors by load.
        task_cpus: CPUs a task asks for.
        task_gpus: GPUs a task asks for.
    """

    master: str | None = None
    slots: int | None = None
    total_slots: int | None = None
    executors: int | None = None
    may_grow: bool = False
    lost_slots: int = 0
    dynamic_allocation: bool = False
    task_cpus: int = 1
    task_gpus: float = 0.0


def job_problems(num_proc: int, gpus_per_rank: int | None, facts: ClusterFacts) -> list[str]:
    """Return what keeps ``num_proc`` ranks with ``gpus_per_rank`` GPUs each from running; [] if nothing does."""
    if num_proc < 1:
        return [f"num_proc={num_proc} must be at least 1: ask for one rank or more"]
    problems = []
    if facts.dynamic_allocation:
        problems.append(
            "a barrier stage cannot run with spark.dynamicAllocation.enabled=true: set it to false for this application"
        )
    gpus_needed = gpus_per_rank or 0
    if gpus_needed > facts.task_gpus:
        local = facts.master is not None and facts.master.startswith("local")
        remedy = (
            "a local master has no GPUs to give: use num_proc below 0 for ranks as processes of this host, or a cluster"
            if local and not facts.master.startswith("local-cluster")  # type: ignore[union-attr]
            else f"set spark.task.resource.gpu.amount={gpus_needed} and spark.executor.resource.gpu.amount"
        )
        problems.append(f"each rank needs {gpus_needed} GPUs, but Spark gives a task {facts.task_gpus:g}: {remedy}")
    if facts.slots is not None and facts.slots < num_proc:
        problems.append(_too_few_slots(num_proc, facts))
    return problems


def _too_few_slots(num_proc: int, facts: ClusterFacts) -> str:
    text = f"num_proc={num_proc} ranks do not fit the cluster's {facts.slots} task slots"
    if facts.master is not None and facts.master.startswith("local["):
        return f"{text}: lower num_proc, or start Spark with master local[{num_proc}]"
    if facts.task_gpus and facts.total_slots is not None and facts.total_slots >= num_proc:
        return (
            f"{text} with {facts.task_gpus:g} GPUs each, though it has {facts.total_slots} by CPUs: lower num_proc or "
            f"spark.task.resource.gpu.amount, or add GPUs"
        )
    return (
        f"{text} ({facts.executors} executors, {facts.task_cpus} CPUs a task): lower num_proc or spark.task.cpus, or "
        f"raise spark.executor.instances or spark.cores.max"
    )


def check_versions(driver: Mapping[str, str], workers: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Refuse workers, pairs of host and versions, that differ from the ``driver``.

    Raises:
        PreflightError: with the first difference.
    """
    for host, versions in workers:
        for name, version in driver.items():
            installed = versions.get(name, "")
            if installed != version:
                raise PreflightError(
                    f"{name} is {installed or 'not installed'} on {host} but {version or 'not installed'} on the "
                    f"driver: install the same version everywhere, or point PYSPARK_PYTHON at an environment that "
                    f"has it"
                )


def crowded_hosts(registered: Sequence[Mapping[str, Any]], threads: int | None) -> list[str]:
    """Return a warning for each host whose ranks want more threads than it has cores.

    Args:
        registered: what each rank said of itself: ``host``, ``cores``, ``threads``.
        threads: per rank, where the user has said it; None takes each rank's own figure.
    """
    warnings = []
    for host in dict.fromkeys(rank_facts["host"] for rank_facts in registered):
        host_ranks = [rank_facts for rank_facts in registered if rank_facts["host"] == host]
        threads_wanted = sum(threads or int(rank_facts["threads"]) for rank_facts in host_ranks)
        cores = max(int(rank_facts["cores"]) for rank_facts in host_ranks)
        if threads_wanted > cores:
            warnings.append(
                f"{len(host_ranks)} ranks on {host} want {threads_wanted} threads, but it has {cores} cores: lower "
                f"num_proc, spark.task.cpus or OMP_NUM_THREADS"
            )
    return warnings
