# `make demo` and `make test` work on a fresh machine with Python ≥ 3.10: each creates or reuses .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed

.PHONY: help demo test test-all audit lint types bench docs wheel clean

help:
	@echo "make demo      prune a real network on real data: a table and a report, about a minute"
	@echo "make test      the default test suite"
	@echo "make test-all  the slow tests too"
	@echo "make audit     known vulnerabilities of what we depend on"
	@echo "make lint      ruff; make types: mypy; make bench: the numbers in docs; make wheel; make clean"
	@echo "make docs      the documentation site, in build/site"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/lobs demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'slow or not slow'

# Known holes in what we depend on. Asks the package index; where that cannot answer, it says so and lets the build go on.
audit: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip setuptools pip-audit 2>/dev/null \
	  || { echo 'audit: SKIPPED, pip-audit cannot be installed from this machine'; exit 0; }; \
	$(BIN)/python -m pip_audit --skip-editable --progress-spinner off --timeout 10 >audit.log 2>&1; code=$$?; \
	if [ $$code -eq 0 ]; then echo 'audit: no known vulnerabilities'; \
	elif grep -q 'Found [0-9]* known' audit.log; then cat audit.log; exit 1; \
	else echo "audit: SKIPPED, the vulnerability service does not answer ($$(tail -n 1 audit.log | cut -c1-120))"; fi; \
	rm -f audit.log

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.exact_speed
	$(BIN)/python -m benchmarks.calibration_cost
	$(BIN)/python -m benchmarks.lenet_accuracy
	$(BIN)/python -m benchmarks.file_size
	$(BIN)/python -m benchmarks.latency

docs: $(READY)
	$(BIN)/python -c 'import mkdocs, mkdocstrings' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(READY)
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
