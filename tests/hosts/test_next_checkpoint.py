"""A checkpoint of LLaVA 1.6's kind, a tower of its own and tiles: official and converted it is the same model, and runs
in both layouts record the paper's budgets.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_own_tower import checkpoint

from llava_consensus import cli
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import make as make_benchmark
from llava_consensus.evaluation.media import open_image
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

DATA, SIDE = Path("playground/mini"), 192
GRIDS = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]  # LLaVA 1.6's, width and height in tiles
TILES = {
    "image_aspect_ratio": "anyres",
    "mm_patch_merge_type": "spatial_unpad",
    "image_grid_pinpoints": [[width * SIDE, height * SIDE] for width, height in GRIDS],
}
NEEDS_HF = pytest.mark.skipif(
    tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 19),
    reason="models of transformers need version 5.19 or later",
)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoint(tmp_path_factory.mktemp("next") / "llava-v1.6-tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | TILES))
    weights = load_file(folder / "model.safetensors")
    noise = torch.randn(config["hidden_size"], generator=torch.Generator().manual_seed(0))
    newline = (0.1 * noise).half().float()  # LLaVA's loader reads half precision
    save_file(weights | {"model.image_newline": newline}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def converted(official: Path) -> Path:
    out = official.parent / "llava-v1.6-tiny-hf"
    assert cli.main(["model", "convert", str(official), str(out)]) == 0
    return out


def records(folder: Path, out: Path, tokens: int, *more: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    arguments = ["eval", "gqa", "--model", str(folder), "--tokens", str(tokens), "--limit", "2", "--batch", "2"]
    assert cli.main([*arguments, "--method", "visionzip", "--out", str(out), "--no-progress", *more]) == 0
    (run,) = [path.parent for path in out.rglob("config.json")]
    answers = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    return json.loads((run / "config.json").read_text()), answers


def counts(answer: dict[str, Any]) -> tuple[int, int, int]:
    before, after, structural = (answer["metadata"][name] for name in ("before", "after", "structural"))
    return before, after, structural


def check_records(folder: Path, tmp_path: Path) -> None:
    """The paper's layout has 2880 tokens of every image, and leaves exactly the budget."""
    for tokens in (640, 320, 160):
        config, answers = records(folder, tmp_path / str(tokens), tokens, "--host-option", "layout=2880")
        assert config["host_options"] == {"layout": "2880"}
        for answer in answers:
            assert counts(answer) == (2880, tokens, 0)


def test_the_official_checkpoint_runs_in_the_layout_of_the_paper(official: Path, tmp_path: Path) -> None:
    check_records(official, tmp_path)


@NEEDS_HF
def test_the_converted_checkpoint_runs_in_the_layout_of_the_paper(converted: Path, tmp_path: Path) -> None:
    check_records(converted, tmp_path)


@NEEDS_HF
@pytest.mark.parametrize("layout", ["stock", "2880"])
def test_both_hosts_see_and_say_the_same(official: Path, converted: Path, layout: str) -> None:
    """Pixels bit for bit; answers, counts and caches of images of several grids, of two in a prompt and of none."""
    from llava.mm_utils import process_images

    pair: list[Any] = [
        models.load(str(path), models.Loading("cpu", "float32"), {"layout": layout}) for path in (official, converted)
    ]
    benchmark = make_benchmark("gqa")
    questions = benchmark.load(DATA)[:2]
    folder = benchmark.place(DATA) / benchmark.images
    images = [open_image(folder / question.images[0]) for question in questions]
    images = [images[0].resize((300, 200)), images[1].crop((0, 0, 120, 50))]
    for image in images:
        pixels = process_images([image], pair[0].image_processor, pair[0].view.config)[0]
        processed = pair[1].processed(image)
        assert torch.equal(processed.inputs["pixel_values"][0], pixels)
    prompts = [models.Prompt(question.text, None, 4) for question in questions]
    for name, tokens in (("consensusdrop", 160), ("tome", 320)):
        said = []
        for host in pair:
            with host.attach(make(name), Budget(tokens)):
                pictures = host.encode(images)
                seen = [*([picture] for picture in pictures), pictures[:2], []]
                said.append(host.answer(seen, [*prompts, *prompts[:2]]))
        for left, right in zip(*said, strict=True):
            assert (left.text, left[1:4], left.prefill) == (right.text, right[1:4], right.prefill)


@NEEDS_HF
@torch.no_grad()
def test_logits_are_equal(official: Path, converted: Path) -> None:
    from llava.mm_utils import process_images

    host: Any = models.load(str(official), models.Loading("cpu", "float32"))
    model = transformers.LlavaNextForConditionalGeneration.from_pretrained(converted).eval()
    processor = transformers.AutoProcessor.from_pretrained(converted)
    benchmark = make_benchmark("gqa")
    question = benchmark.load(DATA)[0]
    image = open_image(benchmark.place(DATA) / benchmark.images / question.images[0])
    content = [{"type": "image"}, {"type": "text", "text": question.text}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    given = processor(images=image, text=text, return_tensors="pt")
    pixels = process_images([image], host.image_processor, host.model.config)
    ids = host.prompt_ids(models.Prompt(question.text))
    logits = host.model(ids[None], images=pixels, image_sizes=[image.size]).logits
    assert given.input_ids[given.input_ids != model.config.image_token_index].tolist() == ids[ids >= 0].tolist()
    assert torch.equal(model(**given).logits[..., :-1], logits)


# ---- the embedded model

PLACES = ("full", "consensusdrop", "consensusdrop+", "prumerge", "tome", "resize", "sparsevlm")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    out = tmp_path_factory.mktemp("converted") / "llava-mini-hf"
    assert cli.main(["model", "convert", "checkpoints/llava-mini", str(out)]) == 0
    loading = models.Loading("cpu", "float32")
    return models.load("checkpoints/llava-mini", loading), models.load(str(out), loading)


def answers(host: Any, name: str, budget: int = 64) -> list[Any]:
    """Six questions about six images, one about two of them, and one about none."""
    benchmark = make_benchmark("gqa")
    questions = benchmark.load(DATA)[:60:10]
    with host.attach(make(name), Budget(budget)):
        folder = benchmark.place(DATA) / benchmark.images
        pictures = host.encode([open_image(folder / question.images[0]) for question in questions])
        seen = [*([picture] for picture in pictures), pictures[:2], []]
        texts = [*(question.text for question in questions), "Which is larger?", "What is two plus two?"]
        return host.answer(seen, [models.Prompt(text, None, 8) for text in texts])


@NEEDS_HF
@pytest.mark.parametrize("name", PLACES)
def test_both_hosts_answer_alike(both: tuple[Any, Any], name: str) -> None:
    official, own = (answers(host, name) for host in both)
    for left, right in zip(official, own, strict=True):
        assert (left.text, left[1:5], left.prefill) == (right.text, right[1:5], right.prefill)
        for one, other in zip(left.outcomes, right.outcomes, strict=True):
            assert one[:4] == other[:4] and one.entering == other.entering
            for (_, chosen), (_, again) in zip(one.reductions, other.reductions, strict=True):
                assert torch.equal(chosen.kept, again.kept) and torch.equal(chosen.owner, again.owner)
