"""A pipeline every day, by Airflow (parsed by 3.3): put this file into the folder of DAGs, with your paths."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from datetime import datetime, timedelta

try:
    from airflow.sdk import BaseOperator, dag
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
except ImportError:  # Airflow 2
    from airflow.decorators import dag
    from airflow.exceptions import AirflowException, AirflowFailException, AirflowSkipException
    from airflow.models import BaseOperator

PROJECT = "/srv/churn"
COMMAND = [".venv/bin/sparkdl", "run", "churn.yaml"]
SKIPPED = {10: "nothing new", 20: "the new model was not promoted"}
WORTH_ANOTHER_TRY = {
    2: "the cluster failed",
    3: "the training failed",
    5: "a store did not answer",
    30: "another run was at work",
}
GRACE_SECONDS = 60


def end(code: int) -> None:
    """Turn an exit code of ``sparkdl run`` into the state of a task.

    Codes, what they mean, and what becomes of the task:

        0               promoted or scored                          success
        10, 20          nothing new; not promoted                   skipped: what follows is skipped, too
        1, 4            refused, or an error nobody foresaw         failed; tried again it would fail again
        2, 3, 5, 30     cluster, training, a store that did not     failed, and tried again
                        answer, another run was at work
        130, -9, ...    ended by a signal                           failed, and tried again: what was done is kept
    """
    if code in SKIPPED:
        raise AirflowSkipException(SKIPPED[code])
    if code in WORTH_ANOTHER_TRY:
        raise AirflowException(f"exit code {code}: {WORTH_ANOTHER_TRY[code]}")
    if code < 0 or code > 128:
        raise AirflowException(f"exit code {code}: a signal ended the run, and the next one goes on where it was")
    if code:
        raise AirflowFailException(f"exit code {code}: the log has the sentence that says why")


class SparkdlRun(BaseOperator):
    """A run in a process of its own, whose output is the task's log.

    A task that is cleared, marked or out of time ends its run by SIGTERM and waits for it: the run leaves its record
    and gives its lease back. Should Airflow lose patience with the task, the run has its signal by then and ends all
    the same.
    """

    process = None

    def execute(self, context: object) -> None:
        """Run to the end, whoever ends it."""
        # In a session of its own: a signal to Airflow's processes does not end Java before the run has its record.
        self.process = subprocess.Popen(
            COMMAND, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        output = threading.Thread(target=self.log_output, daemon=True)
        output.start()
        try:
            while self.process.poll() is None:  # not wait(), which on_kill, in a signal handler, could not share
                time.sleep(0.5)
        finally:  # execution_timeout comes as an exception
            self.on_kill()
            output.join(5)  # processes of the run may hold its output open for longer
        end(self.process.returncode)

    def log_output(self) -> None:
        """Let the task's log have what the run prints."""
        for line in self.process.stdout:
            self.log.info("%s", line.rstrip())

    def on_kill(self) -> None:
        """Ask the run to end, and wait until it has."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dag(
    schedule="15 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=10)},
    tags=["sparkdl"],
)
def churn() -> None:
    """Train, judge, publish and predict what is stale.

    Days that were missed need no catch-up by Airflow: the pipeline's receipts tell what is stale. Nor does it matter if
    two runs meet: one of them leaves with 30.
    """
    SparkdlRun(task_id="run", execution_timeout=timedelta(hours=4))


churn()
