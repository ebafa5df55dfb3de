# Every target sets up .venv first when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test lint format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| (echo "hotset needs Python 3.11 to 3.13; set PYTHON=/path/to/python3.12" && exit 2)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/hotset simulate reference:it reference:c reference:switch \
		-p lru -p lfu -p lfru -p blend -b 12.5% -b 25% -b 50% --fit 0

test: $(STAMP) lint
	$(BIN)/python -m pytest

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
	$(BIN)/python benchmarks/policy_quality.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
