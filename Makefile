# Works alone in a fresh clone with Python >= 3.11 and make: every target installs what it needs into .venv, once.
PYTHON ?= python3
BIN := .venv/bin
XDIST ?= 2

.PHONY: replay test lint docs traces clean

replay: .venv/.installed
	$(BIN)/benchctl replay traces/sharegpt.jsonl --scheduler nano --scheduler vllm

test: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(XDIST)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.installed
	$(BIN)/python -m benchctl.cli_docs > docs/cli.md

traces: .venv/.installed
	$(BIN)/python -m traces.synthetic

clean:
	rm -rf .venv build *.egg-info

# A stamp is as old as its installation: a change of what is to be installed installs anew.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "benchctl needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]' -c constraints.txt
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@
