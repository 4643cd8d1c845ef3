# `make demo` and `make test` work on a fresh machine with Python ≥ 3.10: each creates or reuses .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed

.PHONY: help demo test test-all lint types bench docs wheel clean

help:
	@echo "make demo      prune a real network on real data: a table and a report, about a minute"
	@echo "make test      the default test suite"
	@echo "make test-all  the slow tests too"
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
