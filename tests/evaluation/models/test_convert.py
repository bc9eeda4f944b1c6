"""A checkpoint in Hugging Face's layout answers like the official one."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_data import MINI, mini_checkpoint

from llava_consensus import cli
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import make
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Prompt
from llava_consensus.evaluation.models.convert import EMBEDDING, HEAD

DATA = Path("playground/mini")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "llava-mini-hf"
    assert cli.main(["model", "convert", str(MINI), str(out)]) == 0
    return out


@torch.no_grad()
def test_ids_pixels_logits_and_answers_are_those_of_the_official_model(converted: Path) -> None:
    from llava.mm_utils import process_images

    official: Any = models.load(str(MINI), models.Loading("cpu", "float32"))
    model = transformers.LlavaForConditionalGeneration.from_pretrained(converted).eval()
    processor = transformers.AutoProcessor.from_pretrained(converted)
    benchmark, alone = make("gqa"), []
    for question in benchmark.load(DATA)[:120:20]:
        image = open_image(benchmark.place(DATA) / benchmark.images / question.images[0])
        content = [{"type": "image"}, {"type": "text", "text": question.text}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        given = processor(images=image, text=text, return_tensors="pt")
        ids = official.prompt_ids(Prompt(question.text))
        image_id = model.config.image_token_index
        assert given.input_ids[given.input_ids != image_id].tolist() == ids[ids >= 0].tolist()
        pixels = process_images([image], official.image_processor, official.model.config)
        assert torch.equal(given.pixel_values, pixels)
        assert torch.equal(model(**given).logits[..., :-1], official.model(ids[None], images=pixels).logits)
        told = {"return_dict_in_generate": True, "output_logits": True}
        output = model.generate(**given, max_new_tokens=8, do_sample=False, **told)
        said = output.sequences[:, given.input_ids.shape[1] :]
        prompt = Prompt(question.text, None, 8, sure=True)
        answer = official.answer([official.encode([image])], [prompt])[0]
        assert processor.batch_decode(said, skip_special_tokens=True)[0].strip() == answer.text
        taken = torch.stack(output.logits, dim=1).log_softmax(dim=-1).gather(-1, said[..., None])  # its end included
        assert answer.logprob == pytest.approx(taken.mean().item(), abs=1e-4)
        alone.append((official.encode([image]), prompt, said.shape[1], answer.logprob))
    encoded, asked, lengths, logprobs = zip(*alone, strict=True)
    padded = official.answer(list(encoded), list(asked))
    assert [one.logprob for one in padded] == pytest.approx(logprobs, abs=1e-3) and len(set(lengths)) > 1
    assert official.answer([encoded[0]], [Prompt("What?", None, 1)])[0].logprob is None


def test_a_model_may_have_more_rows_than_its_tokenizer_has_words(tmp_path: Path) -> None:
    spare, words = 3, json.loads((MINI / "config.json").read_text())["vocab_size"]
    source = mini_checkpoint(tmp_path / "llava-spare", vocab_size=words + spare)
    weights = load_file(source / "model.safetensors")
    for name in weights.keys() & {EMBEDDING, HEAD}:
        weights[name] = torch.cat((weights[name], weights[name].new_zeros(spare, weights[name].shape[1])))
    (source / "model.safetensors").unlink()
    torch.save(weights, source / "pytorch_model.bin")  # as older checkpoints have them
    assert cli.main(["model", "convert", str(source), str(tmp_path / "converted")]) == 0
    said = []
    for folder in (source, tmp_path / "converted"):
        host = models.load(str(folder), models.Loading("cpu", "float32"))
        picture = open_image(sorted((DATA / "eval/gqa/data/images").iterdir())[0])
        said += host.answer([host.encode([picture])], [Prompt("What is at the center of the picture?", None, 8)])
    assert said[0].text == said[1].text and said[0].before == said[1].before == 576


def test_what_cannot_be_converted_says_why(converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    for source, out, message in (
        (tmp_path / "nothing", tmp_path / "out", "no config.json"),
        (tmp_path / "other", tmp_path / "out", "only official LLaVA with a Llama model"),
        (MINI, converted, "is there already"),
    ):
        assert cli.main(["model", "convert", str(source), str(out)]) == 3
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tower", ["..", "a/../..", None, 5])
def test_a_tower_that_leads_away_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], tower: Any) -> None:
    source = mini_checkpoint(tmp_path / "in" / "source", mm_vision_tower=tower)
    for name in ("config.json", "preprocessor_config.json", "model.safetensors"):
        shutil.copyfile(MINI / "vision_tower" / name, tmp_path / "in" / name)
    assert cli.main(["model", "convert", str(source), str(tmp_path / "in" / "out")]) == 3
    assert "is not in the same folder" in capsys.readouterr().err and not (tmp_path / "in" / "out").exists()


def test_a_full_disk_leaves_nothing_that_the_next_call_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, full = tmp_path / "out", Mock(side_effect=SafetensorError("I/O error: No space left"))
    with monkeypatch.context() as patched:
        patched.setattr("llava_consensus.evaluation.models.weights.save_file", full)
        assert cli.main(["model", "convert", str(MINI), str(out)]) == 3
    assert "No space left" in capsys.readouterr().err and not list(tmp_path.iterdir())
    (tmp_path / ".out.new").mkdir()  # of a call that was killed
    (tmp_path / ".out.new" / "model-00009.safetensors").write_bytes(b"older")
    assert cli.main(["model", "convert", str(MINI), str(out)]) == 0
    assert list(tmp_path.iterdir()) == [out] and not (out / "model-00009.safetensors").exists()
