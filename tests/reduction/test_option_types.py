"""Options of a method are what their annotations say, however the method is made."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import pytest
import torch
from units import at_angles

from llava_consensus import make
from llava_consensus.cli import arguments
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.models import Loading
from llava_consensus.methods import METHODS, truth
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.options import Bounds, NotNegative, Positive, Ratio, allowed, annotations
from llava_consensus.reduction.selection import diverse


@dataclass(frozen=True, kw_only=True)
class Optional(Method):
    """An option of every kind."""

    kind: Literal["near", "far"] = "near"
    flag: bool = False
    layer: int | None = None
    count: int = 3
    crops: Annotated[int, Bounds(1)] | None = None
    share: Ratio = 0.5
    power: NotNegative = 0.0
    heat: Positive | None = None
    words: str = ""
    fixed: ClassVar[int] = 3


@pytest.mark.parametrize(
    ("option", "good", "bad", "values"),
    [
        ("kind", ["far"], ["both", None, 1], "near | far"),
        ("flag", [True], ["no", 1, None], "true | false"),
        ("layer", [0, -3, None], [1.5, "two", True], "a whole number, or null"),
        ("count", [-1, 0], [None, 1.5, True], "a whole number"),
        ("crops", [1, 9, None], [0, 1.5, True], "a whole number of at least 1, or null"),
        ("share", [0, 0.0, 1], [-0.1, 1.01, float("nan"), None, True], "a number in [0, 1]"),
        ("power", [0, 7.5], [-1e-9, float("nan"), "1"], "a number of at least 0"),
        ("heat", [1e-9, None], [0, -1, float("nan")], "a number above 0, or null"),
        ("words", ["anything"], [], ""),
    ],
)
def test_a_value_that_its_annotation_forbids_is_refused(
    option: str, good: list[Any], bad: list[Any], values: str
) -> None:
    for value in good:
        assert getattr(Optional(**{option: value}), option) == value
    for value in bad:
        with pytest.raises(OptionError, match=rf"^{option}="):
            Optional(**{option: value})
    assert allowed(annotations(Optional)[option]) == values


def test_words_for_true_and_false_and_neither() -> None:
    for word in ("no", "No", "false", "OFF", "0", " false ", False, 0):
        assert truth("exact", word) is False, word
    for word in ("yes", "True", "on", "1", True, 1):
        assert truth("exact", word) is True, word
    for word in ("", "maybe", "nope", "2", None, 0.5, [True]):
        with pytest.raises(OptionError, match=r"exact=.* must be true or false"):
            truth("exact", word)


def test_every_flag_of_a_method_reads_words() -> None:
    names = [(name, field.name) for name in METHODS for field in fields(METHODS[name]) if type(field.default) is bool]
    for method, flag in names:
        for word in ("no", "yes", "0", "True"):
            given = arguments.options([f"{flag}={word}"])  # as --option and NAME:key=value give it
            assert make(method, **given) == make(method, **{flag: word in ("yes", "True")}), method
            assert getattr(make(method, **{flag: word}), flag) is (word in ("yes", "True"))  # as lmms-eval gives it
        with pytest.raises(OptionError, match=f"{flag}='maybe' must be true or false"):
            make(method, **{flag: "maybe"})


def test_code_of_a_checkpoint_runs_only_where_it_is_allowed() -> None:
    assert Loading(trust_remote_code="no") == Loading()  # type: ignore[arg-type]
    assert Loading(trust_remote_code="yes").trust_remote_code is True  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="trust_remote_code='perhaps' must be true or false"):
        Loading(trust_remote_code="perhaps")  # type: ignore[arg-type]


def test_diverse_selection_by_hand() -> None:
    features, saliency = at_angles(0, 5, 90, 180), torch.tensor([[0.5, 0.4, 0.06, 0.04]])
    assert diverse(saliency, features, 2, 1.0).tolist() == [[0, 3]]  # 0.04 x 2 beats 0.06 x 1 and 0.4 x 0.004
    assert diverse(saliency, features, 2, 100.0).tolist() == [[0, 1]]
    assert diverse(saliency, features, 4, 1.0).tolist() == [[0, 1, 2, 3]]
    same = torch.ones(1, 5, 2)
    assert diverse(torch.full((1, 5), 0.2), same, 3, 1.0).tolist() == [[0, 1, 2]]
