# Every target sets up .venv first when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0

RUNS ?= 1
# Test processes: one more than there are cores, since some tests wait; memory sets the bound.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))')

.PHONY: setup demo test test-fast test-long gpu-test families options-page lint format bench bench-engine clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| (echo "hotset needs Python 3.11 to 3.13; set PYTHON=/path/to/python3.12" && exit 2)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/hotset compile
	@touch $(STAMP)

# A model with a quarter of its experts in memory, then what other policies would have hit on the same routing.
demo: $(STAMP)
	@traces=$$(mktemp -d); trap 'rm -rf "$$traces"' EXIT; set -ex; PATH="$(BIN):$$PATH"; \
	hotset run --greedy --memory 25% --max-new-tokens 96 --trace "$$traces/italian.safetensors" \
		-p "La stampante non risponde. Prima di chiamare l'assistenza, l'utente deve"; \
	hotset run --greedy --memory 25% --max-new-tokens 96 --trace "$$traces/c.safetensors" \
		-p "/* Return the number of words in a string. */ int count_words(const char *text) {"; \
	hotset simulate "$$traces/italian.safetensors" "$$traces/c.safetensors" -p lru -p blend -b 25% --fit 0

# Processes side by side, one thread each: threads of several processes would spin against each other.
# Files stay whole, since their tests share models, and those of tests/slow.txt are begun first.
test: $(STAMP) lint
	$(BIN)/python tests/compile_ahead.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
	@$(BIN)/python tests/gpu/covered.py

# Some quick tests of every package, for while one works; `make test` runs all.
test-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(shell cat tests/fast.txt)

# The same tests with many more random examples.
test-long: export HOTSET_LONG_TESTS = 1
test-long: test

# All tests that need a GPU, files side by side in processes; the result is committed. It takes the environment's own
# torch where there is no .venv: RUNS=3 runs everything three times, as every change of what runs on a GPU has to.
gpu-test:
	PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/gpu/run.py --runs $(RUNS)

# The table of all options in the documents.
options-page: $(STAMP)
	$(BIN)/python tests/support/options_page.py > docs/reference/options.md

# Every family of the newest and of the oldest supported transformers against stock.
families: $(STAMP) $(OLDEST)/.ready
	$(BIN)/python -W ignore tests/families/exactness.py --out benchmarks/results
	$(OLDEST)/bin/python -W ignore tests/families/exactness.py --out benchmarks/results

$(OLDEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	grep -v -i -E '^(transformers|huggingface)' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OLDEST)/constraints.txt \
		transformers==$(OLDEST_TRANSFORMERS) --editable '.[models]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/replay_speed.py
	$(BIN)/python benchmarks/event_latency.py
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/policy_quality.py
	$(BIN)/python -W ignore benchmarks/layer_overhead.py
	$(BIN)/python -W ignore benchmarks/reference_exactness.py
	@if [ -w /sys/fs/cgroup/memory ]; then $(MAKE) bench-engine; \
		else echo "left out: make bench-engine, which needs root and cgroup v1"; fi

# Beside other engines, under a memory limit: needs root, cgroup v1, 22 GB of disk and a quiet machine.
bench-engine: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -W ignore benchmarks/cpu_speed.py
	$(BIN)/python -W ignore benchmarks/memory.py

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
