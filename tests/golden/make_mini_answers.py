"""Writes tests/golden/mini_answers.json, what the embedded model answers on the main stack: test_mini_model.py compares
both stacks with it. Run it after the model was trained again: .venv/bin/python tests/golden/make_mini_answers.py
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from llava_consensus import load, make
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Loading, Prompt
from llava_consensus.reduction.budget import Budget

ROOT = Path(__file__).parents[2]
DATA = ROOT / "playground" / "mini"
SIDES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("full", 1, {}),
    ("consensusdrop", 64, {}),
    ("consensusdrop", 32, {"fuser": "recovery", "order": "raster"}),
    ("random", 64, {}),
)


def questions(count: int = 12) -> list[tuple[Path, str]]:
    """Images and texts: the first questions of each benchmark."""
    found = []
    for benchmark in (benchmarks.make(name) for name in ("gqa", "pope", "textvqa")):
        folder = DATA / "eval" / benchmark.folder / benchmark.images
        asked = benchmark.load(DATA)
        found += [(folder / one.images[0], one.text) for one in asked[:: len(asked) // count][:count]]
    return found


def answers(host: Any, batch: int) -> dict[str, list[str]]:
    """Texts of every side to every question, asked in batches."""
    asked = questions()
    said = {}
    for name, tokens, options in SIDES:
        texts: list[str] = []
        with host.attach(make(name, **options), Budget(tokens)):
            for start in range(0, len(asked), batch):
                part = asked[start : start + batch]
                encoded = [[one] for one in host.encode([open_image(path) for path, _ in part])]
                prompts = [Prompt(text, max_new_tokens=16) for _, text in part]
                texts += [answer.text for answer in host.answer(encoded, prompts)]
        said[f"{name}-{tokens}"] = texts
    return said


def prompt_ids(host: Any) -> list[list[int]]:
    return [host.prompt_ids(Prompt(text)).tolist() for _, text in questions(3)]


if __name__ == "__main__":
    model = load(str(ROOT / "checkpoints" / "llava-mini"), Loading("cpu"))
    stack = {"torch": torch.__version__, "transformers": transformers.__version__}
    content = {"made_on": stack, "prompt_ids": prompt_ids(model), "answers": answers(model, 9)}
    path = Path(__file__).with_name("mini_answers.json")
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
