"""The page's state without a browser: forms become requests, requests are answered, answers become HTML."""

import json
import re
from contextlib import nullcontext
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeHost, reduced
from models import tiny_llava
from PIL import Image

from llava_consensus import cli
from llava_consensus.demo import desk, markup
from llava_consensus.demo.desk import DemoPicture, Desk, Form, Side, SideAnswer, offered, samples
from llava_consensus.demo.seen import Seen, card, counted, seen_by
from llava_consensus.errors import ConsensusError, MissingDependency, OptionError, QuestionError
from llava_consensus.evaluation.media import Clip
from llava_consensus.evaluation.models import Loading, load
from llava_consensus.evaluation.models.base import Encoding
from llava_consensus.evaluation.models.llava import LlavaRunner
from llava_consensus.evaluation.report.overlay import view
from llava_consensus.hosts.base import PictureOutcome, Tiles
from llava_consensus.hosts.patches import Patches
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

ROOT = Path(__file__).parents[2]
MINI = ROOT / "playground" / "mini"


def form(**changes: Any) -> Form:
    return Form(**{"picture": "a.png", "question": "What is it?", "second": "", "left": "consensusdrop",
                   "right": "random", "tokens": 64.0} | changes)  # fmt: skip


def test_a_form_becomes_two_sides_of_one_question() -> None:
    sample = DemoPicture(Path("a.png"), {"What is it?": "a cat"})
    asked = desk.request(form(alpha=0.2, positions="keep"), [sample])
    assert asked.tokens == 64 and isinstance(asked.tokens, int)
    left, right = asked.sides
    assert (left.method, left.options) == ("consensusdrop", {"alpha": 0.2, "positions": "keep"})
    assert (right.method, right.options) == ("random", {"positions": "keep"}), "random has no alpha"
    assert left.question == right.question == "What is it?" and left.truth == right.truth == "a cat"


def test_one_method_may_have_two_questions() -> None:
    sides = desk.request(form(second=" Where \n is it? ", right="consensusdrop")).sides
    assert [side.question for side in sides] == ["What is it?", "Where is it?"]
    assert sides[0].method == sides[1].method and sides[1].truth == ""


@pytest.mark.parametrize(("choice", "alpha"), [("vision-only", 1.0), ("cross-only", 0.0)])
def test_the_two_signals_can_be_chosen_alone(choice: str, alpha: float) -> None:
    side = desk.request(form(left=choice, alpha=0.4)).sides[0]
    assert (side.method, side.options["alpha"], side.title) == ("consensusdrop", alpha, choice)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"picture": None}, "no picture yet"),
        ({"question": "  "}, "no question yet"),
        ({"question": None}, "no question yet"),
        ({"question": "x" * 401}, "401 characters: take at most 400"),
        ({"left": "magic"}, "unknown method"),
    ],
)
def test_what_cannot_be_asked_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        desk.request(form(**changes))


ODD = ("question", 5), ("second", ["a"]), ("tokens", "many"), ("tokens", float("nan")), ("tokens", None)
ODDER = ("alpha", "much"), ("left", None), ("right", {}), ("picture", 3)


@pytest.mark.parametrize(("name", "value"), [*ODD, *ODDER])
def test_what_the_page_never_sends_is_said_too(name: str, value: Any) -> None:
    with pytest.raises(ConsensusError, match=r"the form: a value|unknown method"):
        desk.request(form(**{name: value}))


