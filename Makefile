# Everything runs from a virtual environment that the first target makes. `make help` lists targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# One thread a process: results on the CPU must not depend on who else is in a batch.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full check fmt bench bench-gpu clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(VENV)/.installed ## virtual environment with everything in it

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	  sys.exit(0 if (3, 11) <= v <= (3, 12) else f"Tandem needs Python 3.11 or 3.12, {sys.executable} is {v[0]}.{v[1]}: set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: install ## start a local cluster, stream real prompts through it, show what happened
	$(PY) -m cluster.cli demo

test: install ## the suite: pure, model, rank processes, then one Ray cluster
	$(PY) -m pytest -q -n 2 --dist loadfile -m "not ray and not gpu and not full"
	$(PY) -m pytest -q -m "ray and not full" tests/ray

test-full: install ## the long forms too
	$(PY) -m pytest -q -m "not ray"
	$(PY) -m pytest -q -m "ray" tests/ray

check: install ## format, lint, types, who may import whom, file sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy .
	$(BIN)/lint-imports
	$(PY) scripts/sizes.py

fmt: install ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## the CPU benchmarks of docs/benchmarks.md
	$(PY) -m model.bench
	$(PY) -m kv_transfer.bench
	$(PY) -m cluster.bench_route
	$(PY) -m cluster.bench_http
	$(PY) -m tests.bench_placement

bench-gpu: install ## the GPU benchmarks of docs/benchmarks.md, on a machine with an NVIDIA GPU
	$(PY) -m kernels.bench --peers
	$(PY) -m engine.bench_slice
	$(PY) -m kv_transfer.bench_gpu
	$(PY) -m tests.bench_cluster_gpu

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
