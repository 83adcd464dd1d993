# make search | test | test-gpu | soak | check | claims | docs | bench | setup | clean.  Overrides for the search: make search ARGS="n_trials=50 out=runs/mine"
PYTHON ?= python3
VENV ?= .venv
TARGET ?= xeon_int8
ARGS ?=

PY := $(VENV)/bin/python
# The stamp carries a checksum of what is installed, so that a change of either file sets up again.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | tr ' \t' '--')

.PHONY: search test test-gpu soak release-check check lint types claims docs bench setup clean
.DEFAULT_GOAL := search

# Alone it asks for five minutes; with ARGS for what they say.
search: $(STAMP)
	@$(PY) -m hwnas.search +target=$(TARGET) $(or $(ARGS),budget.minutes=5)

# Three files of tests at a time: some wait for processes of theirs. Benchmarks of hwnas itself are `make bench`.
PYTEST := $(PY) -m pytest -p no:benchmark --durations=10
BESIDE := -n 3 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	@$(PYTEST) $(BESIDE) -m "not soak and not gpu" $(ARGS)

# On a machine with an NVIDIA GPU: installs what its targets need (EXTRA=cuda: without TensorRT, which is large), proves
# them in about ten minutes and prints figures. onnxruntime and onnxruntime-gpu are one module: the second takes the
# place of the first in this .venv, until the next `make setup`.
EXTRA ?= tensorrt

test-gpu: $(STAMP)
	@$(PY) -m pip install --disable-pip-version-check --no-input --quiet -c constraints.txt -e '.[$(EXTRA)]'
	@$(PY) -m pip uninstall --disable-pip-version-check --yes --quiet onnxruntime
	@$(PY) -m pip install --disable-pip-version-check --no-input --quiet -c constraints.txt --force-reinstall --no-deps onnxruntime-gpu
	@rm -f $(STAMP)
	@$(PYTEST) -m gpu -rs tests/gpu $(ARGS)

# What takes long: loops of kills, races, real data. ARGS=--minutes=20 starts no test after that, and names those left out.
soak: $(STAMP)
	@$(PYTEST) -m soak $(ARGS)

# Before a release: all of it, and the soak run is recorded in tests/soak.json, from which CI counts what changed.
release-check: check test
	@$(PYTEST) $(BESIDE) -m soak --record

check: lint types claims docs

lint: $(STAMP)
	@$(PY) -m ruff check .

types: $(STAMP)
	@$(PY) -m mypy

# Figures of the pages for users and of experiments/README.md, computed again from files in the repository.
claims: $(STAMP)
	@$(PY) experiments/claims/run.py

# The documentation site, in build/site. What it needs is installed once, beside the rest.
docs: $(STAMP)
	@$(PY) -c 'import material, mkdocstrings' 2>/dev/null || \
	  $(PY) -m pip install --disable-pip-version-check --no-input --quiet -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

bench: $(STAMP)
	@$(PY) -m pytest benchmarks --benchmark-only $(ARGS)

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "hwnas needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | head -n 1). Name one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "hwnas needs venv, which '$(PYTHON)' lacks. Install it (Debian, Ubuntu: apt install python3-venv), then give the command again." >&2; exit 2; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "hwnas: setting up $(VENV) (PyTorch is large: the first time takes a while)"
	@$(PY) -m pip install --disable-pip-version-check --no-input --quiet -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
