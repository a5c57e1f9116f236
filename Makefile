# make alone lists the targets.
# Everything runs in a virtual environment of this folder, made on first use; an active one is left alone.
# Another interpreter: make test PYTHON=python3.12.  More arguments for pytest: make test ARGS="-k digits -x".
# The tests that need an optional package, and no others: make test EXTRA=jax|pytensor|transformers|dpnp|ray.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
EXTRA ?=
# One test process for each core, up to eight.  make test JOBS=0 runs them all in one, where a debugger can stop.
JOBS ?= logical

# What a shell may bring along and would reach into the environment from outside.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
# Without bytecode each of the thousands of workers that the tests start would compile synk again.
unexport PYTHONDONTWRITEBYTECODE
# PyTensor computes with NumPy then, and neither compiles nor makes a folder for it in the home.
export PYTENSOR_FLAGS := cxx=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
MAKEFLAGS += --no-print-directory

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
PY := $(VENV)/bin/python
# The stamps carry the Python version: another PYTHON makes the environment anew, a repeat installs nothing.
BASE := $(VENV)/.base-$(VERSION)
DEMOS := $(VENV)/.demos-$(VERSION)
TEST := $(VENV)/.test-$(VERSION)
DEV := $(VENV)/.dev-$(VERSION)
DOCS := $(VENV)/.docs-$(VERSION)
CHECKS := $(VENV)/.checks-$(VERSION)
BENCH := $(VENV)/.bench-$(VERSION)
GPU := $(VENV)/.gpu-$(VERSION)
# Environments of their own, made anew each time: what a user has who installs synk today, on the newest Python at hand and the oldest.
PYENV := $(wildcard $(HOME)/.pyenv/versions)
NEWEST_PYTHON ?= $(lastword $(PYTHON) $(sort $(wildcard $(PYENV)/3.1*/bin/python)))
OLDEST_PYTHON ?= $(firstword $(wildcard $(PYENV)/3.10.*/bin/python) python3.10)
UNPINNED_PACKAGES := -e '.[cluster]' hypothesis ipykernel joblib psutil pytest pytest-timeout pytest-xdist
UNPINNED_TESTS := tests/first_hour/test_first_steps.py tests/api/test_tracebacks.py \
  tests/code/test_features.py tests/code/test_captured.py tests/code/test_loading.py tests/extensions/test_joblib.py
# The extra that matches the driver, for the gpu targets.
CUDA ?= cuda13
# In variables, because a comma would end an argument of call.
DEMO_EXTRAS := demos,plot
CHECK_EXTRAS := dev,test-jax,test-pytensor
GPU_EXTRAS = $(CUDA),test
EXTRAS_jax := test-jax
EXTRAS_pytensor := test-pytensor
EXTRAS_transformers := test-transformers
EXTRAS_dpnp := test,dpnp
EXTRAS_ray := test,ray

.PHONY: help demo test install soak mutants bench gpu-test gpu-bench storm faults checks lint quick newest oldest doctest docs smoke clean

help:
	@echo "make demo      a bootstrap and a classifier of digits, serial and on 1, 2, ... workers, with pictures"
	@echo "make test      the test suite; a part of it: make test ARGS=\"-k digits -x\""
	@echo "               EXTRA=jax|pytensor|transformers|dpnp|ray installs an optional package and runs its tests"
	@echo "make quick     lint, types, and the tests of what you have changed, in about a minute"
	@echo "make lint      ruff and mypy"
	@echo "make docs      the pages, as HTML"
	@echo "make bench     measures against peers, in an hour; ARGS=--quick in minutes"
	@echo "make gpu-test  the tests that need a GPU (CUDA=cuda12 or cuda13)"
	@echo "make clean     removes what the other targets have made"
	@echo
	@echo "Each target installs what it needs into $(VENV) when it is first used. CONTRIBUTING.md has those for maintainers."

demo: $(DEMOS)
	@$(PY) demos/00_bootstrap.py --picture bootstrap.png
	@echo
	@$(PY) demos/10_digits_softmax.py --picture digits.png

# One thread each: those of a worker alone would take the cores of the other process's workers, and wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest
SUITE := $(PYTEST) -n $(JOBS) --maxprocesses 8 --dist worksteal
ALONE := $(PY) tests/support/alone.py

