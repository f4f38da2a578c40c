# Everything is installed into $(VENV), once; `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
# matching versions; tests/matrix.py lists the other supported pairs
TORCH ?= 2.13.0
TRITON ?= 3.7.1
JOBS ?= auto

# test files that also run on interpreted kernels
INTERPRETED = tests/ops/test_library.py tests/ops/test_fingerprints.py tests/ops/test_pairs.py tests/ops/test_exponents.py tests/ops/test_lines.py tests/ops/test_projections.py tests/ops/test_tap_op.py tests/test_laws.py tests/inputs/test_inputs.py tests/test_numerics.py tests/ops/test_packing.py \
              tests/ops/test_host_path.py tests/control/test_clip.py tests/control/test_adaptive_clip.py tests/control/test_check_finite.py tests/control/test_grad_scaler.py tests/recorder/test_recorder.py tests/recorder/test_sections.py tests/recorder/test_exponent_stores.py \
              tests/columns/test_roots.py tests/kernels/test_compiled_kernels.py tests/kernels/test_activation_kernel.py tests/kernels/test_projections_kernel.py
# of these, the ones that run on compiled kernels too, which support/ptx.py executes for each of these GPUs.
# sm_89 has few fp64 units, and another main loop
DEEP = $(filter deep,$(HYPOTHESIS_PROFILE))
EXECUTED = $(if $(DEEP),$(filter-out tests/kernels/%,$(INTERPRETED)),tests/ops/test_library.py tests/recorder/test_sections.py tests/test_laws.py)
GPU_TARGETS = $(if $(DEEP),sm_80 sm_89 sm_90 sm_100,sm_90)

# the parts of `make test`
PARTS = plain interpreted executed ranks

# tests that start a process for each rank
RANKS = tests/distributed

export HYPOTHESIS_PROFILE ?= ci
# pytest rewrites assertions for seconds, once if it may cache the result
export PYTHONDONTWRITEBYTECODE =
CORE = $(VENV)/.core-$(TORCH)-$(TRITON)
DEV = $(VENV)/.dev-$(TORCH)-$(TRITON)
DOCS = $(VENV)/.docs
# with your own Python, such as `make bench PY=python3`, nothing is installed
TOOLS = $(if $(filter $(VENV)/bin/python,$(PY)),$(DEV))
INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# worksteal keeps neighboring tests on one worker, which share per-file computations and compilations, until another is idle
PYTEST = $(PY) -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal $(PYTEST_FLAGS)

.PHONY: help demo test test-deep test-distributed test-matrix run-plain run-interpreted run-executed run-ranks lint format check docs compare compare-ranks bench bench-cpu bench-host bench-monitor bench-ranks zoo faults machine-code gpu clean
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(CORE) ## record a small training run on this machine and write its report page
	@rm -rf build/demo
	@$(PY) -W 'ignore:Failed to initialize NumPy' -m gradiometer.demo --run-dir build/demo  # a warning of torch; nothing here needs NumPy

test: $(DEV) ## run all tests: plain, on interpreted and on compiled kernels, and on many ranks; continue if a part fails
	@$(PY) tests/parts.py $(PARTS)

test-distributed: $(DEV) run-ranks ## run the tests of many ranks, with processes on this machine

test-deep: ## run all tests with thousands of examples per property
	@$(MAKE) --no-print-directory test HYPOTHESIS_PROFILE=deep PYTEST_FLAGS='$(PYTEST_FLAGS) --timeout=0'

test-matrix: ## run all tests on every supported pair of torch and triton, each in its own environment
	@$(PYTHON) tests/matrix.py $(MATRIX_FLAGS)

run-plain:
	$(PYTEST) --ignore=$(RANKS)

# one worker per file, so that each file starts its processes once, and the longest files first; many of these
# tests wait, so at least three workers
LONGEST = $(patsubst %,$(RANKS)/test_ranks_%.py,integrations monitor compile failures equality clip)
run-ranks: JOBS := $(if $(filter auto,$(JOBS)),$(shell n=$$(nproc 2>/dev/null); echo $$((n > 3 ? n : 3))),$(JOBS))
run-ranks:
	$(PYTEST) --dist loadfile --no-loadscope-reorder $(LONGEST) $(RANKS)

# by default without the laws, which run on compiled kernels, and without files that test little of the kernels
LEFT_OUT = tests/test_laws.py tests/control/% tests/ops/test_host_path.py tests/columns/test_roots.py
run-interpreted: FILES = $(wildcard $(if $(DEEP),$(INTERPRETED),$(filter-out $(LEFT_OUT),$(INTERPRETED))))
run-interpreted:
	$(if $(FILES),TRITON_INTERPRET=1 $(PYTEST) $(FILES))
	$(if $(DEEP),TRITON_INTERPRET=1 GPU_TARGET=sm_89 $(PYTEST) tests/test_numerics.py)

