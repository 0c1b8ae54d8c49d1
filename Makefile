# Everything runs in .venv, which `make install` makes. Settings, on the command line or exported:
#   PYTHON=python3.11   the interpreter to make .venv with          (default: python3)
#   GPU=1 | GPU=0       TensorFlow and Horovod for NVIDIA GPUs, or not (default: as found)
#   MPI=system          build against the mpicxx on PATH            (default: Open MPI from PyPI)
#   ARGS="a.b=c ..."    passed on by train, bench and the tests
# What is not given stays as it was when .venv was made.

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Open MPI refuses to start as root, which is what one is in a container, unless told so.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# Put the environment's programs first, and quote: the path may hold spaces. With `exec`, a signal
# that ends make ends the program and not only the shell around it.
IN_VENV = exec env PATH="$$PWD/.venv/bin:$$PATH"
NP ?= 2
CONFIG ?= configs/allreduce.yaml

.PHONY: help install train ps-demo test test-all test-quick test-netlab torture parity lint bench bench-ps bench-network bench-allreduce container container-test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile
	@sed -n '2,6s/^#  */  /p' Makefile

install: ## make .venv with TensorFlow, MPI, Horovod and hvps (once; then a second or less)
	@command -v "$(or $(PYTHON),python3)" >/dev/null || { \
	  echo "error: there is no Python interpreter '$(or $(PYTHON),python3)'" >&2; \
	  echo "  do:       install Python 3.10 to 3.12, or name one: make install PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@exec env PYTHON="$(PYTHON)" GPU="$(GPU)" MPI="$(MPI)" "$(or $(PYTHON),python3)" tools/install.py

train: install ## train the digits example with 2 Horovod ranks (NP=, CONFIG=, ARGS="key=value ...")
	@$(IN_VENV) horovodrun -np $(NP) python -m hvps.train "$(CONFIG)" $(ARGS)

ps-demo: install ## show parameter servers: placement, then asynchronous training (2 ps, 3 workers)
	@$(IN_VENV) python -m hvps.demo

test: lint ## lint and run the tests, but for the slow ones
	@$(IN_VENV) python -m pytest -q -m "not slow" tests $(ARGS)

test-all: lint ## lint and run all tests, the slow ones too
	@$(IN_VENV) python -m pytest -q tests $(ARGS)

test-quick: install ## the unit tests only
	@$(IN_VENV) python -m pytest -q tests/unit $(ARGS)

parity: install ## show how far ranks and parameter servers are from one process, in the weights
	@$(IN_VENV) python -m pytest -q -s tests/distributed/test_parity.py \
	  tests/distributed/test_ps_parity.py $(ARGS)

lint: install ## ruff and mypy
	@$(IN_VENV) ruff check -q .
	@$(IN_VENV) ruff format -q --check .
	@$(IN_VENV) mypy

bench: install ## measure step times
	@$(IN_VENV) python -m benchmarks.step_time $(ARGS)

bench-ps: install ## measure steps per second of parameter servers, beside TensorFlow's own
	@$(IN_VENV) python -m benchmarks.ps_step_rate $(ARGS)

bench-network: install ## measure parameter servers against the limit of shaped links (root)
	@$(IN_VENV) python -m benchmarks.ps_network --overrides backend.pipeline=4 $(ARGS)

test-netlab: install ## the tests that need root and network namespaces
	@$(IN_VENV) python -m pytest -q tests/netlab $(ARGS)

torture: install ## kill and stop jobs at random and chosen instants, some hours (ARGS= for the kills)
	@$(IN_VENV) sh -c 'python -m tests.torture.kills "$$@" && python -m tests.torture.matrix' torture $(ARGS)

bench-allreduce: install ## measure sums over hosts against the limit of shaped links (root)
	@$(IN_VENV) python -m benchmarks.allreduce $(ARGS)

container: ## build the container image by buildah (BASE=, IMAGE=, STORAGE=; see tools/container.sh)
	@exec tools/container.sh build

container-test: ## run the unit tests and a training with 2 ranks in that image
	@exec tools/container.sh test

clean: ## remove .venv and build leftovers; runs/ and the wheel cache stay
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
