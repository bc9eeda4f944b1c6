"""Options of a host: refused before weights where it has none such, and part of a run where not the default."""

from pathlib import Path
from typing import Any

import pytest
from fakes import config, make_place

from llava_consensus import cli
from llava_consensus.cli import arguments
from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.runs.configuration import prepare
from llava_consensus.hosts import HOSTS


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of the fake benchmark whose model's host leaves one thing open."""
    entry = HOSTS["llava"]._replace(options={"rows": ("all", "even", "odd")})
    monkeypatch.setitem(HOSTS, "llava", entry)
    return make_place(tmp_path / "data", pictures=4)


def described(place: Path, options: dict[str, str]) -> dict[str, Any]:
    return prepare(config(place, place / "model", host_options=options)).description


def test_only_what_is_not_the_default_is_part_of_a_run(place: Path) -> None:
    plain = described(place, {})
    assert "host_options" not in plain
    assert described(place, {"rows": "all"}) == plain
    assert described(place, {"rows": "odd"}) == {**plain, "host_options": {"rows": "odd"}}


@pytest.mark.parametrize("options", [{"row": "all"}, {"rows": "none"}])
def test_what_a_host_does_not_have_is_refused_before_weights(place: Path, options: dict[str, str]) -> None:
    for ask in (lambda: described(place, options), lambda: models.load(str(place / "model"), host_options=options)):
        with pytest.raises(OptionError, match=r"host option row.*: the host of .*model knows rows=all\|even\|odd"):
            ask()


def test_the_command_line_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    given = cli.parser().parse_args(["eval", "gqa", "--host-option", "layout=2880", "--host-option", "rows=odd"])
    assert arguments.host_options(given) == {"layout": "2880", "rows": "odd"}
    for wrong in ("rows", "=odd"):
        assert cli.main(["ask", "a.png", "What?", "--host-option", wrong]) == 2
        assert f"option {wrong!r} must be KEY=VALUE" in capsys.readouterr().err
