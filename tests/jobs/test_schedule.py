"""What is ready to schedule: each file is what its system reads, and what it starts is there and takes its words."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from sparkdl.cli import _parser, job
from sparkdl.pipeline.state.record import EXIT_CODES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "jobs" / "schedule"
CODES = {*EXIT_CODES.values(), 1, 2, 3, 4, 5}
SIGNALS = {-9, 130, 143}
IN_AIRFLOW = """
import json, sys
try:
    from airflow.dag_processing.dagbag import DagBag
except ImportError:
    from airflow.models.dagbag import DagBag
bag = DagBag(sys.argv[1])
sys.path.insert(0, sys.argv[1])
import airflow_dag
ends = {}
for code in map(int, sys.argv[2:]):
    try:
        airflow_dag.end(code)
        ends[code] = "success"
    except Exception as error:
        ends[code] = type(error).__name__
(task,) = bag.dags["churn"].tasks
print(json.dumps({"errors": list(map(str, bag.import_errors.values())), "retries": task.retries, "ends": ends}))
"""


def documents(name):
    return yaml.safe_load((FOLDER / name).read_text())


def cron_lines():
    """The lines that start something, those that are commented out, too."""
    text = (FOLDER / "crontab").read_text()
    return re.findall(r"^#? ?((?:[\d*]+ ){5} ?)(.+)$", text, re.MULTILINE)


def commands():
    """``sparkdl run ...`` and ``jobs/....py ...`` of every file, as words."""
    found = []
    for _, line in cron_lines():
        words = shlex.split(re.search(r"(\S*sparkdl run|\S*jobs/\w+\.py) [^>]*", line)[0])
        found.append(words)
    tree = ast.parse((FOLDER / "airflow_dag.py").read_text())
    (command,) = (ast.literal_eval(node.value) for node in tree.body
                  if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMAND")  # fmt: skip
    found.append(command)
    (task,) = documents("databricks.yml")["resources"]["jobs"]["retrain"]["tasks"]
    found.append([task["spark_python_task"]["python_file"], *task["spark_python_task"]["parameters"]])
    template = documents("kubernetes.yaml")["spec"]["template"]
    found.append([template["mainApplicationFile"], *template["arguments"]])
    return found


def test_every_command_is_one_that_there_is(monkeypatch):
    parsed = []
    monkeypatch.setattr("sparkdl.cli.main", lambda words: parsed.append(_parser().parse_args(words)) or 0)
    for words in commands():
        program, *others = words
        if program.endswith("sparkdl"):
            parsed.append(_parser().parse_args(others))
        else:
            assert (ROOT / "jobs" / Path(program).name).exists(), program
            assert job("run", arguments=others) == 0
    assert len(parsed) == len(commands()) == 7
    assert {Path(each.file).name for each in parsed} == {"churn.yaml"}
    assert all(isinstance(each.ok_when_nothing, bool) for each in parsed)


def test_only_airflow_tells_nothing_new_from_a_failure_by_itself():
    for words in commands():
        assert "--ok-when-nothing" in words or words == [".venv/bin/sparkdl", "run", "churn.yaml"]


def test_the_crontab_has_five_fields_of_time_and_shell_that_parses():
    lines = cron_lines()
    assert len(lines) == 4
    for times, command in lines:
        minute, hour, *days = times.split()
        assert 0 <= int(minute) < 60
        assert hour == "*" or 0 <= int(hour) < 24
        assert days == ["*", "*", "*"]
        assert "%" not in command  # which cron takes for the end of a line
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0


@pytest.fixture
def cron(tmp_path):
    """Run the crontab's first line for real, with a program in place of sparkdl that does what a shell is told."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program = tmp_path / ".venv" / "bin" / "sparkdl"
    (tmp_path / "cron.sh").symlink_to(FOLDER / "cron.sh")
    _, line = cron_lines()[0]

    def run(script, **settings):
        program.write_text(f"#!/bin/bash\necho said\n{script}\n")
        program.chmod(0o755)
        environment = {**os.environ, "PROJECT": str(tmp_path), "PAUSE": "0", **settings}
        return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)

    return run


def log_of(folder):
    (log,) = (folder / "logs").glob("churn-*.log")
    return log.read_text()


@pytest.mark.parametrize("code", sorted(CODES))
def test_cron_tries_again_what_is_worth_it_and_tells_of_what_failed(cron, tmp_path, code):
    done = cron(f"exit {code}")
    assert log_of(tmp_path).count("said") == (3 if code in (2, 3, 5, 30) else 1)
    if code in (0, 30):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    else:
        assert done.returncode == code
        assert done.stdout.startswith(f"churn: exit code {code}\n")
        assert "\nsaid\n" in done.stdout


