# The commands of sparkdl. `make run` and `make test` each need nothing before them; `make help` lists them all.
PYTHON := .venv/bin/python
SHELL := /bin/bash
.SHELLFLAGS := -eo pipefail -c
# Tests wait more than they compute: two processes side by side, unless some tests are picked by ARGS. One that dies fails
# the run at once: started again, pytest-xdist waits for ever for the file that the dead one had in hand.
WORKERS ?= $(if $(ARGS),0,2)
# Containers often forbid Python to keep what it has compiled: a process then imports for 5.9 s of processor, not for 3.5.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-slow check bench bench-quality doctor schema lock airflow mlflow clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

run: .venv/.ready ## the whole journey, jobs/examples/rides: makes rides, cleans, trains, publishes, scores, reports
	$(PYTHON) jobs/examples/rides --ok-when-nothing $(ARGS)

test: .venv/.ready ## every test that CI runs; some of them: make test ARGS=tests/batches
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(ARGS)

test-slow: .venv/.ready ## the tests that take long, or need root for network namespaces; ends with how long each took
	$(PYTHON) -m pytest -m slow --durations=30 $(ARGS)

check: .venv/.ready ## style, types, import rules
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q tests/test_house_rules.py

bench: .venv/.ready ## every benchmark with its peers, as JSON lines; one of them: make bench ARGS=tests/bench/bench_read.py
	@mkdir -p bench-results
	$(PYTHON) -m pytest -q -s -m bench -o python_files='bench_*.py' -o timeout=3600 $(or $(ARGS),tests/bench) | tee bench-results/bench.log

bench-quality: .venv/.ready ## the default model on real tables beside its peers, into docs/quality.md; goes on where it stopped
	$(PYTHON) tests/bench/bench_quality.py $(ARGS)

doctor: .venv/.ready ## what this machine has and what works
	$(PYTHON) -m sparkdl.cli doctor

schema: .venv/.ready ## write docs/pipeline.schema.json anew, from which editors complete pipeline files
	$(PYTHON) -m sparkdl.pipeline.schema

lock: ## write requirements.lock anew from what .venv holds
	{ head -n 1 requirements.lock; $(PYTHON) -m pip list --format=freeze | grep -v -i -E '^(horovod|sparkdl|pip)==' | sed 's/^\(torch==[0-9.]*\).*/\1/'; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

airflow: ## Apache Airflow in .venv-airflow, an environment of its own, by which a slow test reads jobs/schedule/airflow_dag.py
	python3.11 -m venv .venv-airflow
	.venv-airflow/bin/pip install --quiet --disable-pip-version-check 'apache-airflow>=3.3,<4'

mlflow: ## the whole of MLflow in .venv-mlflow, an environment of its own, whose server a slow test mirrors to
	python3.11 -m venv .venv-mlflow
	.venv-mlflow/bin/pip install --quiet --disable-pip-version-check "mlflow$$(sed -n 's/^mlflow-skinny//p' requirements.lock)"

clean: ## remove what make run and the tests wrote; .venv stays
	rm -rf sparkdl-data jobs/examples/*/sparkdl-data bench-results spark-warehouse .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.ready: requirements.lock pyproject.toml docker/install.sh
	docker/install.sh .venv
