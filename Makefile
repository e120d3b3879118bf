# Each target sets up what it needs, so any one of them is enough in a fresh clone. `make` alone lists them.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.stamps
PIP   := $(BIN)/python -m pip

HOST  ?= 127.0.0.1
PORT  ?= 30000
# A checkpoint directory; when empty, the one that comes with the package.
MODEL ?=
# More arguments for the server or for pytest, as in `make serve ARGS=--enable-metrics`.
ARGS  ?=

CPP_SOURCES    := $(wildcard sgl-kernel-ext/csrc/*/*.cpp sgl-kernel-ext/csrc/*/*.h)
KERNEL_SOURCES := $(CPP_SOURCES) $(wildcard sgl-kernel-ext/python/sgl_kernel_ext/*) \
                  sgl-kernel-ext/CMakeLists.txt sgl-kernel-ext/pyproject.toml $(wildcard sgl-kernel-ext/metadata/*.py)
PYTHON_SOURCES := python sgl-kernel-ext/python sgl-kernel-ext/metadata test benchmark training docs tools
# What codespell reads; settings and words that it must accept are in pyproject.toml.
PROSE          := *.md docs python sgl-kernel-ext test benchmark training tools monitoring .github Makefile

say = @echo "==> $(1)"

.PHONY: help
help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

# -- environment ------------------------------------------------------------------------------------------------------
# A stamp is written only when its step has ended well, so an interrupted setup goes on where it stopped.

.PHONY: setup
setup: $(STAMP)/package $(STAMP)/kernels  ## Create .venv with SGLang, this package and its kernels.

# The first of these that runs and is new enough; or name one: make setup PYTHON=/path/to/python3
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

$(STAMP)/venv:
	$(call say,[1/4] Checking this machine)
	@failed=; missing() { echo "Missing: $$1" >&2; echo "   To do: $$2" >&2; failed=1; }; \
	python='$(PYTHON)'; \
	test -n "$$python" && "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || missing \
		"Python 3.11 or newer$${python:+ ($$python is none)}" \
		"install it, e.g. apt install python3.11 python3.11-venv, or name it: make setup PYTHON=/path/to/python3"; \
	test -n "$$failed" || "$$python" -c 'import venv, ensurepip' 2>/dev/null || missing \
		"the modules venv and ensurepip of $$python" \
		"install them, e.g. apt install python3-venv"; \
	cxx=$${CXX:-$$(command -v c++ || command -v g++ || command -v clang++)}; \
	$${cxx:-false} -std=c++20 -x c++ -fsyntax-only - <<< 'int i = __builtin_bit_cast(int, 1.0f);' 2>/dev/null || missing \
		"a C++20 compiler: gcc 11 or clang 14 and newer$${cxx:+ ($$cxx is none)}" \
		"install one, e.g. apt install g++, or name it: make setup CXX=/path/to/c++"; \
	test -z "$$failed"
	$(call say,[2/4] Creating $(VENV) with $(PYTHON))
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMP) && touch $@

# The version stands in __init__.py, and an editable installation has a copy of it.
$(STAMP)/package: $(STAMP)/venv pyproject.toml python/sglang_ced/__init__.py
	$(call say,[3/4] Installing SGLang and this package: some 250 packages - 11 GB on disk - 5 to 15 minutes the first time)
	@$(PIP) install --editable '.[serve,test]'
	@touch $@

$(STAMP)/kernels: $(STAMP)/package $(KERNEL_SOURCES)
	$(call say,[4/4] Building the C++ kernels: about a minute)
	@$(PIP) install --quiet 'scikit-build-core>=0.11' 'cmake>=3.20' ninja
	@$(PIP) install --no-build-isolation --no-deps --force-reinstall ./sgl-kernel-ext
	@touch $@
	$(call say,$(VENV) is ready)

# -- run --------------------------------------------------------------------------------------------------------------

.PHONY: serve
serve: setup  ## Serve the bundled checkpoint, or MODEL=DIR, on HOST=127.0.0.1 PORT=30000.
	@model='$(MODEL)'; model=$${model:-$$($(BIN)/ced models --path ced-tiny)} && \
	echo "==> Serving $$model on http://$(HOST):$(PORT) (stop with Ctrl-C)" && \
	exec $(BIN)/python -m sglang.launch_server --model-path "$$model" --host $(HOST) --port $(PORT) $(ARGS)

# -- check ------------------------------------------------------------------------------------------------------------

.PHONY: test
test: setup lint types  ## Everything that CI checks: lint, types and all tests but the slow ones of the server.
	$(call say,Tests)
	@$(BIN)/pytest -m 'not (server and slow) and not extra' $(ARGS)

.PHONY: test-server-slow
test-server-slow: setup  ## The server tests that `make test` leaves out: scheduling modes, scripts, SGLang's kits, faults.
	@$(BIN)/pytest test/server -m slow $(ARGS)

.PHONY: test-triton
test-triton: setup  ## The GPU kernels: on the GPU if there is one, else interpreted; compiled for three GPU generations.
	@$(BIN)/pytest test/kernels/triton $(ARGS)

# How long `make soak` runs.
MINUTES ?= 30

.PHONY: soak
soak: setup  ## Random traffic on a small server for MINUTES=30, every token held against the offline engine.
	@$(BIN)/python test/server/soak.py --minutes $(MINUTES) $(ARGS)

.PHONY: lint
lint: setup  ## Check style and formatting.
	$(call say,Lint)
	@$(BIN)/ruff check $(PYTHON_SOURCES)
	@$(BIN)/ruff format --check $(PYTHON_SOURCES)
	@$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	@$(BIN)/codespell $(PROSE)

.PHONY: types
types: setup  ## Check types.
	$(call say,Types)
	@$(BIN)/mypy

.PHONY: format
format: setup  ## Format all sources in place.
	@$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	@$(BIN)/ruff format $(PYTHON_SOURCES)
	@$(BIN)/clang-format -i $(CPP_SOURCES)

.PHONY: bench
bench: setup  ## Time the kernels.
	@$(BIN)/pytest benchmark/kernels --benchmark-only $(ARGS)

.PHONY: bench-kernels
bench-kernels: setup  ## Kernels against references, the memory bandwidth and plain torch (QUICK=1: under a minute).
	@$(BIN)/python -m benchmark.kernels.run $(ARGS)

.PHONY: bench-profile
bench-profile: setup  ## Where a decode step and a prefill spend their time (QUICK=1: a small shape, printed only).
	@$(BIN)/python -m benchmark.kernels.profile $(ARGS)

.PHONY: bench-peers
bench-peers: setup  ## Two other CPU engines beside ours; builds them the first time, 10 minutes (QUICK=1: small).
	@$(BIN)/python -m benchmark.peers.run $(ARGS)

$(STAMP)/bench: $(STAMP)/package
	$(call say,Installing matplotlib)
	@$(PIP) install --quiet --editable '.[serve,test,bench]'
	@touch $@

.PHONY: bench-agents
bench-agents: setup $(STAMP)/bench  ## Agent traffic: what each change is worth, how many agents, affinity, a peer (QUICK=1: small).
	@$(BIN)/python -m benchmark.agents.run $(ARGS)

.PHONY: bench-replay
bench-replay: setup  ## Measure bounded replay against exact (QUICK=1: under a minute).
	@$(BIN)/python -m benchmark.serving.replay $(ARGS)

.PHONY: bench-engram
bench-engram: setup  ## Engram look-ups by placement, and decode with large tables (QUICK=1: under a minute).
	@$(BIN)/python -m benchmark.engram.run $(ARGS)

# -- accuracy ---------------------------------------------------------------------------------------------------------

$(STAMP)/accuracy: $(STAMP)/package
	$(call say,Installing lm-eval)
	@$(PIP) install --quiet --editable '.[serve,test,accuracy]'
	@touch $@

# collect keeps what the servers answer, judge reads it; empty = both.
STEP ?=
ACCURACY := $(BIN)/python test/accuracy/run.py $(STEP) $(if $(MODEL),--model '$(MODEL)')

.PHONY: test-accuracy
test-accuracy: setup $(STAMP)/accuracy  ## The accuracy gates on ced-tiny, or MODEL=DIR (QUICK=1: three skills, a few minutes).
	@OMP_WAIT_POLICY=PASSIVE $(ACCURACY) --suite $(if $(QUICK),quick,tiny) $(ARGS)

.PHONY: test-accuracy-controls
test-accuracy-controls: setup $(STAMP)/accuracy  ## Servers broken on purpose: does the gate see each fault?
	@OMP_WAIT_POLICY=PASSIVE $(ACCURACY) --suite controls $(ARGS)

SERVER_ARGS ?=
MARGIN      ?= 0.02
GSM8K_FLOOR ?= 0.9
GPQA_FLOOR  ?= 0.5

.PHONY: test-accuracy-published
test-accuracy-published: setup $(STAMP)/accuracy  ## GSM8K and GPQA on MODEL=DIR, exact against bounded replay.
	@$(ACCURACY) --suite published --server-args='$(SERVER_ARGS)' --margin $(MARGIN) \
		--gsm8k-floor $(GSM8K_FLOOR) --gpqa-floor $(GPQA_FLOOR) $(ARGS)

.PHONY: test-ablations
test-ablations: setup  ## Accuracy by skill without global KV, indexer, Engram or window.
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python test/accuracy/ablate.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

# -- the bundled checkpoint -------------------------------------------------------------------------------------------

.PHONY: train
train: setup  ## Train ced-tiny into build/ced-tiny; goes on where it stopped.
	@$(BIN)/python -m training.train $(ARGS)

.PHONY: train-check
train-check: setup  ## Train the first 60 steps anew: do they give the losses that are kept in training/curve.jsonl?
	@$(BIN)/python -m training.reproduce $(ARGS)

# -- docs and cleaning ------------------------------------------------------------------------------------------------

$(STAMP)/docs: $(STAMP)/package
	$(call say,Installing Sphinx)
	@$(PIP) install --editable '.[docs]'
	@touch $@

.PHONY: docs
docs: setup $(STAMP)/docs  ## Build the documentation into build/docs; warnings and broken links are errors.
	@$(BIN)/sphinx-build -W --keep-going -b html docs build/docs
	@$(BIN)/python tools/check_links.py build/docs README.md CONTRIBUTING.md CHANGELOG.md
	@$(BIN)/codespell $(PROSE)

.PHONY: docs-serve
docs-serve: docs  ## Build the documentation and show it on http://HOST:PORT, PORT=8000 unless given.
	@port='$(if $(filter file,$(origin PORT)),8000,$(PORT))' && \
	echo "==> The documentation is on http://$(HOST):$$port (stop with Ctrl-C)" && \
	exec $(BIN)/python -m http.server --bind $(HOST) --directory build/docs "$$port"

# A Chromium for docs-look; empty = the one that `playwright install chromium` has fetched.
BROWSER ?=

.PHONY: docs-look
docs-look: docs  ## Photograph every page at desktop and phone width into build/look (needs playwright and a Chromium).
	@$(BIN)/python tools/look_at_docs.py build/docs build/look $(if $(BROWSER),--browser '$(BROWSER)') $(ARGS)

.PHONY: test-docs
test-docs: setup  ## Run every runnable block of README and the pages, those that need a server too.
	@$(BIN)/pytest test/docs $(ARGS)

.PHONY: test-wheels
test-wheels: setup  ## Build wheels and source archives, install them outside the repository, and serve from there.
	@$(BIN)/pytest test/packaging -m extra $(ARGS)

.PHONY: wheels
wheels: setup  ## Build wheels and source archives of both packages into dist/.
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/python -m build --no-isolation --outdir dist sgl-kernel-ext
	@ls -1 dist

.PHONY: clean
clean:  ## Remove build outputs and caches (delete .venv yourself to start afresh).
	rm -rf build dist sgl-kernel-ext/build python/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
	       .hypothesis .benchmarks
	find python sgl-kernel-ext test benchmark -name __pycache__ -type d -prune -exec rm -rf {} +
