"""The commands `paper ...`: the paper's tables, study and figures, made again with any model.

A table is a preset: the name of a file in `llava_consensus/paper/presets`, or a file like those. Its grid is run, and
its table printed with the paper's numbers beside; Markdown, LaTeX and CSV are left in `DIR/tables`.
"""

import argparse
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.cli.evaluate import carry_out, folders, loaded_once
from llava_consensus.cli.report import CHANGED, check_results
from llava_consensus.errors import ConsensusError, DataError, Interrupted, OptionError
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.files import misread, read_json, write_json
from llava_consensus.evaluation.report.table import ABSENT, Table, markdown, write, written
from llava_consensus.methods import make
from llava_consensus.paper import preset as presets
from llava_consensus.paper.preset import Preset, PresetRow
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.options import at_least, numbers

if TYPE_CHECKING:
    from llava_consensus.evaluation.runs.loop import RunnerLoader
    from llava_consensus.evaluation.runs.sweep import Cell

ALL = "all"
TABLES = "tables"  # folder in that of results
BUDGETS = "288 128"  # of an example, as in the paper's appendix
ONLY = arg("--bench", metavar="NAMES", help="only these benchmarks (those of each table)")
AT = arg("--tokens", metavar="NUMBERS", help="only these budgets, such as 64 (those of the table)")


@command(
    "paper table",
    arg(
        "name",
        metavar="NAME",
        help="t1, t2, t3, t4-qwen-vl, t4-internvl-chat, t4-cogvlm, alpha, temperature, recovery, anchors, score, "
        "results, positions, a file like theirs, or all",
    ),
    ONLY,
    AT,
    arg("--positions", choices=("keep",), help="every row with positions kept (closed up, as the paper does)"),
    arguments.FORMAT,
    *arguments.LOADED,
    *arguments.RUN,
    examples=("paper table t1 --tokens 64 --sample 40", "paper table all --sample 40"),
)
def table(given: argparse.Namespace) -> Iterator[Any]:
    """A table or an ablation of the paper, ours and the paper's numbers side by side; all: all tables of one model."""

    if given.name == ALL:
        yield from _everything(given)
        return
    preset = presets.read(given.name)
    why = _unfit(preset, given)
    if why:
        raise OptionError(f"{preset.name}: {why}")
    yield from measured(preset, given)


def _everything(given: argparse.Namespace) -> Iterator[Any]:
    """Every table of the paper, then a line for each: its file, or its needs. The first error is raised at the end."""

    load, became, errors = loaded_once(given), {}, []
    for preset in (one for one in map(presets.read, presets.names()) if one.printed):
        became[preset.title] = _unfit(preset, given) or str(given.out / TABLES / f"{preset.name}.md")
        try:
            if not _unfit(preset, given):
                yield from measured(preset, given, load)
        except Interrupted:
            raise
        except ConsensusError as error:
            became[preset.title] = f"failed ({error})"
            errors.append(error)
    yield from (f"{title}: {what}" for title, what in became.items())
    if errors:
        raise errors[0]


def _unfit(preset: "Preset", given: argparse.Namespace) -> str:
    """Why a preset cannot be run on the model; empty if it can."""
    from llava_consensus.evaluation import models

    needs = f"needs weights of {preset.weights}, for example {preset.model}" if preset.weights else "cannot be run"
    loading = arguments.loading(given)
    try:
        name = models.name_of(given.model, loading)
        options = {**preset.host_options, **arguments.host_options(given)}
        models.check(given.model, loading=loading, host_options=options)
    except ConsensusError as error:
        return f"{needs} ({error})"
    return f"{needs} (--model {given.model} is of host {name})" if preset.hosts and name not in preset.hosts else ""


def measured(preset: "Preset", given: argparse.Namespace, load: "RunnerLoader | None" = None) -> Iterator[Any]:
    """Runs a preset and writes its tables; runs that fail are blank there, and the first error is raised at the end."""
    from llava_consensus.evaluation.report.rows import read_row, with_grades
    from llava_consensus.paper.results import Results, read_benches

    preset, missing = preset.narrowed(given.bench, given.tokens), {}
    preset = preset.keeping_positions() if given.positions else preset
    for name in preset.benchmarks:
        try:
            benchmarks.make(name).load(given.data)
        except DataError as error:
            missing[name] = error
            yield f"{name} is left out: {error}"
    there = {name: column for name, column in preset.benchmarks.items() if name not in missing}
    if not there:
        raise next(iter(missing.values()))
    preset = replace(preset, benchmarks=there)
    places, errors, runs = plan_of(preset, given), [], {}
    for place, (line, cell) in zip(places, carry_out(list(places.values()), given, load=load), strict=True):
        yield line
        if cell.result:
            runs[place] = read_row(cell.result.path)
        elif cell.error:
            errors.append(cell.error)
    if runs:
        results = Results(preset, with_grades(runs, given.out), read_benches(given.out))
        found, rows = results.tables(), results.csv_rows
        files = write(given.out / TABLES, preset.name, found, rows)
        yield from written(given.format, found, rows)
        yield f"written: {', '.join(map(str, files))}"
    if errors:
        raise errors[0]


def plan_of(preset: "Preset", given: argparse.Namespace) -> "dict[tuple[PresetRow | None, str], Cell]":
    from llava_consensus.evaluation.runs.configuration import prepare
    from llava_consensus.evaluation.runs.sweep import Cell

    cells: dict[tuple[PresetRow | None, str], Cell] = {}
    for name in preset.benchmarks:
        config = arguments.config(given, benchmarks.make(name), make("full"))
        sample = config.sample or (None if config.limit else preset.samples.get(name))
        full = prepare(replace(config, sample=sample, host_options={**preset.host_options, **config.host_options}))
        cells[None, name] = Cell(full)
        for row in preset.rows:
            if name in preset.asked_at(row.tokens):
                cells[row, name] = Cell(full.reduced_by(*row.reduction, given.match))
    return cells


@command(
    "paper plan",
    arg("name", metavar="NAME", nargs="?", default="t1", help="a table, as of `paper table` (%(default)s)"),
    ONLY,
    AT,
    arg("--model", help="checkpoint that will be asked (one that the table is about)"),
    arg("--data", default="playground/data", type=Path, metavar="DIR", help="folder of the benchmarks (%(default)s)"),
    examples=("paper plan t1 --tokens 64", "paper plan t1 --model liuhaotian/llava-v1.5-13b"),
)
def plan(given: argparse.Namespace) -> Iterator[Any]:
    """The runs of a table: their number, needs and command; nothing is loaded."""
    from llava_consensus.evaluation.benchmarks.check import ANSWERING, check, uses
    from llava_consensus.paper.official import expected

    preset = presets.read(given.name).narrowed(given.bench, given.tokens)
    model, lines, unready = given.model or preset.model, [], []
    for name in preset.benchmarks:
        benchmark = benchmarks.make(name)
        runs = 1 + sum(name in preset.asked_at(row.tokens) for row in preset.rows)
        findings = list(check(benchmark, given.data))
        unready += [name] if uses(benchmark, given.data, findings)[ANSWERING] == "not ready" else []
        needs, elsewhere = ["files"] if name in unready else [], benchmark.scored_by(given.data)
        if any(one.state == "other" for one in findings):
            needs.append(f"the official files, not a part or another version (llava-consensus data check {name})")
        if elsewhere:
            how = f"judge {name}" if benchmark.judge else f"score {name} --export FILE"
            needs.append(f"{elsewhere} (llava-consensus {how})")
        wide = ABSENT if benchmark.paper is None or not benchmark.count else expected(benchmark)
        lines.append((name, f"{benchmark.count or 0:,}", str(runs), wide, ", ".join(needs) or "nothing"))
    budgets = ", ".join(dict.fromkeys(f"{row.tokens:g}" for row in preset.rows))
    head = ("benchmark", "questions", "runs", "expected ± at all, 1,000, 300", "still needs")
    yield markdown(Table(f"{preset.title}, at {budgets} tokens", head, {"": lines})) + "\n"
    yield f"weights: {model}" + (f", of {preset.weights}" if preset.weights else "")
    if unready:
        yield f"first: llava-consensus data download {' '.join(unready)} --data {given.data}"
    own = " --trust-remote-code" * preset.remote_code
    asked = "".join(f" --{one} '{value}'" for one in ("bench", "tokens") if (value := getattr(given, one)))
    yield f"then:  llava-consensus paper table {given.name}{asked} --model {model}{own} --data {given.data}"


