"""The examples in docs/adding.md work as printed: the method in a copy of this package, all of them as a package that
registers entry points, the report column in place.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from run_folders import store
from tiny_data import write_lines
from units import unit

from llava_consensus import Budget, attach, cli, make
from llava_consensus.errors import OptionError
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.report import section
from llava_consensus.evaluation.report.rows import read_rows
from llava_consensus.hosts.images import TABLE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding.md"
SUITE = ("reduction/test_method.py", "methods", "cli/test_front_door.py", "hosts/test_matrix.py")


def blocks(heading: str, language: str = "python") -> list[str]:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where packages are found, until the test ends."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def install(site: Path, heading: str, file: str) -> None:
    """The example of a section as pip leaves it: its file, and what its pyproject.toml registers."""
    package, facts = site / "my_package", site / "my_package-1.0.dist-info"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / file).write_text(blocks(heading)[0])
    found = re.fullmatch(r'\[project\.entry-points\."(.+)"\]\n([\w-]+) = "(.+)"\n', blocks(heading, "toml")[0])
    assert found
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[{}]\n{} = {}\n".format(*found.groups()))


@pytest.fixture
def data(tmp_path: Path, site: Path) -> Path:
    """Three questions about grey things; the benchmark of the page is installed."""
    install(site, "Add a benchmark", "colours.py")
    folder, asked = tmp_path / "eval" / "colours", {"image": "1.png", "text": "Which colour is it?"}
    write_lines(folder / "questions.jsonl", [{"question_id": number, **asked} for number in range(3)])
    (folder / "answers.json").write_text(json.dumps({str(number): "grey" for number in range(3)}))
    (folder / "images").mkdir()
    Image.new("RGB", (48, 48), "grey").save(folder / "images" / "1.png")
    return tmp_path


@pytest.fixture
def answers(data: Path) -> Path:
    """One answer that is right, one that is right in American, one that is wrong."""
    rows = [{"question_id": number, "text": text} for number, text in enumerate(("Grey.", "gray", "red"))]
    write_lines(data / "said.jsonl", rows)
    return data / "said.jsonl"


def test_the_example_benchmark_is_scored(data: Path, answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["colours", "--answers", str(answers), "--data", str(data)]
    assert cli.main(["score", *place]) == 0 and "accuracy: 66.67" in capsys.readouterr().out
    assert cli.main(["score", *place, "--benchmark-option", "spelling=british"]) == 0
    assert "accuracy: 33.33" in capsys.readouterr().out
    assert cli.main(["list"]) == 0
    assert re.search(r"colours +Colours: which colour something has", capsys.readouterr().out)
    assert cli.main(["data", "check", "colours", "--data", str(data)]) == 0
    colours = benchmarks.make("colours", spelling="british")
    assert colours.chosen == {"spelling": "british"} and colours.asking == {} and colours.max_new_tokens in (128, 1024)
    with pytest.raises(OptionError, match="whether `gray` counts"):
        benchmarks.make("colours", spelling="french")
    with pytest.raises(OptionError, match="Did you mean 'colours'"):
        benchmarks.make("colors")


def test_the_example_benchmark_is_asked_and_in_the_tables(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(data / "results")]
    asked = ["eval", "colours", "--data", str(data), *out, "--tokens", "16", "--no-progress"]
    assert cli.main(asked) == 0 and "colours: accuracy 0.00 on 3 of 3 questions" in capsys.readouterr().out
    (metrics,) = (data / "results").glob("colours-*/metrics.json")
    assert json.loads(metrics.read_text())["answered"] == 3
    assert cli.main(["report", *out]) == 0 and "Colours" in capsys.readouterr().out


def test_the_example_method_in_a_copy_of_the_package(tmp_path: Path) -> None:
    """A file and a line, and every test that goes through METHODS or asks what methods are."""
    for path in ROOT.iterdir():
        if path.name != "llava_consensus":
            (tmp_path / path.name).symlink_to(path)
    package = tmp_path / "llava_consensus"
    shutil.copytree(ROOT / "llava_consensus", package, ignore=shutil.ignore_patterns("__pycache__"))
    registry = package / "methods" / "__init__.py"
    first = '        "full": "full:Full",\n'
    registry.write_text(registry.read_text().replace(first, f'{first}        "brightest": "brightest:Brightest",\n'))
    (package / "methods" / "brightest.py").write_text(blocks("Add a method")[0])
    chosen = "brightest or options_follow or reads_the_prompt or costs_of_a or official_llava"
    asked = [*(f"tests/{file}" for file in SUITE), "-k", chosen, "-n0", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    run = [sys.executable, "-m", "pytest", *asked]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    listed = [sys.executable, "-m", "llava_consensus.cli", "list", "brightest"]
    shown = subprocess.run(listed, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert "Keep the T tokens whose feature vectors are longest." in shown and "vision_layer=null" in shown


def test_the_example_method_of_another_package(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "Add a method", "brightest.py")
    tokens = unit()
    assert tokens.features is not None
    longest = tokens.features.norm(dim=-1).topk(8).indices.sort().values
    assert torch.equal(make("brightest").reduce(tokens, Budget(8)).kept, longest)
    assert cli.main(["list", "brightest"]) == 0
    assert "0 GFLOP of its own" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["Colours = 3", "class Colours: pass", "import no_such_package", ""])
def test_what_is_registered_and_is_no_benchmark_is_said(data: Path, source: str) -> None:
    words = "must be a dataclass that derives from Benchmark" if "Colours" in source else "cannot be imported"
    (data / "site" / "my_package" / "colours.py").write_text(source)
    with pytest.raises(OptionError, match=words) as caught:
        benchmarks.make("colours")
    assert "benchmark 'colours' of my_package.colours:Colours" in str(caught.value)
    assert benchmarks.known_benchmarks()["colours"] == str(caught.value)


def test_a_benchmark_that_is_not_whole_says_what_it_lacks(data: Path) -> None:
    path = data / "site" / "my_package" / "colours.py"
    whole = path.read_text()
    path.write_text(whole.replace("    def grade(", "    def grades(").replace('    title = "Colours"\n', ""))
    with pytest.raises(OptionError, match="give it `grade` and `title`"):
        benchmarks.make("colours")


def test_the_example_column_is_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = eval(f"{{{blocks('Add a report column')[0]}}}")
    monkeypatch.setattr(section, "COSTS", section.COSTS | entry)
    store(tmp_path, [1, 0])
    bench = [{"method": "consensusdrop", "tokens": 64, "peak_bytes": 3 * 2**20}]
    sections = section.in_sections(read_rows(tmp_path), bench=bench)
    marked, csv, tex = (section.written(sections, name) for name in ("markdown", "csv", "latex"))
    assert "| peak (MiB) |" in marked and "| 3.0 |" in marked
    assert csv.splitlines()[0].endswith(",peak_bytes") and csv.splitlines()[1].endswith(f",{3 * 2**20}")
    assert "peak (MiB)" in tex


def test_the_example_model(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hf_models import IMAGE, SQUARE, TEXT, prompts, ready, square

    vision, text = transformers.CLIPVisionConfig(**SQUARE), transformers.LlamaConfig(**TEXT)
    words = {"image_token_index": IMAGE, "image_seq_length": 16, "vision_feature_layer": [-2, -3, 1]}
    config = transformers.VipLlavaConfig(vision_config=vision, text_config=text, **words)
    model = ready(transformers.VipLlavaForConditionalGeneration, config)
    inputs = prompts([1, 5, 6, square(0), 7, 8, 9], [1, square(1), 5])
    with attach(model, "consensusdrop", tokens=5) as attached:
        assert "tokens per tile" in repr(attached)  # without an entry
    install(site, "Add a model", "vip_llava.py")
    monkeypatch.setitem(TABLE, "vipllava", TABLE["llava"])  # so that what the entry registers is removed again

    plain = model(**inputs).logits
    for method in ("consensusdrop", "consensusdrop+", "vispruner", "visionzip", "fastv"):
        with attach(model, method, tokens=5) as attached:
            assert "5 tokens," in repr(attached)
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
            assert [(one.before, one.after) for one in attached.outcomes] == [(16, 5), (16, 5)]
        with attach(model, method, tokens=16):
            assert torch.equal(model(**inputs).logits, plain)
    assert torch.equal(model(**inputs).logits, plain)
    for method in ("tome", "resize"):
        with pytest.raises(OptionError, match="not known how the tower"):
            attach(model, method, tokens=5)
    assert cli.main(["list", "--host", "vip-llava"]) == 0
    works = capsys.readouterr().out.splitlines()[1]
    assert works.startswith("works: consensusdrop, ")
