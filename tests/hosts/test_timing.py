"""What a method gains, as `timed` says it: both sides in turns, first forward and whole call, the model as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_llava
from prompts import row, tiles

from llava_consensus import timed
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.bench import timing


@pytest.fixture
def model(tower_folder: Path) -> Any:
    return tiny_llava(tower_folder)


def test_rows_of_every_forward_are_what_is_timed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a second for each row that enters the language model."""
    words, images = torch.tensor([row(5, images=1, after=4)]), tiles(1, 0)
    clock = [0.0]
    layer = model.get_model().layers[0]
    rows: list[int] = []

    def run(module: Any, args: Any, named: Any) -> None:
        rows.append((args[0] if args else named["hidden_states"]).shape[1])
        clock[0] += rows[-1]

    layer.register_forward_pre_hook(run, with_kwargs=True)
    monkeypatch.setattr(timing, "now", lambda device: clock[0])
    found = timed(
        model, lambda: model.generate(words, images=images, max_new_tokens=3, min_new_tokens=3), tokens=6, rounds=2
    )
    prompt = rows[0]
    assert rows == [prompt, 1, 1, prompt - found.before + 6, 1, 1] * 3
    assert (found.after, found.rounds) == (6, 2) and found.full_first_ms == 1e3 * prompt
    assert found.full_ms - found.full_first_ms == found.ms - found.first_ms == 2e3
    assert found.full_first_ms - found.first_ms == 1e3 * (found.before - 6)
    assert f"visual tokens {found.before} -> 6\n" in str(found) and "medians of 2 rounds" in str(found)
    assert len(layer._forward_pre_hooks) == 1 and not model._forward_hooks and "generate" not in vars(model)


@pytest.mark.parametrize(
    ("call", "options", "says"),
    [
        (lambda model: None, {}, "did not run the model"),
        (lambda model: model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=1), {}, "no image"),
        (lambda model: pytest.fail("called"), {"rounds": 0}, "rounds=0 must be a whole number of at least 1"),
        (lambda model: pytest.fail("called"), {"method": "randon"}, "Did you mean 'random'"),
    ],
)
def test_what_cannot_be_timed_says_why(model: Any, call: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        timed(model, lambda: call(model), tokens=6, **{"rounds": 1, **options})
    assert not model._forward_hooks