@command(
    "paper study",
    arg("--bench", default="pope mme mmbench mmbench_cn textvqa gqa", metavar="NAMES", help="benchmarks (%(default)s)"),
    arg("--retention", default="0.25 0.5 0.12 0.06 0.03", metavar="SHARES", help="shares of tokens kept (%(default)s)"),
    arg("--rates", default="0.1 0.3 0.5", metavar="SHARES", help="what recovery adds of the other side (%(default)s)"),
    arg("--layer", type=int, help="decoder layers that see everything (2, less in shallow models)"),
    arg("--scap-bench", default="gqa", metavar="NAME", help="where SCAP looks, on this one, or none (%(default)s)"),
    *arguments.LOADED,
    *arguments.RUN,
    examples=("paper study --sample 40",),
)
def study(given: argparse.Namespace) -> Iterator[Any]:
    """Selection inside the language model by vision, by the question, by both; the model's decoder must allow cuts."""
    from llava_consensus.paper.study import results

    retentions, rates = _shares(given.retention), numbers("rates", given.rates)
    _check_layer(given.layer, given.model, given.revision)
    full = [arguments.config(given, benchmarks.make(name), make("full")) for name in given.bench.split()]
    cells, probed = results.grid(full, retentions, rates, given.layer), []
    if given.scap_bench != "none":
        config = arguments.config(given, benchmarks.make(given.scap_bench), make("full"))
        probed = [results.probing(config, retentions[0])]
    reduced = [cell for cell in cells if cell.plan.method.reduces]
    whole = [cell for cell in cells if cell not in reduced]
    groups = (whole, given.out), (reduced + probed, given.out / results.RUNS)
    found = yield from _all_run(groups, given, loaded_once(given))
    content = results.study(found[: len(cells)])
    write_json(given.out / results.STUDY, content)
    tables = [results.study_table(content)]
    write(given.out, Path(results.STUDY).stem, tables, results.study_csv(content))
    yield from written(None, tables, [])
    yield f"written: {given.out / results.STUDY}"
    if probed:
        write_json(given.out / results.SCAP, results.scap(found[-1]))
        yield f"written: {given.out / results.SCAP}"


def _check_layer(layer: int | None, model: str, revision: str | None) -> None:
    """Raises OptionError for a layer beyond `num_hidden_layers` of the model's configuration."""
    from llava_consensus.evaluation.models import find

    config = read_json(find(model, revision).folder / "config.json", "Fetch the checkpoint again", dict)
    inner = config.get("text_config")
    layers = (inner if isinstance(inner, dict) else config).get("num_hidden_layers")
    if layer is not None and isinstance(layers, int) and not 1 <= layer < layers:
        raise OptionError(f"--layer {layer}: must be in 1..{layers - 1}, {model} has {layers} decoder layers")


def _all_run(
    groups: "Iterable[tuple[Sequence[Cell], Path]]", given: argparse.Namespace, load: "RunnerLoader | None"
) -> Generator[str, None, list[Path]]:
    """Runs groups of cells, each into its folder; a line for each, and their folders at the end."""
    done = []
    for group, out in groups:
        for line, cell in carry_out(group, given, out, load):
            yield line
            done.append(cell)
    return folders(done)


def _shares(text: str) -> "list[Share]":
    shares = [budget for budget in arguments.budgets(text) if isinstance(budget, Share)]
    if not shares or len(shares) < len(text.split()):
        raise OptionError(f"--retention {text!r}: must be shares of the tokens, such as '0.25 0.5'")
    return shares


