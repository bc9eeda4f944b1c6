"""`lmms:TASK`: a task of local files as a benchmark of ours. The harness is held to lmms-eval's own command in
`tests/evaluation/test_lmms_eval.py`.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("lmms_eval")

from llava_consensus.errors import OptionError
from llava_consensus.evaluation import benchmarks

TASK = """task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: KIND
doc_to_visual: !function seen.pictures
doc_to_text: !function seen.text
doc_to_target: right
generation_kwargs: {max_new_tokens: 7, do_sample: SAMPLES, until: ["."]}
process_results: !function seen.score
metric_list: [{metric: closeness, aggregation: mean, higher_is_better: true}]
"""
FUNCTIONS = """from PIL import Image
def pictures(document): return [Image.new("RGB", (4, 4), document["colour"])] * document["pictures"]
def text(document): return f"Which letter is {document['colour']}?"
def score(document, results): return {"closeness": 1.0 if results[0] == document["right"] else 0.25}
"""
ROWS = [
    {"colour": "red", "right": "a", "pictures": 1},
    {"colour": "blue", "right": "b", "pictures": 2},
    {"colour": "red", "right": "c", "pictures": 0},
]


def made(folder: Path, kind: str = "generate_until", samples: str = "false") -> str:
    """The name of a task in a folder."""
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = TASK.replace("QUESTIONS", str(folder / "rows.jsonl")).replace("KIND", kind).replace("SAMPLES", samples)
    (folder / "letters.yaml").write_text(text)
    (folder / "seen.py").write_text(FUNCTIONS)
    return f"lmms:{folder / 'letters.yaml'}"


def test_a_task_is_asked_and_scored_by_its_own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    task = benchmarks.make(made(tmp_path / "task"))
    assert (task.name, task.max_new_tokens, task.metric) == ("lmms:letters", 7, "closeness")
    questions = task.load(tmp_path)
    assert [one.text for one in questions] == [f"Which letter is {row['colour']}?" for row in ROWS]
    assert [len(one.images) for one in questions] == [1, 2, 0]
    pictures = tmp_path / "eval" / "lmms" / "letters" / "images"
    assert {name for one in questions for name in one.images} == {file.name for file in pictures.iterdir()}
    assert len(list(pictures.iterdir())) == 2, "a picture is stored once"
    said = [{"question_id": 2, "text": "a"}, {"question_id": 0, "text": "a. Or b"}]
    report = task.score(said, tmp_path)
    assert report["closeness"] == pytest.approx(62.5) and not report["complete"]
    assert [(row["index"], row["correct"]) for row in report["extracted"]] == [(0, 1.0), (2, 0.25)]


def test_what_is_not_asked_here_is_refused(tmp_path: Path) -> None:
    for number, (kind, samples, message) in enumerate(
        [("loglikelihood", "false", "asks for loglikelihood"), ("generate_until", "true", "is not greedy")]
    ):
        with pytest.raises(OptionError, match=message):
            benchmarks.make(made(tmp_path / str(number), kind, samples))
    with pytest.raises(OptionError, match="no task that lmms-eval knows"):
        benchmarks.make(f"lmms:{tmp_path / '0' / 'lettrs.yaml'}")
