"""Record what the package answers, to compare two of its versions.

    python tools/record.py OUT                    # in each of two checkouts: two minutes of a core
    python tools/record.py --compare OUT OTHER    # names what differs; exit code 1 where anything does

Only public names are used, so that old versions can be recorded as well. Recorded are: every method on 40 GQA questions
on official LLaVA and on its conversion to transformers, methods on a small video set, every method on a tiny tiled
model with random weights, a mixed batch (text alone, one picture, two pictures, padded on the left), and the tables of
a small grid. An error is recorded as its type and text.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

LLAVA = "checkpoints/llava-mini"
HF = "checkpoints/llava-mini-hf"
VIDEO = ("full", "consensusdrop", "consensusdrop+", "vidcom2", "evs", "random", "fastv")
IMAGE, MOST = 500, 3  # placeholder of the tiny model; new tokens


def command(*words: str) -> str:
    """Standard output of one command of the package; its error and exit code where it fails."""
    from llava_consensus.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code: int | str | None = 0
        try:
            code = main(words)
        except SystemExit as stopped:
            code = stopped.code
    return out.getvalue() if not code else f"exit {code}: {err.getvalue().strip().splitlines()[-1:]}"


def asked(benchmark: str, model: str, method: str, limit: int) -> dict[str, Any]:
    """Answer and number of visual tokens of each question, and the score."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = () if method == "full" else ("--tokens", "64")
        given = ("--model", model, "--method", method, *tokens, "--limit", str(limit), "--out", folder)
        said = command("eval", benchmark, *given, "--max-new-tokens", "8", "--no-progress", "--json")
        files = list(Path(folder).glob("*/answers.jsonl"))
        if not said.startswith("{") or not files:
            return {"error": said.replace(folder, "OUT")}
        records = [json.loads(line) for line in files[0].read_text("utf-8").splitlines()]
        found = {
            one["question_id"]: [one["text"], one["metadata"]["before"], one["metadata"]["after"]] for one in records
        }
        return {**{str(name): value for name, value in found.items()}, "score": json.loads(said).get("score")}


def tiled() -> Any:
    """A tiny LLaVA-NeXT of transformers with random weights."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    sizes = dict(intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    vision = CLIPVisionConfig(hidden_size=32, image_size=56, patch_size=14, **sizes)
    text = LlamaConfig(hidden_size=64, vocab_size=512, pad_token_id=0, eos_token_id=None, **sizes)
    pins = [[56, 112], [112, 56], [112, 112]]
    config = LlavaNextConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_grid_pinpoints=pins)
    torch.manual_seed(0)
    model = LlavaNextForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "newline" in name or "position" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def batch() -> dict[str, Any]:
    """Prompts of text alone, of one picture and of two, as the processor of the tiny model makes them."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    shapes = [(112, 112, 5, 8, 8), (112, 60, 5, 8, 4), (40, 100, 3, 4, 8)]  # pixels, tiles, patches that are shown
    a, b, c = ([IMAGE] * (16 + rows * (columns + 1)) for *_, rows, columns in shapes)
    rows = [torch.tensor(row) for row in ([1, 21, 22, 23], [1, 5, *a, 6, 7], [1, *b, 9, *c, 11, 12])]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    pixels = torch.zeros(3, 5, 3, 56, 56)
    for number, (_, _, count, _, _) in enumerate(shapes):
        pixels[number, :count] = torch.randn(count, 3, 56, 56, generator=torch.Generator().manual_seed(number))
    sizes = torch.tensor([shape[:2] for shape in shapes])
    return dict(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=pixels, image_sizes=sizes)


def generated(model: Any, inputs: dict[str, Any], method: str, tokens: int, **options: Any) -> dict[str, Any]:
    """New ids, sums of the logits behind them, and what each picture was reduced to."""
    import torch

    from llava_consensus import attach

    given = dict(max_new_tokens=MOST, do_sample=False, return_dict_in_generate=True, output_logits=True)
    try:
        with attach(model, method, tokens, **options) as attached:
            found = model.generate(**inputs, **given)
            pictures = [[one.row, one.before, one.after] for one in attached.outcomes]
            kept = [one.kept[0].tolist() for outcome in attached.outcomes for _, one in outcome.reductions]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    sums = torch.stack(found.logits).double().abs().sum((0, 2))
    ids = found.sequences[:, -MOST:].tolist()
    return {"ids": ids, "logits": [f"{one:.6g}" for one in sums.tolist()], "pictures": pictures, "kept": kept}