run-executed:
	$(foreach target,$(GPU_TARGETS),GPU_TARGET=$(target) $(PYTEST) $(EXECUTED) &&) true
	$(if $(DEEP),,GPU_TARGET=sm_89 $(PYTEST) tests/test_numerics.py)

lint: $(DEV) ## check with ruff, mypy and import-linter, without edits
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(DEV) ## fix and format with ruff
	$(PY) -m ruff check --fix-only
	$(PY) -m ruff format

check: $(DEV) ## run lint and test, both even if one fails
	@$(PY) tests/parts.py lint $(PARTS)

docs: $(DOCS) ## build the documentation site in build/site; a dead link fails
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --config-file docs/.site/mkdocs.yml

compare: $(TOOLS) ## compare with home-grown telemetry: values, errors, waits, times
	PYTHONPATH=src $(PY) tests/compare_home_grown.py $(COMPARE_FLAGS)

compare-ranks: $(TOOLS) ## compare statistics of two and four ranks with those of one process
	PYTHONPATH=src $(PY) tests/compare_ranks.py $(COMPARE_FLAGS)

bench: $(TOOLS) ## benchmark against other implementations: a table, JSON and a picture in build/bench
	PYTHONPATH=src $(PY) -m kernels_bench $(BENCH_FLAGS)

bench-cpu: $(TOOLS) ## check the time and memory bounds of the CPU path
	PYTHONPATH=src $(PY) -m kernels_bench --device cpu --check $(BENCH_FLAGS)
	PYTHONPATH=src $(PY) -m kernels_bench.cpu_bounds --check

bench-host: $(TOOLS) ## measure the host time of a call, without the kernels
	PYTHONPATH=src $(PY) -m kernels_bench.host_path $(BENCH_HOST_FLAGS)

bench-monitor: $(TOOLS) ## measure a training step with a monitor and other telemetry, the recorder, and the run record
	PYTHONPATH=src $(PY) -m kernels_bench.monitoring.monitor $(BENCH_FLAGS)
	PYTHONPATH=src $(PY) -m kernels_bench.monitoring.recorder
	PYTHONPATH=src $(PY) -m kernels_bench.monitoring.run_record
	PYTHONPATH=src $(PY) -m kernels_bench.monitoring.taps
	PYTHONPATH=src $(PY) -m kernels_bench.monitoring.fused_taps
	PYTHONPATH=src $(PY) -m kernels_bench.monitoring.tap_kernels

bench-ranks: $(TOOLS) ## measure a reduction over ranks and alternatives, and predict it for thousands of ranks
	PYTHONPATH=src $(PY) -m kernels_bench.distributed.bench $(BENCH_FLAGS)

zoo: $(TOOLS) ## check and train healthy and broken models, and count what contracts and rules name, and false warnings
	PYTHONPATH=src $(PY) -m kernels_bench.zoo --family contracts --held-out --check
	PYTHONPATH=src $(PY) -m kernels_bench.zoo --family gradients --seeds 5 --check
	PYTHONPATH=src $(PY) -m kernels_bench.zoo --check $(ZOO_FLAGS)
	PYTHONPATH=src $(PY) -m kernels_bench.zoo --family transformers --held-out --check

faults: $(TOOLS) ## inject a million faults into tensors, and count those that fingerprints and other checks miss
	PYTHONPATH=src $(PY) -m kernels_bench.faults --check $(FAULTS_FLAGS)

machine-code: $(TOOLS) ## report the machine code of the kernels, and the resulting bound for each GPU
	PYTHONPATH=src $(PY) -m kernels_bench.machine_code.report $(MACHINE_CODE_FLAGS)

gpu: $(TOOLS) ## on a GPU machine, run the GPU tests, the benchmark and a training step
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
	@echo "installing gradiometer with torch $(TORCH) into $(VENV): a minute or two the first time"
	@rm -f $(VENV)/.core-* $(VENV)/.dev-*
	@$(INSTALL) 'torch==$(TORCH)' $(if $(TRITON),"triton==$(TRITON); platform_system == 'Linux'") --editable '.[monitor]'
	@touch $@

# without torch: only the packages for the site
$(DOCS): $(VENV)/bin/python pyproject.toml
	@echo "installing the packages for the documentation"
	@$(VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)-requirements
	@$(INSTALL) --requirement $(DOCS)-requirements
	@touch $@

$(DEV): $(CORE)
	@echo "installing the packages for tests and linters"
	@$(INSTALL) --editable '.[dev]'
	@touch $@
