"""MMBench: questions and images out of the table, circular accuracy, and a sheet that opens again."""

import io
import json
from pathlib import Path
from typing import Any

import openpyxl
import pandas
import pytest
from fakes import FakeHost, config, make_model
from golden_cases import golden, sample
from tiny_data import make_mmbench

from llava_consensus.errors import DataError, ImageError
from llava_consensus.evaluation.benchmarks import make
from llava_consensus.evaluation.benchmarks.mmbench import to_xlsx
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.loop import run

RIGHT = {5: "A", 1000005: "C", 2000005: "B", 6: "A", 1000006: "B"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_mmbench(make_mmbench(tmp_path / "data"), chinese=True)


def table(data: Path) -> Path:
    return data / "eval" / "mmbench" / "mmbench_dev_20230712.tsv"


def answers(texts: dict[int, str]) -> list[dict[str, Any]]:
    return [{"question_id": key, "prompt": "", "text": text} for key, text in texts.items()]


def test_asked_as_llava_does(data: Path) -> None:
    first, *_, last = make("mmbench").load(data)
    assert first.prompt == "What is it?\nA. cat\nB. dog\nC. bird" and first.question_id == 5
    assert first.text == f"{first.prompt}\nAnswer with the option's letter from the given choices directly."
    assert last.prompt == "提示\n图中？\nA. 狗\nB. 猫" and last.question_id == 1000006
    assert make("mmbench_cn").load(data)[-1].text == f"{last.prompt}\n请直接回答选项字母。"


def test_options_end_where_llavas_script_ends_them(data: Path) -> None:
    pytest.importorskip("llava")
    from llava.eval import model_vqa_mmbench as official

    text = table(data).read_text().replace("\tdog\tbird", "\tNone\tbird").replace("\tbird\tcat", "\tN/A\tcat")
    table(data).write_text(text)
    for question, (_, row) in zip(make("mmbench").load(data), pandas.read_table(table(data)).iterrows(), strict=True):
        options = official.get_options(row, official.all_options)
        lines = (question.prompt or "").split("\n")
        shown = lines[len(lines) - len(options) :]
        assert shown == [f"{letter}. {text}" for letter, text in zip(official.all_options, options, strict=False)]
        assert f"\n{'ABCD'[len(options)]}. " not in question.text


def test_pictures_come_out_of_the_table_once_each(data: Path, tmp_path: Path) -> None:
    questions = make("mmbench").load(data)
    assert [one.images for one in questions] == [("5",)] * 3 + [("6",)] * 2
    host = FakeHost()
    asked = config(data, make_model(tmp_path / "model"), benchmark=make("mmbench"))
    result = run(asked, tmp_path / "out", Execution(progress=False), runner_loader=lambda *_: host)
    assert sorted(host.encoded) == [0, 255] and result.metrics["answered"] == 5
    assert "choices" not in json.loads((result.path / "config.json").read_text())
    recorded = json.loads((result.path / "answers.jsonl").read_text().splitlines()[0])
    assert recorded["prompt"] == questions[0].prompt
    read = make("mmbench").read_image
    assert read is not None
    with pytest.raises(ImageError, match="no image named '7'"):
        read(data, "7")
    lines = table(data).read_text().split("\n")
    cells = lines[2].split("\t")
    cells[9] = "6"
    lines[2] = "\t".join(cells)
    table(data).write_text("\n".join(lines))
    names = [one.images[0] for one in make("mmbench").load(data)]
    assert names == ["5", "1000005", "5", "1000005", "1000005"]  # the first row that has it


def test_circular_accuracy(data: Path) -> None:
    report = make("mmbench").score(answers(RIGHT), data)
    assert report["accuracy"] == report["single"] == 100.0 and report["questions"] == 2
    one_wrong = make("mmbench").score(answers({**RIGHT, 2000005: "It is a dog"}), data)
    assert one_wrong["accuracy"] == 50.0 and one_wrong["single"] == 80.0
    assert one_wrong["extracted"][2] == {"index": 2, "extracted": "C", "correct": False, "unit": 5, "turn": 2}
    unread = make("mmbench").score(answers({**RIGHT, 6: "?"}), data)
    assert unread["accuracy"] == 50.0 and unread["undecided"] == 1 and "v0.2" in unread["rules"]
    part = make("mmbench").score(answers({5: "A", 6: "A", 1000006: "B"}), data)
    assert (part["accuracy"], part["questions"], part["complete"]) == (100.0, 2, False)
    nothing = make("mmbench").score([], data)
    assert nothing["accuracy"] is None and json.loads(json.dumps(nothing)) == nothing
    chinese = make("mmbench_cn").score(answers(RIGHT), data)
    assert chinese["benchmark"] == "mmbench_cn" and chinese["accuracy"] == 100.0


def test_without_published_answers_there_is_no_score(data: Path) -> None:
    lines = [line.split("\t") for line in table(data).read_text().splitlines()]
    test = table(data).with_name("mmbench_test_20230712.tsv")
    test.write_text("\n".join("\t".join(cells[:7] + cells[8:]) for cells in lines))
    benchmark = make("mmbench", split="test")
    report = benchmark.score(answers(RIGHT), data)
    assert report["accuracy"] is None and report["complete"] and report["split"] == "test"
    assert report["extracted"][0] == {"index": 0, "extracted": "A"}
    assert benchmark.read_image and benchmark.read_image(data, "5")[:4] == b"\x89PNG"


def test_a_text_that_looks_like_a_formula_stays_text_and_what_no_cell_can_hold_is_told() -> None:
    for text in ("=1+1", "@SUM(A1)"):
        content = to_xlsx(pandas.DataFrame({"index": [7], "prediction": [text]}))
        cell = openpyxl.load_workbook(io.BytesIO(content)).active["B2"]
        assert cell.data_type == "s" and cell.value == text and cell.quotePrefix
        assert pandas.read_excel(io.BytesIO(content), dtype=str)["prediction"][0] == text
    assert to_xlsx(pandas.DataFrame({"answer": ["a" * 32767]})).startswith(b"PK")
    with pytest.raises(DataError, match="32,768 characters"):
        to_xlsx(pandas.DataFrame({"answer": ["a" * 32768]}))
    content = to_xlsx(pandas.DataFrame({"index": [7], "prediction": ["a\x07b"]}))
    assert pandas.read_excel(io.BytesIO(content))["prediction"][0] == "ab"


def test_sheet_equals_that_of_llavas_converter(tmp_path: Path) -> None:
    case = next(one for one in golden("mmbench") if one["inputs"]["kind"] == "llava_convert")
    table(tmp_path).parent.mkdir(parents=True)
    table(tmp_path).write_text(case["inputs"]["tsv"])
    export = make("mmbench").export
    assert export
    export(case["inputs"]["results"], tmp_path, tmp_path / "o.xlsx")
    sheet = pandas.read_excel(tmp_path / "o.xlsx")
    rows = [[None if value != value else value for value in row] for row in sheet.astype(object).to_numpy().tolist()]
    assert list(sheet.columns) == case["official_score"]["columns"]
    assert json.loads(json.dumps(rows)) == [
        [None if value is None else type(ours)(value) for value, ours in zip(row, own, strict=True)]
        for row, own in zip(case["official_score"]["rows"], rows, strict=True)
    ]


def test_damaged_tables_are_named(data: Path) -> None:
    whole = table(data).read_text()
    for damaged, words in (
        (whole.replace("\thint", "\tHint", 1), "no column hint"),
        (whole.replace("\n1000005\t", "\nx\t"), "no whole number"),
        ("", "not a table"),
        (whole.replace("\tWhat is it?\t", "\t\t", 1), r"row 1 \(index 5\): no question"),
    ):
        table(data).write_text(damaged)
        with pytest.raises(DataError, match=words):
            make("mmbench").load(data)


def test_prompts_of_llavas_own_answers(tmp_path: Path) -> None:
    lines = (sample("mmbench") / "llava-v1.5-13b_answers_first300.jsonl").read_text().splitlines()
    recorded, rows = list(map(json.loads, lines)), []
    for one in recorded:
        question = one["prompt"].split("\nA. " + one["options"][0])[0]
        options = dict(zip("ABCD", [*one["options"], *[None] * 4], strict=False))
        rows.append({"index": one["question_id"], "question": question, "hint": None, "image": "x", **options})
    table(tmp_path).parent.mkdir(parents=True)
    pandas.DataFrame(rows).to_csv(table(tmp_path), sep="\t", index=False)
    assert [one.prompt for one in make("mmbench").load(tmp_path)] == [one["prompt"] for one in recorded]