def official() -> dict[str, Any]:
    """The mixed batch on official LLaVA, by the `generate` that users call."""
    import torch

    from llava_consensus import load

    model = load(LLAVA).model
    rows = [[1, 21, 22, 23], [1, 5, -200, 6, 7], [1, -200, 9, -200, 11, 12]]
    ids = torch.tensor([[0] * (6 - len(row)) + row for row in rows])
    side = model.get_vision_tower().config.image_size
    pixels = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0))  # the first of text alone
    model.config.tokenizer_padding_side, model.generation_config.eos_token_id = "left", None
    inputs = dict(inputs=ids, images=pixels, attention_mask=(ids != 0).long(), pad_token_id=0)
    methods = ("full", "consensusdrop", "consensusdrop+", "fastv", "visionzip")
    return {method: generated(model, inputs, method, 64) for method in methods}


def tables() -> dict[str, Any]:
    """What is printed of a grid, without times and folders."""
    with tempfile.TemporaryDirectory() as folder:
        grid = ("--bench", "gqa pope", "--methods", "consensusdrop random", "--tokens", "64 32", "--limit", "40")
        command("sweep", *grid, "--model", LLAVA, "--out", folder, "--no-progress")
        return {form: command("report", "--out", folder, "--format", form) for form in ("markdown", "csv", "latex")}


def record(out: Path) -> None:
    from llava_consensus import METHODS

    if not Path(HF).exists():
        command("model", "convert", LLAVA, HF)
    model, inputs = tiled(), batch()
    one = {name: value[1:2, :] if name != "pixel_values" else value[:1] for name, value in inputs.items()}
    one["image_sizes"] = inputs["image_sizes"][:1]

    def of_each(benchmark: str, path: str, limit: int, methods: Iterable[str]) -> dict[str, Any]:
        return {method: asked(benchmark, path, method, limit) for method in methods}

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "gqa-llava": partial(of_each, "gqa", LLAVA, 40, METHODS),
        "gqa-hf": partial(of_each, "gqa", HF, 40, METHODS),
        "video": partial(of_each, "msvd", LLAVA, 10, VIDEO),
        "tiled": lambda: {m: generated(model, one, m, 20) for m in METHODS},
        "mixed": lambda: {m: generated(model, inputs, m, 20) for m in METHODS},
        "mixed-llava": official,
        "tables": lambda: {"grid": tables()},
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (out / f"{name}.json").write_text(json.dumps(part(), indent=1, sort_keys=True) + "\n", "utf-8")
        print(name, flush=True)


def compare(one: Path, other: Path) -> int:
    """Print what differs and return how many cells do."""
    different = cells = 0
    for name in sorted({path.name for folder in (one, other) for path in folder.glob("*.json")}):
        sides = [
            json.loads((folder / name).read_text("utf-8")) if (folder / name).exists() else {}
            for folder in (one, other)
        ]
        for row in sorted(sides[0].keys() | sides[1].keys()):
            before, after = (side.get(row, {}) for side in sides)
            keys = sorted(before.keys() | after.keys())
            changed = [key for key in keys if before.get(key) != after.get(key)]
            cells, different = cells + len(keys), different + len(changed)
            if changed:
                print(f"{name.removesuffix('.json')} {row}: {len(changed)} of {len(keys)} differ, first {changed[0]}")
                print(
                    *(f"  {sign} {str(side.get(changed[0]))[:200]}" for sign, side in (("-", before), ("+", after))),
                    sep="\n",
                )
    print(f"{different} of {cells} differ")
    return different


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        sys.exit(bool(compare(Path(sys.argv[2]), Path(sys.argv[3]))))
    record(Path(sys.argv[1]))
