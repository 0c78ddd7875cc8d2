# Everything sets itself up in .venv with the machine's python3 and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint infra/constraints-cpu.txt
SETUP := pyproject.toml infra/constraints-cpu.txt
PYTEST := $(BIN)/python -m pytest
# One thread per process: more is slower for tiny models on few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-fast test-prefect check bench clean help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.run  ## run the demo campaign (again: only what is missing)
	$(BIN)/areal-pipe run configs/demo.yaml

test: test-fast test-prefect  ## the whole suite

test-fast: $(VENV)/.dev  ## everything but the tests on a Prefect server
	$(PYTEST) -m "not prefect"

test-prefect: $(VENV)/.dev  ## flows, demo and crash tests on a real Prefect server
	$(PYTEST) -m prefect

check: $(VENV)/.dev  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/.dev  ## what it costs on this machine
	$(BIN)/python -m tests.benchmarks.episode_cost

clean:  ## remove the virtual environment, caches and demo results
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist build runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(SETUP) | $(VENV)/bin/python
	$(PIP) --editable '.[all]'
	touch $@

$(VENV)/.dev: $(SETUP) | $(VENV)/bin/python
	$(PIP) --editable '.[all,dev]'
	touch $@ $(VENV)/.run
