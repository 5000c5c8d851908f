# make is the manual: each target says what it does.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-slow test-all test-convert test-sweep lint format bench bench-peers clean
help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)  ## compare FedAvg, FedAvgM and FedEve on embedded data; writes demo/report.html
	$(BIN)/fedeve demo --out demo

test: $(READY)  ## all tests but the slow ones
	$(BIN)/python -m pytest -n 2 $(PYTEST)

test-slow: $(READY)  ## the slow ones alone
	$(BIN)/python -m pytest -n 2 -m slow $(PYTEST)

test-all: $(READY)  ## every test
	$(BIN)/python -m pytest -n 2 -m '' $(PYTEST)

CONVERT := .venv-convert/.ready
$(CONVERT): pyproject.toml
	$(PYTHON) -m venv .venv-convert
	.venv-convert/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[data,convert]' \
		pytest pytest-xdist hypothesis scipy
	@touch $(CONVERT)

test-convert: $(CONVERT)  ## conversions from Hugging Face and Flower data sets, in an environment of their own
	.venv-convert/bin/python -m pytest tests/data/test_own.py tests/data/test_converted.py $(PYTEST)

SWEEP := .venv-sweep/.ready
$(SWEEP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-sweep
	.venv-sweep/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev,ray,tensorboard,wandb,mlflow]'
	@touch $(SWEEP)

test-sweep: $(SWEEP)  ## sweeps on a real Ray cluster, and the trackers, in an environment of their own
	FEDEVE_REQUIRE_EXTRAS=1 .venv-sweep/bin/python -m pytest -m '' tests/experiments/test_sweep_ray.py \
		tests/experiments/test_trackers.py $(PYTEST)

lint: $(READY)  ## formatter, linter, type checker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)  ## let the formatter and linter mend what they can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## speed, on this machine, into benchmarks/results (MovieLens only where FEDEVE_DATA has it)
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/sweep.py
	$(BIN)/python benchmarks/femnist.py build
	$(BIN)/python benchmarks/lanes.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/inspect_full.py
	@if [ -n "$$FEDEVE_DATA" ]; then $(BIN)/python benchmarks/movielens.py; else echo "FEDEVE_DATA is not set: no MovieLens"; fi

bench-peers: $(READY)  ## pfl and Flower beside ours on the same work, in environments of their own (PEERS='--repeats 1')
	$(BIN)/python benchmarks/peers.py $(PEERS)

clean:  ## remove what was made
	rm -rf $(VENV) .venv-* build dist demo *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
