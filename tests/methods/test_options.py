"""Options that are true or false, wherever they come from as text: `no` must not mean yes."""

from dataclasses import fields

import pytest

from llava_consensus import make
from llava_consensus.cli import arguments
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.models import Loading
from llava_consensus.methods import METHODS, truth

FLAGS = [(name, field.name) for name in METHODS for field in fields(METHODS[name]) if isinstance(field.default, bool)]


def test_words_for_true_and_false_and_neither() -> None:
    for word in ("no", "No", "false", "OFF", "0", " false ", False, 0):
        assert truth("exact", word) is False, word
    for word in ("yes", "True", "on", "1", True, 1):
        assert truth("exact", word) is True, word
    for word in ("", "maybe", "nope", "2", None, 0.5, [True]):
        with pytest.raises(OptionError, match=r"exact=.* must be true or false"):
            truth("exact", word)


def test_every_flag_of_a_method_reads_words() -> None:
    for method, flag in FLAGS:
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
