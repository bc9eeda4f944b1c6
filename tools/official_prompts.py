"""Records the prompts and pixels that official LLaVA makes, for `llava-consensus paper verify`.

    python -m tools.official_prompts --set mini --data playground/mini --tokenizer checkpoints/llava-mini
    python -m tools.official_prompts --set eval.zip --data playground/data --tokenizer DIR --no-pictures

LLaVA's own evaluation scripts run to their end, one for each benchmark, with a model that keeps what `generate` is
given in place of answering. Needs LLaVA's pins. Files of benchmarks that are not there are left out.
"""

import argparse
import hashlib
import importlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from PIL import Image

FILE = Path(__file__).parents[1] / "llava_consensus/paper/official_prompts.json"
SAMPLES = 10
CLIP = dict(image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711])
SIDES = (336, 192)  # of CLIP's published configuration, and of the embedded model's
LOADER, SHORT = "model_vqa_loader", {"single_pred_prompt": True}
SCRIPTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # script, question file, pictures, its own arguments
    "vqav2": (LOADER, "vqav2/llava_vqav2_mscoco_test-dev2015.jsonl", "vqav2/test2015", {}),
    "gqa": (LOADER, "gqa/llava_gqa_testdev_balanced.jsonl", "gqa/data/images", {}),
    "sqa": ("model_vqa_science", "scienceqa/llava_test_CQM-A.json", "scienceqa/images/test", SHORT),
    "textvqa": (LOADER, "textvqa/llava_textvqa_val_v051_ocr.jsonl", "textvqa/train_images", {}),
    "pope": (LOADER, "pope/llava_pope_test.jsonl", "pope/val2014", {}),
    "mme": (LOADER, "MME/llava_mme.jsonl", "MME/MME_Benchmark_release_version", {}),
    "mmbench": ("model_vqa_mmbench", "mmbench/mmbench_dev_20230712.tsv", "", {**SHORT, "lang": "en"}),
    "mmbench_cn": ("model_vqa_mmbench", "mmbench_cn/mmbench_dev_cn_20231003.tsv", "", {**SHORT, "lang": "cn"}),
    "mmvet": ("model_vqa", "mm-vet/llava-mm-vet.jsonl", "mm-vet/images", {}),
    "seed": (LOADER, "seed_bench/llava-seed-bench.jsonl", "seed_bench", {}),
}
Row = dict[str, Any]


