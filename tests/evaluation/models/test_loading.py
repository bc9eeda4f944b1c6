"""How checkpoints are loaded: options, quantised models, a vision tower that was trained along, converted ones."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fakes import config, make_place
from models import tiny_llava
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llava_consensus import attach, cli
from llava_consensus.cli import arguments, parser
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import make as make_benchmark
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.models.convert import convert
from llava_consensus.evaluation.models.llava import PREFIX
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.configuration import prepare
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.hosts.facts import check_version
from llava_consensus.hosts.official_model import check_llava_version
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.training.official import check as check_training
from llava_consensus.training.plan import TrainingPlan

MINI, DATA, SIDE = Path("checkpoints/llava-mini"), Path("playground/mini"), 192
PLAIN = Loading("cpu", "float32")
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
NEEDS_HF = pytest.mark.skipif(VERSION < (5, 19), reason="models of transformers need version 5.19 or later")


def test_a_value_outside_its_bound_is_refused() -> None:
    for told, why in (
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"device_map": "everywhere"}, "unknown device map"),
        ({"device_map": "auto", "device": "cpu"}, "a map takes all devices"),
        ({"bits": 3}, "unknown bits 3. Known: 4, 8"),
        ({"attention": "flash"}, "unknown attention 'flash'.*flash_attention_2"),
    ):
        with pytest.raises(OptionError, match=why):
            Loading(**told)


def test_every_option_of_the_command_line_arrives() -> None:
    told = "--device cpu --dtype bfloat16 --load-8bit --attn eager --revision v1 --trust-remote-code"
    for command in (["eval", "gqa"], ["sweep"], ["ask", "p.png", "what?"]):
        given = parser().parse_args([*command, *told.split()])
        assert arguments.loading(given) == Loading("cpu", "bfloat16", None, 8, "eager", "v1", True)
    given = parser().parse_args(["eval", "gqa", "--device-map", "auto", "--load-4bit"])
    assert arguments.loading(given) == Loading(device_map="auto", bits=4)


def test_a_run_describes_what_may_change_an_answer_and_refuses_what_cannot_work(tmp_path: Path) -> None:
    data = make_place(tmp_path)
    plain = config(data, data / "model")
    assert "loading" not in prepare(plain).description
    eager = prepare(replace(plain, loading=Loading("cpu", attention="eager"))).description
    assert eager["loading"] == {"attention": "eager"} and eager["dtype"] == "auto" and eager["device"] == "cpu"
    flash = Loading("cpu", attention="flash_attention_2")
    assert prepare(replace(plain, loading=flash)).loading == flash
    with pytest.raises(OptionError, match=r"FastV cuts between decoder layers.*Take sdpa"):
        prepare(replace(config(data, data / "model", method="fastv"), loading=flash))
    with pytest.raises(OptionError, match="Take one worker"):
        loop.run(replace(plain, loading=Loading(device_map="auto")), tmp_path / "out", Execution(workers=2))


def test_another_version_of_transformers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.57.6", "5.18.1", "5.25.0", "6.0"):
        with pytest.raises(OptionError, match=rf"transformers {version}: .*run on 5\.19 to 5\.24"):
            check_version(version)
        monkeypatch.setattr("llava_consensus.hosts.official_model.version", lambda _, found=version: found)
        with pytest.raises(OptionError, match=rf"transformers {version}: .*its own pin, and on 5\.19 to 5\.23"):
            check_llava_version()
    check_version("5.19.0.dev0")
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaForConditionalGeneration"]}')
    monkeypatch.setattr("llava_consensus.evaluation.models.hf.version", lambda package: "4.37.2")
    with pytest.raises(OptionError, match=r"transformers 4\.37\.2"):
        models.check(str(tmp_path))


def test_official_llava_is_given_the_kernel_and_no_map_but_auto() -> None:
    host: Any = models.load(str(MINI), Loading("cpu", attention="eager"))
    assert host.model.config._attn_implementation == "eager"
    with pytest.raises(OptionError, match="with auto only"):
        models.load(str(MINI), Loading(device_map="balanced"))


class Packed(nn.Module):
    """A linear layer as a quantiser leaves it: whole numbers and a scale, unpacked when it runs. No plain weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scale = nn.Parameter(weight.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.packed = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias, self.in_features, self.out_features = linear.bias, linear.in_features, linear.out_features

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.packed * self.scale, self.bias)


