"""`eval --engine vllm`: the harness asks vLLM as it asks any host, and goes on where a run stopped."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
from fakes import config, make_place

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.models.vllm import arguments_of, starting
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.user_files import read_answers

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


def test_arguments_of_an_engine_that_is_not_there_are_refused() -> None:
    with pytest.raises(OptionError, match="vllm='--seed 1' is for engine='vllm'"):
        Loading(vllm="--seed 1")


@pytest.mark.vllm
def test_arguments_of_vllm_reach_its_engine_or_are_refused() -> None:
    assert arguments_of("--gpu-memory-utilization 0.3 --max-model-len=512") == {
        "gpu_memory_utilization": 0.3,
        "max_model_len": 512,
    }
    for text, reason in (
        ("--port 8000", "an engine has no --port"),
        ("--max-model-len many", "--max-model-len"),
        ("--enable-lora", "not adapted"),
        ("'", "Close the quote"),
    ):
        with pytest.raises(OptionError, match=reason):
            arguments_of(text)


def test_of_an_engine_that_does_not_start_the_first_error_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    program = "print('INFO 1\\nERROR 2] ValueError: Available memory (1/23 GiB)\\nRuntimeError: see above')"
    with (
        pytest.raises(OptionError, match=r"start: ValueError: Available memory \(1/23 GiB\)\. All") as raised,
        starting(),
    ):
        subprocess.run([sys.executable, "-c", program], check=True)
        raise RuntimeError("Engine core initialization failed")
    assert capfd.readouterr() == ("", "")
    log = Path(str(raised.value).rpartition(" ")[2])
    assert "INFO 1" in log.read_text()
    log.unlink()
    with starting():
        subprocess.run([sys.executable, "-c", "print('INFO 1\\nWARNING 2')"], check=True)
        time.sleep(0.2)
    print("later", file=sys.stderr)
    assert capfd.readouterr().err == "WARNING 2\nlater\n"


def test_a_forked_process_ends_with_its_parent_though_that_is_killed() -> None:
    program = (
        "import os, signal, time; from llava_consensus.serving.parent import children_end_too\n"
        "with children_end_too():\n"
        "    child = os.fork()\n"
        "if child == 0: time.sleep(60)\n"
        "time.sleep(1); print(child, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60
    )
    state, end = Path(f"/proc/{int(said.stdout)}/stat"), time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the child lives on"
        time.sleep(0.05)


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