def test_a_word_that_stands_for_a_picture_is_said(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(picture)
    asked = desk.request(form(picture=str(picture), question="What is <image>?"))
    with pytest.raises(QuestionError, match="holds <image>, which stands for a picture"):
        Desk(load(str(ROOT / "checkpoints" / "llava-mini"), Loading("cpu"))).ask(asked)


def test_our_method_and_its_sides_come_first() -> None:
    listed = desk.choices(["full", "consensusdrop", "random"])
    assert [value for _, value in listed] == ["consensusdrop", "vision-only", "cross-only", "full", "random"]
    assert listed[0][0] == "ConsensusDrop" and listed[3][0] == "all tokens"
    assert [value for _, value in desk.choices(["full", "random"])] == ["full", "random"]


def test_picking_an_example_gives_its_questions() -> None:
    found = desk.picked([DemoPicture(Path("a.png"), {"One?": "1", "Two?": "2"})], 0)
    assert found == ("a.png", ["One?", "Two?"], "One?")


def test_an_upload_must_be_a_picture_and_its_place_stays_private(tmp_path: Path) -> None:
    file = tmp_path / "notes.png"
    file.write_text("no picture")
    with pytest.raises(ConsensusError, match=r"^notes\.png: not a picture"):
        desk.uploaded(str(file))
    with pytest.raises(OptionError, match="no picture yet"):
        desk.uploaded(None)
    Image.new("1", (10_000, 9_000)).save(file)
    with pytest.raises(ConsensusError, match="limit"):
        desk.uploaded(str(file))
    Image.new("RGB", (9, 9)).save(file)
    assert desk.uploaded(str(file)) == str(file)


def test_every_view_is_drawn_by_one_of_the_ways() -> None:
    assert set(desk.VIEWS.values()) == {"selection", "kept", "vision", "cross", "fused", "picture"}


def a_seen(kept: list[int], anchors: list[int], owner: list[int], **saliencies: list[float]) -> Seen:
    grid = view(Image.new("RGB", (40, 40), "gray"), (2, 2))
    return Seen((grid,), (), Patches(kept, anchors, owner, **saliencies), 4, len({*owner} - {-1}))


def test_patches_are_told_by_token_rank_and_saliency() -> None:
    seen = a_seen([0], [1], [4, 5, 5, -1], vision=[0.1, 0.2, 0.3, 0.4], fused=[0.4, 0.1, 0.2, float("nan")])
    data = markup.table(seen, seen.views[0])
    assert data["slot"] == [1, 2, 2, 0] and data["size"] == [1, 2, 2, 0]
    assert data["kept"] == [1, 0, 0, 0] and data["head"] == [0, 1, 0, 0]
    assert data["by"] == "fused" and data["rank"] == [1, 3, 2, 4]
    assert data["vision"] == [0.4, 0.8, 1.2, 1.6] and data["fused"][3] == 0 and "cross" not in data
    assert seen.counts == (1, 1, 1)


def test_ranks_begin_with_the_largest() -> None:
    assert markup.ranks([0.2, 0.9, 0.2, float("nan")]).tolist() == [2, 1, 3, 4]


def side_answer(**changes: Any) -> SideAnswer:
    side = Side("consensusdrop", "consensusdrop", {}, "What <b>is</b> it?", "a cat")
    given = {"answer": "A cat.", "full": "a dog", "milliseconds": 12.4, "full_milliseconds": 30.2, "rounds": 3,
             "seen": a_seen([0], [1], [4, 5, 5, -1], vision=[0.1, 0.2, 0.3, 0.4])}  # fmt: skip
    return SideAnswer(side, **given | changes)


def test_a_column_says_question_answer_truth_tokens_and_times() -> None:
    html = markup.results([side_answer(), side_answer(answer="a dog")], "kept and merged")
    assert html.count("cd-column") == 2 and "What &lt;b&gt;is&lt;/b&gt; it?" in html and "<b>is</b>" not in html
    assert "right" in html and "wrong" in html and "truth: a cat" in html and "from all tokens: a dog" in html
    assert "<b>2</b> of 4 tokens <small>1 kept, 1 merged, 1 dropped" in html
    assert "<b>12 ms</b>" in html and "all tokens: 30 ms; median of 3 rounds" in html


def test_patches_travel_inside_the_page_and_nothing_is_fetched() -> None:
    html = markup.results([side_answer()], "kept and merged")
    (data,) = re.findall(r'data-patches="([^"]+)"', html)
    assert json.loads(unescape(data))["slot"] == [1, 2, 2, 0]
    assert re.findall(r'src="(.{11})', html) == ["data:image/"] and "http" not in html


@pytest.mark.parametrize("name", desk.VIEWS)
def test_every_view_shows_something_and_says_what_a_method_lacks(name: str) -> None:
    pytest.importorskip("matplotlib")
    html = markup.results([side_answer()], name)
    lacks = desk.VIEWS[name] in ("cross", "fused")
    assert (f"no {desk.VIEWS[name]} saliency" in html) == lacks
    assert f'data-view="{"selection" if lacks else desk.VIEWS[name]}"' in html


def test_what_a_side_cannot_do_stands_in_its_column() -> None:
    html = markup.results([side_answer(error="needs <attention>", seen=None)], "kept and merged")
    assert "needs &lt;attention&gt;" in html and "cd-picture" not in html
    assert markup.message("") == "" and 'role="alert"' in markup.message("no")


class SquareHost(FakeHost):
    """Refuses one method, and reports a reduction of every picture."""

    visual_tokens = 16

    def attach(self, method: Any, budget: Any) -> Any:
        if type(method).__name__ == "FastV":
            raise OptionError("fastv: not here")
        return super().attach(method, budget)


def test_both_sides_are_answered_and_timed_and_refusals_are_told(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    Image.new("RGB", (8, 8), (7, 0, 0)).save(picture)
    host = SquareHost()
    asked = desk.request(form(picture=str(picture), right="fastv", tokens=4, second="And where?"))
    asking = Desk(host, seconds=0)
    left, right = answers = asking.ask(asked)
    assert asking.ask(asked) is answers, "the same again is not answered again"
    assert left.answer.startswith("What is it?") and left.rounds == 1 and left.milliseconds is not None
    assert right.error == "fastv: not here" and right.milliseconds is None
    assert left.seen is not None and left.seen.before == 16
    assert "fastv" not in offered(host) and "consensusdrop" in offered(host)
    assert "And where?" in right.full and "What is it?" in left.full


def test_rounds_end_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(picture)
    asked = desk.request(form(picture=str(picture), tokens=4))
    assert Desk(SquareHost(), seconds=1e6).ask(asked)[0].rounds == desk.ROUNDS
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr(desk, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert Desk(SquareHost(), seconds=25).ask(asked)[0].rounds == 3


def outcome(count: int, kept: list[int], tile: torch.Tensor, token: torch.Tensor) -> PictureOutcome:
    return PictureOutcome(0, count, len(kept), 0, ((0, reduced(count, kept)),), origin=(tile, token))


def encoded(side: int | None, size: tuple[int, int]) -> Encoding:
    return Encoding(Tiles(torch.zeros(1, 1, 1), {}, side), False, size, make("random"), Budget(2))


def test_a_picture_of_any_shape_is_one_grid() -> None:
    """As Qwen-VL sees it: 3 rows of 5 tokens."""
    image = Image.new("RGB", (150, 90))
    answer = SimpleNamespace(outcomes=(outcome(15, [1, 14], torch.zeros(15).long(), torch.arange(15)),))
    (seen,) = seen_by(FakeHost(), [image], [encoded(5, image.size)], answer)  # type: ignore[arg-type]
    (grid,) = seen.views
    assert (grid.rows, grid.columns) == (3, 5) and seen.counts == (2, 0, 13)
    assert seen.patches.vision is not None and not np.isnan(seen.patches.vision).any()


def test_a_clip_is_a_strip_of_frames(tmp_path: Path) -> None:
    clip = Clip(tuple(Image.new("RGB", (20, 20), colour) for colour in ("red", "green", "blue")), (0, 1, 2), 3)
    tile, token = torch.arange(12) // 4, torch.arange(12) % 4
    answer = SimpleNamespace(outcomes=(outcome(12, [0, 5, 11], tile, token),))
    (seen,) = seen_by(FakeHost(), [clip], [encoded(2, (20, 20))], answer)  # type: ignore[arg-type]
    assert [grid.first for grid in seen.views] == [0, 4, 8] and seen.patches.kept == [0, 5, 11]
    drawn = card([seen], "What happens?", ["answer: nothing", counted([seen])])
    assert drawn.width > 3 * 120 and counted([seen]).endswith("3 of 12 (3 kept; 9 patches dropped)")


def test_frames_shown_as_pictures_are_a_strip_too() -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "green", "blue", "white")]
    origin = torch.zeros(4).long(), torch.arange(4)
    answer = SimpleNamespace(outcomes=tuple(outcome(4, [place], *origin) for place in range(4)))
    seen = seen_by(FakeHost(), frames, [encoded(2, (20, 20))] * 4, answer)  # type: ignore[arg-type]
    assert card(seen, "What happens?", []).height > card(seen[:1], "What happens?", []).height / 4
    assert counted(seen).startswith("visual tokens the language model saw: 4 of 16")


def test_tokens_without_a_grid_are_refused() -> None:
    image = Image.new("RGB", (20, 20))
    tile, token = torch.arange(8) // 4, torch.arange(8) % 4
    answer = SimpleNamespace(outcomes=(outcome(8, [0], tile, token),))
    for side, message in ((0, "form no grid"), (2, "those of LLaVA-NeXT are drawn")):
        with pytest.raises(OptionError, match=message):
            seen_by(FakeHost(), [image], [encoded(side, image.size)], answer)  # type: ignore[arg-type]


def test_a_method_that_a_model_refuses_is_not_offered(tower_folder: Path) -> None:
    host = LlavaRunner(tiny_llava(tower_folder))
    assert {"consensusdrop", "full", "random"} <= set(offered(host))


def test_examples_are_questions_with_known_answers() -> None:
    found = samples(MINI)
    assert len(found) == 6 and all(sample.picture.is_file() for sample in found)
    assert all(len(sample.questions) > 1 and all(sample.questions.values()) for sample in found)
    assert next(iter(found[0].questions.items())) == ("What color is the lemon?", "yellow"), "methods differ on it"
    assert samples(ROOT / "nowhere") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "0"], "--port 0 must be in 1..65535"),
        (["--max-upload", "0"], "max-upload=0.0 must be above 0"),
        (["--model", "./nowhere"], "no such folder"),
    ],
)
def test_bad_arguments_end_before_weights_load(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llava_consensus.evaluation.models.load", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setattr("llava_consensus.cli.ask.find_spec", lambda _: object())
    assert cli.main(["demo", *words]) in (2, 3)
    assert message in capsys.readouterr().err


def test_without_gradio_the_line_to_type_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llava_consensus.cli.ask.find_spec", lambda _: None)
    assert cli.main(["demo"]) == MissingDependency.exit_code
    assert capsys.readouterr().err.strip().endswith("[demo]'")


def test_the_page_opens_with_a_question_on_which_methods_differ(tmp_path: Path) -> None:
    class Runner:
        def attach(self, method: Any, budget: Budget) -> Any:
            self.name = type(method).__name__
            return nullcontext()

        def ask(self, _: list[Image.Image], prompt: Any) -> tuple[None, SimpleNamespace]:
            lost = self.name == "Random" and prompt.text.startswith(("Which", "Whose"))
            lost |= self.name == "Full" and prompt.text.startswith("Whose")  # ours alone is right: an accident
            return None, SimpleNamespace(text="dog" if lost else "Cat.")

    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    pictures = [
        DemoPicture(tmp_path / "a.png", {"What?": "cat"}),
        DemoPicture(tmp_path / "b.png", {"Whose?": "cat", "Which?": "cat"}),
    ]
    (first, second), differ = desk.telling_first(Runner(), pictures, "random", 64)  # type: ignore[arg-type]
    assert differ and (first.picture, list(first.questions)) == (tmp_path / "b.png", ["Which?", "Whose?"])
    assert second == pictures[0]
    assert desk.telling_first(Runner(), pictures[:1], "random", 64) == (pictures[:1], False)  # type: ignore[arg-type]
