"""`eval --engine vllm`: the harness asks vLLM as it asks any host, and goes on where a run stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
from fakes import config, make_place

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.files import read_answers
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution

ENGINE = Loading("cpu", engine="vllm")


@pytest.mark.parametrize(
    "changes",
    [{"bits": 4}, {"attention": "eager"}, {"device": "auto", "device_map": "auto"}, {"trust_remote_code": True}],
)
def test_what_an_engine_is_not_told_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="engine='vllm' loads the model itself"):
        replace(ENGINE, **changes)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(OptionError, match="engine='sglang' must be one of vllm"):
        Loading(engine="sglang")


@pytest.mark.vllm
@pytest.mark.slow
def test_answers_are_those_of_the_model_itself_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    small.ready()
    data, folder = make_place(tmp_path / "data"), tmp_path / "llava"
    small.llava(folder)
    runs = {}
    for name, loading in (("torch", Loading("cpu")), ("vllm", ENGINE)):
        asked = config(data, folder, "visionzip", tokens=5, loading=loading, max_new_tokens=6)
        runs[name] = loop.run(asked, tmp_path / name, Execution(4, progress=False))
    answers = {name: read_answers(run.path / "answers.jsonl") for name, run in runs.items()}
    for own, other in zip(answers["vllm"], answers["torch"], strict=True):
        assert own["text"] == other["text"] and own["text"]
        assert [own["metadata"][name] for name in ("before", "after", "structural")] == [16, 5, 0]

    file = runs["vllm"].path / "answers.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:7]))
    (runs["vllm"].path / "metrics.json").unlink()
    again = loop.run(asked, tmp_path / "vllm", Execution(4, progress=False))
    assert again.asked == 13 and file.read_bytes() == whole
    with pytest.raises(OptionError, match="between the layers of the language model"):
        loop.run(
            config(data, folder, "fastv", tokens=5, loading=ENGINE), tmp_path / "fastv", Execution(4, progress=False)
        )
