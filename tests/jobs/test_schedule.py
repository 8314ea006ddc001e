"""What is ready to schedule: each file is what its system reads, and what it starts is there and takes its words."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from sparkdl.cli import _parser, job
from sparkdl.pipeline.state.record import EXIT_CODES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "jobs" / "schedule"
CODES = {*EXIT_CODES.values(), 1, 2, 3, 4}
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
    assert len(parsed) == len(commands()) == 6
    assert {Path(each.file).name for each in parsed} == {"churn.yaml"}
    assert all(isinstance(each.ok_when_nothing, bool) for each in parsed)


def test_only_airflow_tells_nothing_new_from_a_failure_by_itself():
    for words in commands():
        assert "--ok-when-nothing" in words or words == [".venv/bin/sparkdl", "run", "churn.yaml"]


def test_the_crontab_has_five_fields_of_time_and_shell_that_parses():
    lines = cron_lines()
    assert len(lines) == 3
    for times, command in lines:
        minute, hour, *days = times.split()
        assert 0 <= int(minute) < 60
        assert hour == "*" or 0 <= int(hour) < 24
        assert days == ["*", "*", "*"]
        assert "%" not in command  # which cron takes for the end of a line
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0


def test_the_crontab_is_silent_about_a_run_that_had_nothing_to_do_or_met_another(tmp_path):
    """The first line for real, with a pipeline that ends with each exit code."""
    _, line = cron_lines()[0]
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program = tmp_path / ".venv" / "bin" / "sparkdl"
    for code in sorted(CODES):
        program.write_text(f"#!/bin/sh\necho said\nexit {code}\n")
        program.chmod(0o755)
        done = subprocess.run(
            ["bash", "-c", line],
            env={**os.environ, "PROJECT": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        silent = code in (0, 30)
        assert done.stdout == ("" if silent else f"exit code {code}\nsaid\n")


def test_the_bundle_of_databricks_has_a_job_that_starts_on_a_cluster_of_one_size():
    bundle = documents("databricks.yml")
    assert set(bundle) == {"bundle", "variables", "resources", "targets"}
    retrain = bundle["resources"]["jobs"]["retrain"]
    (task,), (cluster,) = retrain["tasks"], retrain["job_clusters"]
    assert task["job_cluster_key"] == cluster["job_cluster_key"]
    assert isinstance(cluster["new_cluster"]["num_workers"], int)
    assert "autoscale" not in cluster["new_cluster"]
    assert (FOLDER / task["spark_python_task"]["python_file"]).resolve() == ROOT / "jobs" / "retrain.py"
    named = re.findall(r"\$\{var\.(\w+)\}", (FOLDER / "databricks.yml").read_text())
    assert set(named) == set(bundle["variables"])
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


@pytest.mark.parametrize("name", ["crontab", "airflow_dag.py"])
def test_every_exit_code_that_a_scheduler_may_see_is_explained(name):
    text = (FOLDER / name).read_text()
    assert {code for code in CODES if re.search(rf"\b{code}\b", text)} == CODES


def airflow():
    named = os.environ.get("AIRFLOW_PYTHON")
    return Path(named) if named else ROOT / ".venv-airflow" / "bin" / "python"


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
        "2": "AirflowException", "3": "AirflowException", "30": "AirflowException",
        "-9": "AirflowException", "130": "AirflowException", "143": "AirflowException",
    }  # fmt: skip
