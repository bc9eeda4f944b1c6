# The front door. `make eval-gqa TOKENS=64` in a fresh clone sets everything up and shows an accuracy; `make help` lists the rest.
SHELL := /bin/bash -o pipefail
# some images forbid Python to keep bytecode: then every process compiles torch and transformers anew, 15 s of the processor
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := help

# what is measured; TOKENS=64 is a number for each image, TOKENS=0.1 a share of its own
TOKENS ?= 64
METHOD ?= consensusdrop
HOST ?= llava
HF_MINI := checkpoints/llava-mini-hf
MODEL ?= $(if $(filter hf,$(HOST)),$(HF_MINI),checkpoints/llava-mini)
DATA ?= playground/mini
OUT ?= results
BATCH ?= 16
LIMIT ?=
SAMPLE ?=
ARGS ?=
ANSWERS ?=
BENCH ?=
METHODS ?=
CASES ?= 1000
NAME ?=
EVERYTHING ?=

# how it is set up
PYTHON3 ?= python3
VENV := .venv
PINNED := .venv-pinned
VLLM := .venv-vllm
PYTHON := $(VENV)/bin/python
UV ?= uv
LOCK := $(UV) pip compile -q --universal --python-version 3.10 --generate-hashes --no-header --no-annotate --no-emit-index-url
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.ready-dev
PINNED_READY := $(PINNED)/.ready
VLLM_READY := $(VLLM)/.ready
CLI := $(PYTHON) -m llava_consensus.cli
PYTEST := -m pytest -n auto --dist worksteal
FEWER := $(if $(LIMIT),--limit $(LIMIT)) $(if $(SAMPLE),--sample $(SAMPLE))
RUN := --model $(MODEL) --data $(DATA) --out $(OUT) --batch $(BATCH) $(FEWER) $(if $(BENCH),--bench "$(BENCH)")
LARGE := $(filter playground/mini-large playground/mini-large/,$(DATA))
PHOTOS := $(filter playground/photo playground/photo-unseen playground/photo-crowded,$(DATA:/=))
MINI := $(LARGE)$(filter playground/mini playground/mini/,$(DATA))

.PHONY: help setup setup-dev setup-pinned setup-vllm lock data style test test-pinned test-serving mutate sweep tables pages compatibility bench table study paper figures demo space finetune checkpoint-photo train-photo dist site clean FORCE

help:  ## this list
	@echo "make TARGET [TOKENS=64 METHOD=consensusdrop MODEL=checkpoints/llava-mini HOST=llava|hf DATA=playground/mini LIMIT= SAMPLE= BATCH=16 OUT=results ARGS=]"
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /  \1|/' | column -t -s '|'

setup: $(READY)  ## the venv, as small as answering needs: official LLaVA on current transformers; mended when requirements change

$(READY): pyproject.toml requirements/main.lock requirements/llava.lock requirements/set_up.py
	@$(PYTHON3) requirements/set_up.py main $(VENV)
	@touch $@

setup-dev: $(DEV_READY)  ## its second stage: what tests, style, figures and further hosts need

$(DEV_READY): $(READY) requirements/dev.lock requirements/lmms-eval.lock
	@$(PYTHON3) requirements/set_up.py dev $(VENV)
	@touch $@

setup-pinned: $(PINNED_READY)  ## the second venv: LLaVA's own pins

$(PINNED_READY): pyproject.toml requirements/pinned.lock requirements/llava.lock requirements/set_up.py
	@$(PYTHON3) requirements/set_up.py pinned $(PINNED)
	@touch $@

setup-vllm: $(VLLM_READY)  ## the third: vLLM on the CPU, for Python 3.11 or newer

$(VLLM_READY): pyproject.toml requirements/vllm.lock requirements/llava.lock requirements/set_up.py
	@$(PYTHON3) requirements/set_up.py vllm $(VLLM)
	@touch $@

lock:  ## exact versions and hashes of what pyproject.toml names but torch, whose builds differ: needs uv
	echo torch > requirements/.torch
	$(LOCK) --excludes requirements/.torch pyproject.toml --extra eval --extra video --group build -o requirements/main.lock
	$(LOCK) --excludes requirements/.torch pyproject.toml --extra dev --group build -c requirements/main.lock -o requirements/dev.lock
	$(LOCK) --excludes requirements/.torch --group pinned -o requirements/pinned.lock
	printf '%s\n' torch torchaudio torchcodec triton > requirements/.torch
	$(subst 3.10,3.11,$(LOCK)) --excludes requirements/.torch pyproject.toml --extra eval --extra video --group build --group vllm -o requirements/vllm.lock
	echo 'pillow>=12' > requirements/.override
	$(LOCK) --overrides requirements/.override --group demo -c requirements/main.lock -c requirements/dev.lock -o requirements/demo.lock
	$(LOCK) --no-deps --group llava -o requirements/llava.lock
	$(LOCK) --no-deps --group lmms-eval -o requirements/lmms-eval.lock
	rm requirements/.torch requirements/.override

