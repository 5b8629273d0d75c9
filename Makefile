# Each target works on a fresh machine with Python >= 3.11 and a C++ compiler: .venv is made when it is missing.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check test-gpu install clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch numpy
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

demo: install
	$(BIN)/python -m launch.demo

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_floors.py

# Needs a CUDA device; uses the packages that are there.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu

clean:
	rm -rf .venv runs/demo
