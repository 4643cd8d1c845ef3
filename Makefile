# `make demo` and `make test` work on a fresh machine with Python 3.10 or newer. Each creates or
# reuses .venv. The demo needs the package alone; everything else needs the developers' tools too.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
PACKAGE := $(VENV)/.package-installed
READY   := $(VENV)/.tools-installed
PIP      = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST   = $(BIN)/python -m pytest -n 2 --dist loadgroup

# The inner loop: laws, layers, targets, and the golden runs of toy networks.
QUICK := tests/test_targets.py tests/test_errors.py tests/solvers/test_laws.py tests/layers \
         tests/golden -k 'not (lenet or two_processes)'

.PHONY: help demo quick coverage test test-all lint types architecture voice docs audit bench wheel clean

help:
	@echo "make demo          prune a real network on real data: a table and a report, about a minute"
	@echo "make quick         laws, layers, targets and golden toys, under a minute"
	@echo "make test          the default test suite; make test-all: the slow tests too"
	@echo "make lint          ruff; make types: mypy; make architecture: the import ranks"
	@echo "make voice         the words and sentences of README and docs"
	@echo "make docs          the documentation site, in build/site"
	@echo "make coverage      the share of lines that the quick tests run"
	@echo "make audit         known vulnerabilities of our dependencies"
	@echo "make bench         the numbers in docs; make wheel; make clean"

$(PACKAGE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(READY): $(PACKAGE)
	$(PIP) -e '.[dev]'
	touch $@

demo: $(PACKAGE)
	$(BIN)/lobs demo

quick: $(READY)
	$(PYTEST) $(QUICK)

coverage: $(READY)
	$(PYTEST) $(QUICK) --cov=lobs --cov-report=
	@echo "coverage of the quick tests: $$($(BIN)/coverage report --format=total) %"

test: $(READY)
	$(PYTEST)

test-all: $(READY)
	$(PYTEST) -m 'slow or not slow'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

architecture: $(READY)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest tests/project/test_architecture.py tests/project/test_texture.py

voice: $(READY)
	$(BIN)/python -m pytest tests/project/test_voice.py

docs: $(READY)
	$(BIN)/python -c 'import mkdocs, mkdocstrings' 2>/dev/null || $(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Where the package index or the vulnerability service does not answer, this says so and goes on.
audit: $(READY)
	@$(PIP) --upgrade pip setuptools pip-audit 2>/dev/null \
	  || { echo 'audit: SKIPPED, pip-audit cannot be installed from this machine'; exit 0; }; \
	$(BIN)/python -m pip_audit --skip-editable --progress-spinner off --timeout 10 >audit.log 2>&1; code=$$?; \
	if [ $$code -eq 0 ]; then echo 'audit: no known vulnerabilities'; \
	elif grep -q 'Found [0-9]* known' audit.log; then cat audit.log; exit 1; \
	else echo "audit: SKIPPED, the vulnerability service does not answer ($$(tail -n 1 audit.log | cut -c1-120))"; fi; \
	rm -f audit.log

bench: $(READY)
	$(BIN)/python -m benchmarks.greedy_speed
	$(BIN)/python -m benchmarks.calibration_cost
	$(BIN)/python -m benchmarks.lenet_accuracy
	$(BIN)/python -m benchmarks.file_size
	$(BIN)/python -m benchmarks.latency
	$(BIN)/python -m benchmarks.files_visited

wheel: $(READY)
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
