# The commands of sparkdl. `make run` and `make test` each need nothing before them.
PYTHON := .venv/bin/python
CONFIG ?= jobs/retrain.yaml

.PHONY: run test test-slow check bench doctor lock clean

run: .venv/.ready ## the whole journey: events, ETL, shards, training, publication, predictions, report
	$(PYTHON) jobs/retrain.py --config $(CONFIG) $(ARGS)

test: .venv/.ready ## every test that CI runs
	$(PYTHON) -m pytest $(ARGS)

test-slow: .venv/.ready ## the tests that take long, or need root for network namespaces
	$(PYTHON) -m pytest -m slow $(ARGS)

check: .venv/.ready ## style, types, import rules
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q tests/test_house_rules.py

bench: .venv/.ready ## every benchmark with its peers; JSON lines under bench-results/
	$(PYTHON) -m pytest -m bench $(ARGS)

doctor: .venv/.ready ## what this machine has and what works
	$(PYTHON) -m sparkdl.cli doctor

lock: ## write requirements.lock anew from what .venv holds
	{ head -n 1 requirements.lock; $(PYTHON) -m pip list --format=freeze | grep -v -i -E '^(horovod|sparkdl|pip|setuptools|wheel)==' | sed 's/^\(torch==[0-9.]*\).*/\1/'; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean: ## remove what make run and the tests wrote; .venv stays
	rm -rf sparkdl-data bench-results spark-warehouse .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.ready: requirements.lock pyproject.toml docker/install.sh
	docker/install.sh .venv
