# make demo     trains examples/train_gpt.py on two ranks          make test   every test that this machine can run
# Both make .venv first (Python 3.10+ and a C++ compiler are all they need). PYTHON=/path/to/python uses that
# environment instead, as it is, and installs nothing. FORCE_CUDA=1 or 0 overrules "is a GPU visible".

TORCH ?= torch==2.11.0
# The oldest that is supported: XLA accepts handlers that were built for an older minor version.
JAX ?= jax==0.11.2
NPROC ?= 2
export OMP_NUM_THREADS ?= 1
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
MAKEFLAGS += --no-print-directory

ifdef PYTHON
  PY := $(PYTHON)
  ENV := check-python
else
  PY := $(CURDIR)/.venv/bin/python
  ENV := .venv/.installed$(FORCE_CUDA)
endif
CURRENT := build/current
# The CMake that configured the build made last.
CMAKE = $(shell sed -n 's/^CMAKE_COMMAND:INTERNAL=//p' $(CURRENT)/CMakeCache.txt)

.PHONY: help build demo test test-python test-cpp test-docs test-frameworks test-jax check compat conformance gpu-test bench results sanitize \
        sanitize-quick sanitize-gpu site stress format lint lint-tidy wheel wheels \
        sdist check-wheel clean check-python
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -3
	@echo 'also: build wheel wheels sdist check-wheel format lint lint-tidy compat conformance gpu-test bench results sanitize sanitize-gpu site stress test-docs clean (see CONTRIBUTING.md)'

# ---- the environment

# The first Python that will do; empty where there is none.
BASE_PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
  $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)

define say_what_is_missing
	@[ -n "$(1)" ] && $(1) -c '' || \
	  { echo 'torch_overlap: expected Python 3.10 to 3.13, got $(or $(PYTHON),none on the path); install one'; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo 'torch_overlap: expected a C++ compiler, got none; install g++ (12 or newer)'; exit 1; }
	@$(1) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || \
	  { echo 'torch_overlap: $(1) has no Python.h; install python3-dev'; exit 1; }
endef

.venv/.packages: pyproject.toml
	$(call say_what_is_missing,$(BASE_PYTHON))
	@[ -x .venv/bin/python ] || $(BASE_PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo 'torch_overlap: $(BASE_PYTHON) cannot make an environment; install python3-venv'; exit 1; }
	.venv/bin/python -m pip install -q $(TORCH) numpy matplotlib expecttest pytest pytest-timeout pytest-xdist \
	  'cmake>=3.26' ninja 'setuptools>=77,<82' wheel
	@touch $@

# nvcc from PyPI where CUDA is wanted and no toolkit is installed; then the package, in place.
define take_nvcc
	packages=$$($(PY) -I cmake/torch_facts.py --nvcc-packages) && \
	  { [ -z "$$packages" ] || $(PY) -m pip install -q "$$packages"; }
endef
.venv/.installed$(FORCE_CUDA): .venv/.packages setup.py
	$(take_nvcc)
	$(PY) -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@

