# Two commands do everything on a machine that has Python, make and git: `make train` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RIVALS := .venv-bench
TORCH  ?= 2.13.0
OTHER  := .venv-torch-$(TORCH)
DOCS   := .venv-docs
FRAMES := .venv-frameworks
GPU    := .venv-gpu
GPU_TORCH ?= torch>=2.6
NPROC  ?= 2
ARGS   ?=

# Each of the processes that a run of the tests starts would compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-long test-all test-fuzz test-mutants test-corpus test-optimizers test-frameworks test-migration test-package test-gpu test-hosts test-torch test-docs docs docs-serve lint format bench-core bench-step bench-precision bench-hosts bench-gpu bench-checkpoint bench-compare clean
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

# The simulated device, where there is a compiler: before the tests, whose time limit is not for building it.
DEVICE = $(BIN)/python -c 'from tests.accelerator import simulated; simulated.missing() or simulated.build()'

# Everything but what takes long (test-long) and what needs further packages or root (targets of their own). Tests of the
# simulated device skip without a C++ compiler, and say so; SHARDSTEP_DEVICE=required: then they fail.
test: lint
	$(DEVICE)
	$(BIN)/python -m pytest -m "not long and not extra" $(ARGS)

test-long: $(VENV)/installed
	$(DEVICE)
	$(BIN)/python -m pytest -m "long and not extra" $(ARGS)

# Both, and every triple of values in the differential suite instead of every pair. Hours.
test-all: lint
	$(DEVICE)
	SHARDSTEP_STRENGTH=3 $(BIN)/python -m pytest -m "not extra" $(ARGS)

# New programs against DDP, for so many seconds: make test-fuzz SECONDS=600
SECONDS ?= 600
test-fuzz: $(VENV)/installed
	$(DEVICE)
	$(BIN)/python -m tests.differential.cases --seconds $(SECONDS) $(ARGS)

# How much the differential suite notices: 120 mutants of the package, and patches that undo a mended bug (a folder of
# them: make test-corpus DIR=...). Hours on two cores; both go on where they stopped (see tests/corpus/judge.py).
test-mutants: $(VENV)/installed
	$(BIN)/python -m tests.corpus.mutants --out .mutants/drawn
	$(BIN)/python -m tests.corpus.judge .mutants/drawn --out .mutants/mutants.tsv $(ARGS)

test-corpus: $(VENV)/installed
	$(BIN)/python -m tests.corpus.judge $(DIR) --out .mutants/corpus.tsv $(ARGS)

# Every optimizer class of five packages. For the page about it: python -m tests.optimizers.table > docs/optimizers.md
$(VENV)/installed-optimizers: $(VENV)/installed
	$(BIN)/pip install --quiet torch==2.13.0 --editable '.[dev,optimizers]'
	touch $@

test-optimizers: $(VENV)/installed-optimizers
	$(BIN)/python -m pytest tests/optimizers tests/unit/test_probe.py tests/ranks/test_heavyball.py $(ARGS)

# Programs of Accelerate, transformers, Lightning, Fabric and Ignite, in an environment of their own (they choose the
# versions of much else). Two at a time: a program is two or three processes already.
$(FRAMES)/installed: pyproject.toml
	test -x $(FRAMES)/bin/python || $(PYTHON) -m venv $(FRAMES)
	$(FRAMES)/bin/pip install --quiet torch==2.13.0
	$(FRAMES)/bin/pip install --quiet torch==2.13.0 --editable '.[test,frameworks]'
	touch $@

test-frameworks: $(FRAMES)/installed
	$(FRAMES)/bin/python -m pytest tests/frameworks tests/ranks/test_logging_gradients.py -n 2 $(ARGS)

# Builds the package, installs it where nothing else is, and uses it as a user does. One process: one environment for all.
$(VENV)/installed-package: $(VENV)/installed
	$(BIN)/pip install --quiet torch==2.13.0 --editable '.[dev,package]'
	touch $@

test-package: $(VENV)/installed-package
	$(BIN)/python -m pytest tests/package -n 0 $(ARGS)

# The tests of the simulated device (tests/accelerator) on GPUs, with NCCL: a rank per GPU, at most 4. Takes the torch of $(PYTHON) if it is built for CUDA, else
# installs one (GPU_TORCH), in an environment of its own. docs/gpu.md says what to do with the output.
A_GPU = test -e /dev/nvidia0 || (nvidia-smi -L 2> /dev/null | grep -q GPU) \
	|| { echo "make $@ needs an NVIDIA GPU, and this machine has none." >&2; exit 1; }
HAS_CUDA := -c 'import sys, torch; sys.exit(torch.version.cuda is None or torch.__version__ < "2.6")' 2> /dev/null

$(GPU)/installed: pyproject.toml
	test -x $(GPU)/bin/python || $(PYTHON) -m venv --system-site-packages $(GPU)
	$(GPU)/bin/python $(HAS_CUDA) || $(GPU)/bin/pip install --quiet --upgrade '$(GPU_TORCH)'
	$(GPU)/bin/pip install --quiet --editable '.[test]'
	touch $@

