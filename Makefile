# make demo and make test each work alone in a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
DEMO := reports/phase_change

.PHONY: demo test check format

demo: .venv/ready
	$(BIN)/interp run configs/phase_change.toml --resume --out $(DEMO)

test: .venv/ready-dev check
	$(BIN)/pytest

check: .venv/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

.venv/ready-dev: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@ .venv/ready
