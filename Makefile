# Installs, tests and builds the project. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= cpu
TORCH := 2.13.0
TOOLS := $(VENV)-tools
STAMP := $(VENV)/.installed-$(EXTRA)
# --no-deps: the lists are complete. --no-compile: Python imports few of the 27,000 files. It compiles them then.
PIP := $(BIN)/pip install --quiet --no-deps --no-compile
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

MODEL_TESTS := tests/benchmarks $(addprefix tests/atropos_common/,broadcast models protocol) tests/atropos_envs \
  $(addprefix tests/atropos_tui/profile/,budget checks) tests/trainer_core tests/vllm_server

# The tests start thousands of processes. With this variable set, each would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo demo-gpu cuda-driver test test-waiting test-computing test-all test-verifiers environments test-cluster cluster-tools check language format requirements dist docs lint-image clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## set up .venv (EXTRA=gpu on CUDA machines)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# With dependencies, pip would install CUDA builds of torchvision, torchaudio and torchcodec from PyPI.
$(VENV)/.installed-cpu: $(VENV)/bin/python requirements/cpu.txt pyproject.toml
	$(PIP) "torch==$(TORCH)+cpu" 2>/dev/null \
	  || $(PIP) "torch==$(TORCH)" --index-url https://download.pytorch.org/whl/cpu
	$(PIP) --require-hashes --requirement requirements/cpu.txt
	$(PIP) --no-build-isolation --editable .
	@touch $@

# PyPI has the CUDA build of torch for which this vLLM was built. The download is about 5 GB.
$(VENV)/.installed-gpu: $(VENV)/bin/python requirements/gpu.txt pyproject.toml
	$(PIP) --require-hashes --requirement requirements/gpu.txt
	$(PIP) --no-build-isolation --editable .
	@touch $@

demo: install  ## run the four-process stack on the CPU and watch it learn
	$(BIN)/atropos-tui up profiles/demo.toml

demo-gpu: cuda-driver $(VENV)/.installed-gpu  ## train SmolLM2-135M on one CUDA GPU; needs only the driver and PyPI
	$(BIN)/atropos-tui up profiles/demo-gpu.toml

