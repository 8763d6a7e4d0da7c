# One place for every command. `make test` is what the checks run; it needs no GPU.

# The first interpreter that runs and is new enough (a name on PATH may be a shim of nothing).
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Installed before the rest, so that a machine may choose its own build of torch (CPU, another CUDA).
TORCH ?= torch==2.13.0
# Its source alone, 0.5 MB, for the tests that hold its signatures; it runs on GPUs only.
FA4 := flash-attn-4==4.0.0b36
VENV := .venv
EXTRAS := [dev]
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := test
.PHONY: venv demo library test test-all lint format stale clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python of 3.11 or newer found: set PYTHON=..." >&2; exit 1; }
	@echo "installing $(TORCH) and the rest into $(VENV): a few minutes, in silence"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --upgrade pip
	@$(PY) -m pip install -q '$(TORCH)'
	@$(PY) -m pip install -q -e '.$(EXTRAS)'
	@test -z '$(EXTRAS)' || $(PY) -m pip install -q --no-deps '$(FA4)'
	@touch $@

# Needs no tools of development: installs the library alone where nothing is installed yet.
demo:
	@test -e $(STAMP) || test -x $(VENV)/bin/ithaca || $(MAKE) -s library
	@$(VENV)/bin/ithaca train

library:
	@$(MAKE) -s EXTRAS= $(STAMP) && rm $(STAMP)

lint: venv
	@$(PY) -m ruff check -q .
	@$(PY) -m ruff format -q --check . || { echo "run: make format" >&2; exit 1; }
	@$(PY) -m mypy --no-error-summary
	@$(PY) -m tools.lint

format: venv
	@$(PY) -m ruff check -q --fix .
	@$(PY) -m ruff format -q .

# Files of tests run side by side, each whole in one process, the longest first (tests/conftest.py). Ranks are started
# by the tests: two keep two cores busy.
JOBS ?= 2
PYTEST := $(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: lint
	@$(PYTEST) -m "not slow"

# All tests, or those named by TESTS, whose result is added to the record.
test-all: lint
	@$(PYTEST) --record tests/results/test-all.json $(TESTS)

# The committed figures that were measured on code which has changed since.
stale: venv
	@$(PY) -m benchmarks.stale

clean:
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
