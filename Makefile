# `make help` lists what there is. Every target builds .venv first, if it is missing or out of date.
#
#   PYTHON      interpreters to try, in turn; the first that is Python 3.11 or 3.12 and has venv
#   LOCK        the lock file; by default gpu.txt where nvidia-smi lists a GPU, else cpu.txt
#   WHEELS      folders with wheels that pip may take too, say PyTorch's CPU build; `make lock` adds
#               their digests to the lock, without which pip refuses them
#   TEST_FLAGS  more arguments for pytest; DEMO_FLAGS, for the demo; BENCH_FLAGS, for benchmarks

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3.11 python3.12 python3
WHEELS ?= $(wildcard /opt/wheels)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Programs that start others (torchx, torchrun) find them in the environment too.
ON_PATH := PATH="$(CURDIR)/$(BIN):$$PATH"
INSTALL := $(PIP) install --quiet $(addprefix --find-links=,$(WHEELS))
# Of a lock: nothing that is not in it, and no file that is not the one that was locked.
HASHED := --no-deps --require-hashes
ifndef LOCK
LOCK := requirements/$(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU [0-9]'),gpu,cpu).txt
endif
# Touched last, so that what is half built, or built from another lock, is built again.
BUILT := $(VENV)/built-from-$(notdir $(LOCK))
LINKED := $(VENV)/linked
TOOLS := build/tools/built

# Sets $python in a recipe's shell, or ends it.
define FIND_PYTHON
for python in $(PYTHON); do \
    $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
        2>/dev/null </dev/null && break; \
    python=; \
done; \
if [ -z "$$python" ]; then \
    echo "make: none of these is a Python 3.11 or 3.12 with venv: $(PYTHON)" >&2; \
    echo "  -> install Python 3.11, or name one: make env PYTHON=/path/to/python3.11" >&2; \
    exit 1; \
fi
endef

.PHONY: help env demo test test-gpu rapids-sources lint bench-etl bench-loader bench-train bench-convergence bench-stability bench-gpu lock audit sbom clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

env: $(LINKED) ## build the environment in .venv
	@echo "env: ready in $(VENV), from $(LOCK)"

demo: $(LINKED) ## raw click log -> ETL -> training -> scored rows; everything below build/demo
	@$(ON_PATH) python -m demo --output build/demo $(DEMO_FLAGS)

test: $(LINKED) ## run the tests, two files at a time; on the CPU, also where there are GPUs
	@CUDA_VISIBLE_DEVICES= $(ON_PATH) python -m pytest -n 2 --dist loadfile $(TEST_FLAGS)

test-gpu: $(LINKED) ## the tests that need a GPU; minutes
	@$(ON_PATH) python -m pytest -m gpu -rs --durations=10 tests/gpu tests/nvt_loader $(TEST_FLAGS)

rapids-sources: $(LINKED) ## RAPIDS' Python sources in build/rapids, for the tests of nvt_compat
	@$(ON_PATH) python -m tests.nvt_compat.rapids

lint: $(LINKED) ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

bench-etl: $(LINKED) ## the ETL beside NVTabular, Polars and DuckDB; minutes
	@$(ON_PATH) python -m benchmarks.etl $(BENCH_FLAGS)

bench-loader: $(LINKED) ## the loader beside Merlin's and TorchRec's; minutes
	@$(ON_PATH) python -m benchmarks.loader $(BENCH_FLAGS)

bench-train: $(LINKED) ## the trainer beside dlrm_main.py and a bare loop; minutes
	@$(ON_PATH) python -m benchmarks.train $(BENCH_FLAGS)

bench-convergence: $(LINKED) ## AUROC after one epoch beside the oracle's, at the default learning rates; hours
	@$(ON_PATH) python -m benchmarks.convergence $(BENCH_FLAGS)

bench-stability: $(LINKED) ## AUROC over seeds: mean, spread, worst; minutes
	@$(ON_PATH) python -m benchmarks.stability $(BENCH_FLAGS)

bench-gpu: $(LINKED) ## ETL, loader, training, inference on a GPU beside its limits; minutes
	@$(ON_PATH) python -m benchmarks.gpu $(BENCH_FLAGS)

# What these three run has an environment of its own, which needs nothing of the project's.
lock: $(TOOLS) ## the digests of all pins into requirements/*.txt, after a pin was changed by hand
	@PATH="$(CURDIR)/build/tools/bin:$$PATH" $(CURDIR)/build/tools/bin/python requirements/hashes.py $(WHEELS)

audit: $(TOOLS) ## known vulnerabilities of the locked versions, where they can be looked up
	@build/tools/bin/python requirements/audit.py

sbom: $(TOOLS) $(LINKED) ## what is installed, as CycloneDX, in build/sbom.json
	@PYTHONWARNINGS=ignore build/tools/bin/cyclonedx-py environment $(BIN)/python \
	    --pyproject pyproject.toml --of JSON -o build/sbom.json
	@echo "sbom: build/sbom.json"

clean: ## remove the environment and everything built
	@rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis *.egg-info

$(TOOLS): requirements/tools.txt
	@$(FIND_PYTHON); rm -rf build/tools && $$python -m venv build/tools
	@build/tools/bin/python -m pip --disable-pip-version-check install --quiet $(HASHED) -r $<
	@touch $@

$(BUILT): requirements/build.txt requirements/torch.txt requirements/cuda.txt $(LOCK)
	@$(FIND_PYTHON); \
	echo "env: $$($$python --version) in $(VENV)"; \
	rm -rf $(VENV) && $$python -m venv $(VENV)
	@echo "env: $(shell sed -n 's/^\([a-z][^ ]*\).*/\1/p' requirements/build.txt)"
	@$(INSTALL) $(HASHED) -r requirements/build.txt
	@echo "env: $(shell sed -n 's/^\([a-z][^ ]*\).*/\1/p' requirements/torch.txt) and what it needs"
	@# pip prefers files whose digests the package index tells: so WHEELS come first, by themselves.
	@$(if $(wildcard $(addsuffix /torch-*.whl,$(WHEELS))),$(INSTALL) $(HASHED) --no-index -r requirements/torch.txt ||) \
	    $(INSTALL) $(HASHED) -r requirements/torch.txt
	@if grep -q '^Requires-Dist: cuda' $(VENV)/lib/python3*/site-packages/torch-*.dist-info/METADATA; \
	    then $(INSTALL) $(HASHED) -r requirements/cuda.txt; fi
	@echo "env: $(LOCK), $(shell grep -c == $(LOCK)) packages"
	@$(INSTALL) $(HASHED) --no-build-isolation -r $(LOCK)
	@touch $@

# The project itself, so that Dask's workers and torchrun find it from any folder.
$(LINKED): $(BUILT) pyproject.toml
	@echo "env: this project, editable"
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@$(ON_PATH) CUDA_VISIBLE_DEVICES= python -m demo.compile_ahead || \
	    echo "env: not compiled ahead; the first runs will compile" >&2
	@touch $@
