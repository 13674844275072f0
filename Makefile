# Everything a developer types. A bare machine needs Python >= 3.11, make and git; the rest lands in .venv.
SHELL := /bin/bash
.DELETE_ON_ERROR:

# The first interpreter that runs and is new enough. PYTHON=/path/to/python overrides.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP := .venv/bin/python -m pip --disable-pip-version-check --quiet
BIN := .venv/bin
SEEDS ?= 200
MINUTES ?= 5
RAY_VERSION := 2.60.*

.PHONY: help setup demo test lint fmt bench simulate chaos soak clean

help:
	@echo 'make demo               a run that survives a kill, in a few seconds'
	@echo 'make test               the whole gate: lint, types, layers, tests'
	@echo 'make lint | make fmt    check | rewrite'
	@echo 'make simulate SEEDS=n   n seeds of the deterministic simulator'
	@echo 'make chaos MINUTES=n    runs whose processes are killed and stopped at random, for n minutes'
	@echo 'make soak               a million reports and 10,000 checkpoints: nothing grows'
	@echo 'make bench              side by side with Ray Train, into docs/benchmarks.md'
	@echo 'make clean              remove everything that make made'

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints-dev.txt
	@test -n '$(PYTHON)' || { echo 'Holdfast needs Python >= 3.11 with venv: install it, or make PYTHON=/path/to/python3.11'; exit 1; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) install -e '.[dev]' -c constraints-dev.txt
	@touch $@

demo: .venv/.stamp
	@$(BIN)/python examples/demo.py

lint: .venv/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest

fmt: .venv/.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

simulate: .venv/.stamp
	$(BIN)/python -m holdfast.testing.simulate --seeds $(SEEDS)

chaos: .venv/.stamp
	$(BIN)/python -m holdfast.testing.chaos --minutes $(MINUTES)

soak: .venv/.stamp
	HOLDFAST_SOAK=1 $(BIN)/python -m pytest tests/train/test_flat.py

# Ray lives in an environment of its own, so that neither side's dependencies bend the other's.
.venv-bench-ray/.stamp: Makefile
	@test -x .venv-bench-ray/bin/python || $(PYTHON) -m venv .venv-bench-ray
	.venv-bench-ray/bin/python -m pip --disable-pip-version-check --quiet install 'ray[train]==$(RAY_VERSION)'
	@touch $@

bench: .venv/.stamp .venv-bench-ray/.stamp
	$(BIN)/python -m bench $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-bench-ray .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