# What failed runs once more, alone; what passes then is listed as FLAKY (tests/conftest.py), and does not fail the command.
ifeq ($(EXTRA),)
test: CACHE := -o cache_dir=build/test
test: $(TEST)
	@$(SUITE) $(CACHE) --cache-clear $(ARGS) || { [ $$? = 1 ] && echo "== what failed, once more, alone" && \
	  $(PYTEST) $(CACHE) --last-failed --last-failed-no-failures=none --maxfail=10 -rfEp $(ARGS); }
else
test: install
	@$(TEST_$(EXTRA))
endif

OPTIONAL := jax pytensor transformers dpnp ray
$(if $(filter-out $(OPTIONAL),$(EXTRA)),$(error cannot use EXTRA=$(EXTRA): expected one of $(OPTIONAL)))

# From then on `make test` also runs the tests that need the package, if it is jax, pytensor or transformers.
install: $(if $(EXTRA),$(VENV)/.$(EXTRA)-$(VERSION),$(TEST))

TEST_jax = $(PYTEST) $$(grep -rl '"jax"' tests --include=test_*.py) $(ARGS)
TEST_pytensor = $(PYTEST) $$(grep -rl '"pytensor"' tests --include=test_*.py) $(ARGS)
TEST_transformers = $(PYTEST) $$(grep -rl '"transformers"' tests --include=test_*.py) $(ARGS)
TEST_dpnp = SYNK_TEST_BACKENDS=dpnp $(PYTEST) -m dpnp tests/backends $(ARGS)
# In a network of its own: Ray listens on all interfaces. Whether Ray starts at all is tried first.
TEST_ray = if ! $(ALONE) true; then \
    echo "== make test EXTRA=ray: NOT RUN. This machine gives no network namespace, in which Ray could listen."; \
  elif ! $(ALONE) $(PY) -c "import ray; ray.init(num_cpus=1, include_dashboard=False)" >/dev/null 2>&1; then \
    echo "== make test EXTRA=ray: NOT RUN. Ray itself does not start in a network namespace of this machine."; \
  else OMP_NUM_THREADS=1 $(ALONE) $(PY) -m pytest -m ray tests/cluster $(ARGS); fi

# The whole suite three times beside four busy processes. A test that fails in any of the runs races, or has found a bug.
soak: $(TEST)
	@for each in 1 2 3 4; do timeout 2h sh -c "while :; do :; done" & busy="$$busy $$!"; done; trap "kill $$busy" EXIT INT TERM; \
	for run in 1 2 3; do echo "== run $$run of 3"; $(SUITE) $(ARGS) || failed=1; done; exit $${failed:-0}

mutants: $(TEST)
	@$(PY) tests/support/mutants.py $(ARGS)

storm: $(TEST)
	@$(SUITE) -m storm --timeout=3000 -o faulthandler_timeout=1800 $(ARGS)

faults: $(TEST)
	@$(PY) -m benchmarks.faults $(ARGS)

bench: $(BENCH)
	@$(PY) -m benchmarks $(ARGS)

gpu-test: $(GPU)
	@$(PY) -m pytest -m "gpu or multi_gpu" $(ARGS)

gpu-bench: $(GPU)
	@$(PY) -m benchmarks.gpu $(ARGS)

# All that the checks need, in one run of pip: each run would resolve and look through all packages again.
checks: $(CHECKS)
	@:

lint: $(DEV)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

# What a change since main is likely to break: the tests that were changed, or that name a changed file of the package.
quick: lint $(TEST)
	@changed=$$(git diff --name-only $$(git merge-base main HEAD); git ls-files --others --exclude-standard); \
	tests=$$(echo "$$changed" | grep "^tests/.*/test_.*py$$"; echo "$$changed" | tr / . | sed -n "s/^\(synk[.].*\)[.]py$$/\1/p" \
	  | grep -rlFw -f - tests --include="test_*.py" | head -20); \
	$(SUITE) -q tests/house/test_layout.py tests/house/test_messages.py $$tests $(ARGS)

# Without constraints; and without torch and scikit-learn, which are large.
newest:
	$(call unpinned,$@,$(NEWEST_PYTHON))

