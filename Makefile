# Every target makes its own environment, so `make demo` and `make test` each work on a fresh checkout. The stamp
# .venv/.ready says that the environment is what constraints.txt and the pyproject files ask for.

PYTHON  ?= python3
TORCH   ?=
VENV    ?= .venv$(addprefix -torch-,$(TORCH))
DIST    ?= dist
WORKERS ?= 2
ARGS    ?=

BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PIP     := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq --no-compile --progress-bar off --constraint $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

# two cores: one thread for each of the test workers
test nightly conformance-full: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test nightly conformance-full lint types docs bench gpu-check gpu-check-bundle dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s  %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  make demo ARGS="--query ..." and make test ARGS="-k ..." pass arguments on;'
	@echo '  PYTHON=python3.12 picks the Python that the environment is made from, and TORCH=2.9.0 another PyTorch.'

setup: $(READY) ## make the environment in .venv; every other target does it by itself

demo: $(READY) ## semantic search with a real model that runs through kagent
	@$(BIN)/kagent demo $(ARGS)

test: $(READY) ## run all tests
	@$(install_opencl)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --max-worker-restart 0 $(ARGS)

nightly: $(READY) ## compare 2000 random programs with eager PyTorch, other ones each time; run the longest tests
	@$(install_opencl)
	@TEST_SEED=$${TEST_SEED:-$$(date +%s)} $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --timeout 3600 \
		-m nightly $(ARGS)
	@RANDOM_GRAPHS=$(or $(GRAPHS),2000) $(BIN)/python -m pytest -n $(WORKERS) --timeout 14400 \
		tests/pipeline/test_random_graphs.py $(ARGS)

lint: $(READY) ## check style, format and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

conformance-full: $(READY) ## run the whole conformance kit on our own devices, for the docs to publish (hours)
	@$(install_opencl)
	@for device in $(or $(DEVICES),cpu fake opencl cuda); do \
		emulate=; [ $$device != cuda ] || emulate=KAGENT_EMULATE=cuda; \
		env $$emulate $(BIN)/kagent conformance $$device --full --json docs/conformance/$$device.json $(ARGS) || failed=1; \
	done; exit $${failed:-0}

types: $(READY) ## check types
	@$(BIN)/mypy $(ARGS)

docs: $(READY) ## build the docs into docs/_build/html
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo "docs: docs/_build/html/index.html"

bench: $(READY) ## measure kagent's own overhead, its fused kernels, and whole models (an hour)
	@$(BIN)/kagent bench overhead
	@$(BIN)/kagent bench fused
	@$(BIN)/kagent bench models --where $(ARGS)

# The machine has its own PyTorch with CUDA, which stays as it is: what kagent needs besides lies next to the checkout.
GPU_PYTHON ?= python3
GPU_BUNDLE ?= build/gpu-check
GPU_TARGET ?= 3.12
GPU_NEEDS  := pydantic pydantic_core pydantic-settings annotated-types typing-inspection typing_extensions \
	python-dotenv platformdirs importlib_metadata lazy-importer zipp pluggy
GPU_PATH   := plugins/kagent-cuda/src:plugins/kagent-cpu/src:.:$(GPU_BUNDLE)

gpu-check: ## check kagent on an NVIDIA GPU and measure it there, with the PyTorch of GPU_PYTHON (six minutes)
	@PYTHONPATH="$(GPU_PATH)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m kagent_cuda.check $(ARGS)

gpu-check-bundle: $(READY) ## gather what gpu-check needs on a machine without a network: GPU_TARGET is its Python
	@rm -rf $(GPU_BUNDLE)
	@$(PIP) install -qq --no-compile --no-deps --target $(GPU_BUNDLE) --constraint constraints.txt --only-binary=:all: \
		--implementation cp --python-version $(GPU_TARGET) --platform manylinux_2_17_x86_64 $(GPU_NEEDS)
	@$(PIP) install -qq --no-compile --no-deps --no-build-isolation --target $(GPU_BUNDLE) \
		. ./plugins/kagent-cpu ./plugins/kagent-cuda
	@du -sh $(GPU_BUNDLE)

dist: $(READY) ## build the wheels of all distributions into dist/
	@$(PIP) wheel -qq --no-deps --no-build-isolation --wheel-dir $(DIST) . $(addprefix ./,$(PLUGINS))
	@ls $(DIST)/kagent_*.whl

clean: ## remove the environment and everything that was built
	@rm -rf $(VENV) dist build docs/_build htmlcov .coverage .coverage.* \
		.benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find kagent_core plugins tests docs -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# hatchling goes first: it builds the editable installs, so that no build fetches an unpinned one; another PyTorch than the
# pinned one may bring libraries of NVIDIA's, of versions of its own
$(READY): constraints.txt pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
	@$(check_python)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "setup: making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV); }
	@echo "setup: installing into $(VENV), pinned by constraints.txt$(if $(TORCH), but with PyTorch $(TORCH)) (a few minutes the first time)"
	@[ ! "$(TORCH)" ] || sed 's/^torch==.*/torch==$(TORCH)/; /^nvidia-/d' constraints.txt >$(VENV)/constraints.txt
	@$(INSTALL) hatchling editables
	@$(INSTALL) --no-build-isolation --editable '.[demo,dev]' $(foreach plugin,$(PLUGINS),--editable ./$(plugin))
	@command -v gcc >/dev/null || command -v clang >/dev/null || { \
		echo "setup: there is no C compiler: installing one into $(VENV)"; \
		$(INSTALL) --no-build-isolation --editable './plugins/kagent-cpu[compiler]'; }
	@touch $@
	@echo "setup: done"

# For the tests of kagent-opencl: PoCL runs OpenCL on the CPU (that of PyPI knows too few processors), CLBlast is a
# library for it, and Oclgrind interprets kernels.
OPENCL_PACKAGES := pocl-opencl-icd libclblast1 oclgrind

define install_opencl
{ ls /etc/OpenCL/vendors/*.icd && ldconfig -p | grep libclblast && command -v oclgrind; } >/dev/null 2>&1 || { \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "test: installing an OpenCL driver and tools for the CPU: $(OPENCL_PACKAGES)"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(OPENCL_PACKAGES); } >/dev/null || true; \
	else \
		echo "test: for the tests of kagent-opencl: sudo apt-get install $(OPENCL_PACKAGES)"; \
	fi; }
endef

# Debian and Ubuntu keep ensurepip, which venv needs, in a package of its own
define check_python
command -v $(PYTHON) >/dev/null || { \
	echo "setup: there is no '$(PYTHON)'; install Python 3.11 or later (Debian: apt-get install python3 python3-venv)," \
		"or say which one: make PYTHON=/path/to/python3" >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "setup: $(PYTHON) is $$($(PYTHON) --version); kagent needs Python 3.11 or later:" \
		"make PYTHON=/path/to/python3" >&2; exit 1; }; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "setup: installing $$package, which Python needs to make an environment"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$package >/dev/null; \
	else \
		echo "setup: $(PYTHON) cannot make a virtual environment; run: sudo apt-get install $$package" >&2; exit 1; \
	fi; }
endef
