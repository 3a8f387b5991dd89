# Two commands do everything on a machine that has Python, make and git: `make train` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NPROC  ?= 2
ARGS   ?=

.PHONY: train test lint format bench-core clean
.DEFAULT_GOAL := test

# torch first and by exact version: anything else may choose another build of it.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# The main job: a small GPT under DDP + shardstep. Options: make train ARGS=--help
train: $(VENV)/installed
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) examples/train_gpt.py $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-core: $(VENV)/installed
	$(BIN)/python -m benchmarks.core $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