@NEEDS_HF
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_quantised_projections_work_by_hooks(family: str) -> None:
    """They answer as plain layers with the unpacked weights do."""
    from hf_models import CASES, prompts

    case = CASES[family]
    packed, plain = case.build(), case.build()
    for name, linear in list(plain.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            packed.set_submodule(name, made := Packed(linear))
            linear.weight = nn.Parameter(made.packed * made.scale)
    inputs = prompts([1, 7, case.picture(0), 8, 9], [1, case.picture(1), 5])
    for name in ("consensusdrop", "consensusdrop+", "prumerge", "tome", "resize", "fastv", "sparsevlm", "dart"):
        answers: list[Any] = []
        for model in (packed, plain):
            try:
                with attach(model, name, tokens=case.square):
                    answers.append(model.generate(**inputs, max_new_tokens=4, do_sample=False).tolist())
            except OptionError as error:  # what this family cannot do at all is refused alike
                answers.append(str(error))
        assert answers[0] == answers[1], name


def checkpoint(folder: Path, change: Any = None, name: str = "model.safetensors", **entries: Any) -> Path:
    """The mini model with a tower of its own: the stock one is beside it, with other weights."""
    shutil.copytree(MINI, folder, ignore=shutil.ignore_patterns("README.md", ".work"))
    config = json.loads((folder / "config.json").read_text()) | {"unfreeze_mm_vision_tower": True, **entries}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    stock = load_file(MINI / "vision_tower" / "model.safetensors")
    own = {PREFIX + key: values + 0.01 for key, values in stock.items() if key.startswith("vision_model.")}
    if change:
        change(own)
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
        torch.save(weights | own, folder / name)
    else:
        save_file(weights | own, folder / name, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_checkpoints_own_tower_is_loaded(tmp_path: Path, name: str) -> None:
    host: Any = models.load(str(checkpoint(tmp_path / "llava-v1.6-tiny", name=name)), PLAIN)
    stock = load_file(MINI / "vision_tower" / "model.safetensors")
    stock = {key.removeprefix("vision_model."): values for key, values in stock.items()}
    for key, values in host.model.get_vision_tower().vision_tower.state_dict().items():
        if not key.endswith("position_ids"):
            assert torch.equal(values, stock[key.removeprefix("vision_model.")] + 0.01), key
    assert host.model.config.unfreeze_mm_vision_tower


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own.clear(), "103 tensors missing"),
        (lambda own: own.pop(next(iter(own))), "1 tensor missing"),
        (lambda own: own.update({PREFIX + "vision_model.more": torch.zeros(1)}), "1 tensor left over"),
        (lambda own: own.update({next(iter(own)): torch.zeros(3)}), "1 tensor of another shape"),
    ],
)
def test_a_tower_that_is_not_whole_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        models.load(str(checkpoint(tmp_path / "llava-v1.6-tiny", change)), PLAIN)


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("image_aspect_ratio", "anyres_max_9", r"knows square\|pad\|anyres, "),
        ("mm_patch_merge_type", "spatial_maxpool2x2", r"\|spatial_unpad, "),
    ],
)
def test_images_that_official_llava_lays_out_otherwise_are_refused_before_weights(
    tower_folder: Path, tmp_path: Path, name: str, value: str, known: str
) -> None:
    """By check, load, conversion, training and attach; a merge that nothing reads is let through."""
    entries = {"image_aspect_ratio": "anyres", name: value}
    folder = checkpoint(tmp_path / "llava-tiny", **entries)
    (folder / "model.safetensors").write_bytes(bytes(1000))
    plan = TrainingPlan(str(folder), tmp_path, tmp_path, tmp_path / "llava-out", None, ())
    refused: list[Callable[[], object]] = [
        lambda: models.check(str(folder)),
        lambda: models.load(str(folder), Loading("cpu")),
        lambda: convert(folder, tmp_path / "out"),
        lambda: check_training(plan, folder),
        lambda: attach(tiny_llava(tower_folder, **entries), tokens=4),
    ]
    for call in refused:
        with pytest.raises(OptionError, match=f"{name}='{value}': .*{known}"):
            call()
    config = json.loads((folder / "config.json").read_text()) | {"image_aspect_ratio": "pad"}
    (folder / "config.json").write_text(json.dumps(config))
    assert models.check(str(folder))


GRIDS = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]  # LLaVA 1.6's, width and height in tiles
TILES: dict[str, Any] = {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad"}
TILES["image_grid_pinpoints"] = [[width * SIDE, height * SIDE] for width, height in GRIDS]


def newline(own: dict[str, Tensor]) -> None:
    noise = torch.randn(192, generator=torch.Generator().manual_seed(0))
    own["model.image_newline"] = (0.1 * noise).half().float()  # LLaVA's loader reads half precision


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The embedded model and one of LLaVA 1.6's kind, a tower of its own and tiles, as they are and converted."""
    place, found = tmp_path_factory.mktemp("converted"), {}
    for kind, own in (("1.5", MINI), ("1.6", checkpoint(place / "llava-v1.6-tiny", newline, **TILES))):
        found[kind] = own, place / f"{own.name}-hf"
        assert cli.main(["model", "convert", *map(str, found[kind])]) == 0
    return found


def seen() -> tuple[list[str], list[Any]]:
    """Questions about six images of several sizes and grids."""
    benchmark = make_benchmark("gqa")
    questions = benchmark.load(DATA)[:60:10]
    images = [open_image(benchmark.place(DATA) / benchmark.images / one.images[0]) for one in questions]
    images[:2] = images[0].resize((300, 200)), images[1].crop((0, 0, 120, 50))
    return [one.text for one in questions], images


ON_TILES = [("1.6", layout, name, 160) for layout in ("stock", "2880") for name in ("consensusdrop", "visionzip")]
PLACES = ("full", "consensusdrop", "consensusdrop+", "prumerge", "tome", "resize", "sparsevlm")


@NEEDS_HF
@pytest.mark.parametrize(
    ("kind", "layout", "name", "tokens"),
    [*(("1.5", None, name, 64) for name in PLACES), ("1.6", "2880", "tome", 320), *ON_TILES],
)
def test_both_hosts_see_and_say_the_same(
    folders: dict[str, tuple[Path, Path]], kind: str, layout: str | None, name: str, tokens: int
) -> None:
    """Pixels bit for bit; answers, counts, caches, costs and what was kept: about one image each, two and none."""
    told, (texts, images), found = {"layout": layout} if layout else {}, seen(), []
    options = {"scap_rope": kind == "1.5"} if name == "consensusdrop" else {}
    for folder in folders[kind]:
        host: Any = models.load(str(folder), PLAIN, told)
        with host.attach(make(name, **options), Budget(tokens)):
            pictures = host.encode(images)
            shown = [*([picture] for picture in pictures), pictures[:2], []]
            asked = [models.Prompt(text, None, 8) for text in (*texts, "Which is larger?", "What is two plus two?")]
            pixels = [host.processed(one).inputs["pixel_values"][0] for one in images] if found else None
            found.append((host.answer(shown, asked), pixels or [host.pixels(one) for one in images], host.shape()))
    (official, own_pixels, shape), (converted, pixels, other_shape) = found
    assert all(map(torch.equal, own_pixels, pixels))
    assert other_shape == shape._replace(vocabulary=shape.vocabulary + 1)  # `<image>` is a word
    for left, right in zip(official, converted, strict=True):
        assert (left.text, left[1:5], left.prefill) == (right.text, right[1:5], right.prefill)
        for one, other in zip(left.outcomes, right.outcomes, strict=True):
            assert one[:4] == other[:4] and one.entering == other.entering
            assert layout != "2880" or one[1:4] == (2880, tokens, 0)  # the paper's layout leaves exactly the budget
            for (_, chosen), (_, again) in zip(one.reductions, other.reductions, strict=True):
                assert torch.equal(chosen.kept, again.kept) and torch.equal(chosen.owner, again.owner)


@NEEDS_HF
@torch.no_grad()
def test_logits_are_equal(folders: dict[str, tuple[Path, Path]]) -> None:
    """Of LLaVA 1.6's kind; those of 1.5 are compared in evaluation/models/test_convert.py."""
    official, converted = folders["1.6"]
    host: Any = models.load(str(official), PLAIN)
    model = transformers.LlavaNextForConditionalGeneration.from_pretrained(converted).eval()
    processor = transformers.AutoProcessor.from_pretrained(converted)
    (text, *_), (image, *_) = seen()
    content = [{"type": "image"}, {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    given = processor(images=image, text=prompt, return_tensors="pt")
    ids = host.prompt_ids(models.Prompt(text))
    logits = host.model(ids[None], images=[host.pixels(image)], image_sizes=[image.size]).logits
    assert given.input_ids[given.input_ids != model.config.image_token_index].tolist() == ids[ids >= 0].tolist()
    assert torch.equal(model(**given).logits[..., :-1], logits)
    host = models.load(str(converted), Loading(dtype="float32", device_map="auto", attention="eager"))
    assert host.model.config._attn_implementation == "eager" and host.model.dtype == torch.float32
