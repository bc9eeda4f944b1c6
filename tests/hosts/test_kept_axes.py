"""Positions of three axes (M-RoPE) are kept whatever a method's default says; who asks for new ones is refused."""

import pytest
import transformers
from hf_models import CASES, prompts

from llava_consensus import attach, cli, make
from llava_consensus.errors import OptionError

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_new_positions_are_refused_and_a_default_is_said(family: str) -> None:
    case = CASES[family]
    model = case.build()
    for method in ("consensusdrop", "random", "fastv", "pyramiddrop"):
        with pytest.raises(OptionError, match=r"positions=renumber: Qwen\w+ has positions of three axes"):
            attach(model, method, tokens=5, positions="renumber")
    inputs = prompts([1, 7, case.picture(0), 8, 9])
    for method, options, notes in (
        ("consensusdrop", {}, ("positions of three axes are kept",)),
        ("consensusdrop+", {}, ()),
        ("consensusdrop", {"positions": "keep"}, ()),
    ):
        with attach(model, method, tokens=5, **options) as attached:
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
            assert attached.notes == notes


def test_the_list_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--host", "qwen2.5-vl"]) == 0
    assert "positions: kept, as they have three axes" in capsys.readouterr().out
    assert cli.main(["list", "--host", "llava"]) == 0
    assert "positions:" not in capsys.readouterr().out


def test_a_method_knows_what_it_was_asked() -> None:
    assert make("consensusdrop", positions="renumber") == make("consensusdrop")
    assert make("consensusdrop", positions="renumber").asked == {"positions"}
    assert make("consensusdrop").asked == set()
