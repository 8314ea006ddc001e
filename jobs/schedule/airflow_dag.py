"""A pipeline every day, by Airflow (parsed by 3.3): put this file into the folder of DAGs, with your paths.

The task calls ``sparkdl run``, and its exit codes become states of the task:

    0               promoted or scored                                  success
    10, 20          nothing new; the new model was not promoted         skipped: what follows is skipped, too
    1, 4            refused, or an error nobody foresaw                 failed; tried again it would fail again
    2, 3, 30        cluster, training, another run was at work          failed, and tried again
    130, -9, ...    ended by a signal                                   failed, and tried again: what was done is kept

Days that were missed need no catch-up by Airflow: the pipeline keeps books of its own of what is due. Nor does it
matter if two runs meet: one of them leaves with 30.
"""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta

try:
    from airflow.sdk import dag, task
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
except ImportError:  # Airflow 2
    from airflow.decorators import dag, task
    from airflow.exceptions import AirflowException, AirflowFailException, AirflowSkipException

PROJECT = "/srv/churn"
COMMAND = [".venv/bin/sparkdl", "run", "churn.yaml"]
SKIPPED = {10: "nothing new", 20: "the new model was not promoted"}
WORTH_ANOTHER_TRY = {2: "the cluster failed", 3: "the training failed", 30: "another run was at work"}


def end(code: int) -> None:
    """Turn an exit code of ``sparkdl run`` into the state of a task."""
    if code in SKIPPED:
        raise AirflowSkipException(SKIPPED[code])
    if code in WORTH_ANOTHER_TRY:
        raise AirflowException(f"exit code {code}: {WORTH_ANOTHER_TRY[code]}")
    if code < 0 or code > 128:
        raise AirflowException(f"exit code {code}: a signal ended the run, and the next one goes on where it was")
    if code:
        raise AirflowFailException(f"exit code {code}: the log has the sentence that says why")


@dag(
    schedule="15 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=10)},
    tags=["sparkdl"],
)
def churn() -> None:
    """Train, judge, publish and predict what is due."""

    @task(execution_timeout=timedelta(hours=4))
    def run() -> None:
        end(subprocess.run(COMMAND, cwd=PROJECT, check=False).returncode)

    run()


churn()
