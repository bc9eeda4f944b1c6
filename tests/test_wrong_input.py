"""Wrong calls and wrong files: each ends in one line that names what is wrong, and nothing is silently ignored."""

import json
from pathlib import Path
from typing import Any

import compatibility
import pytest
import torch
from hf_models import CASES, QWEN2, SIGLIP, SQUARE, built
from transformers import StaticCache
from transformers.modeling_outputs import BaseModelOutput

from llava_consensus import attach, cli
from llava_consensus.errors import OptionError
from llava_consensus.training.scorer import ScorerWeights, store

ROOT = Path(__file__).parents[1]
MINI, DATA = str(ROOT / "checkpoints" / "llava-mini"), str(ROOT / "playground" / "mini")
FILES = {"not-json.jsonl": "not json", "empty.jsonl": "", "image.jpg": "this is text"}
ANSWERED = ["--image-folder", ".", "--answers-file", "answers.jsonl"]
CUSTOM = ["eval", "custom", "--model", MINI, *ANSWERED, "--question-file"]
EXAMPLES, JUDGE = ["paper", "figures", "--examples"], ["judge", "--judge-model", "m"]
OF = ["--benchmark", "pope", "--method", "x", "--model", "y"]
COMMANDS: dict[str, tuple[list[str], str]] = {  # words, and a word that the line must have
    "no command": ([], "COMMAND"),
    "unknown command": (["nonsense"], "nonsense"),
    "no benchmark": (["eval"], "BENCHMARK"),
    "unknown benchmark": (["eval", "gqqa"], "gqa"),
    "unknown argument": (["eval", "gqa", "--tokenz", "64"], "Did you mean '--tokens'"),
    "no tokens": (["eval", "gqa", "--tokens", "0"], "tokens=0"),
    "tokens in words": (["eval", "gqa", "--tokens", "many"], "many"),
    "share above one": (["eval", "gqa", "--tokens", "1.5"], "1.5"),
    "tokens twice": (["eval", "gqa", "--model", MINI, "--tokens", "64", "--tokens", "32"], "tokens"),
    "unknown method": (["eval", "gqa", "--method", "visionzap"], "visionzip"),
    "empty method": (["eval", "gqa", "--method", ""], "method"),
    "methods in the wrong order": (["eval", "gqa", "--method", "fastv+divprune"], "DivPrune"),
    "option without value": (["eval", "gqa", "--option", "alpha"], "KEY=VALUE"),
    "option twice": (["eval", "gqa", "--option", "alpha=0.1", "--option", "alpha=0.2"], "twice"),
    "unknown option": (["eval", "gqa", "--option", "alhpa=0.1"], "llava-consensus list consensusdrop"),
    "more merged than tokens": (["eval", "gqa", "--tokens", "64", "--merged", "65"], "merged=65"),
    "no such model": (["eval", "gqa", "--model", "/nowhere/llava"], "/nowhere/llava"),
    "no such data": (["eval", "gqa", "--model", MINI, "--data", "/nowhere"], "/nowhere"),
    "no limit": (["eval", "gqa", "--limit", "0"], "limit=0"),
    "limit in words": (["eval", "gqa", "--limit", "few"], "few"),
    "no sample": (["eval", "gqa", "--sample", "0"], "sample=0"),
    "limit and sample": (["eval", "gqa", "--limit", "2", "--sample", "3"], "limit=2 and sample=3: give one of them"),
    "no batch": (["eval", "gqa", "--batch", "0"], "batch=0"),
    "no workers": (["eval", "gqa", "--workers", "0"], "workers=0"),
    "shard that is not there": (["eval", "gqa", "--shard", "5/4"], "5/4"),
    "shard without a count": (["eval", "gqa", "--shard", "2"], "must be N/COUNT"),
    "unknown dtype": (["eval", "gqa", "--model", MINI, "--dtype", "float99"], "float32"),
    "question file of a benchmark": (["eval", "gqa", "--question-file", "x"], "for `eval custom`"),
    "no question file": (["eval", "custom", "--model", MINI], "question-file"),
    "question file that is not there": ([*CUSTOM, "none.jsonl"], "none.jsonl"),
    "empty file": ([*CUSTOM, "empty.jsonl"], "empty.jsonl"),
    "image that is text": (["ask", "image.jpg", "What?", "--model", MINI], "image.jpg"),
    "no frames": (["ask", "image.jpg", "What?", "--frames", "0"], "frames=0"),
    "drawing of no kind": (["ask", "image.jpg", "What?", "--overlay", "a.txt"], "must end with"),
    "drawing into no folder": (["ask", "image.jpg", "What?", "--overlay", "nowhere/a.png"], "no folder"),
    "image at an address": (["ask", "https://a.org/b.jpg", "What?", "--model", MINI], "addresses"),
    "answers that are not there": (["score", "gqa", "--data", DATA, "--answers", "none.jsonl"], "none.jsonl"),
    "answers that are no JSON": (["score", "gqa", "--data", DATA, "--answers", "not-json.jsonl"], "not-json.jsonl"),
    "score of an unknown benchmark": (["score", "nope", "--answers", "empty.jsonl"], "nope"),
    "judge without answers": ([*JUDGE, "mmvet", "--data", DATA, "--answers", "none.jsonl"], "none.jsonl"),
    "judge of a benchmark without one": ([*JUDGE, "gqa", "--answers", "empty.jsonl"], "gqa"),
    "runs that are not there": (["report", "compare", "none-1", "none-2"], "none-1"),
    "import of no results": (["report", "import", "not-json.jsonl", *OF], "not-json.jsonl"),
    "unknown name in list": (["list", "nope"], "nope"),
    "download of an unknown benchmark": (["data", "download", "pop"], "Did you mean 'pope'"),
    "check of nothing": (["model", "check", "/nowhere"], "/nowhere"),
    "merge of nothing": (["model", "merge", "/nowhere", "/nowhere", "out"], "/nowhere"),
    "unknown task": (["recommend", "--task", "reading"], "reading"),
    "recommendation for no tokens": (["recommend", "--tokens", "0"], "tokens=0"),
    "recommendation for everything": (["recommend", "--share", "1"], "share=1.0 must be between 0 and 1"),
    "recommendation for tokens and a share": (["recommend", "--tokens", "9", "--share", "0.1"], "give one of them"),
    "recommendation by tokens": (["recommend", "--model", "qwen2.5-vl", "--tokens", "64"], "Give share=0.1"),
    "unknown shape": (["bench", "--shape", "llava-99b"], "llava-99b"),
    "budgets in words": (["bench", "--tokens", "many"], "--tokens 'many': must be whole numbers"),
    "no images": (["bench", "--image-count", "0"], "image_count=0 must be a whole number of at least 1"),
    "no rounds": (["bench", "--repeats", "0"], "repeats=0 must be a whole number of at least 1"),
    "answers of one token": (["bench", "--length", "1"], "length=1 must be a whole number of at least 2"),
    "measurements into a folder": (["bench", "--out", "."], "--out .: is a folder"),
    "images that are nowhere": (["bench", "--images", "nowhere"], "--images nowhere: no .jpg or .png there"),
    "no images to break even": (["bench", "--break-even", "0"], "break_even"),
    "sweep of an unknown method": (["sweep", "--methods", "randon"], "unknown method 'randon'"),
    "sweep of an unknown option": (["sweep", "--methods", "random:sead=1"], "Did you mean 'seed'"),
    "sweep of an unknown benchmark": (["sweep", "--bench", "gqa gqaa"], "Did you mean 'gqa'"),
    "sweep over a budget in words": (["sweep", "--tokens", "64 many"], "must be whole numbers"),
    "sweep over no tokens": (["sweep", "--tokens", "64 0"], "tokens=0"),
    "server of nothing": (["serve", "/nowhere"], ""),  # without vLLM the line names it
    "plan of an unknown table": (["paper", "plan", "t99"], "t99"),
    "unknown table": (["paper", "table", "t99"], "t99"),
    "no examples": ([*EXAMPLES, "gqa", "--count", "0"], "count=0 must be a whole number of at least 1"),
    "examples at a share": ([*EXAMPLES, "gqa", "--budgets", "0.5"], "must be whole numbers"),
    "examples without tokens": ([*EXAMPLES, "gqa", "--budgets", "0"], "must be at least 1"),
    "examples of an unknown benchmark": ([*EXAMPLES, "nope"], "unknown benchmark"),
    "no port": (["demo", "--port", "0"], "port=0 must be in 1..65535"),
    "no upload": (["demo", "--max-upload", "0"], "max-upload=0.0 must be above 0"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_wrong_command_ends_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    words, named = COMMANDS[case]
    try:
        code = cli.main(words)
    except SystemExit as left:
        code = int(left.code or 0)
    out, err = capsys.readouterr()
    line, *files = err.strip().splitlines()
    assert code != 0 and line.startswith("error: ") and named in err and not out
    assert all(file.startswith("  ") for file in files)  # missing files are listed below the line
    assert {path.name for path in tmp_path.iterdir()} <= {*FILES, "results"}


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no method": ({"method": None}, "method=None"),
    "list of methods": ({"method": ["fastv"]}, "method="),
    "bytes": ({"method": b"fastv"}, "method="),
    "tokens as method": ({"method": 64}, "given as tokens=64"),
    "no tokens": ({"tokens": None}, "tokens=None"),
    "list of tokens": ({"tokens": [64]}, "tokens="),
    "flag": ({"tokens": True}, "tokens=True"),
    "nan": ({"tokens": float("nan")}, "tokens=nan"),
    "merged as share": ({"merged": 0.5}, "merged=0.5"),
    "host options in words": ({"host_options": "x"}, "host_options"),
    "position policy": ({"positions": "spread out"}, "positions"),
    "no alpha": ({"alpha": None}, "alpha=None"),
    "seed in words": ({"method": "random", "seed": "x"}, "seed"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_wrong_option_of_attach_is_named(case: str) -> None:
    options, named = OPTIONS[case]
    with pytest.raises(OptionError) as raised:
        attach(object(), **options)
    assert named in str(raised.value) and "\n" not in str(raised.value)


ImageTextToTextPipeline = type("ImageTextToTextPipeline", (type("Pipeline", (), {}),), {})
PASS = r"pass pipe\.model"


@pytest.mark.parametrize(
    ("model", "words"),
    [("owner/name", PASS), (ImageTextToTextPipeline(), PASS), *((one, "^model of class") for one in (None, 7, json))],
)
def test_what_is_no_model_is_refused(model: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        attach(model)


def test_what_only_the_model_can_say_is_refused_when_a_method_is_attached(tmp_path: Path) -> None:
    model = CASES["llava"].build()
    with pytest.raises(OptionError, match="LlavaModel makes no tokens: attach to the whole model"):
        attach(model.model)
    for layer in (99, -1):
        with pytest.raises(OptionError, match=rf"layer={layer} must be in 1\.\."):
            attach(model, "fastv", layer=layer)
    with pytest.raises(OptionError, match="total=3 is below tokens=64"):
        attach(model, "divprune", tokens=64, total=3)
    store(ScorerWeights(32, 8, seed=0), tmp_path / "scorer.safetensors")
    with pytest.raises(OptionError, match="of width 32, and those of LlavaForConditionalGeneration have 64"):
        attach(model, "scorer", weights=str(tmp_path / "scorer.safetensors"))
    with pytest.raises(OptionError, match="its `generate` passes by its forward"):
        attach(compatibility.small_model("blip-2"), "divprune")


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [  # by a model, an entry of its configuration and a method
    ("llava vit", {}, "resize", "CLIP, SigLIP and DINOv2 towers only. Take"),
    ("qwen2_vl", {"vision_config": QWEN2 | {"spatial_merge_size": 4}}, "resize", "spatial_merge_size=4: Resize is"),
    ("llava", {"vision_feature_layer": [-2, -3]}, "tome", r"\[-2, -3\]: features of several"),
    ("llava", {"vision_feature_select_strategy": "full"}, "tome", "'full' does not fit a clip_vision_model"),
    ("llava", {"vision_config": SQUARE | SIGLIP}, "tome", "'default' does not fit a siglip_vision_model"),
    ("llava_next", {}, "resize:tokens=27+visionzip", r"VisionZip .* Resize leaves tiles of several sizes \(5, 6\)"),
    ("llava_next_video video", {}, "resize", "pools the patches of a video"),
]


@pytest.mark.parametrize(("case", "config", "method", "line"), REFUSED)
def test_no_method_acts_where_it_is_not_known_how(case: str, config: dict[str, Any], method: str, line: str) -> None:
    model = built(CASES[case].kind, **CASES[case].config | config)
    with pytest.raises(OptionError, match=line), attach(model, method, tokens=15):
        model(**CASES[case].inputs())


@torch.no_grad()
def test_what_cross_attention_cannot_be_given_is_refused() -> None:
    florence, llama = (compatibility.small_model(kind) for kind in ("florence2", "mllama"))
    given, own = compatibility.across(florence, 2), compatibility.across(llama)
    encoder, embeds = florence.get_encoder(), torch.ones(*given["input_ids"].shape, 128)
    dense = encoder(inputs_embeds=embeds)[0]
    with attach(florence, "divprune", tokens=20), attach(llama, "divprune", tokens=20):
        states = BaseModelOutput(florence(**given).encoder_last_hidden_state)
        assert torch.equal(encoder(inputs_embeds=embeds)[0], dense)  # its rows are of no prompt
        one = {"input_ids": given["input_ids"] * torch.tensor([[1], [0]]), "pixel_values": given["pixel_values"][:1]}
        used, static = llama(**own).past_key_values, StaticCache(llama.config.text_config, 16)
        for model, inputs, why in (
            (florence, given | {"encoder_outputs": states}, "Pass the mask of their rows"),
            (florence, given | one, "lose different numbers of rows"),
            *((llama, own | {"past_key_values": cache}, "later turn, or in a static") for cache in (used, static)),
        ):
            with pytest.raises(OptionError, match=why):
                model(**inputs)


def test_what_a_tower_of_official_llava_does_not_give_is_refused(llava_model: Any, monkeypatch: Any) -> None:
    tower = llava_model.get_vision_tower()
    for part, name, value, method, why in (
        (tower, "is_loaded", False, "divprune", r"call model\.get_vision_tower\(\)\.load_model\(\) first"),
        (tower, "select_feature", "cls_patch", "divprune", "'cls_patch' must be 'patch'"),
        (tower.vision_tower.config, "model_type", "eva", "tome", "done in CLIP and SigLIP towers only"),
    ):
        with monkeypatch.context() as patch, pytest.raises(OptionError, match=why):
            patch.setattr(part, name, value)
            attach(llava_model, method)