def test_cron_tells_of_a_store_that_came_back_nothing(cron, tmp_path):
    done = cron("[ -e once ] || { touch once; exit 5; }")
    assert (done.returncode, done.stdout) == (0, "")
    assert log_of(tmp_path).count("said") == 2


def test_cron_is_not_silent_for_ever_about_runs_that_meet_another_one(cron, tmp_path):
    assert cron("exit 30").stdout == ""
    well = tmp_path / "logs" / "churn.ended-well"
    os.utime(well, (time.time() - 50 * 3600,) * 2)
    assert "no run has ended well for 48 hours" in cron("exit 30").stdout
    assert cron("exit 0").stdout == ""
    assert cron("exit 30").stdout == ""


def test_cron_ends_a_run_that_takes_too_long_and_lets_it_end_well(cron, tmp_path):
    done = cron("trap 'echo record written; exit 130' TERM; sleep 60 & wait", LIMIT="0.5s")
    assert done.stdout.startswith("churn: ended after 0.5s")
    assert "record written" in log_of(tmp_path)


def test_cron_keeps_logs_for_a_while(cron, tmp_path):
    (tmp_path / "logs").mkdir()
    old, other = tmp_path / "logs" / "churn-2026-01-01.log", tmp_path / "logs" / "score-2026-01-01.log"
    for log in (old, other):
        log.write_text("")
        os.utime(log, (time.time() - 40 * 86400,) * 2)
    cron("exit 0")
    assert not old.exists()
    assert other.exists()