oldest:
	@command -v $(OLDEST_PYTHON) >/dev/null || echo "== make oldest: NOT RUN. There is no Python 3.10 on this machine."
	$(if $(shell command -v $(OLDEST_PYTHON)),$(call unpinned,$@,$(OLDEST_PYTHON)))

define unpinned
@$(2) -m venv --clear build/$(1)
@build/$(1)/bin/python -m pip install -qq --no-compile $(UNPINNED_PACKAGES)
@build/$(1)/bin/python -c 'import importlib.metadata as m, platform; names = "numpy cloudpickle optree pyzmq joblib ipykernel pytest"; \
  print("== make $(1): Python", platform.python_version(), *(f"{name} {m.version(name)}" for name in names.split()))'
@OMP_NUM_THREADS=1 build/$(1)/bin/python -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal -k "not loky" $(UNPINNED_TESTS) $(ARGS)
endef

doctest: $(TEST)
	@$(PY) -m pytest --doctest-modules $(if $(wildcard $(VENV)/.pytensor-$(VERSION)),,--ignore=synk/extensions/synkhronos.py) $(if $(wildcard $(VENV)/.ray-$(VERSION)),,--ignore-glob=synk/cluster/ray*.py) synk $(ARGS)

docs: $(DOCS)
	@$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# The wheel, alone in an environment that has seen nothing else.
smoke: $(DEV)
	@rm -rf build/smoke dist
	@mkdir -p build && $(PY) -m build --outdir dist >build/log 2>&1 || { cat build/log; exit 1; }
	@$(PYTHON) -m venv build/smoke
	@build/smoke/bin/python -m pip install -qq dist/*.whl
	@cp .ci/smoke.py build/smoke/smoke.py
	@cd build/smoke && bin/python -X dev -W error smoke.py && bin/python -m synk

clean:
	rm -rf $(VENV) build dist docs/_build .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BASE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "synk needs Python 3.10 or later: found $(PYTHON) $(VERSION). Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

# What the package is built with is needed in any case: one short look-up for it, before pip tries each package for minutes.
# pip would compile on one core. Some packages carry files for other versions of Python, which do not compile.
define install
@echo "installing into $(VENV) ..."
@$(PY) -m pip install -qq --retries 0 --timeout 15 --dry-run --no-deps --ignore-installed hatchling 2>/dev/null || \
  { echo "cannot install: no package index answers. Connect to a network, or name an index that can be reached" \
    "(PIP_INDEX_URL, or PIP_FIND_LINKS with PIP_NO_INDEX=1)." >&2; exit 1; }
@$(PY) -m pip install --no-compile $(1)
@$(PY) -m compileall -qq -j 0 $(VENV)/lib || true
@touch $@
endef

$(DEMOS): $(BASE) pyproject.toml
	@echo "Two demos: a bootstrap, and a classifier of handwritten digits, as serial programs and on 1, 2, ... workers."
	@echo "It needs NumPy, SciPy, scikit-learn and matplotlib, about 150 MB to download."
	$(call install,-e '.[$(DEMO_EXTRAS)]')

$(TEST): $(BASE) pyproject.toml tests/constraints.txt
	$(call install,-c tests/constraints.txt -e '.[test]')

$(OPTIONAL:%=$(VENV)/.%-$(VERSION)): $(VENV)/.%-$(VERSION): $(TEST)
	$(call install,-c tests/constraints.txt -e '.[$(EXTRAS_$*)]')

$(DOCS): $(BASE) pyproject.toml
	$(call install,-e '.[docs]')

$(DEV): $(TEST)
	$(call install,-c tests/constraints.txt -e '.[dev]')

$(CHECKS): $(BASE) pyproject.toml tests/constraints.txt
	$(call install,-c tests/constraints.txt -e '.[$(CHECK_EXTRAS)]')
	@touch $(TEST) $(VENV)/.jax-$(VERSION) $(VENV)/.pytensor-$(VERSION) $(DEV) $(DOCS)

# A peer that cannot be installed here is listed as missing in the tables; the others still count.
$(BENCH): $(TEST) benchmarks/requirements.txt
	@echo "installing peers into $(VENV) ..."
	@grep -v '^#' benchmarks/requirements.txt | xargs -n 1 $(PY) -m pip install -qq || true
	@touch $@

$(GPU): $(TEST)
	$(call install,-e '.[$(GPU_EXTRAS)]')