def digest(content: bytes) -> str:
    """Sixteen digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def spread(count: int) -> list[int]:
    """Places of the samples among `count` questions."""
    return sorted({place * count // SAMPLES for place in range(SAMPLES)})


def subset(questions: Path, target: Path) -> list[int]:
    """Writes a question file of the samples alone; their places in the whole one."""
    if questions.suffix == ".tsv":
        import pandas

        table = pandas.read_table(questions)
        table.iloc[spread(len(table))].to_csv(target, sep="\t", index=False)
        return spread(len(table))
    text = questions.read_text("utf-8")
    if questions.suffix == ".json":
        rows = json.loads(text)
        target.write_text(json.dumps([rows[place] for place in spread(len(rows))]))
        return spread(len(rows))
    lines = text.splitlines()
    target.write_text("\n".join(lines[place] for place in spread(len(lines))) + "\n")
    return spread(len(lines))


class Recorder:
    """A model that keeps the ids and pixels that it is asked with, and ends every answer at once."""

    config = SimpleNamespace(mm_use_im_start_end=False, image_aspect_ratio="pad")

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def generate(self, input_ids: torch.Tensor, images: "torch.Tensor | None" = None, **_: Any) -> torch.Tensor:
        """The end mark alone."""
        ids = input_ids[0].to(torch.int64).numpy().astype("<i8").tobytes()
        pixels = None if images is None else digest(images.to(torch.float16).numpy().astype("<f2").tobytes())
        self.rows.append({"ids": digest(ids), "pixels": pixels})
        return torch.tensor([[2]])


def recorded(name: str, data: Path, tokenizer: Any, side: int, pictures: bool) -> list[Row]:
    """What a script of LLaVA's hands its model for each sample of a benchmark."""
    script, questions, folder, own = SCRIPTS[name]
    module, model, prompts = importlib.import_module(f"llava.eval.{script}"), Recorder(), []
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, resample=3, **CLIP
    )

    def ids(prompt: str, *rest: Any, **more: Any) -> Any:
        prompts.append(digest(prompt.encode()))
        return tokenizer_image_token(prompt, *rest, **more)

    def one_process(*given: Any, **more: Any) -> Any:
        return torch.utils.data.DataLoader(*given, **{**more, "num_workers": 0})

    tokenizer_image_token, to = module.tokenizer_image_token, torch.Tensor.to
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        file = Path(place) / Path(questions).name
        places = subset(data / "eval" / questions, file)
        args = argparse.Namespace(
            model_path="llava", model_base=None, image_folder=str(data / "eval" / folder), question_file=str(file),
            answers_file=str(Path(place) / "answers.jsonl"), conv_mode="vicuna_v1", num_chunks=1, chunk_idx=0,
            temperature=0, top_p=None, num_beams=1, max_new_tokens=128, all_rounds=False, **own,
        )  # fmt: skip
        swaps: Row = {"load_pretrained_model": lambda *_: (tokenizer, model, processor, 2048), "args": args}
        swaps |= {"tokenizer_image_token": ids, "DataLoader": one_process}
        if not pictures:
            blank = Image.new("RGB", (64, 48))
            swaps["Image"] = SimpleNamespace(open=lambda *_: blank)
        for key, value in swaps.items():
            stack.enter_context(mock.patch.object(module, key, value, create=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", lambda self, *a, **k: to(self, *a, **on_cpu(k))))
        module.eval_model(args)
    unseen = {} if pictures else {"pixels": None}
    return [
        {"index": index, "prompt": prompt, **row, **unseen}
        for index, prompt, row in zip(places, prompts, model.rows, strict=True)
    ]


def on_cpu(given: Row) -> Row:
    """Arguments of `Tensor.to` without a GPU."""
    return {key: value for key, value in given.items() if key not in ("device", "non_blocking")}


def benchmarks(data: Path, tokenizer: Any, pictures: bool) -> Iterator[tuple[str, Row]]:
    """The samples of every benchmark whose question file is there, and the checksum of that file."""
    for name, (_, questions, _, _) in SCRIPTS.items():
        file = data / "eval" / questions
        if not file.is_file():
            continue
        sides = [recorded(name, data, tokenizer, side, pictures) for side in (SIDES if pictures else SIDES[:1])]
        samples = [
            {**rows[0], "pixels": {str(side): row["pixels"] for side, row in zip(SIDES, rows, strict=False)}}
            if rows[0]["pixels"]
            else rows[0]
            for rows in zip(*sides, strict=True)
        ]
        yield name, {"questions": hashlib.sha256(file.read_bytes()).hexdigest(), "samples": samples}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", required=True, help="name of the set in the file; another of that name is replaced")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder of tokenizer.model")
    parser.add_argument("--no-pictures", dest="pictures", action="store_false", help="where only the texts are at hand")
    given = parser.parse_args()
    tokenizer = transformers.LlamaTokenizer.from_pretrained(given.tokenizer, legacy=False)
    model = hashlib.sha256((given.tokenizer / "tokenizer.model").read_bytes()).hexdigest()
    content = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {}
    content[given.set] = {
        "llava": importlib.import_module("importlib.metadata").version("llava-torch"),
        "transformers": transformers.__version__,
        "tokenizer": model,
        "benchmarks": dict(benchmarks(given.data, tokenizer, given.pictures)),
    }
    text = json.dumps(content, indent=1)
    FILE.write_text(re.sub(r"\{\s+(\"index\"[^{]*?(?:\{[^}]*\})?)\s+\}", in_a_line, text) + "\n", "utf-8")


def in_a_line(sample: re.Match[str]) -> str:
    """A sample without its line breaks."""
    return "{" + re.sub(r"\s+", " ", sample[1]) + "}"


if __name__ == "__main__":
    main()
