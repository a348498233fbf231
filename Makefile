# Every target works in a fresh clone: it makes .venv if there is none, installs what it needs
# through constraints.txt (again only when pyproject.toml or constraints.txt changed), and runs.
#
#   make test                      lint, types, and the tests that a push runs (tests/tiers.py)
#   make quick                     the tests that the changes since HEAD touch (tests/touched.py)
#   make nightly                   lint, types, and all tests; writes what tests took and run
#   make mutants ARGS="--count 40" what the tests find of errors that are put into fzero/
#   make train ARGS="--steps 50"   the demo job of examples/train, in one process
#   make train RANKS=2 ARGS="--stage 3"   the same under torchrun
#   make train RANKS=4 RESTARTS=3 ARGS="--mirror 10"   a rank that dies takes its machine with it:
#                                  goes on with the others from memory, and then with all again
#   make lint | notebooks | bench
#   make docs                      the site, into docs/_build/html; warnings are errors
#   make test-gpu                  tests/gpu; skipped where there is no GPU
#   make test-torch-2.11 | test-torch-newest    the tests on the oldest and the newest torch, each
#                                  in an environment of its own (.venv-2.11, .venv-newest)
#   make test-floor                a few of them, marked `floor`, on the oldest torch; CI runs it
#
# PYTHON=python3.12 chooses the interpreter of a new .venv, PIP_ARGS goes to pip, ARGS to the
# program that the target runs.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
RANKS ?=
RESTARTS ?=
ARGS ?=

BIN := $(VENV)/bin

# What each kind of target installs; see the stamp rule below.
EXTRAS_train := train
EXTRAS_test := dev,docs,notebook,train,examples
EXTRAS_bench := bench,plots
EXTRAS_docs := docs,plots
EXTRAS_nightly := $(EXTRAS_test)

# One thread a process: the tests run several at once.
ONE_THREAD := OMP_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest
NIGHTLY := FZERO_HYPOTHESIS_PROFILE=nightly $(PYTEST) -n 2 --dist loadgroup \
	-p tests.costs --costs .nightly.jsonl

# The torch of `make test-torch-<name>`, and the versions of Python that may run it unless PYTHON is
# given, the first that is found: 3.12 is that of the GPU machines at hand.
TORCH_2.11 := torch==2.11.*
PYTHONS_2.11 := 3.12 3.11 3.13 3.14
TORCH_newest := torch
PYTHONS_newest := 3.13 3.12 3.11 3.14

.PHONY: test pushed quick mutants test-gpu test-torch-2.11 test-torch-newest test-with-torch test-floor
.PHONY: lint nightly notebooks docs train bench clean

test: $(VENV)/.installed-test
	$(MAKE) --jobs=2 lint pushed

# Beside lint: the type checker takes one of two cores for some minutes.
pushed: $(VENV)/.installed-test
	$(PYTEST) -n 2 --dist loadgroup $(ARGS)

quick: $(VENV)/.installed-test
	$(ONE_THREAD) $(BIN)/python -m tests.touched $(ARGS)

mutants: $(VENV)/.installed-test
	$(ONE_THREAD) $(BIN)/python -m tests.mutants $(ARGS)

test-gpu: $(VENV)/.installed-test
	$(PYTEST) tests/gpu $(ARGS)

test-torch-2.11 test-torch-newest: test-torch-%:
	@python='$(if $(filter file,$(origin PYTHON)),,$(PYTHON))'; \
	python=$${python:-$$(.ci/find-python $(PYTHONS_$*))} || { \
		echo "Fix: name one of them, e.g. make $@ PYTHON=/path/to/python$(firstword $(PYTHONS_$*))"; \
		exit 1; }; \
	$(MAKE) test-with-torch VENV=.venv-$* TORCH='$(TORCH_$*)' PYTHON="$$python" MAKECMDGOALS='$@'

test-floor:
	$(MAKE) test-torch-2.11 ARGS='-m floor tests'

# Asks pip each time, for what is newest changes. All but torch is as in constraints.txt.
test-with-torch: | $(BIN)/pip
	grep -v '^torch==' constraints.txt >$(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --upgrade $(PIP_ARGS) \
		-c $(VENV)/constraints.txt -e ".[$(EXTRAS_test)]" '$(TORCH)'
	$(PYTEST) -n 2 --dist loadgroup $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# First what a push runs, and which functions each test runs; then what waits for the night.
nightly: lint $(VENV)/.installed-nightly
	rm -f .nightly.jsonl .nightly.failed
	status=0; \
	$(NIGHTLY) -p tests.touched --map tests/map.json $(ARGS) || status=$$?; \
	$(NIGHTLY) -m slow --timeout 1200 $(ARGS) || status=$$?; \
	$(BIN)/python -m tests.costs .nightly.jsonl --keep; \
	$(BIN)/python -m tests.costs .nightly.jsonl; \
	exit $$status

notebooks: $(VENV)/.installed-test
	$(ONE_THREAD) $(BIN)/jupyter-execute $(if $(ARGS),$(ARGS),notebooks/*.ipynb)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -E -b html docs docs/_build/html $(ARGS)
	@echo "The site is in docs/_build/html: open docs/_build/html/index.html."

train: $(VENV)/.installed-train
	$(BIN)/$(if $(RESTARTS),python examples/train/machines.py --ranks $(or $(RANKS),1) --restarts $(RESTARTS) --,$(if $(RANKS),torchrun --standalone --nproc-per-node $(RANKS),python) examples/train) $(ARGS)

bench: $(VENV)/.installed-bench
	DS_ACCELERATOR=cpu $(BIN)/python benchmarks/bench_step.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-2.11 .venv-newest .pytest_cache .ruff_cache .hypothesis
	rm -rf docs/_build docs/notebooks

# bin/pip is the last thing that `python -m venv` writes: where it is, the environment is whole.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "fzero needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)."; \
		echo "Fix: name another interpreter, e.g. make $(MAKECMDGOALS) PYTHON=python3.12"; \
		exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "'$(PYTHON) -m venv $(VENV)' failed."; \
		echo "Usual cause: Debian and Ubuntu ship Python without venv."; \
		echo "Fix: apt-get install python3-venv, then run make again."; \
		exit 1; }

# DS_BUILD_OPS=0: DeepSpeed's setup must not compile its CUDA operators (bench only).
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/pip
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet \
		$(PIP_ARGS) -c constraints.txt -e ".[$(EXTRAS_$*)]"
	@touch $@
