"""CDPruner, and the text tower it needs of a host: maths by hand, CLIP's own features as oracle, and the embedded model
with a whole CLIP model for a tower.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hf_models import CASES, prompts
from models import IMAGE, LENGTH, tiny_llava, write_clip
from prompts import ANYRES, batch, row, tiles
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPTextModelWithProjection
from units import of_batch, unit

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.inputs import BY_WORDS, NO_WORDS
from llava_consensus.methods import make
from llava_consensus.methods.cdpruner import SHORT_ANSWER, greedy_map, relevance
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.tokens import ClipSides, WholeImages


def test_no_token_is_repeated_past_the_rank_of_the_kernel() -> None:
    """The authors' loop divides by the root of a negative number here and repeats one index."""
    tokens = unit(size=25)  # six channels: rank six; the number of tokens is odd
    result = make("cdpruner").reduce(tokens, Budget(15))
    assert all(len(set(kept)) == 15 for kept in result.kept.tolist()) and torch.isfinite(result.fused).all()
    alone = (make("cdpruner").reduce(of_batch(tokens, index), Budget(15)).kept[0].tolist() for index in range(2))
    assert result.kept.tolist() == list(alone)
    same = tokens._replace(projected=torch.ones(2, 25, 6), clip=tokens.clip._replace(patches=torch.ones(2, 25, 7)))
    assert make("cdpruner").reduce(same, Budget(3)).kept.tolist() == [[0, 1, 2]] * 2


def test_relevance_is_the_negated_cosine_scaled_over_the_tiles_of_a_picture() -> None:
    patches = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[-1.0, 0.0], [3.0, 4.0]], [[2.0, 0.0], [0.0, 5.0]]])
    text = torch.tensor([[[1.0, 0.0], [9.0, 9.0]]]).expand(3, -1, -1)
    real = torch.tensor([[True, False]]).expand(3, -1)  # the second segment is padding
    whole = WholeImages(torch.tensor([7, 7, 8]), torch.ones(3, 2, dtype=torch.bool))
    found = relevance(ClipSides(patches, text, real), whole)
    expected = torch.tensor([[0.0, 0.5], [1.0, 0.2], [0.0, 1.0]])  # cosines 1 0 | -1 .6 of one image, 1 0 of another
    assert torch.allclose(found, expected, atol=2e-6) and (found > 0).all()
    toward = relevance(ClipSides(patches, text, real), whole, negated=False)
    assert torch.allclose(toward, 1 - expected, atol=2e-6) and (toward > 0).all()
    cut = whole._replace(present=torch.tensor([[True, True], [False, True], [True, True]]))  # unpadding took the -1
    assert torch.allclose(relevance(ClipSides(patches, text, real), cut)[:2, 1], torch.tensor([1.0, 0.4]), atol=2e-6)


def test_theta_moves_from_diversity_to_relevance() -> None:
    tokens = unit(size=24)
    blind = make("cdpruner", theta=0.0).reduce(tokens, Budget(5)).kept
    other = tokens._replace(clip=unit(size=24, seed=8).clip)
    assert torch.equal(make("cdpruner", theta=0.0).reduce(other, Budget(5)).kept, blind)
    assert not torch.equal(make("cdpruner", theta=0.9).reduce(tokens, Budget(5)).kept, blind)
    found = make("cdpruner", theta=0.999).reduce(tokens, Budget(1))
    assert torch.equal(found.kept[:, 0], found.fused.argmax(1))
    with pytest.raises(OptionError, match="theta=1"):
        make("cdpruner", theta=1)
    with pytest.raises(OptionError, match="relevance='both' must be one of negated, cosine"):
        make("cdpruner", relevance="both")


@torch.no_grad()
def test_without_clip_relevance_is_by_the_embeddings_of_the_words_after_the_picture() -> None:
    case = CASES["llava"]
    model, picture = case.build(), case.picture(0)
    with attach(model, "cdpruner", tokens=5) as attached:
        model(**prompts([1, 7, picture, 8, 9], [1, picture, 6]))
        assert attached.notes == (BY_WORDS,)
        found = [outcome.reductions[0][1] for outcome in attached.outcomes]
        model(**prompts([1, 7, picture]))
        assert attached.notes == (BY_WORDS, NO_WORDS)
        ((_, blind),) = attached.outcomes[0].reductions
    (tokens,) = model.model.get_image_features(picture.pixels["pixel_values"], return_dict=True).pooler_output
    direction = torch.nn.functional.normalize(tokens, dim=-1)
    for words, reduction in (([8, 9], found[0]), ([6], found[1])):
        text = torch.nn.functional.normalize(model.get_input_embeddings()(torch.tensor(words)), dim=-1)
        raw = (direction @ text.T).mean(1)
        weight = (raw - raw.min() + 1e-6) / (raw.max() - raw.min())
        assert torch.allclose(reduction.fused[0], weight, atol=1e-5)
        kernel = weight[:, None] * (direction @ direction.T) * weight
        assert reduction.kept[0].tolist() == sorted(greedy_map(kernel[None], 5)[0].tolist())
    assert blind.fused.tolist() == [[1.0] * 16]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("whole_clip")
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    model = write_clip(folder, {**vision, "image_size": IMAGE, "patch_size": 14})
    size = {"height": IMAGE, "width": IMAGE}
    CLIPImageProcessor(size={"shortest_edge": IMAGE}, crop_size=size).save_pretrained(folder)
    return SimpleNamespace(folder=folder, clip=model)