cuda-driver:
	@[ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || { echo "No NVIDIA driver found. In a container: start it with --gpus all. Without a GPU: make demo"; exit 1; }

# Two calls of pytest run at the same time (tests/README.md). Importing torch and vLLM is most of the cost of collecting
# tests, so tests that import them have their own processes. The tests of the first call mostly wait for processes that
# they start, and measure times. The tests of the second call compute at a lower priority, in the time that the first call
# leaves. Whole stacks run last, when the machine is otherwise idle. Each call prints its output at its end.
test: install  ## unit, supervisor, screen and end-to-end tests
	$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=target test-waiting test-computing MARKS='$(MARKS)'

test-waiting:
	ATROPOS_TESTS_WITHOUT=torch $(PYTEST) $(MARKS) --numprocesses 3 $(addprefix --ignore=,$(MODEL_TESTS) tests/e2e tests/gpu tests/cluster)

test-computing:
	nice -n 5 $(PYTEST) $(MARKS) --numprocesses 2 $(MODEL_TESTS) tests/e2e

# verifiers needs an older openai than the pinned one, so it has its own environment, which takes all else from .venv.
$(VENV)-verifiers/.installed: $(STAMP)
	$(BIN)/python -m venv $(VENV)-verifiers
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
	  > "$$($(VENV)-verifiers/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth"
	$(VENV)-verifiers/bin/python -m pip install --quiet --no-compile "verifiers>=0.4,<0.5"
	@touch $@

$(VENV)-verifiers/.installed-environments: requirements/environments.txt $(VENV)-verifiers/.installed
	$(VENV)-verifiers/bin/python -m pip install --quiet --no-compile --requirement $<
	@touch $@

environments: $(VENV)-verifiers/.installed-environments  ## train the environments of benchmarks/environments.toml, three steps each
	$(VENV)-verifiers/bin/python -m benchmarks.environments

test-verifiers: $(VENV)-verifiers/.installed  ## the tests that need the package verifiers
	$(VENV)-verifiers/bin/python -m pytest -n0 tests/atropos_envs/test_verifiers.py

test-all: MARKS := -m "not gpu and not cluster"
test-all: export ATROPOS_TESTS_THOROUGH := 1
test-all: test test-verifiers docs dist  ## also the tests marked slow, the documentation site, and the packages

test-cluster: install cluster-tools  ## the stack over SLURM, ssh and Ray: three nodes on this host
	$(PYTEST) -m cluster -n0 tests/cluster

# The tests start sshd and slurmd as their own children. RUNLEVEL=1 keeps Debian's packages from starting services.
cluster-tools: install
	@for each in slurmctld slurmd munged sshd; do PATH="$$PATH:/usr/sbin" command -v $$each >/dev/null || missing=1; done; \
	[ -z "$$missing" ] || { [ "$$(id -u)" = 0 ] && apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
	  apt-get install -qq -y --no-install-recommends slurm-wlm munge openssh-server openssh-client; } \
	  || { echo "slurm-wlm, munge and openssh-server are needed: apt-get install them, as root"; exit 1; }
	@$(BIN)/python -c "import ray" 2>/dev/null || $(BIN)/python -m pip install --quiet "ray>=2.54"

READABLE := tools tests benchmarks docs README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md \
  atropos_api atropos_common atropos_envs atropos_tui trainer_core vllm_server

language: install  ## refuse phrases that CONTRIBUTING.md forbids, and files and functions that are too long
	$(BIN)/python -m tools.readability --lint $(READABLE)

check: install language  ## lint, types, import contracts, language
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install  ## format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(TOOLS)/.installed: requirements/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --requirement $<
	@touch $@

# The first step writes pages and reference below build/pages, and checks files, descriptions and navigation. The second
# step checks pages and anchors (docs/internals/site.md).
docs: install $(TOOLS)/.installed  ## build the documentation site into site/; a broken link is an error
	$(BIN)/python -m tools.site build/pages
	$(TOOLS)/bin/zensical build --strict --clean

lint-image: $(TOOLS)/.installed  ## check the Dockerfile
	$(TOOLS)/bin/hadolint Dockerfile

# The empty environment gets the dependencies of the wheel's metadata from PyPI. The test reads a copied run with them.
dist: install $(TOOLS)/.installed  ## build wheel and source archive into dist/, check them, test the wheel in an empty environment
	rm -rf dist $(VENV)-empty
	$(BIN)/python -m hatchling build
	$(TOOLS)/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(VENV)-empty
	$(VENV)-empty/bin/pip install --quiet "$$(ls dist/*.whl)[report,mcp]"
	ATROPOS_EMPTY_PYTHON="$(CURDIR)/$(VENV)-empty/bin/python" $(PYTEST) -m slow -n0 tests/project/test_wheel.py

COMPILE := uv pip compile --universal --python-version 3.11 --no-annotate --no-header --generate-hashes
requirements:  ## resolve requirements/*.in into the pinned *.txt (needs uv)
	$(COMPILE) --overrides requirements/cpu.overrides \
	  $(foreach p,torch torchaudio torchvision torchcodec triton,--no-emit-package $(p)) \
	  requirements/cpu.in --output-file requirements/cpu.txt
	$(COMPILE) --overrides requirements/gpu.overrides requirements/gpu.in --output-file requirements/gpu.txt
	for kind in cpu gpu; do \
	  sed -i "1i # Resolved from $$kind.in by \`make requirements\`; installed with --no-deps." requirements/$$kind.txt; \
	done

clean:  ## remove caches and .venv; runs/ stays
	rm -rf $(VENV) $(TOOLS) $(VENV)-empty $(VENV)-verifiers dist build site .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
