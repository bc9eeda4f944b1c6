# The front door. `make eval-gqa TOKENS=64` in a fresh clone sets everything up and shows an accuracy; `make help` lists the rest.
SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := help

# what is measured
TOKENS ?= 64
METHOD ?= consensusdrop
HOST ?= llava
HF_MINI := checkpoints/llava-mini-hf
MODEL ?= $(if $(filter hf,$(HOST)),$(HF_MINI),checkpoints/llava-mini)
DATA ?= playground/mini
OUT ?= results
BATCH ?= 16
LIMIT ?=
ARGS ?=
ANSWERS ?=
BENCH ?=
METHODS ?=

# how it is set up
PYTHON3 ?= python3
VENV := .venv
PINNED := .venv-pinned
PYTHON := $(VENV)/bin/python
LLAVA := llava-torch==1.2.2.post1
READY := $(VENV)/.ready
PINNED_READY := $(PINNED)/.ready
CLI := $(PYTHON) -m llava_consensus.cli
MINI := $(filter playground/mini playground/mini/,$(DATA))

.PHONY: help setup setup-pinned data style test test-pinned sweep tables bench demo train-mini clean FORCE

help:  ## this list
	@echo "make TARGET [TOKENS=64 METHOD=consensusdrop MODEL=checkpoints/llava-mini HOST=llava|hf DATA=playground/mini LIMIT= BATCH=16 OUT=results ARGS=]"
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /  \1|/' | column -t -s '|'

setup: $(READY)  ## the venv: official LLaVA on current transformers; made once, mended when requirements change

$(READY): pyproject.toml requirements/main.txt requirements/dev.txt
	@echo "setting up $(VENV): a few minutes the first time"
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install -q torch==2.13.0
	$(PYTHON) -m pip install -q -r requirements/main.txt -r requirements/dev.txt
	$(PYTHON) -m pip install -q --no-deps $(LLAVA)
	$(PYTHON) -m pip install -q --no-deps -e .
	@touch $@

setup-pinned: $(PINNED_READY)  ## the second venv: LLaVA's own pins

$(PINNED_READY): pyproject.toml requirements/pinned.txt
	@echo "setting up $(PINNED): a few minutes the first time"
	test -x $(PINNED)/bin/python || $(PYTHON3) -m venv $(PINNED)
	$(PINNED)/bin/python -m pip install -q torch==2.13.0
	$(PINNED)/bin/python -m pip install -q -r requirements/pinned.txt
	$(PINNED)/bin/python -m pip install -q --no-deps $(LLAVA)
	$(PINNED)/bin/python -m pip install -q --no-deps -e .
	@touch $@

$(HF_MINI)/config.json: $(READY) checkpoints/llava-mini/model.safetensors
	rm -rf $(HF_MINI) $(HF_MINI).new
	$(CLI) convert checkpoints/llava-mini $(HF_MINI).new
	mv $(HF_MINI).new $(HF_MINI)

data: $(READY) $(if $(filter $(HF_MINI),$(MODEL)),$(HF_MINI)/config.json)  ## the mini benchmarks: generated once, in seconds
	$(if $(MINI),@$(PYTHON) -m playground.mini.build,@true)

eval-%: data FORCE  ## accuracy on one benchmark, llava-consensus list names them: make eval-gqa TOKENS=64
	$(CLI) eval $* --model $(MODEL) --method $(METHOD) --tokens $(TOKENS) --data $(DATA) --out $(OUT) --batch $(BATCH) $(if $(LIMIT),--limit $(LIMIT)) $(ARGS)

score-%: data FORCE  ## score an answer file: make score-gqa ANSWERS=answers.jsonl
	$(if $(ANSWERS),@$(CLI) score $* --answers $(ANSWERS) --data $(DATA) $(ARGS),$(error which answer file? make score-$* ANSWERS=answers.jsonl))

sweep: data  ## a grid: make sweep BENCH="gqa pope" METHODS="consensusdrop random" TOKENS="192 128 64 32"
	$(CLI) sweep --model $(MODEL) --data $(DATA) --out $(OUT) --batch $(BATCH) $(if $(LIMIT),--limit $(LIMIT)) \
		$(if $(BENCH),--bench "$(BENCH)") $(if $(METHODS),--methods "$(METHODS)") \
		$(if $(filter command line environment,$(origin TOKENS)),--tokens "$(TOKENS)") $(ARGS)

tables: sweep  ## every run of the results table on MODEL, then the table in README.md and docs/results.md
	$(CLI) report --out $(OUT) --csv $(OUT)/tables.csv --latex $(OUT)/tables.tex \
		$(patsubst %,--summary %,$(wildcard README.md)) $(patsubst %,--write %,$(wildcard docs/results.md))

bench: data  ## time, cache and memory of every method on MODEL, interleaved in one process
	$(PYTHON) eval_scripts/bench.py --model $(MODEL) --images $(DATA)/eval/gqa/data/images --tokens $(TOKENS) \
		--out $(OUT)/bench.json $(ARGS)

demo: data  ## one question about one mini picture, with a picture of what was kept
	$(PYTHON) eval_scripts/demo.py --model $(MODEL) --method $(METHOD) --tokens $(TOKENS) $(ARGS)

train-mini: $(READY)  ## train checkpoints/llava-mini again (hours on a CPU, minutes on a GPU)
	$(PYTHON) -m playground.mini.train $(ARGS)

style: $(READY)  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: data  ## all tests on the main stack
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n auto $(ARGS)

test-pinned: $(PINNED_READY) data  ## the tests on LLaVA's own pins
	OMP_NUM_THREADS=1 $(PINNED)/bin/python -m pytest -n auto $(ARGS)

clean:  ## generated data and caches; results and venvs stay
	rm -rf playground/mini/eval build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

FORCE:
