# `make help` lists what there is. Every target builds .venv first, if it is missing or out of date.
#
#   PYTHON      interpreters to try, in turn; the first that is Python 3.11 or 3.12 and has venv
#   LOCK        the lock file; by default gpu.txt where nvidia-smi lists a GPU, else cpu.txt
#   WHEELS      folders with wheels that pip may take too, such as PyTorch's CPU build; their digests
#               must be in the lock
#   TEST_FLAGS  more arguments for pytest; DEMO_FLAGS, for the demo; BENCH_FLAGS, for benchmarks;
#               RELEASE_FLAGS, for what tries a release

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Where it is set, each of the tests' many processes compiles every module again: 0.4 s of each start.
unexport PYTHONDONTWRITEBYTECODE

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
AUDIT := build/tools/bin/pip-audit
DOCS_TOOLS := build/docs-tools/built
COVERAGE := build/coverage/built
# What the site consists of: pages, and what they link to.
ON_SITE := README.md CHANGELOG.md CONTRIBUTING.md CODE_OF_CONDUCT.md SECURITY.md LICENSE docs deploy examples nvt_torchrec
# Modules whose loops Numba compiles on import: at the end of `make env`, instead of in the first runs.
COMPILED := nvt_torchrec.workflows.compiled nvt_torchrec.nvt_loader.parquet.decoder
# Servers of others, each installed with ONNX Runtime into an environment of its own.
SERVERS := nvidia-pytriton==0.7.0 kserve==0.21.0
RUNTIME := onnxruntime==1.32.0
# Tests write and sync many small files, which takes less time in memory. Where 4 GB of it are free, a
# tenth of that is used until the tests end, and then by the files of failed tests.
TEST_FILES = $(shell df --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 4e6 { print "TMPDIR=/dev/shm" }')
# Installed before a lock.
BEFORE := requirements/build.txt requirements/torch.txt requirements/cuda.txt
# The next argument is a version of Python. Pins stay as they are while requirements/*.in allow them;
# UV_FLAGS=--upgrade takes the newest versions.
RESOLVE = build/tools/bin/uv pip compile --quiet --no-config --no-annotate --generate-hashes \
    --custom-compile-command='make lock' --python-platform=x86_64-manylinux_2_35 $(UV_FLAGS) \
    --python-version

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

.PHONY: help env demo test test-servers test-gpu lint docs coverage release bench-etl bench-parquet bench-events bench-tables bench-negatives bench-popularity bench-labels bench-sources bench-loader bench-train bench-quality bench-published bench-inference bench-gpu lock audit sbom clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

env: $(LINKED) ## build the environment in .venv
	@echo "env: ready in $(VENV), from $(LOCK)"

demo: $(LINKED) ## raw click log -> ETL -> training -> scored rows; everything below build/demo
	@$(ON_PATH) python -m demo --output build/demo $(DEMO_FLAGS)

test: $(LINKED) ## run the tests, two files at a time; on the CPU, also where there are GPUs
	@CUDA_VISIBLE_DEVICES= $(ON_PATH) $(TEST_FILES) python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	    -o tmp_path_retention_policy=failed $(TEST_FLAGS)

test-servers: $(LINKED) ## an exported model in genuine Triton and KServe servers, installed into build/servers
	@for package in $(SERVERS); do \
	    folder=build/servers/$${package%%=*}; \
	    [ -e $$folder/built ] || { rm -rf $$folder && $(BIN)/python -m venv $$folder && \
	        $$folder/bin/python -m pip --disable-pip-version-check install --quiet $$package $(RUNTIME) && \
	        touch $$folder/built; }; \
	done; $(ON_PATH) python -m pytest -rs $(TEST_FLAGS) tests/inference/test_servers.py

test-gpu: $(LINKED) ## the tests that need a GPU, a process for each file; minutes
	@for file in tests/gpu/test_*.py; do \
	    $(ON_PATH) timeout 240 python -m pytest -q -m gpu -rs $(TEST_FLAGS) $$file || failed=1; \
	done; exit $${failed:-0}

lint: $(LINKED) $(TOOLS) ## check style, formatting and types, also of the Python in README and docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@build/tools/bin/mypy --python-executable=$(BIN)/python
	@$(BIN)/python -m tests.doc_lines build/doc_lines
	@build/tools/bin/mypy --python-executable=$(BIN)/python --strict --allow-redefinition \
	    --cache-dir=build/mypy-strict build/doc_lines tests/typed_lines.py

docs: $(DOCS_TOOLS) ## the documentation as a site, in build/site; ends at a link that leads nowhere
	@rm -rf build/site-source && mkdir -p build/site-source && ln -s $(ON_SITE:%=$(CURDIR)/%) build/site-source
	@# With --quiet it would not count warnings, which --strict ends with.
	@NO_MKDOCS_2_WARNING=1 build/docs-tools/bin/mkdocs build --strict --config-file mkdocs.yml >build/docs.log 2>&1 \
	    || { grep -v '^INFO' build/docs.log; exit 1; }
	@echo "docs: build/site/index.html"

coverage: $(LINKED) $(COVERAGE) ## run the tests; list the files of which they execute less than 80 %; slower than `make test`
	@export CUDA_VISIBLE_DEVICES= PYTHONPATH=$(CURDIR)/build/coverage $(ON_PATH); \
	python -m coverage erase; \
	python -m coverage run -m pytest $(TEST_FLAGS) || failed=1; \
	python -m coverage combine --quiet && python -m coverage report --sort=cover \
	    | awk 'NR <= 2 || /^TOTAL/ || $$4 + 0 < 80'; exit $${failed:-0}

release: $(LINKED) ## sdist and wheel of the last commit in build/release, tried in environments of their own
	@$(ON_PATH) python -m tests.release build/release $(RELEASE_FLAGS)

bench-etl: $(LINKED) ## the ETL beside NVTabular and Polars; minutes
	@$(ON_PATH) python -m benchmarks.etl $(BENCH_FLAGS)

bench-parquet: $(LINKED) ## the ETL's writer of parquet beside Arrow's; minutes
	@$(ON_PATH) python -m benchmarks.parquet_writer $(BENCH_FLAGS)

bench-events: $(LINKED) ## aggregates and histories beside DuckDB and Polars; minutes
	@$(ON_PATH) python -m benchmarks.events $(BENCH_FLAGS)

bench-tables: $(LINKED) ## tables joined as of a time beside DuckDB and Polars; minutes
	@$(ON_PATH) python -m benchmarks.tables $(BENCH_FLAGS)

bench-negatives: $(LINKED) ## negatives drawn beside the rows of a log, beside Polars; minutes
	@$(ON_PATH) python -m benchmarks.negatives $(BENCH_FLAGS)

bench-popularity: $(LINKED) ## scores of models whose negatives were drawn by popularity; minutes
	@$(ON_PATH) python -m benchmarks.popularity $(BENCH_FLAGS)

bench-labels: $(LINKED) ## clicks in a file of their own beside the same log with them; minutes
	@$(ON_PATH) python -m benchmarks.label_files $(BENCH_FLAGS)

bench-sources: $(LINKED) ## a further source of events, and the same log without it; minutes
	@$(ON_PATH) python -m benchmarks.sources $(BENCH_FLAGS)

bench-loader: $(LINKED) ## the loader beside Merlin's and TorchRec's; minutes
	@$(ON_PATH) python -m benchmarks.loader $(BENCH_FLAGS)

bench-train: $(LINKED) ## the trainer beside dlrm_main.py and a bare loop; minutes
	@$(ON_PATH) python -m benchmarks.train $(BENCH_FLAGS)

bench-quality: $(LINKED) ## AUROC beside logistic regression, boosted trees and the oracle's; hours
	@$(ON_PATH) python -m benchmarks.regression $(BENCH_FLAGS)

bench-published: $(LINKED) ## every model on data sets with published tables; docs/quality.md says where they come from; hours
	@$(ON_PATH) python -m benchmarks.published $(BENCH_FLAGS)

bench-inference: $(LINKED) ## scoring beside NVTabular and TorchRec; BENCH_FLAGS names model and rows
	@$(ON_PATH) python -m benchmarks.inference $(BENCH_FLAGS)

# 21 GB of text, 22 names of one file.
BIG_LOG := build/bench/gpu-log-of-22-days
# Most valuable first, as a card is often lent for minutes; a step that fails or hangs costs its own time.
bench-gpu: $(LINKED) ## checks, tests, and figures beside their limits on a GPU, step by step; half an hour
	@export $(ON_PATH); . benchmarks/gpu_flags.sh; step() { echo "== $$*"; timeout "$$@" || echo "== failed, status $$?: $$*"; }; \
	step 90 python -m etl doctor; \
	step 900 make test-gpu; \
	step 600 python -m benchmarks.train $$mlperf --batch_sizes 65536,8192 -- --amp; \
	step 300 python -m benchmarks.train $$mlperf --batch_sizes 65536 -- --amp $$large_defaults; \
	step 400 python -m benchmarks.train $$mlperf --batch_sizes 65536 --plain bins,lookups,join -- --amp $$large_defaults; \
	step 300 python -m benchmarks.train $$mlperf --batch_sizes 8192 -- --amp --compile_dense; \
	step 300 python -m benchmarks.train $$mlperf --batch_sizes 65536 -- --allow_tf32; \
	step 300 python -m benchmarks.train $$mlperf --batch_sizes 65536; \
	step 300 python -m benchmarks.train $$mlperf --batch_sizes 65536 -- --amp --table_precision fp16; \
	step 300 python -m benchmarks.loader --device cuda --cases B=65536 --repeats 1; \
	step 240 sh -c '. benchmarks/gpu_flags.sh; make_big_log $(BIG_LOG) 22'; \
	for run in "dask 64" "cpu 64" "dask 256" "dask 512"; do \
	    rm -rf build/bench/gpu-etl; \
	    step 240 python -m etl run --engine $${run% *} --block_mb $${run#* } \
	        --input_path $(BIG_LOG) --output_path build/bench/gpu-etl; \
	done

# What these run is in an environment of its own, which needs nothing of the project's.
lock: $(TOOLS) ## resolve requirements/*.in into requirements/*.txt, with the digest of every file
	@for name in build torch cuda; do \
	    $(RESOLVE) 3.11 --no-deps -o requirements/$$name.txt requirements/$$name.in || exit; \
	done
	@for kind in cpu gpu; do \
	    set -- requirements/$$kind.in --override=requirements/overrides.in \
	        --excludes=requirements/$$kind-excludes.txt $(BEFORE:%=-c %) \
	        $$(sed -n 's/^\([a-z][a-z0-9-]*\)==.*/--no-emit-package=\1/p' $(BEFORE)); \
	    $(RESOLVE) 3.11 "$$@" -o requirements/$$kind.txt || exit; \
	    $(RESOLVE) 3.12 "$$@" -c requirements/$$kind.txt >/dev/null || exit; \
	done
	@$(RESOLVE) 3.11 pyproject.toml --extra=serve -c requirements/cpu.txt -o requirements/serve.txt \
	    $(BEFORE:%=-c %) $$(sed -n 's/^\([a-z][a-z0-9-]*\)==.*/--no-emit-package=\1/p' $(BEFORE))
	@$(RESOLVE) 3.11 requirements/tools.in -o requirements/tools.txt \
	    $(BEFORE:%=-c %) -c requirements/cpu.txt -c requirements/gpu.txt
	@$(RESOLVE) 3.11 requirements/docs.in -o requirements/docs.txt \
	    $(BEFORE:%=-c %) -c requirements/cpu.txt -c requirements/gpu.txt -c requirements/tools.txt
	@$(RESOLVE) 3.11 requirements/coverage.in -o requirements/coverage.txt
	@git --no-pager diff --stat -- requirements

# pip-audit writes a report, unless it fails. A mirror of the index may have packages and no advisories.
# MAY_CHECK_NOTHING=1 is for machines from which they cannot be reached, where nobody could do more.
audit: $(TOOLS) ## known vulnerabilities of the locked versions; fails if none could be looked up
	@mkdir -p build && rm -f build/audit.txt
	@sed -n 's/^\([a-z][^ ]*==[^ ]*\).*/\1/p' $(BEFORE) $(addprefix requirements/,cpu.txt gpu.txt tools.txt docs.txt coverage.txt) \
	    | sort -u >build/pins.txt
	@pins=$$(wc -l <build/pins.txt); \
	if $(AUDIT) --requirement build/pins.txt --no-deps --disable-pip --progress-spinner=off \
	    --output build/audit.txt 2>build/audit.log; then \
	    skipped=$$(cat build/audit.txt 2>/dev/null | grep -c 'could not be audited'); \
	    [ $$skipped -lt $$pins ] && \
	        echo "audit: $$pins packages: no known vulnerabilities; $$skipped could not be looked up" && exit; \
	    why="the index has advisories for none of $$pins packages"; \
	elif [ -s build/audit.txt ]; then cat build/audit.txt; exit 1; \
	else tail -n 1 build/audit.log; why='the advisories cannot be reached from here'; \
	    grep -q 'ConnectionError\|ProxyError\|SSLError\|Timeout\|Could not connect' build/audit.log || exit 1; \
	fi; echo "audit: NOTHING WAS CHECKED: $$why"; [ -n "$(MAY_CHECK_NOTHING)" ]

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

$(DOCS_TOOLS): requirements/docs.txt
	@$(FIND_PYTHON); rm -rf build/docs-tools && $$python -m venv build/docs-tools
	@build/docs-tools/bin/python -m pip --disable-pip-version-check install --quiet $(HASHED) -r $<
	@touch $@

# Beside the environment and not in it, which the tests compare with its lock.
$(COVERAGE): requirements/coverage.txt $(BUILT)
	@rm -rf build/coverage
	@$(PIP) install --quiet $(HASHED) --target build/coverage -r $<
	@# The tests compare the packages on the path with the lock, by these folders.
	@rm -rf build/coverage/*.dist-info
	@# What its .pth file does in an environment: processes that tests start are measured, too.
	@echo 'import coverage; coverage.process_startup()' >build/coverage/sitecustomize.py
	@touch $@

$(BUILT): $(BEFORE) $(LOCK)
	@$(FIND_PYTHON); \
	echo "env: $$($$python --version) in $(VENV)"; \
	rm -rf $(VENV) && $$python -m venv $(VENV)
	@echo "env: $(shell sed -n 's/^\([a-z][^ ]*\).*/\1/p' requirements/build.txt)"
	@$(INSTALL) $(HASHED) -r requirements/build.txt
	@echo "env: $(shell sed -n 's/^\([a-z][^ ]*\).*/\1/p' requirements/torch.txt) and what it needs"
	@# A wheel in WHEELS for this Python is the only one to be taken: if pip refuses it, stop.
	@tag=$$($(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])'); \
	for folder in $(WHEELS); do \
	    ls $$folder/torch-*-$$tag-*.whl >/dev/null 2>&1 && local=--no-index; \
	done; \
	$(INSTALL) $(HASHED) $$local -r requirements/torch.txt
	@if grep -q '^Requires-Dist: cuda' $(VENV)/lib/python3*/site-packages/torch-*.dist-info/METADATA; \
	    then $(INSTALL) $(HASHED) -r requirements/cuda.txt; fi
	@echo "env: $(LOCK), $(shell grep -c == $(LOCK)) packages"
	@$(INSTALL) $(HASHED) --no-build-isolation -r $(LOCK)
	@touch $@

# The project itself, so that Dask's workers and torchrun find it from any folder.
$(LINKED): $(BUILT) pyproject.toml
	@echo "env: this project, editable"
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@for module in $(COMPILED); do CUDA_VISIBLE_DEVICES= $(BIN)/python -c "import $$module" & done; wait
	@touch $@