def test_a_run_on_yarn_is_submitted_once_with_its_file_and_keeps_its_exit_code(tmp_path):
    """With a client of YARN's that says what Spark's says."""
    (tmp_path / "spark-submit").write_text(
        "#!/bin/bash\nprintf '%s\\n' \"$@\" >asked\n"
        "echo 'INFO Client: Submitting application application_17_0001 to ResourceManager'\n"
        "echo 'diagnostics: User application exited with status 5'\nexit 1\n"
    )
    (tmp_path / "spark-submit").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PY_FILES": "network.py"}
    command = [str(FOLDER / "yarn.sh"), "jobs/retrain.py", "--config", "conf/churn.yaml", "--ok-when-nothing"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "yarn logs -applicationId application_17_0001 | grep '^sparkdl:'" in done.stdout
    asked = (tmp_path / "asked").read_text().split()
    assert asked[asked.index("--files") + 1] == "conf/churn.yaml"
    assert asked[asked.index("--py-files") + 1] == "network.py"
    assert "spark.yarn.maxAppAttempts=1" in asked
    assert asked[asked.index("jobs/retrain.py") :] == ["jobs/retrain.py", "--config", "churn.yaml", "--ok-when-nothing"]


def test_the_bundle_of_databricks_has_a_job_that_starts_on_a_cluster_of_one_size():
    bundle = documents("databricks.yml")
    assert set(bundle) == {"bundle", "variables", "resources", "targets"}
    retrain = bundle["resources"]["jobs"]["retrain"]
    (task,), (cluster,) = retrain["tasks"], retrain["job_clusters"]
    assert task["job_cluster_key"] == cluster["job_cluster_key"]
    assert isinstance(cluster["new_cluster"]["num_workers"], int)
    assert "autoscale" not in cluster["new_cluster"]
    files = [task["spark_python_task"]["python_file"], *(library["whl"] for library in task["libraries"])]
    assert all(name.startswith("./") and ".." not in name for name in files), "a bundle is the folder of its file"
    assert "${workspace.file_path}/churn.yaml" in task["spark_python_task"]["parameters"]
    named = re.findall(r"\$\{var\.(\w+)\}", (FOLDER / "databricks.yml").read_text())
    assert set(named) == set(bundle["variables"])
    assert (task["max_retries"], task["timeout_seconds"]) == (2, 14400)
    assert len(retrain["schedule"]["quartz_cron_expression"].split()) == 6
    assert retrain["max_concurrent_runs"] == 1


def test_the_application_of_kubernetes_has_what_the_operator_asks_for():
    found = documents("kubernetes.yaml")
    assert (found["apiVersion"], found["kind"]) == ("sparkoperator.k8s.io/v1beta2", "ScheduledSparkApplication")
    spec, template = found["spec"], found["spec"]["template"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert len(spec["schedule"].split()) == 5
    assert {"type", "sparkVersion", "driver", "executor"} <= set(template)
    assert template["sparkConf"]["spark.dynamicAllocation.enabled"] == "false"
    assert all(isinstance(value, str) for value in template["sparkConf"].values())
    assert template["restartPolicy"]["type"] == "OnFailure"
    module = template["sparkConf"]["spark.python.daemon.module"]
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_the_help_of_a_run_explains_every_exit_code(capsys):
    with pytest.raises(SystemExit):
        _parser().parse_args(["run", "--help"])
    text = capsys.readouterr().out
    text = text[text.index("exit codes:") :].partition(";")[0]
    assert set(map(int, re.findall(r"\d+", text))) == {*CODES, 130}


@pytest.mark.parametrize("name", ["crontab", "airflow_dag.py"])
def test_every_exit_code_that_a_scheduler_may_see_is_explained(name):
    text = (FOLDER / name).read_text()
    assert {code for code in CODES if re.search(rf"\b{code}\b", text)} == CODES


def airflow():
    named = os.environ.get("AIRFLOW_PYTHON")
    return Path(named) if named else ROOT / ".venv-airflow" / "bin" / "python"


STAND_IN = """
import logging
class BaseOperator:
    def __init__(self, **options):
        self.log = logging.getLogger("task")
def dag(**options):
    return lambda function: lambda: None
class exceptions:
    AirflowException = type("AirflowException", (Exception,), {})
    AirflowFailException = type("AirflowFailException", (AirflowException,), {})
    AirflowSkipException = type("AirflowSkipException", (AirflowException,), {})
import sys
sys.modules["airflow.sdk.exceptions"] = exceptions
"""
TASK = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import airflow_dag
airflow_dag.PROJECT = sys.argv[2]
program = "trap 'sleep 0.3; echo ended well >record; exit 130' TERM; touch begun; sleep 50 & wait"
airflow_dag.COMMAND = ["bash", "-c", program]
task = airflow_dag.SparkdlRun(task_id="run")

def out_of_time(*_):
    raise TimeoutError("out of time")

# what a task runner of Airflow does: it asks by SIGTERM, and ends what takes too long by an exception
signal.signal(signal.SIGTERM, lambda *_: task.on_kill())
signal.signal(signal.SIGALRM, out_of_time)

def end():
    while not os.path.exists(os.path.join(sys.argv[2], "begun")):
        time.sleep(0.05)
    time.sleep(0.5)  # the shell waits by now
    os.kill(os.getpid(), int(sys.argv[3]))

threading.Thread(target=end, daemon=True).start()
try:
    task.execute({})
except Exception as error:
    print(type(error).__name__, error, os.path.exists(os.path.join(sys.argv[2], "record")))
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (signal.SIGTERM, "AirflowException exit code 130: a signal ended the run"),
        pytest.param(signal.SIGALRM, "TimeoutError", marks=pytest.mark.slow),
    ],
)
def test_airflow_ends_a_run_by_sigterm_and_waits_until_it_has_ended(tmp_path, how, told):
    (tmp_path / "airflow").mkdir()
    (tmp_path / "airflow" / "__init__.py").write_text("")
    (tmp_path / "airflow" / "sdk.py").write_text(STAND_IN)
    done = subprocess.run(
        [sys.executable, "-c", TASK, str(FOLDER), str(tmp_path), str(int(how))],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith(told), done.stderr
    assert done.stdout.endswith(" True\n")


@pytest.mark.slow
@pytest.mark.skipif(not airflow().exists(), reason="needs Airflow in an environment of its own: make airflow")
def test_airflow_reads_the_dag_and_exit_codes_become_states(tmp_path):
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "airflow_dag.py").write_text((FOLDER / "airflow_dag.py").read_text())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    done = subprocess.run(
        [str(airflow()), "-c", IN_AIRFLOW, str(tmp_path / "dags"), *map(str, sorted(CODES | SIGNALS))],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["errors"], found["retries"]) == ([], 2)
    assert found["ends"] == {
        "0": "success", "10": "AirflowSkipException", "20": "AirflowSkipException",
        "1": "AirflowFailException", "4": "AirflowFailException",
        "2": "AirflowException", "3": "AirflowException", "5": "AirflowException", "30": "AirflowException",
        "-9": "AirflowException", "130": "AirflowException", "143": "AirflowException",
    }  # fmt: skip
