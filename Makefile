# encoderd from a checkout: `make demo` and `make test` do everything, each creating .venv on first use.

PYTHON ?= python3
# Another package index for torch and torchvision alone, such as https://download.pytorch.org/whl/cpu.
TORCH_INDEX ?=
# make serve MODEL=/path/to/checkpoint ARGS="--port 9000 --workers 2"
MODEL ?=
ARGS ?=
# make test PYTEST_ARGS="-k ring"
PYTEST_ARGS ?=

VENV := .venv
INSTALLED := $(VENV)/.installed
APT_LINE := sudo apt-get install python3-venv python3-dev gcc make
# What the installation takes at its peak, wheels and pip's cache included.
DISK_GB := $(if $(TORCH_INDEX),4,12)
ifdef TORCH_INDEX
ABOUT_TORCH := Installing into $(VENV) with torch from $(TORCH_INDEX).
else
ABOUT_TORCH := Installing into $(VENV): torch is 5.6 GB with its CUDA libraries. \
  TORCH_INDEX=https://download.pytorch.org/whl/cpu chooses the CPU build, about 1 GB.
endif
# torch's version is said once, in constraints.txt.
TORCH := $(shell grep -E '^(torch|torchvision)==' constraints.txt)

.PHONY: help
help:
	@echo 'make demo                 encode a JPEG end to end on a small checkpoint and check the rows'
	@echo 'make test                 format, lint, types, import rules and the whole test suite'
	@echo 'make serve MODEL=DIR      serve a checkpoint (ARGS="--port 9000 --workers 2" and so on)'
	@echo 'make lint                 everything of `make test` but the tests'
	@echo 'make clean                remove .venv and what was built'
	@echo 'Settings: PYTHON=$(PYTHON)  TORCH_INDEX=URL (a CPU build of torch is about 1 GB, the default 5.6 GB)'

.PHONY: demo
demo: $(INSTALLED)
	@$(VENV)/bin/encoderd demo

.PHONY: serve
serve: model-is-named $(INSTALLED)
	@exec $(VENV)/bin/encoderd serve '$(MODEL)' $(ARGS)

.PHONY: model-is-named
model-is-named:
	@test -n '$(MODEL)' || { echo 'make serve: say which checkpoint: MODEL=/path/to/checkpoint' >&2; exit 2; }

.PHONY: test
test: lint
	$(VENV)/bin/python -m tests.suite.parts $(PYTEST_ARGS)

.PHONY: lint
lint: $(INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

.PHONY: clean
clean:
	rm -rf $(VENV) build *.egg-info shm/*.so gpu_workers/*.so

# --- installation ---

# Renewed when the requirements or the C code change. An interrupted installation goes on where it stopped.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard shm/csrc/* gpu_workers/csrc/*)
	@$(check_python)
	@$(check_compiler)
	@$(check_disk)
	@echo '$(ABOUT_TORCH)'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(VENV)/tmp
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --no-deps --index-url '$(TORCH_INDEX)' $(TORCH))
	$(PIP_INSTALL) -c constraints.txt -e '.[server,test]'
	@rm -rf $(VENV)/tmp
	@touch $@

# The temporary directory lies in .venv because /tmp may be a small tmpfs.
PIP_INSTALL := TMPDIR='$(CURDIR)/$(VENV)/tmp' $(VENV)/bin/python -m pip install --disable-pip-version-check

define missing
{ echo 'make: $(1). On Debian or Ubuntu: $(APT_LINE)' >&2; exit 1; }
endef

define check_python
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  || $(call missing,$(PYTHON) is missing or older than Python 3.11 (PYTHON=python3.12 names another)); \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
  || $(call missing,$(PYTHON) lacks the modules venv and ensurepip)
endef

define check_compiler
$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
  || $(call missing,Python.h for $(PYTHON) is missing); \
command -v $(CC) >/dev/null || $(call missing,no C compiler: $(CC))
endef

# Once torch lies in .venv a renewal needs little.
define check_disk
free_gb=$$(($$(df -Pk . | awk 'NR == 2 { print $$4 }') * 1024 / 1000000000)); \
ls -d $(VENV)/lib/python3*/site-packages/torch >/dev/null 2>&1 || test $$free_gb -ge $(DISK_GB) \
  || { echo "make: the installation needs $(DISK_GB) GB of free disk here, there are $$free_gb GB." >&2; exit 1; }
endef
