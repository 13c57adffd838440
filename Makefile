# Two commands need nothing but Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
OUT ?= runs/demo
BIN := .venv/bin

.PHONY: help setup demo compare test lint types test-slow gallery oracle docs house format clean

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

setup: .venv/.ready  ## make .venv and install atoll into it

.venv/.ready: pyproject.toml constraints.txt tools/setup
	PYTHON=$(PYTHON) bash tools/setup

demo: setup  ## eight experts that never met paint digits; two minutes on two cores, once installed
	$(BIN)/atoll demo --out $(OUT)

compare: setup  ## the demo with a monolith and a blind router beside it
	$(BIN)/atoll demo --out $(OUT) --compare

test: lint types  ## lint, types and every quick test
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

test-slow: setup  ## the tests that take minutes
	$(BIN)/pytest -m slow

gallery: setup  ## every hostile contribution against a real run; about five minutes on two cores
	$(BIN)/pytest -m "slow or not slow" tests/exchange/test_gallery.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

oracle: setup  ## the closed-form tables: bridged, mixed and literal velocities against the truth
	$(BIN)/python benchmarks/oracle.py

docs: setup  ## write docs/commands, a page per command, from --help
	$(BIN)/python tools/write_commands.py

house: setup  ## how large every package is, beside commit 3167457 and the limits
	$(BIN)/python tools/house.py

format: setup  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what the tools left behind; keeps .venv and runs
	rm -rf .pytest_cache .mypy_cache .ruff_cache build dist