.venv/.lint: pyproject.toml | .venv/.packages
	.venv/bin/python -m pip install -q $$(sed -n 's/^lint = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	@touch $@

.venv/.frameworks: pyproject.toml | .venv/.packages
	.venv/bin/python -m pip install -q $$(sed -n 's/^frameworks = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	@touch $@

.venv/.docs: pyproject.toml | .venv/.packages
	.venv/bin/python -m pip install -q $$(sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	@touch $@

.venv/.wheels: pyproject.toml | .venv/.packages
	.venv/bin/python -m pip install -q $$(sed -n 's/^wheels = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	@touch $@

# jax for CPUs, or that of PYTHON. Python 3.12 or newer.
.venv/.jax: pyproject.toml | .venv/.packages
	.venv/bin/python -m pip install -q $(JAX)
	@touch $@

# The packages of tests/python/compat.
.venv/.slots: pyproject.toml | .venv/.packages
	.venv/bin/python -m pip install -q $$(sed -n 's/^slots = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	@touch $@

check-python:
	$(call say_what_is_missing,$(PYTHON))
	@$(PYTHON) -c 'import setuptools, torch' || \
	  { echo 'torch_overlap: $(PYTHON) lacks this; pip install $(TORCH) setuptools wheel cmake ninja'; exit 1; }

# ---- build and test

build: $(ENV)
	$(PY) setup.py -q build_ext --inplace

demo: build
	$(PY) -m torch.distributed.run --standalone --nproc_per_node $(NPROC) examples/train_gpt.py $(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: build check test-cpp test-python test-docs

# Most tests wait for ranks, so four run at a time, also on two cores. pytest needs pytest-xdist for it.
TEST_JOBS ?= 4
several_at_a_time = $(shell $(PY) -c 'import xdist' 2>/dev/null && printf '%s' '-n $(TEST_JOBS) --dist worksteal')
test-python: build
	$(PY) -m pytest tests/python -m 'not gpu' $(several_at_a_time) $(PYTEST_ARGS)

# The tests of the JAX front end, which the build makes where it finds jax.
test-jax: $(if $(PYTHON),,.venv/.jax)
	$(MAKE) build
	$(PY) -m pytest tests/python/jax $(several_at_a_time) $(PYTEST_ARGS)

test-cpp: build
	$(CMAKE) --build $(CURRENT) --target torch_overlap_tests
	@if [ -x $(CURRENT)/tests/cpp/torch_overlap_tests ]; then \
	  [ "$(TEST_JOBS)" -gt 0 ] || { echo 'test-cpp: expected TEST_JOBS of at least 1, got $(TEST_JOBS)'; exit 1; }; \
	  seq 0 $$(($(TEST_JOBS) - 1)) | xargs -P $(TEST_JOBS) -I{} env GTEST_TOTAL_SHARDS=$(TEST_JOBS) GTEST_SHARD_INDEX={} \
	  $(CURRENT)/tests/cpp/torch_overlap_tests --gtest_brief=1; fi

check:
	$(or $(PYTHON),$(BASE_PYTHON)) scripts/check_layers.py
	$(or $(PYTHON),$(BASE_PYTHON)) scripts/check_python_layers.py
	$(or $(PYTHON),$(BASE_PYTHON)) scripts/check_plugins.py
	$(or $(PYTHON),$(BASE_PYTHON)) scripts/check_style.py

gpu-test: export FORCE_CUDA = 1
gpu-test: build
	$(PY) -m pytest tests/python -m gpu $(PYTEST_ARGS)

# All operators and collectives beside what else there is, on all GPUs, in four minutes; ARGS='--set fp8 --tp 2'. A
# script of benchmarks/ instead: BENCH=benchmarks/window.py. Without a GPU it only shows that everything runs.
BUDGET ?= 225
bench: build
	$(if $(BENCH),$(PY) -m torch.distributed.run --standalone --nproc_per_node $(NPROC) $(BENCH) $(ARGS), \
	  $(PY) -m torch_overlap bench all --budget $(BUDGET) $(if $(wildcard /dev/nvidiactl),--out benchmarks/results) $(ARGS))

# The tables and pictures of docs/results.md from the result files that it names.
results: build
	$(PY) benchmarks/results_page.py

# The CPU tests against the newest torch on PyPI, in a copy with its own environment; before a release.
compat:
	mkdir -p build/compat && find build/compat -mindepth 1 -maxdepth 1 ! -name .venv ! -name build -exec rm -rf {} +
	git ls-files -z --cached --others --exclude-standard | xargs -0 tar c --ignore-failed-read | tar x -C build/compat
	FORCE_CUDA=0 $(MAKE) -C build/compat test TORCH=torch PYTHON= PYTHONPATH=

# The C++ tests of the layers without Python: what needs only the standard library, and the communicators over `local`
# and `fake`. First AddressSanitizer with UndefinedBehaviorSanitizer, then ThreadSanitizer. SUITES='Failures.*' runs some.
SANITIZED = build/sanitize-$(1)
SUITES ?= *
define sanitize
	$(CMAKE) -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM='$(NINJA)' -DPython3_EXECUTABLE='$(shell command -v $(PY))' \
	  -DTORCH_OVERLAP_CUDA=OFF -DTORCH_OVERLAP_SANITIZE=$(2) >build/sanitize-$(1).log || { cat build/sanitize-$(1).log; exit 1; }
	$(CMAKE) --build $(SANITIZED) $(if $(MAX_JOBS),-j $(MAX_JOBS)) --target $(3)
	@for program in $(3); do \
	  [ -x $(SANITIZED)/tests/cpp/$$program ] || continue; \
	  echo "-- $$program under $(2)"; \
	  ASAN_OPTIONS=detect_leaks=1 LSAN_OPTIONS=suppressions=$(CURDIR)/tests/cpp/lsan.supp:print_suppressions=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=suppressions=$(CURDIR)/tests/cpp/tsan.supp:exitcode=66 \
	  $(SANITIZED)/tests/cpp/$$program --gtest_brief=1 --gtest_filter='$(SUITES)' || exit 1; done
endef
NINJA = $(shell sed -n 's/^CMAKE_MAKE_PROGRAM:[A-Z]*=//p' $(CURRENT)/CMakeCache.txt)

sanitize: build
	$(call sanitize,address,address$(comma)undefined,torch_overlap_std_tests torch_overlap_comm_tests)
	$(call sanitize,thread,thread,torch_overlap_std_tests torch_overlap_comm_tests)
comma := ,

# What CI runs of it.
sanitize-quick: build
	$(call sanitize,address,address$(comma)undefined,torch_overlap_std_tests torch_overlap_comm_tests)
	$(call sanitize,thread,thread,torch_overlap_std_tests)

# Tests of our kernels (windows, custom collectives, also without copies, norms, fused and plain products, sums and
# copies of channels, "low_latency") on two GPUs, each process under compute-sanitizer (of the CUDA toolkit), which runs one
# kernel at a time: a test whose kernels wait for later ones of the same rank cannot pass. NCCL's own probing calls are
# not errors. TOOL=racecheck or synccheck looks for other mistakes.
TOOL ?= memcheck
SANITIZED_WINDOWS = values_of_every_size or ring_a_hundred_times or everyone_writes or others_as_tensors or of_a_pool
SANITIZED_COLLECTIVES = lists_and_in_place or nan_and_infinity or ranks_have_the_same_bits or rounded_once \
  or (every_reduction and two_shot and bfloat16) or (no_place_in_the_window and plain) or few_blocks_do_it \
  or protocols_take_turns or unequal_parts or (every_reduction and ll128 and bfloat16)
SANITIZED_PRODUCTS = a_mean or same_bits_every_time or (our_own_kernels and 264) or (RowScatter and 257 and 4x4) \
  or (RowGather and 257 and 4x4) or test_double or (no_rows and p2p) or (any_alignment and off-4) or (watched_graphs and sync) \
  or operands_at_any_offset or same_bits_everywhere or (test_values and GatherOfOne and bias and along_k and bfloat16)
GPU_TESTS ?= $(patsubst %,tests/python/gpu/test_%.py,windows small_collectives bulk_copies zero_copy rms_norm fused fused_all_reduce \
  fused_scaled fused_row_scales overlap ops low_latency own_gemm residual graph_timeouts) -k '$(SANITIZED_WINDOWS) or $(SANITIZED_COLLECTIVES) or $(SANITIZED_PRODUCTS)'
sanitize-gpu: export FORCE_CUDA = 1
sanitize-gpu: export CMAKE_ARGS += -DTORCH_OVERLAP_LINEINFO=ON
sanitize-gpu: build
	$(PY) -m torch.distributed.run --standalone --nproc_per_node 2 --no-python \
	  compute-sanitizer --tool $(TOOL) --target-processes application-only --report-api-errors no --launch-timeout 300 --error-exitcode 9 \
	  $(PY) -m pytest -x $(GPU_TESTS)

# Tests with models of transformers and PEFT, which `make test` skips where those are not installed.
test-frameworks: build $(if $(PYTHON),,.venv/.frameworks)
	HF_HUB_OFFLINE=1 $(PY) -m pytest $(patsubst %,tests/python/nn/test_%.py,pretrained pretrained_hybrids styles lora) \
	  tests/python/compat/test_megatron.py tests/python/compat/test_trainer_loop.py \
	  tests/python/examples/test_decode_llama.py \
	  -k 'transformers or pretrained or lora or megatron or trainer_loop' \
	  $(several_at_a_time) $(PYTEST_ARGS)

# The documentation site, build/site/index.html; a warning is an error.
site: build $(if $(PYTHON),,.venv/.docs)
	$(PY) -m sphinx -q -W --keep-going -b html docs build/site
	@echo 'the site is build/site/index.html'

# The code blocks of README.md and docs/, on two gloo ranks. Those that need transformers run where that is installed.
test-docs: build
	$(PY) -m pytest tests/docs $(several_at_a_time) $(PYTEST_ARGS)

# torch's own tests of c10d backends, on torch_overlap and on gloo; writes docs/reference/conformance.md. `make test` runs those that
# gloo passes. Then the tests with other frameworks; writes the table of docs/howto/frameworks.md.
conformance: build $(if $(PYTHON),,.venv/.slots)
	$(PY) tests/conformance/conformance.py --jobs $(TEST_JOBS)
	$(PY) tests/conformance/frameworks.py --jobs $(TEST_JOBS)

# The long forms of the random tests (marked stress; the planner's in C++): TEST_SEED repeats a run, in C++
# TORCH_OVERLAP_TEST_SEED; TORCH_OVERLAP_STRESS scales it. The tests have time limits of their own, which grow with it;
# pytest's is for those that do not.
stress: export TORCH_OVERLAP_STRESS ?= 20
stress: build
	$(CMAKE) --build $(CURRENT) --target torch_overlap_std_tests
	@if [ -x $(CURRENT)/tests/cpp/torch_overlap_std_tests ]; then $(CURRENT)/tests/cpp/torch_overlap_std_tests --gtest_brief=1; \
	else echo "stress: the planner's C++ tests are skipped: they were not built (googletest?)"; fi
	$(PY) -m pytest tests/python -m 'stress and not gpu' --timeout 7200 $(PYTEST_ARGS)

# ---- the text

LINT := $(if $(PYTHON),,.venv/.lint)
format: $(LINT)
	PYTHON=$(PY) scripts/format.sh

lint: $(LINT) check
	$(PY) scripts/check_docs.py
	PYTHON=$(PY) scripts/format.sh --check
	$(PY) -m ruff check .
	$(PY) -m mypy

# FILES: some .cpp files, or all of the build made last; those that differ from main, unless given.
lint-tidy: build $(LINT)
	$(PY) scripts/tidy.py $(CURRENT) $(FILES)

# ---- packages

# One for the Python of the environment, as it is built.
wheel: $(ENV)
	$(PY) -m pip wheel -q --no-build-isolation --no-deps -w dist .

# The wheels of a release, one for each of PYTHONS, with the CUDA parts (FORCE_CUDA=0: without), in dist/torch<version>.
# jax, for whose headers one library is built, needs an environment of Python 3.12 or newer.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
wheels: export FORCE_CUDA := $(or $(FORCE_CUDA),1)
wheels: $(if $(PYTHON),check-python,.venv/.wheels .venv/.jax)
	$(if $(PYTHON),,$(take_nvcc))
	PYTHONPATH= $(PY) scripts/make_wheels.py $(PYTHONS)

# The source distribution. CMake configures it, which names a file that it lacks.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
sdist: build
	$(PY) setup.py -q sdist
	rm -rf build/sdist && mkdir -p build/sdist && tar xzf dist/torch_overlap-$(VERSION).tar.gz -C build/sdist --strip-components 1
	@$(CMAKE) -S build/sdist -B build/sdist/build -G Ninja -DCMAKE_MAKE_PROGRAM='$(NINJA)' -DPython3_EXECUTABLE='$(shell command -v $(PY))' \
	  -DTORCH_OVERLAP_CUDA=OFF >build/sdist.log || { cat build/sdist.log; exit 1; }
	@echo 'sdist: dist/torch_overlap-$(VERSION).tar.gz configures'

# A wheel of what is built, or WHEEL, which is for this Python, in an environment of its own.
check-wheel: $(if $(WHEEL),,build)
	PYTHONPATH= $(PY) scripts/check_wheel.py $(WHEEL)

clean:
	rm -rf build dist *.egg-info torch_overlap/*.so torch_overlap/_build_info.py .venv/.installed*
