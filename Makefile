# Everything is installed into $(VENV), once; `make help` lists what there is to run.
PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
# these two belong together; `make test-matrix` knows the other pairs
TORCH ?= 2.13.0
TRITON ?= 3.7.1
JOBS ?= auto

# test files whose bodies run a second time on interpreted kernels
INTERPRETED = tests/ops/test_library.py tests/test_laws.py tests/inputs/test_inputs.py tests/test_numerics.py tests/ops/test_packing.py \
              tests/ops/test_host_path.py tests/control/test_clip.py tests/control/test_check_finite.py tests/control/test_grad_scaler.py tests/recorder/test_recorder.py \
              tests/columns/test_roots.py

# what `make test` is made of
PARTS = plain interpreted ranks

# tests that start processes, each a rank
RANKS = tests/distributed

export HYPOTHESIS_PROFILE ?= ci
CORE = $(VENV)/.core-$(TORCH)-$(TRITON)
DEV = $(VENV)/.dev-$(TORCH)-$(TRITON)
DOCS = $(VENV)/.docs
# a Python of yours has what it has: `make bench PY=python3` installs nothing
TOOLS = $(if $(filter $(VENV)/bin/python,$(PY)),$(DEV))
INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# neighbours stay together, since they share what a file computes or compiles once, until one worker has nothing left
PYTEST = $(PY) -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal $(PYTEST_FLAGS)

.PHONY: help demo test test-deep test-distributed test-matrix run-plain run-interpreted run-ranks lint format check docs compare compare-ranks bench bench-cpu bench-host bench-monitor bench-ranks machine-code gpu clean
.NOTPARALLEL:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(CORE) ## a small training run, recorded, on this machine, and a page of it
	@rm -rf build/demo
	@$(PY) -W 'ignore:Failed to initialize NumPy' -m gradiometer.demo --run-dir build/demo  # torch says so of itself; nothing here needs NumPy

test: $(DEV) ## every test, the shared ones on interpreted kernels, those of many ranks: all parts, even where one fails
	@$(PY) tests/parts.py $(PARTS)

test-distributed: $(DEV) run-ranks ## those of many ranks: processes on this machine

test-deep: ## the same with thousands of examples a property
	@$(MAKE) --no-print-directory test HYPOTHESIS_PROFILE=deep PYTEST_FLAGS='$(PYTEST_FLAGS) --timeout=0'

test-matrix: ## the same on every supported pair of torch and triton, each in an environment of its own
	@$(PYTHON) tests/matrix.py $(MATRIX_FLAGS)

run-plain:
	$(PYTEST) --ignore=$(RANKS)

# each file's processes once
run-ranks:
	$(PYTEST) --dist loadfile $(RANKS)

run-interpreted:
	$(if $(wildcard $(INTERPRETED)),TRITON_INTERPRET=1 $(PYTEST) $(wildcard $(INTERPRETED)))

lint: $(DEV) ## ruff, mypy, import rules; edits nothing
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(DEV) ## let ruff edit
	$(PY) -m ruff check --fix-only
	$(PY) -m ruff format

check: $(DEV) ## lint and test, both even where one fails: what continuous integration runs
	@$(PY) tests/parts.py lint $(PARTS)

docs: $(DOCS) ## the documentation site, in build/site; a dead link fails
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --config-file docs/.site/mkdocs.yml

compare: $(TOOLS) ## ours beside home-grown telemetry: values, errors, waits, times
	PYTHONPATH=src $(PY) tests/compare_home_grown.py $(COMPARE_FLAGS)

compare-ranks: $(TOOLS) ## statistics of two and four ranks beside those of one process
	PYTHONPATH=src $(PY) tests/compare_ranks.py $(COMPARE_FLAGS)

bench: $(TOOLS) ## ours against its peers on this machine: a table, JSON and a picture in build/bench
	PYTHONPATH=src $(PY) -m kernels_bench $(BENCH_FLAGS)

bench-cpu: $(TOOLS) ## the CPU path against its bounds
	PYTHONPATH=src $(PY) -m kernels_bench --device cpu --check $(BENCH_FLAGS)
	PYTHONPATH=src $(PY) -m kernels_bench.cpu_bounds --check

bench-host: $(TOOLS) ## the host's time of a call, without the kernels
	PYTHONPATH=src $(PY) -m kernels_bench.host_path $(BENCH_HOST_FLAGS)

bench-monitor: $(TOOLS) ## a training step with a monitor against other telemetry; recording against collecting; the run record
	PYTHONPATH=src $(PY) -m kernels_bench.monitoring.monitor $(BENCH_FLAGS)
	PYTHONPATH=src $(PY) -m kernels_bench.monitoring.recorder
	PYTHONPATH=src $(PY) -m kernels_bench.monitoring.run_record

bench-ranks: $(TOOLS) ## a reduction over ranks beside its peers, and what it takes at more ranks than there are here
	PYTHONPATH=src $(PY) -m kernels_bench.distributed.bench $(BENCH_FLAGS)

machine-code: $(TOOLS) ## what the kernels compile to, and the bound that follows for each GPU
	PYTHONPATH=src $(PY) -m kernels_bench.machine_code.report $(MACHINE_CODE_FLAGS)

gpu: $(TOOLS) ## on a GPU machine: tests, benchmark, a training step
	PYTHONPATH=src $(PY) -m kernels_bench.gpu.run $(GPU_FLAGS)

clean: ## remove environments, builds and caches
	rm -rf $(VENV) .matrix build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests kernels_bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "gradiometer needs Python 3.11 or newer as $(PYTHON): try 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: install it (on Debian and Ubuntu the package python3-venv)" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)

$(CORE): $(VENV)/bin/python pyproject.toml
	@echo "installing gradiometer with torch $(TORCH) into $(VENV), the first time this takes a minute or two"
	@rm -f $(VENV)/.core-* $(VENV)/.dev-*
	@$(INSTALL) 'torch==$(TORCH)' $(if $(TRITON),"triton==$(TRITON); platform_system == 'Linux'") --editable '.[monitor]'
	@touch $@

# no torch: the site's packages alone
$(DOCS): $(VENV)/bin/python pyproject.toml
	@echo "installing what the documentation needs"
	@$(VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)-requirements
	@$(INSTALL) --requirement $(DOCS)-requirements
	@touch $@

$(DEV): $(CORE)
	@echo "installing what the tests and linters need"
	@$(INSTALL) --editable '.[dev]'
	@touch $@