$(HF_MINI)/config.json: $(READY) checkpoints/llava-mini/model.safetensors
	rm -rf $(HF_MINI) $(HF_MINI).new
	$(CLI) model convert checkpoints/llava-mini $(HF_MINI).new
	mv $(HF_MINI).new $(HF_MINI)

PHOTO := checkpoints/llava-photo

checkpoint-photo: $(PHOTO)/config.json  ## a LLaVA of 157 M with a pretrained tower and language model, in checkpoints/llava-photo: fetches 206 MB once

$(PHOTO)/config.json: $(READY) $(PHOTO)/adapter.json
	$(PYTHON) -m playground.photo.checkpoint $(ARGS)

$(PHOTO)/adapter.json:
	@echo "$(PHOTO)/adapter.safetensors.xz is not there: make train-photo trains one" >&2; exit 1

train-photo: $(READY)  ## train its adapter, or go on where that was stopped: fetches 463 MB once, all of it in PHOTO_WORK
	$(PYTHON) -m playground.photo.recipe $(ARGS)

data: $(READY) $(if $(filter $(HF_MINI) $(PHOTO),$(MODEL)),$(MODEL)/config.json)  ## the mini benchmarks: generated once, in seconds
	$(if $(MINI),@$(PYTHON) -m playground.mini.build $(if $(LARGE),--split large --out $(DATA)),@true)
	$(if $(PHOTOS),@$(PYTHON) -m playground.photo.build --out $(DATA) $(addprefix --split ,$(findstring unseen,$(DATA))$(findstring crowded,$(DATA))))

eval-%: data FORCE  ## accuracy on one benchmark, llava-consensus list names them: make eval-gqa TOKENS=64
	$(CLI) eval $* --model $(MODEL) --method $(METHOD) --tokens $(TOKENS) --data $(DATA) --out $(OUT) --batch $(BATCH) $(FEWER) $(ARGS)

score-%: data FORCE  ## score an answer file: make score-gqa ANSWERS=answers.jsonl
	$(if $(ANSWERS),@$(CLI) score $* --answers $(ANSWERS) --data $(DATA) $(ARGS),$(error which answer file? make score-$* ANSWERS=answers.jsonl))

sweep: data  ## a grid: make sweep BENCH="gqa pope" METHODS="consensusdrop random" TOKENS="192 128 64 32"
	$(CLI) sweep --model $(MODEL) --data $(DATA) --out $(OUT) --batch $(BATCH) $(FEWER) \
		$(if $(BENCH),--bench "$(BENCH)") $(if $(METHODS),--methods "$(METHODS)") \
		$(if $(filter command line environment,$(origin TOKENS)),--tokens "$(TOKENS)") $(ARGS)

tables: data  ## every run of the results table (llava_consensus/paper/presets/results.json) on MODEL: OUT/tables/results.md, .csv, .tex
	$(CLI) paper table results $(RUN) $(ARGS)

pages: $(READY)  ## the generated numbers of README.md and docs, from docs/measured*.tar.xz
	$(PYTHON) -m tools.pages write

compatibility: $(DEV_READY)  ## docs/compatibility.md anew: a tiny model of every image-text-to-text type of transformers x a method of each kind
	OMP_NUM_THREADS=1 PYTHONPATH=. $(PYTHON) tests/compatibility.py $(ARGS)

bench: data  ## time, memory, FLOPs: make bench METHODS=all TOKENS="192 64", or ARGS="--shape llava-1.5-1b"
	$(CLI) bench --model $(MODEL) $(if $(findstring --shape,$(ARGS)),,--images $(DATA)/eval/gqa/data/images) --out $(OUT)/bench.json \
		$(if $(METHODS),--methods "$(METHODS)") \
		$(if $(filter command line environment,$(origin TOKENS)),--tokens "$(TOKENS)") $(ARGS)

table: data  ## a table or an ablation of the paper beside its numbers: make table NAME=t1, alpha, temperature, recovery, anchors, score
	$(if $(NAME),$(CLI) paper table $(NAME) $(RUN) $(ARGS),$(error which one? make table NAME=t1))

study: data  ## the controlled study: selection inside the language model by vision, by the question, by both
	$(CLI) paper study $(RUN) $(ARGS)

PARETO := tome fastv sparsevlm prumerge_plus visionzip vispruner consensusdrop  # of table 1

paper: $(DEV_READY) data  ## every table and figure of the paper that MODEL can give, and what needs which weights: make paper SAMPLE=100
	$(CLI) paper table all $(RUN) $(ARGS)
	$(CLI) paper study $(RUN) $(ARGS)
	$(CLI) bench --model $(MODEL) --repeats 3 --out $(OUT)/bench.json
	$(CLI) bench --model $(MODEL) --repeats 3 --methods "$(PARETO)" --tokens "192 128 64 32" --out $(OUT)/bench-tradeoff.json
	$(MAKE) figures OUT=$(OUT) ARGS=

