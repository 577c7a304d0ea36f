# `make demo` sets everything up and runs the main job on 2 CPU ranks; `make test` sets up and tests.

PYTHON ?= $(or $(shell command -v python3.11),python3)
TORCH ?= 2.13.0
# For another release: `make test TORCH=2.11.0 VENV=.venv-2.11.0`; without a VENV of its own it is reinstalled.
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(TORCH)
# One process more than 2 cores: tests wait for processes that they start.
XDIST ?= -n 3 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu soak soak-gpu wheel-test lint format types bench wheel clean

help:
	@echo "make demo | test | test-all | test-gpu | soak | soak-gpu | wheel-test | lint | format | types | bench | wheel | clean"

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py $(wildcard native_kernels/*/*.cpp native_kernels/cpu/*.h)
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch $(TORCH) and autofuse into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check "torch==$(TORCH)" "setuptools>=77" wheel
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation \
		-e ".[dev,examples,cli,bench]" "torch==$(TORCH)"
	@rm -f $(VENV)/.ready-*
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/llama_tp.py
	$(BIN)/python examples/dlrm.py
	$(BIN)/python examples/moe.py

# The fast tier: before every commit. Inductor's code around our ops need not be vectorised: it compiles faster.
test: $(STAMP)
	TORCHINDUCTOR_VEC_ISA_OK=0 $(BIN)/python -m pytest $(XDIST) -m "not full and not wheel and not gpu"

# Every test that needs no GPU: for changes of kernels, and before a release.
test-all: $(STAMP)
	$(BIN)/python -m pytest $(XDIST) -m "not wheel and not gpu"

# Needs NVIDIA Hopper GPUs that reach each other; what takes more than there are is skipped.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu tests/gpu

# Random calls, stragglers and killed ranks on CPU ranks, for SECONDS.
SECONDS ?= 600
SEED ?= 0
soak: $(STAMP)
	$(BIN)/python -m tests.soak.run --seconds $(SECONDS) --seed $(SEED)

# The same on WORLD GPUs, eager and from CUDA graphs, beside NCCL on other streams.
WORLD ?= 2
soak-gpu: $(STAMP)
	$(BIN)/python -m tests.soak.run --device cuda --worlds $(WORLD) --seconds $(SECONDS) --seed $(SEED)

wheel-test: $(STAMP)
	$(BIN)/python -m pytest -m wheel tests/packaging

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/python -m mypy

bench: $(STAMP)
	$(BIN)/autofuse bench

wheel: $(STAMP)
	$(BIN)/python -m build -q --wheel --no-isolation

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
