# make search | test | test-in-use | test-gpu | soak | check | tables | docs | bench | setup | clean.  Overrides for the search: make search ARGS="n_trials=50 out=runs/mine"
PYTHON ?= python3
VENV ?= .venv
TARGET ?= xeon_int8
ARGS ?=

PY := $(VENV)/bin/python
# The stamps carry a checksum of what is installed, so that a change of either file sets up again. A search needs less
# than tests do. Without byte-compiling, set-up takes half the time; Python compiles what it imports, when it does.
SUM := $(shell cat pyproject.toml constraints.txt | cksum | tr ' \t' '--')
STAMP := $(VENV)/.installed-search-$(SUM)
DEV := $(VENV)/.installed-dev-$(SUM)
INSTALL := $(PY) -m pip install --disable-pip-version-check --no-input --quiet --no-compile -c constraints.txt

.PHONY: search test test-in-use test-gpu soak release-check check lint types tables docs bench setup clean
.DEFAULT_GOAL := search

# Alone it asks for five minutes; with ARGS for what they say.
search: $(STAMP)
	@$(PY) -m hwnas.search target=$(TARGET) $(or $(ARGS),budget.minutes=5)

# Three files of tests at a time: some wait for processes of theirs. Benchmarks of hwnas itself are `make bench`.
PYTEST := $(PY) -m pytest -p no:benchmark --durations=10
BESIDE := -n 3 --dist loadfile --no-loadscope-reorder

test: $(DEV)
	@$(PYTEST) $(BESIDE) -m "not soak and not gpu" $(ARGS)

# The same beside two processes that keep every core busy, as on a machine that others use too.
test-in-use: $(DEV)
	@$(PY) tests/beside_busy_cores.py $(PYTEST) $(BESIDE) -m "not soak and not gpu" $(ARGS)

# On a machine with an NVIDIA GPU: installs what its targets need, proves them in about ten minutes and prints figures.
# onnxruntime and onnxruntime-gpu are one module: the second takes the place of the first in this .venv, until the next
# `make setup`.
test-gpu: $(DEV)
	@$(INSTALL) -e '.[cuda]'
	@$(PY) -m pip uninstall --disable-pip-version-check --yes --quiet onnxruntime
	@$(INSTALL) --force-reinstall --no-deps onnxruntime-gpu
	@rm -f $(STAMP) $(DEV)
	@$(PYTEST) -m gpu -rs tests/gpu $(ARGS)

# What takes long: loops of kills, races, real data. ARGS=--minutes=20 starts no test after that, and names those left out.
soak: $(DEV)
	@$(PYTEST) -m soak $(ARGS)

# Before a release: all of it, and the soak run is recorded in tests/soak.json, from which CI counts what changed.
release-check: check test
	@$(PYTEST) $(BESIDE) -m soak --record

check: lint types tables docs

lint: $(DEV)
	@$(PY) -m ruff check .

types: $(DEV)
	@$(PY) -m mypy

# Fails where a table of a page differs from the files in the repository. `python -m experiments.tables` writes them anew.
tables: $(DEV)
	@$(PY) -m experiments.tables --check

# The documentation site, in build/site. What it needs is installed once, beside the rest.
docs: $(DEV)
	@$(PY) -c 'import material, mkdocstrings' 2>/dev/null || \
	  $(INSTALL) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

bench: $(DEV)
	@$(PY) -m pytest benchmarks --benchmark-only $(ARGS)

setup: $(DEV)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "hwnas needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | head -n 1). Name one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "hwnas needs venv, which '$(PYTHON)' lacks. Install it (Debian, Ubuntu: apt install python3-venv), then give the command again." >&2; exit 2; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "hwnas: setting up $(VENV) (PyTorch is large: the first time takes a while)"
	@$(INSTALL) -e .
	@rm -f $(VENV)/.installed-*
	@touch $@

$(DEV): $(STAMP)
	@echo "hwnas: adding what tests need"
	@$(INSTALL) -e '.[dev]'
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