@command(
    "paper figures",
    arguments.OUT_DIR,
    arg("--to", type=Path, metavar="FOLDER", help="where they are written (DIR/figures)"),
    arg("--examples", metavar="NAME", help="instead, examples of this benchmark"),
    arg("--count", default=4, type=int, help="examples, those with the highest disagreement (%(default)s)"),
    arg("--budgets", default=BUDGETS, metavar="NUMBERS", help="of an example, searched at the first (%(default)s)"),
    arg("--limit", default=200, type=int, help="search the first questions only (%(default)s)"),
    *arguments.LOADED,
    arguments.DATA_DIR,
    examples=("paper figures --out results", "paper figures --examples gqa"),
)
def figures(given: argparse.Namespace) -> Iterator[str]:
    """Every figure of the paper from result files, as PNG and SVG, or examples of where the two signals look."""
    from llava_consensus.paper import figures as drawings
    from llava_consensus.paper import results

    if given.examples is not None:
        yield from _examples(given)
        return
    check_results(given.out)
    folder = _folder(given.to or given.out / "figures")
    with misread(f"{given.out}: a file of results", CHANGED):
        material, count = results.read(given.out), 0
        for figure, missing in drawings.draw(material, folder):
            count += not missing
            yield f"{figure.name}: " + (f"not drawn, {missing}. It comes with: {figure.makes}" if missing else "drawn")
        tables, rows = results.claims(material)
        if rows:
            write(folder, "claims", tables, rows)
            yield f"claims: paired differences of each, {folder / 'claims.md'}"
    yield f"{count} of {len(drawings.FIGURES)} figures are drawn: {folder}"


def _folder(folder: Path) -> Path:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file, and images are written to a folder. Give another name")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _examples(given: argparse.Namespace) -> Iterator[str]:
    from llava_consensus.evaluation import models
    from llava_consensus.evaluation.runs.configuration import prepare
    from llava_consensus.paper import examples

    budgets = [one.tokens for one in arguments.budgets(given.budgets) if isinstance(one, Budget)]
    if not budgets or len(budgets) < len(given.budgets.split()):
        raise OptionError(f"--budgets {given.budgets!r}: must be whole numbers, such as '{BUDGETS}'")
    at_least("count", given.count, 1)
    setting = prepare(arguments.config(given, benchmarks.make(given.examples), make("full")))
    if setting.benchmark.frames:
        raise OptionError(f"--examples {given.examples}: asks about videos, and examples are drawn of images")
    folder = _folder(given.to or given.out / "examples")
    runner = models.load(setting.model, setting.loading, setting.host_options)
    found = examples.search(runner, setting, budgets[0], given.count)
    for number, (share, question) in enumerate(found, 1):
        one = examples.example(runner, setting, question, budgets)
        examples.drawn(one).save(folder / f"{given.examples}-{budgets[0]}-{number}.png")
        yield f"{question.question_id}: disagreement {100 * share:.0f} %, {one.words}"
    yield f"{len(found)} examples: {folder}/{given.examples}-{budgets[0]}-*.png"


@command(
    "paper verify",
    arg("--bench", default="gqa pope textvqa", metavar="NAMES", help="benchmarks (%(default)s)"),
    arg("--published", type=Path, metavar="FILE", help="scores by benchmark, as JSON (LLaVA-1.5-7B's)"),
    *arguments.LOADED,
    *arguments.RUN,
    examples=("paper verify --bench pope --published scores.json --sample 300",),
)
def verify(given: argparse.Namespace) -> Iterator[Any]:
    """Before any method is judged: prompts against LLaVA's own, and scores with all tokens against published ones."""
    from llava_consensus.evaluation import models
    from llava_consensus.evaluation.models.llava import LlavaRunner
    from llava_consensus.evaluation.report.rows import read_row
    from llava_consensus.evaluation.runs.configuration import prepare
    from llava_consensus.evaluation.runs.sweep import Cell, LoadedOnce
    from llava_consensus.evidence import family_of
    from llava_consensus.paper import official

    made = [benchmarks.make(name) for name in given.bench.split()]
    theirs = family_of(given.model) in (None, "llava-1.5")
    known = {one.name: one.paper for one in made if one.paper is not None and theirs}
    published = read_json(given.published, "Give benchmark: score", dict) if given.published else known
    plans = [prepare(arguments.config(given, one, make("full"))) for one in made]
    load = LoadedOnce(models.load)
    runner = load(plans[0].model, plans[0].loading, plans[0].host_options)
    if isinstance(runner, LlavaRunner):
        yield markdown(official.prompts_table(plans, runner, models.find(plans[0].model).folder)) + "\n"
    else:
        yield "prompts are not compared: this checkpoint is not in official LLaVA's layout"
    found = yield from _all_run([(list(map(Cell, plans)), given.out)], given, load if given.workers == 1 else None)
    runs = [read_row(folder) for folder in found]
    yield markdown(official.verify_table(runs, published, {one.name: one.count for one in made})) + "\n"
