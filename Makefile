# Targets: make help. Variables are given on the command line: make demo DEVICE=cuda

PYTHON ?= python3
EXTRAS ?= worker,cuda,metrics,serve,test,bench
# One release for machines with and without a GPU: pip takes its CPU build where the index in use has one, and an open
# range could bring gigabytes of a newer CUDA build.
TORCH ?= torch==2.13.0
# 1: take torch and triton (and whatever else is there) from PYTHON's own packages.
KVD_USE_SYSTEM_TORCH ?=
# A folder of wheels to install from where no package index is reached.
WHEELS ?=
# Processes of the test run.
JOBS ?= 2

TEXT ?=
DEVICE ?= cpu
JSON ?=
ARGS ?=

# Where `make install` puts the daemon, and what its own environment has.
DESTDIR ?=
prefix ?= /usr/local
sysconfdir ?= /etc
unitprefix ?= $(prefix)/lib
INSTALL_EXTRAS ?= cuda,metrics

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

# Without byte-compiling what most runs never import, set-up takes half the time.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
ifneq ($(WHEELS),)
PIP += --no-index --find-links $(WHEELS)
endif
ifneq ($(filter-out 0,$(KVD_USE_SYSTEM_TORCH)),)
SYSTEM_PACKAGES := --system-site-packages
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test torture sanitize lint format bench man install deb clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything in it; does nothing when it is up to date

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvd needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(SYSTEM_PACKAGES) $(VENV)

$(STAMP): pyproject.toml | $(BIN)/python
ifeq ($(SYSTEM_PACKAGES),)
	$(PIP) "$(TORCH)"
else
	@$(BIN)/python -c 'import torch, triton'
endif
	$(PIP) --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP) ## Decode a text file's history in both modes (TEXT=path DEVICE=cpu|cuda JSON=1)
	@$(BIN)/python -m compute.demo --device $(DEVICE) $(if $(TEXT),--text "$(TEXT)") $(if $(filter-out 0,$(JSON)),--json)

# The processes of the test run share the machine's cores.
test: export OMP_NUM_THREADS ?= 1
test: lint ## Check style, types and imports, then run all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

torture: export OMP_NUM_THREADS ?= 1
torture: $(STAMP) ## Run the long trials, for hours, and print how many there were
	$(BIN)/python -m pytest -m torture -s $(ARGS)

sanitize: $(STAMP) ## Run every kernel under compute-sanitizer, on a GPU (ARGS="--tool memcheck --only KERNEL")
	$(BIN)/python -m tests.kernels.sanitize $(ARGS)

lint: $(STAMP) ## Check style, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Put the code into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Run a bench (ARGS="kernels --json")
	$(BIN)/kvd-bench $(if $(ARGS),$(ARGS),--help)

man: $(STAMP) ## Make manual pages of all commands in build/man
	@$(BIN)/python -m kvd.manual build/man kvd.cli:parser kvd.commands.stat:parser compute.cli:parser

# The environment outside a checkout needs nothing of .venv; PYTHON is the one it will run with.
PACKAGE = PYTHON="$(PYTHON)" EXTRAS="$(INSTALL_EXTRAS)" PIP_FLAGS="$(if $(WHEELS),--no-index --find-links $(abspath $(WHEELS)))"

install: ## Install the daemon, its units and an example of its settings (DESTDIR= prefix=/usr/local sysconfdir=/etc)
	@$(PACKAGE) DESTDIR="$(DESTDIR)" prefix="$(prefix)" sysconfdir="$(sysconfdir)" unitprefix="$(unitprefix)" \
	    sh packaging/install.sh

deb: ## Make a Debian package of that in dist/
	@$(PACKAGE) sh packaging/deb.sh

clean: ## Remove .venv, caches and builds
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