figures: $(DEV_READY)  ## every figure of the paper from the results in OUT, and the differences its claims are about: docs/paper.md says which run makes which; examples: ARGS="--examples gqa"
	@mkdir -p $(OUT)
	$(CLI) paper figures --out $(OUT) $(if $(findstring --examples,$(ARGS)),--model $(MODEL) --data $(DATA)) $(ARGS)

ifeq ($(origin MODEL) $(origin DATA),file file)  # photographs, where their model and questions have been made
ifneq ($(and $(wildcard $(PHOTO)/config.json),$(wildcard playground/photo/eval/.complete)),)
demo: MODEL := $(PHOTO)
demo: DATA := playground/photo
endif
endif

demo: data  ## a page to play with, in the browser: two methods side by side; make demo ARGS="--port 8000"
	@$(PYTHON) -c "import gradio" 2>/dev/null || $(PYTHON3) requirements/set_up.py demo $(VENV)
	$(CLI) demo --model $(MODEL) --data $(DATA) $(ARGS)

space: $(HF_MINI)/config.json  ## a folder that is pushed to a Space of Hugging Face as it is: the page with the embedded model, in space/
	$(PYTHON) -m playground.mini.build
	rm -rf space && mkdir -p space/checkpoints space/playground/mini
	cp tools/space/* space/ && cp -r $(HF_MINI) space/checkpoints/
	cd playground/mini && cp -r --parents eval/gqa eval/textvqa ../../space/playground/mini/

TRAIN_DATA ?= playground/mini-train
TUNE ?= full
STEPS ?= $(if $(LIMIT),$(LIMIT),80)
ADAPTED ?= checkpoints/llava-mini-$(METHOD)-$(subst $(empty) ,+,$(TOKENS))

finetune: $(READY)  ## adapt MODEL to fewer tokens: make finetune TOKENS="64 32" LIMIT=80 (steps), then eval-gqa MODEL=<what it names>
	$(if $(filter playground/mini-train,$(TRAIN_DATA)),test -f $(TRAIN_DATA)/conversations.json || \
		$(PYTHON) -m playground.mini.conversations --out $(TRAIN_DATA) --scenes 640 --questions 4 --turns 4 --reading 20)
	$(CLI) train --model $(MODEL) --data-path $(TRAIN_DATA)/conversations.json --images $(TRAIN_DATA)/images \
		--method $(METHOD) --tokens "$(TOKENS)" --tune $(TUNE) --steps $(STEPS) --out $(ADAPTED) \
		$(if $(findstring --learning-rate,$(ARGS)),,--learning-rate $(if $(filter projector,$(TUNE)),1e-3,3e-4)) $(ARGS)

dist: $(DEV_READY)  ## wheel and sdist in dist/, checked
	rm -rf build dist
	$(PYTHON) -m build
	$(PYTHON) -m twine check --strict dist/*

site: $(DEV_READY)  ## these pages, the notebook and the API as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
	@echo "site/ is made; with its search: $(PYTHON) -m http.server -d site, then http://localhost:8000"

style: $(DEV_READY)  ## ruff, mypy, and the wording of the lines that you added
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PYTHON) -m tools.plain
	$(VENV)/bin/mypy

test: $(DEV_READY) data  ## all tests on the main stack
	OMP_NUM_THREADS=1 $(PYTHON) $(PYTEST) $(ARGS)

MUTANTS := .venv-mutants

mutate: $(DEV_READY) data  ## mutants of the maths and the hosts, and which of them no test sees: make mutate SAMPLE=100
	test -x $(MUTANTS)/bin/cosmic-ray || { $(PYTHON3) -m venv $(MUTANTS) && $(MUTANTS)/bin/pip install -q cosmic-ray==8.7.0; }
	$(MUTANTS)/bin/python tools/mutants.py list $(or $(SAMPLE),100) > $(MUTANTS)/mutants.json
	OMP_NUM_THREADS=1 $(PYTHON) tools/mutants.py try $(MUTANTS)/mutants.json

test-pinned: $(PINNED_READY) data  ## the tests on LLaVA's own pins
	OMP_NUM_THREADS=1 $(PINNED)/bin/python $(PYTEST) $(ARGS)

test-serving: $(VLLM_READY) data  ## the tests of serving, on vLLM; EVERYTHING=1: every method on every model, 500 requests
	OMP_NUM_THREADS=1 EVERYTHING=$(EVERYTHING) $(VLLM)/bin/python -m pytest -n 0 tests/serving $(ARGS)

clean:  ## generated data and caches; results and venvs stay
	rm -rf playground/mini/eval build dist site space .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

FORCE:
