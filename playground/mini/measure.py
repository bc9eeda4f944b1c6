"""Measure the checkpoint as a test bed, before any reduction method: accuracy, random selection, attention lifts.

    python -m playground.mini.measure [--limit IMAGES] [--tokens 64 32] [--only gqa pope textvqa lifts]
    python -m playground.mini.measure --model checkpoints/NAME --limit 10 --only layers

Reads the benchmark files and the checkpoint through the official loader. Answers are greedy; the questions about one
picture share the pass over its visual prefix. "Random" keeps a uniform random subset of the patches, in order.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llava.conversation import conv_templates
from llava.mm_utils import process_images, tokenizer_image_token
from llava.model.builder import load_pretrained_model
from PIL import Image
from transformers import DynamicCache

from playground.mini.labels import label
from playground.mini.paths import CHECKPOINT, MINI, ROOT
from playground.mini.scenes import scene

EVAL = MINI / "eval"


class Mini:
    """The loaded checkpoint with a greedy loop that shares the visual prefix between questions."""

    def __init__(self, folder: Path = CHECKPOINT) -> None:
        name = str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else str(folder)
        self.tokenizer, model, self.processor, _ = load_pretrained_model(name, None, "llava-mini", device="cpu")
        self.model = model.float().eval()
        self.tower = model.get_vision_tower().float()
        self.embed = self.model.get_input_embeddings()

    def look(self, image: Image.Image) -> torch.Tensor:
        """Projected patch features [1, 576, hidden]."""
        with torch.inference_mode():
            return self.model.encode_images(process_images([image], self.processor, self.model.config).float())

    def ids(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids before and after the image of a `vicuna_v1` prompt."""
        conversation = conv_templates["vicuna_v1"].copy()
        conversation.append_message(conversation.roles[0], "<image>\n" + text)
        conversation.append_message(conversation.roles[1], None)
        ids = tokenizer_image_token(conversation.get_prompt(), self.tokenizer, -200)
        cut = ids.index(-200)
        return ids[:cut], ids[cut + 1 :]

    @torch.inference_mode()
    def answer(self, visual: torch.Tensor, texts: list[str], most: int = 12) -> list[str]:
        """Greedy answers to several questions about one picture; `visual` is [1, k, hidden]."""
        split = [self.ids(text) for text in texts]
        head = torch.cat([self.embed(torch.tensor([split[0][0]])), visual], 1)
        cache = DynamicCache()
        self.model.model(inputs_embeds=head, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(texts))
        long = max(len(tail) for _, tail in split)
        ids = torch.tensor([[0] * (long - len(tail)) + tail for _, tail in split])
        given = torch.tensor([[1] * head.shape[1] + [0] * (long - len(tail)) + [1] * len(tail) for _, tail in split])
        place = given.cumsum(1)[:, head.shape[1] :] - 1
        said: list[list[int]] = [[] for _ in texts]
        open_rows = set(range(len(texts)))
        for _ in range(most):
            out = self.model.model(
                input_ids=ids, attention_mask=given, position_ids=place, past_key_values=cache, use_cache=True
            )
            best = self.model.lm_head(out.last_hidden_state[:, -1]).argmax(-1)
            for row in sorted(open_rows):
                open_rows.discard(row) if best[row] == 2 else said[row].append(int(best[row]))
            if not open_rows:
                break
            ids, place = best[:, None], place[:, -1:] + 1
            given = torch.cat([given, torch.ones(len(texts), 1, dtype=given.dtype)], 1)
        return [self.tokenizer.decode(row, skip_special_tokens=True).strip() for row in said]


def subset(visual: torch.Tensor, tokens: int, seed: int) -> torch.Tensor:
    """A uniform random subset of the patches, in their order."""
    if tokens >= visual.shape[1]:
        return visual
    kept = np.random.default_rng(seed).choice(visual.shape[1], tokens, replace=False)
    return visual[:, torch.from_numpy(np.sort(kept))]


def by_image(path: Path, limit: int) -> list[tuple[str, list[tuple[int, dict]]]]:
    """Question lines grouped by picture, with their line numbers."""
    groups: dict[str, list[tuple[int, dict]]] = {}
    for number, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        groups.setdefault(row["image"], []).append((number, row))
    return list(groups.items())[:limit]


def run(mini: Mini, questions: Path, images: Path, tokens: int, limit: int) -> dict[int, str]:
    """Answers by line number."""
    answers: dict[int, str] = {}
    for seed, (image, rows) in enumerate(by_image(questions, limit)):
        with Image.open(images / image) as picture:
            visual = subset(mini.look(picture.convert("RGB")), tokens, seed)
        answers |= zip((n for n, _ in rows), mini.answer(visual, [row["text"] for _, row in rows]), strict=True)
    return answers


def gqa(mini: Mini, tokens: int, limit: int) -> dict[str, float]:
    """Accuracy in percent, overall and per kind of question."""
    truth = list(json.loads((EVAL / "gqa/data/testdev_balanced_questions.json").read_text()).values())
    answers = run(mini, EVAL / "gqa/llava_gqa_testdev_balanced.jsonl", EVAL / "gqa/data/images", tokens, limit)
    right: dict[str, list[bool]] = collections.defaultdict(list)
    for number, text in answers.items():
        good = text.rstrip(".").lower() == truth[number]["answer"]
        for key in ("all", truth[number]["types"]["semantic"], f"{truth[number]['types']['detailed']}"):
            right[key].append(good)
    return {key: round(100 * float(np.mean(value)), 2) for key, value in right.items()}


def pope(mini: Mini, tokens: int, limit: int) -> dict[str, float]:
    """F1 in percent for each split, and their mean."""
    answers = run(mini, EVAL / "pope/llava_pope_test.jsonl", EVAL / "pope/val2014", tokens, limit)
    lines = [json.loads(line) for line in (EVAL / "pope/llava_pope_test.jsonl").read_text().splitlines()]
    labels = {}
    for split in ("adversarial", "random", "popular"):
        text = (EVAL / f"pope/coco/coco_pope_{split}.json").read_text()
        labels[split] = [json.loads(x)["label"] for x in text.splitlines()]
    first = {split: next(n for n, row in enumerate(lines) if row["category"] == split) for split in labels}
    scores = {}
    for split, wanted in labels.items():
        pairs = [
            (text.lower() != "no", wanted[n - first[split]] == "yes")
            for n, text in answers.items()
            if lines[n]["category"] == split
        ]
        hit, said, true = sum(a and b for a, b in pairs), sum(a for a, _ in pairs), sum(b for _, b in pairs)
        scores[split] = round(100 * 2 * hit / max(1, said + true), 2)
    return {"mean_f1": round(sum(scores.values()) / 3, 2), **scores}


def textvqa(mini: Mini, tokens: int, limit: int) -> dict[str, float]:
    """Exact match in percent (all ten answers agree, so this is the TextVQA accuracy)."""
    truth = json.loads((EVAL / "textvqa/TextVQA_0.5.1_val.json").read_text())["data"]
    answers = run(mini, EVAL / "textvqa/llava_textvqa_val_v051_ocr.jsonl", EVAL / "textvqa/train_images", tokens, limit)
    right = {n: text.lower() == truth[n]["answers"][0] for n, text in answers.items()}
    whole = [good for n, good in right.items() if "character" not in truth[n]["question"]]
    return {
        "all": round(100 * float(np.mean(list(right.values()))), 2),
        "whole_sign": round(100 * float(np.mean(whole)), 2),
    }


@torch.no_grad()
def lifts(mini: Mini, limit: int = 50) -> dict[str, float]:
    """Share of attention over share of area: CLS on objects and signs, layer-0 text rows (SCAP) on the named object."""
    from transformers import CLIPVisionModel

    clip = CLIPVisionModel.from_pretrained(mini.tower.vision_tower_name, attn_implementation="eager").eval()
    mini.model.model.config._attn_implementation = "eager"
    records = list(json.loads((EVAL / "gqa/data/testdev_balanced_questions.json").read_text()).values())
    shares: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for image, rows in by_image(EVAL / "gqa/llava_gqa_testdev_balanced.jsonl", limit):
        scene_ = scene("test", int(image[1:-4]) - 700000)
        packed = label(scene_).packed()
        shown, owner = torch.from_numpy(packed[0].reshape(-1) > 0), torch.from_numpy(packed[6].reshape(-1))
        with Image.open(EVAL / "gqa/data/images" / image) as picture:
            pixels = process_images([picture.convert("RGB")], mini.processor, mini.model.config).float()
        weights = clip(pixels, output_attentions=True).attentions[-2][0].mean(0)[0, 1:]
        shares["cls"].append(((weights * shown).sum().item() / weights.sum().item(), shown.float().mean().item()))
        shares["cls_of_all_keys"].append(((weights * shown).sum().item(), shown.float().mean().item()))
        visual = mini.model.encode_images(pixels)
        for number, row in rows[:12]:
            named = {
                int(s["argument"].split("(")[1][:-1]) for s in records[number]["semantic"] if s["operation"] == "select"
            }
            words = [k for k in named if scene_.items[k].name in records[number]["question"].replace("?", "").split()]
            mine = torch.isin(owner, torch.tensor(words or [-9]))
            if words and mine.any():
                shares["scap"].append(scap_share(mini, visual, row["text"], mine))
    result: dict[str, float] = {}
    for key, pairs in shares.items():
        got, area = np.mean([a for a, _ in pairs]), np.mean([b for _, b in pairs])
        result |= {
            f"{key}_share": round(float(got), 4),
            f"{key}_area": round(float(area), 4),
            f"{key}_lift": round(float(got / area), 2),
        }
    return result


def scap_share(mini: Mini, visual: torch.Tensor, text: str, mine: torch.Tensor) -> tuple[float, float]:
    """Share of the layer-0 attention that the text after the image pays to the patches `mine`, and their area."""
    head, tail = mini.ids(text)
    embeds = torch.cat([mini.embed(torch.tensor([head])), visual, mini.embed(torch.tensor([tail]))], 1)
    out = mini.model.model(inputs_embeds=embeds, output_attentions=True, use_cache=False)
    rows = out.attentions[0][0].mean(0)[len(head) + visual.shape[1] :, len(head) : len(head) + visual.shape[1]].mean(0)
    return (rows[mine].sum() / rows.sum()).item(), mine.float().mean().item()


def layers(mini: Mini, limit: int = 10) -> dict[str, dict[str, float]]:
    """Accuracy on `limit` pictures of GQA and five times as many of TextVQA with all decoder layers, with each of them,
    from 1, left out in turn, and with each quarter of them.

    In a model that was made deeper than it was trained first this shows what its layers do.
    """
    stack = mini.model.model.layers
    single, quarter = [range(n, n + 1) for n in range(len(stack))], len(stack) // 4
    runs = [range(n, n + quarter) for n in range(0, len(stack), quarter)] if quarter > 1 else []
    found = {}
    for left_out in (range(0), *single, *runs):
        hooks = [stack[n].register_forward_hook(passed_by) for n in left_out]
        scores = {name: TASKS[name](mini, 576, most)["all"] for name, most in (("gqa", limit), ("textvqa", 5 * limit))}
        found[f"without {', '.join(str(n + 1) for n in left_out)}" if hooks else "all"] = scores
        for hook in hooks:
            hook.remove()
    return found


def passed_by(layer: torch.nn.Module, given: tuple, out: Any) -> Any:
    """A hook: what a layer was given in place of what it made of it."""
    return given[0] if isinstance(out, torch.Tensor) else (given[0], *out[1:])


TASKS = {"gqa": gqa, "pope": pope, "textvqa": textvqa}


def main(argv: Iterable[str] | None = None) -> None:
    """Command line: one line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=10**6, help="pictures of each benchmark")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[64, 32], help="sizes of the random subsets, beside all 576"
    )
    parser.add_argument("--only", nargs="*", default=[*TASKS, "lifts"], choices=[*TASKS, "lifts", "layers"])
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="the folder of a checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    mini = Mini(options.model)
    for name in options.only:
        if name == "lifts":
            print(json.dumps({"lifts": lifts(mini, min(50, options.limit))}), flush=True)
            continue
        if name == "layers":
            print(json.dumps({"layers": layers(mini, options.limit)}), flush=True)
            continue
        for tokens in (576, *options.tokens):
            started = time.time()
            scores = TASKS[name](mini, tokens, options.limit)
            print(json.dumps({name: scores, "tokens": tokens, "seconds": round(time.time() - started, 1)}), flush=True)


if __name__ == "__main__":
    main()
