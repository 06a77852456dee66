# `make serve` and `make test` are all one needs; both work on a fresh clone.
# PYTHON: the interpreter (3.11 or later). TORCH: what is installed when no torch is there yet.
PYTHON ?=
TORCH ?= torch==2.13.0
SERVE_ARGS ?=
PYTEST_ARGS ?=
BIN := .venv/bin

.PHONY: setup deps serve test lint types check clean help

help: ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 10

setup: ## create .venv and install Headrace with its tools; does nothing when nothing changed
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" sh tools/setup.sh

deps: ## redis-server from Debian's packages, when it is missing
	@sh tools/deps.sh

serve: setup ## start the service on the nano model (SERVE_ARGS="--set router.port=9000")
	@exec $(BIN)/headrace serve $(SERVE_ARGS)

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy
	$(BIN)/mypy

check: setup deps ## the tests alone (PYTEST_ARGS="tests/deploy -x")
	$(BIN)/python -P -m pytest $(PYTEST_ARGS)

test: setup deps lint types check ## what CI runs

clean: ## remove .venv, caches and build leftovers
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
