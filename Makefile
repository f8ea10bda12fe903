# make test    a virtual environment, the test dependencies, ruff and the CPU tests
# make demo    the same environment, then the demo (minutes; picture and numbers in demo_out/)
# make report  tables and pictures of README and docs, from the results in benchmarks/results
# make matrix  the tests on every supported version of PyTorch, an environment each (long, and gigabytes of downloads)
# make lint    ruff alone
# make clean   removes the environment and everything built
#
#   make test PYTHON=python3.12           another interpreter
#   make test TORCH=torch==2.11.0         another PyTorch
#   make test PYTEST_ARGS="-k match -x"   some of the tests
#   make test JOBS=8                      in as many processes
#   make matrix VERSIONS="2.11.0 2.15.0"  some of the versions
#   make demo DEMO_ARGS="--device cuda"   options of the demo (python -m flce_inductor.demo --help)

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
PYTEST_ARGS ?=
JOBS ?= 2
DEMO_ARGS ?=
VERSIONS ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
export PIP_NO_INPUT := 1

# Stamps: an environment is brought up to date only when what it was built from has changed.
TORCH_STAMP := $(VENV)/.stamp-$(shell printf '%s' '$(TORCH)' | tr -c 'A-Za-z0-9.' _)

.PHONY: help test report matrix demo lint clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# PyTorch by itself and pinned, before the package: the package's own requirement is a range, and a bare range would let
# pip fetch whichever build of the newest version comes first, CUDA libraries included. Changing TORCH changes the
# stamp's name; the old stamps go, so that changing it back installs again.
$(TORCH_STAMP): | $(BIN)/python
	$(PIP) $(TORCH)
	rm -f $(VENV)/.stamp-*
	touch $@

$(VENV)/.stamp-test: pyproject.toml $(TORCH_STAMP)
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/.stamp-demo: pyproject.toml $(TORCH_STAMP)
	$(PIP) -e '.[demo]'
	touch $@

# Two processes of one thread: the tests' tensors are small, and threads that wait for each other make them slower.
test: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu" $(PYTEST_ARGS)

# Goes on after a version that fails; the table says what became of each.
matrix:
	@mkdir -p .matrix; failed=; for version in $(VERSIONS); do \
	    log=.matrix/$$version.log; \
	    $(MAKE) test TORCH=torch==$$version VENV=.matrix/$$version > $$log 2>&1 || failed="$$failed $$version"; \
	    triton=$$(.matrix/$$version/bin/python -c 'import triton; print(triton.__version__)' 2> /dev/null); \
	    result=$$(grep -E '(passed|failed|errors?).* in [0-9.]+s' $$log | tr -d = | tail -1); \
	    echo "| $$version | $${triton:--} | $${result:-no test ran, see $$log} |"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

report: $(VENV)/.stamp-demo
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.plots

demo: $(VENV)/.stamp-demo
	$(BIN)/python -m flce_inductor.demo $(DEMO_ARGS)

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) .matrix build dist *.egg-info .pytest_cache .ruff_cache demo_out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
