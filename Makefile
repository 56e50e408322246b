# Set-up and checks, from a fresh clone. Needed: Python 3.11 or newer, make, and for `make test` and `make lint` a C++ compiler
# (llama-cpp-python is compiled, once, in about 4 minutes). Everything goes into .venv; a second call installs nothing.
#
#   make fuzz   20 seconds of fuzzing our own caches, of three families (each has kernels to compile, once: a quarter of a minute)
#   make test   all tests, llama.cpp included, on two processes (TEST_PROCESSES=0: on one). CUDA kernels run in a simulator; they are compiled,
#               too, where a compiler is: a CUDA toolkit, or .venv/bin/pip install -e '.[cuda-compile]' (half a gigabyte)
#   make lint   style, and types of the built wheel
#   make clean  remove what these made

VENV := .venv
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet
TYPECHECK := build/typecheck
PYTHON ?= python3
TEST_PROCESSES ?= 2

.PHONY: fuzz test lint clean
.DELETE_ON_ERROR:

fuzz: $(VENV)/.installed
	$(VENV)/bin/statedrift fuzz --target numba --family mamba2 --family lfm2 --family qwen35 --seconds 20

test: $(VENV)/.installed-test
	NUMBA_ENABLE_CUDASIM=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q --numprocesses $(TEST_PROCESSES) tests/cudasim
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/lib build/bdist.* $(TYPECHECK)
	mkdir -p $(TYPECHECK)
	$(VENV)/bin/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir $(TYPECHECK)/wheel .
	$(PIP) --no-deps --target $(TYPECHECK)/site $(TYPECHECK)/wheel/*.whl
	cd $(TYPECHECK) && MYPYPATH=site ../../$(VENV)/bin/python -m mypy --config-file ../../pyproject.toml -p statedrift

$(VENV)/bin/python:
	@for candidate in '$(PYTHON)' python3.13 python3.12 python3.11 python3.14; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$candidate ($$("$$candidate" --version))"; \
	    exec "$$candidate" -m venv $(VENV); \
	  fi; \
	done; \
	echo "statedrift needs Python 3.11 or newer and found none: $(PYTHON) is $$($(PYTHON) --version 2>&1). Name one: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing statedrift into $(VENV) (once)"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	@echo "installing statedrift with llama-cpp-python into $(VENV) (once; the compilation takes about 4 minutes)"
	$(PIP) -e '.[llamacpp,test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-lint: pyproject.toml | $(VENV)/bin/python
	@echo "installing statedrift with all extras into $(VENV) (once)"
	$(PIP) -e '.[llamacpp,test,dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

clean:
	rm -rf $(VENV) build dist *.egg-info
