# One command sets everything up: a virtual environment, its packages, the compiled extension.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Those that wheels are for, as in the workflows: an extension works with no other release.
TORCHES ?= 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
CXX ?= g++
# How many processes run the tests.
JOBS ?= auto
# The files whose tests run on the simulated device too, or on it alone.
ON_SEALED = $(shell grep -lE 'mark.sealed|BACKENDS|\(gpu[,)]' -r tests --include='test_*.py')
RUN := $(VENV)/bin/python
PYTEST = $(RUN) -m pytest -q --disable-warnings -n $(JOBS) --dist loadfile --no-loadscope-reorder
CHECKED = tests/base tests/scanner $(filter-out %_parity_models.py %_device.py %_differences.py \
  tests/detector/test_compile%, \
  $(wildcard tests/detector/test_*.py)) $(addprefix tests/guard/,record report) \
  $(wildcard tests/guard/test_guard*.py tests/guard/test_option*.py tests/guard/test_polic*.py) \
  $(patsubst %,tests/project/test_%.py,additions architecture causes constants layers pages workflows) \
  tests/tools/cli tests/tools/files/test_formats.py
# Tests start many processes: each would compile the package's sources anew, for 2 s.
unexport PYTHONDONTWRITEBYTECODE
CORE := $(wildcard csrc/scan/*.h csrc/scan/cpu/*)
CUDA := $(wildcard csrc/scan/cuda/*)
METAL := $(wildcard overflow_fast/scanner/metal/*.metal csrc/scan/mps/*)
TORCH_SIDE := $(wildcard csrc/scan/*.cpp csrc/torch_internals/* csrc/record/* csrc/python/*)

.PHONY: build demo docs check check-tests test test-rest test-all test-cases test-sealed texts release-check wheels bench lint sanitize cuda-check cuda-mutants gpu-check mps-check engines-check clean

# Of what is installed, Python compiles what is imported: all of it takes 90 s.
$(VENV)/ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "overflow_fast: $(PYTHON) was not found; install Python 3.10 or newer, or set PYTHON."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "overflow_fast: Python 3.10 or newer is needed; set PYTHON to one."; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || { echo "overflow_fast: no C++ compiler: $(CXX) was not found; install g++ 10 or newer (Debian: apt install g++) or set CXX."; exit 1; }
	@echo "overflow_fast: setting up $(VENV) (a few minutes, once)"
	@$(PYTHON) -m venv $(VENV) || { echo "overflow_fast: no virtual environment could be made (Debian: apt install python3-venv)."; exit 1; }
	$(RUN) -m pip install -q --upgrade 'pip>=25.1'
	$(RUN) -m pip install -q --no-compile "$(TORCH)" setuptools wheel
	$(RUN) -m pip install -q --no-compile --group dev
	@touch $@

$(VENV)/built: $(VENV)/ready setup.py $(CORE) $(TORCH_SIDE) $(CUDA) $(METAL)
	@echo "overflow_fast: compiling the extension (about a minute)"
	PYTHONWARNINGS=ignore $(RUN) -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@

build: $(VENV)/built

demo: build
	@mkdir -p build
	$(RUN) -m overflow_fast demo --page build/demo.html

# The site of the documentation: open build/site/index.html. Tables of pages that follow
# from the code are written anew before.
docs: build
	$(RUN) docs/tools/tables.py
	$(RUN) docs/tools/site_pages.py
	$(RUN) -m zensical build --clean --strict

# One case of each function, and all cases of tables that are contracts.
test: build
	$(PYTEST) --when day

# All others, and those of the simulated device.
test-rest: build
	$(PYTEST) --when night
	$(PYTEST) --sealed $(ON_SEALED)

# Both. In one run, the tests are collected and what they need is imported once.
test-all: test-cases test-sealed

test-cases: build
	$(PYTEST)

test-sealed: build
	$(PYTEST) --sealed $(ON_SEALED)

# Lint, types, and of `make test` the inner layers and what tells what a change has left
# out (pages, tables, formats, the command line): under a minute.
check: build
	$(MAKE) --no-print-directory -j2 --output-sync=target lint check-tests

check-tests: build
	$(PYTEST) --when day $(CHECKED)

# Keeps the texts of reports, pages and commands as they are today, and shows what has
# changed; ARGS="tests/tools -k help", for example, renews those of these tests alone.
texts: build
	$(if $(ARGS),,$(RUN) tests/support/golden.py)
	$(PYTEST) --renew $(or $(ARGS),$(shell grep -l as_kept -r tests --include='test_*.py'))

# Packs the sources, compiles them in an empty folder and runs tests with what was installed.
release-check: build
	$(RUN) -m pytest -q tests/project/test_release.py --release

# For each release of torch a wheel of what is committed, without CUDA; all of them in one,
# in dist/; and tests with each, in environments of their own. PIP_EXTRA_INDEX_URL can
# name where torch's builds for CPUs are; TORCHES="2.13.0", for example, makes it for one.
WHEELS = build/wheels
COMMIT := $(shell git rev-parse HEAD 2>/dev/null)
BUILT = $(TORCHES:%=$(WHEELS)/torch-%/built-$(COMMIT))
.NOTPARALLEL: wheels
wheels: $(BUILT)
	rm -rf $(WHEELS)/merged
	$(dir $(firstword $(BUILT)))env/bin/python tools/merge_wheels.py --into $(WHEELS)/merged \
	  $(foreach each,$(BUILT),$(wildcard $(dir $(each))*.whl))
	@mkdir -p dist && cp $(WHEELS)/merged/*.whl dist/
	$(PYTHON) tools/try_wheel.py $(WHEELS)/merged/*.whl \
	  $(foreach each,$(BUILT),$(dir $(each))env/bin/python)

# Of another commit it is another file: what is archived decides, not what lies here.
$(WHEELS)/torch-%/built-$(COMMIT):
	rm -rf $(@D) && mkdir -p $(@D)/source
	$(PYTHON) -m venv $(@D)/env
	$(@D)/env/bin/python -m pip install -q "torch==$*" setuptools wheel ninja pybind11 \
	  msgspec numpy pytest hypothesis allpairspy
	git archive $(COMMIT) | tar x -C $(@D)/source
	OVERFLOW_FAST_CUDA=0 $(@D)/env/bin/python -m pip wheel -q --no-build-isolation \
	  --no-deps -w $(@D) $(@D)/source
	@touch $@

bench: build
	$(RUN) benchmarks/run.py

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*' 'tests/cpp/*' ':!*.py')

# The torch-free core under AddressSanitizer with UndefinedBehaviorSanitizer, and ThreadSanitizer,
# for which one instruction set will do: threads share the same in all; the kernels of CUDA and MPS,
# emulated on the CPU, under the former.
SANITIZED = $(CXX) -std=c++20 -O1 -g -Wno-psabi -fno-sanitize-recover=all -pthread
comma := ,
build/scan_core_%: tests/cpp/scan_core_test.cpp tests/cpp/reference.h $(CORE)
	@mkdir -p build
	$(SANITIZED) -fsanitize=$(subst +,$(comma),$*) -o $@ tests/cpp/scan_core_test.cpp \
	  $(wildcard csrc/scan/cpu/*.cpp)
build/cuda_kernel_%: $(wildcard tests/cpp/*) $(wildcard tests/cpp/cuda_emulation/*) $(CORE) $(CUDA)
	@mkdir -p build
	$(SANITIZED) -fsanitize=$(subst +,$(comma),$*) -fno-strict-aliasing -Wno-unknown-pragmas \
	  -Itests/cpp/cuda_emulation -o $@ tests/cpp/cuda_kernel_test.cpp \
	  -x c++ $(wildcard csrc/scan/cuda/*.cu)

# As ROCm would compile them: wavefronts of 64 lanes, AMD's names.
build/wide_kernel_%: $(wildcard tests/cpp/*) $(wildcard tests/cpp/cuda_emulation/*) $(CORE) $(CUDA)
	@mkdir -p build
	$(SANITIZED) -fsanitize=$(subst +,$(comma),$*) -fno-strict-aliasing -Wno-unknown-pragmas \
	  -D__HIP_PLATFORM_AMD__ -Itests/cpp/cuda_emulation -o $@ tests/cpp/cuda_kernel_test.cpp \
	  -x c++ $(wildcard csrc/scan/cuda/*.cu)

build/metal_kernel_%: $(wildcard tests/cpp/*) $(wildcard tests/cpp/*/*) $(CORE) $(METAL)
	@mkdir -p build
	$(SANITIZED) -fsanitize=$(subst +,$(comma),$*) -fno-strict-aliasing -Wno-attributes \
	  -Itests/cpp/metal_emulation -o $@ tests/cpp/metal_kernel_test.cpp