@torch.no_grad()
def test_relevance_on_a_host_equals_clips_own_features(clip_folder: SimpleNamespace) -> None:
    model, clip = tiny_llava(clip_folder.folder), clip_folder.clip
    questions = ["what is red?", "is there a very long dog behind the second or the third tree?"]  # one and three
    assert make("cdpruner").query(questions[0] + SHORT_ANSWER) == questions[0]  # the sentence is no question
    ids, mask = batch(row(5), row(6))
    images = tiles(2)
    with attach(model, "cdpruner", tokens=6) as attached:
        with attached.asking([questions[0] + SHORT_ANSWER, questions[1]]):
            model(ids, images=images, attention_mask=mask)
        found = [outcome.reductions[0][1] for outcome in attached.outcomes]
    text_model = CLIPTextModelWithProjection.from_pretrained(clip_folder.folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(clip_folder.folder)
    vision = clip.vision_model
    hidden = vision(images, output_hidden_states=True).hidden_states[-2][:, 1:]
    patches = clip.visual_projection(vision.post_layernorm(hidden))
    for index, question in enumerate(questions):
        numbers = tokenizer(question).input_ids
        segments = [numbers[start : start + LENGTH] for start in range(0, len(numbers), LENGTH)]
        assert len(segments) == (1, 3)[index]
        embeds = []
        for one in segments:
            blank = [0] * (LENGTH - len(one))
            given = dict(input_ids=torch.tensor([one + blank]), attention_mask=torch.tensor([[1] * len(one) + blank]))
            embeds.append(text_model(**given).text_embeds[0])
        raw = -torch.cosine_similarity(patches[index][:, None], torch.stack(embeds)[None], dim=-1).mean(1)
        expected = (raw - raw.min() + 1e-6) / (raw.max() - raw.min())
        assert torch.allclose(found[index].fused[0], expected, atol=1e-4) and found[index].kept.shape == (1, 6)


@torch.no_grad()
def test_pictures_of_a_prompt_are_scaled_by_what_unpadding_leaves_of_each(clip_folder: SimpleNamespace) -> None:
    model = tiny_llava(clip_folder.folder, **ANYRES, mm_patch_merge_type="spatial_unpad")
    (together, _), (single, _) = batch(row(5, images=2)), batch(row(5))
    images, sizes = [tiles(5), tiles(5, 3)], [(100, 60), (100, 100)]
    with attach(model, "cdpruner", tokens=12, tile_budget="global") as attached:
        with attached.asking(["where is it?"]):
            model(together, images=images, image_sizes=sizes)
        found = [outcome.reductions[0][1].fused for outcome in attached.outcomes]
        for one, image, size in zip(found, images, sizes, strict=True):
            with attached.asking(["where is it?"]):
                model(single, images=[image], image_sizes=[size])
            assert torch.allclose(one, attached.outcomes[0].reductions[0][1].fused, atol=1e-5)
            assert float(one.max()) == pytest.approx(1, abs=1e-5)  # by a token that is there


def test_what_it_needs_is_said_when_it_is_missing(tower_folder: Path, clip_folder: SimpleNamespace) -> None:
    with pytest.raises(OptionError, match=r"is only a vision model.*Use a checkpoint"):
        attach(tiny_llava(tower_folder), "cdpruner", tokens=6)
    model, (ids, _) = tiny_llava(clip_folder.folder), batch(row(5))
    with attach(model, "cdpruner", tokens=6) as attached:
        with pytest.raises(OptionError, match=r"reads the question: say it around the call.* 1 texts, one for each"):
            model(ids, images=tiles(1))
        with pytest.raises(OptionError, match="1 texts, one for each"), attached.asking(["one", "two"]):
            model(ids, images=tiles(1))
    dense = model(ids, images=tiles(1)).logits
    with attach(model, "cdpruner", tokens=16):
        assert torch.equal(model(ids, images=tiles(1)).logits, dense)  # the full model asks for no question
