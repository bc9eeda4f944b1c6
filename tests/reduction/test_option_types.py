"""Options of a method are what their annotations say, however the method is made."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest

from llava_consensus.errors import OptionError
from llava_consensus.methods.consensusdrop import ConsensusDrop
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.options import Bounds, NotNegative, Positive, Ratio, allowed, annotations


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
def test_a_value_that_an_annotation_does_not_allow_is_refused(
    option: str, good: list[Any], bad: list[Any], values: str
) -> None:
    for value in good:
        assert getattr(Optional(**{option: value}), option) == value
    for value in bad:
        with pytest.raises(OptionError, match=rf"^{option}="):
            Optional(**{option: value})
    assert allowed(annotations(Optional)[option]) == values


def test_a_method_checks_its_flags_without_make() -> None:
    with pytest.raises(OptionError, match="scap_rope='no' must be true or false"):
        ConsensusDrop(scap_rope="no")  # type: ignore[arg-type]