sanitize: build/scan_core_address+undefined build/scan_core_thread \
    build/cuda_kernel_address+undefined build/metal_kernel_address+undefined \
    build/wide_kernel_undefined
	for isa in baseline avx2 avx512; do \
	  OVERFLOW_FAST_ISA=$$isa build/scan_core_address+undefined || exit 1; done
	build/scan_core_thread
	build/cuda_kernel_address+undefined
	build/wide_kernel_undefined few
	build/metal_kernel_address+undefined

# Compiles the CUDA sources for every architecture, where nvcc is found, and runs their PTX on
# the CPU, each a share of the test, or with ARGS=--whole all of it; compiles the kernels for AMD's
# GPUs, where clang is. Needs no GPU.
cuda-check: $(VENV)/ready
	$(RUN) tests/cpp/cuda_check.py $(ARGS)
	$(RUN) tests/cpp/hip_check.py

# Kernels that are broken on purpose: their PTX fails on the CPU. Needs nvcc, and two minutes.
cuda-mutants: $(VENV)/ready
	$(RUN) tests/cpp/ptx_mutants.py

# Tests and measures on a machine with a GPU, built for that one, with .venv or else the Python
# that has torch there;
# ARGS="--minutes 20 --resume", for example: `benchmarks/gpu_check.py --help`.
gpu-check:
	TORCH_CUDA_ARCH_LIST=$${TORCH_CUDA_ARCH_LIST:-native} \
	  $(if $(wildcard $(RUN)),$(RUN),$(PYTHON)) benchmarks/gpu_check.py $(ARGS)

# Builds, tests and measures on a Mac with MPS; writes build/mps-check.json, a file to send.
mps-check: build
	$(RUN) benchmarks/mps_check.py

# The guard under training engines, where these are installed, on CPUs with gloo: pip install
# deepspeed==0.19.8 megatron-core==0.16.1 trl==1.16.0 torchtitan==0.3.0 triton (DS_BUILD_OPS=0)
engines-check: build
	$(RUN) benchmarks/engines_check.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info overflow_fast/binaries/torch*