test-gpu:
	@$(A_GPU)
	$(MAKE) $(GPU)/installed
	$(GPU)/bin/python -c 'from benchmarks.gpu_worker import machine_text; print(machine_text())' | tee test-gpu.txt
	SHARDSTEP_ACCELERATOR=cuda SHARDSTEP_DEVICE=required $(GPU)/bin/python -m pytest tests/accelerator -n 0 -ra \
		$(ARGS) > test-gpu.log 2>&1; status=$$?; cat test-gpu.log; cat test-gpu.log >> test-gpu.txt; rm test-gpu.log; exit $$status

bench-gpu:
	@$(A_GPU)
	$(MAKE) $(GPU)/installed
	$(GPU)/bin/python -m benchmarks.gpu $(ARGS)

# Several hosts, as namespaces of this machine (tests/hosts). It takes root, and two packages of the system, which are
# installed if they are missing; whoever is not root sees the tests skipped. SHARDSTEP_HOSTS=required: then they fail.
HOST_TOOLS := (command -v ip && command -v tc && command -v nsenter) > /dev/null || test "$$(id -u)" != 0 \
	|| (apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends iproute2 util-linux)

test-hosts: $(VENV)/installed
	$(HOST_TOOLS)
	$(BIN)/python -m pytest tests/hosts -m extra -n 2 --dist loadfile $(ARGS)

# The suite with another torch, without the frameworks: make test-torch TORCH=2.9.1 PYTHON=python3.12. Every version has
# an environment of its own (5-7 GB with its CUDA libraries); torch is named again so that nothing else changes it.
$(OTHER)/installed: pyproject.toml
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet torch==$(TORCH)
	$(OTHER)/bin/pip install --quiet torch==$(TORCH) --editable '.[test]'
	touch $@

test-torch: $(OTHER)/installed
	$(OTHER)/bin/python -m pytest -m "not extra" $(ARGS)

# The site, into site/. Sources are read, not imported, so its environment needs neither torch nor the package: only the
# group "docs" (which pip knows since 25.1). The theme's notice about its future says nothing about a build.
$(DOCS)/installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet 'pip>=25.1'
	$(DOCS)/bin/pip install --quiet --group docs
	touch $@

docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build $(ARGS)

docs-serve: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve $(ARGS)

# Every link of the site, what it loads, and whether it shows what GitHub shows.
test-docs: $(VENV)/installed $(DOCS)/installed
	$(BIN)/python -m pytest tests/docs -n 0 $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-core: $(VENV)/installed
	$(BIN)/python -m benchmarks.core $(ARGS)

# The rivals have an environment of their own, so that the tests do not need them. Both build against the torch that is
# there, and DeepSpeed compiles nothing now. If they cannot be had, the figures come without them and say so.
$(RIVALS)/installed: pyproject.toml benchmarks/rivals.txt
	test -x $(RIVALS)/bin/python || $(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/pip install --quiet torch==2.13.0
	$(RIVALS)/bin/pip install --quiet --editable .
	$(RIVALS)/bin/pip install --quiet numpy setuptools wheel ninja
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(RIVALS)/bin/pip install --quiet --no-build-isolation -r benchmarks/rivals.txt \
		&& touch $@ || echo "The benchmark goes on without the rivals."

# docs/migration.md with the packages that it comes from: programs of before and of after, and checkpoints.
$(RIVALS)/installed-tests: $(RIVALS)/installed
	$(RIVALS)/bin/pip install --quiet torch==2.13.0 --editable '.[test]'
	touch $@

test-migration: $(RIVALS)/installed-tests
	$(RIVALS)/bin/python -c 'import deepspeed, fairscale'
	$(RIVALS)/bin/python -m pytest tests/test_migration.py -n 2 $(ARGS)

bench-step: $(RIVALS)/installed
	$(RIVALS)/bin/python -m benchmarks.step $(ARGS)

# The model in 16 bits, masters in 32: beside DDP with masters by hand, FSDP2 and DeepSpeed.
bench-precision: $(RIVALS)/installed
	$(RIVALS)/bin/python -m benchmarks.precision $(ARGS)

# Two hosts over 1 and 10 Gbit/s, as root (see test-hosts).
bench-hosts: $(VENV)/installed
	$(HOST_TOOLS)
	$(BIN)/python -m benchmarks.hosts $(ARGS)

bench-checkpoint: $(VENV)/installed
	$(BIN)/python -m benchmarks.checkpoint $(ARGS)

# Is this commit slower than an earlier one? Both in turns: make bench-compare BASE=main~20
bench-compare: $(VENV)/installed
	$(BIN)/python -m benchmarks.compare $(BASE) $(ARGS)

clean:
	rm -rf $(VENV) $(RIVALS) $(DOCS) $(FRAMES) $(GPU) site .venv-torch-* .pytest_cache .ruff_cache .hypothesis .mutants
