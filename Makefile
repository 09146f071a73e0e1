# One command sets everything up: a virtual environment, its packages, the compiled extension.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
RUN := $(VENV)/bin/python
CXX ?= g++

.PHONY: build test lint clean

$(VENV)/ready: pyproject.toml Makefile
	@command -v $(PYTHON) >/dev/null || { echo "overflow_fast: $(PYTHON) was not found; install Python 3.10 or newer, or set PYTHON."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "overflow_fast: Python 3.10 or newer is needed; set PYTHON to one."; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || { echo "overflow_fast: no C++ compiler: $(CXX) was not found; install g++ 10 or newer (Debian: apt install g++) or set CXX."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q "$(TORCH)" setuptools wheel ninja pybind11
	$(RUN) -m pip install -q $$($(RUN) -c 'import pathlib, re; text = pathlib.Path("pyproject.toml").read_text(); block = re.search(r"dev = \[(.*?)\n\]", text, re.S).group(1); print(" ".join(re.findall(r"\"(.+?)\"", block)))')
	@touch $@

$(VENV)/built: $(VENV)/ready setup.py $(wildcard csrc/*.* csrc/*/*.*)
	$(RUN) -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@

build: $(VENV)/built

test: build
	$(RUN) -m pytest -q

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) build *.egg-info overflow_fast/_C*.so
