"""The tables of a folder of results, as Markdown, LaTeX or CSV. No torch, no model; pure functions of files.

`llava-consensus report --out results --write docs/results.md` puts them between the markers of a page. Acc is the plain
mean over the paper's benchmarks (MME perception / 20), Rel is Acc in percent of all tokens'. Times come from
`bench.json` in the folder of results: rows with `method` (its name, or its label in tables), `tokens`, `ttft_ms`,
`tpot_ms`, `share` (the method's own part of the time to first token).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.report import table as engine
from llava_consensus.evaluation.report.rows import ALL, FULL, Line, Row, by_setting
from llava_consensus.evaluation.report.section import Section, half, signed, with_interval
from llava_consensus.evaluation.report.stats import RESAMPLES, Mean, corrected, mark
from llava_consensus.evaluation.report.table import ABSENT, Table, groups, number, one_decimal, p_value

if TYPE_CHECKING:
    import pandas as pd

NOTHING = "No results yet: `make tables` measures them."
BENCH = "bench.json"
AGAIN = "Measure again, or move it away"
FORMATS = ("markdown", "csv", "latex")
SIMPLE_WAYS = ("resize", "uniform_grid", "random")  # which no method is compared without
COSTS = {  # of `Section.frame` and of bench.json: title and unit of its column, which CSV has as it is
    "average": ("tokens per layer", 1.0),
    "flops": ("GFLOPs", 1e-9),
    "flips": ("flips (%)", 1.0),
    "kv_bytes": ("KV (MiB)", 2**-20),
    "ttft_ms": ("TTFT (ms)", 1.0),
    "tpot_ms": ("TPOT (ms)", 1.0),
    "share": ("selection (% of TTFT)", 100.0),
}

Bench = Sequence[Mapping[str, Any]]
Write = Callable[[Line], str]  # the cell of a line


def in_sections(rows: Iterable[Row], against: str = FULL) -> list[Section]:
    """Runs in sections, those of all questions before those of the first few."""
    return sorted((Section(own, against) for own in by_setting(rows)), key=lambda section: bool(section.rows[0].part))


def title(section: Section) -> str:
    config, parts = section.rows[0].config, sorted({row.part for row in section.rows if row.limited})
    versions = {name: config["versions"].get(name) for name in ("torch", "transformers")}
    later = {name: config["versions"].get(name, 1) for name in ("reduction", "host", "serving")}
    later |= {row.benchmark: row.config.get("benchmark_version", 1) for row in section.rows}
    raised = {f"{name} version": number for name, number in later.items() if number != 1}
    where = [str(config["device"]), *(f"{name} {number}" for name, number in {**versions, **raised}.items())]
    return f"**{config['model']}** on `{config['data']}`{''.join(f', {part}' for part in parts)} ({', '.join(where)})"


def section_tables(section: Section, bench: Bench = ()) -> list[Table]:
    """Scores with intervals and costs; differences to the method that the section is compared against."""
    found = [scores(section, bench), *([differences(section)] if section.against != FULL else [])]
    return [table for table in found if table.groups]


def tabulate(section: Section, title: str, columns: Mapping[str, Write], note: str, lines: Iterable[Line]) -> Table:
    """Lines of a section under the headings of their budgets; without columns and lines that are empty."""
    found = []
    for line in lines:
        heading = section.about(line)
        name = line.label.removesuffix(f", positions={line.policy}") if "positions=" in heading else line.label
        found.append((heading, name, [write(line) for write in columns.values()]))
    used = [place for place in range(len(columns)) if any(row[place] != ABSENT for *_, row in found)]
    cells = [(head, (name, *(row[place] for place in used))) for head, name, row in found if set(row) - {ABSENT}]
    return Table(title, ("method", *(list(columns)[place] for place in used)), groups(cells), note)


def scores(section: Section, bench: Bench = ()) -> Table:
    """Every benchmark that was run, each score with its interval; means and costs beside them."""
    columns: dict[str, Write] = {}
    for name in section.names:
        run = next((row for row in section.rows if row.benchmark == name and row.metrics), None)
        asked = "no complete run" if run is None else f"{run.metrics['questions']} questions"  # type: ignore[index]
        about = f", {run.pictures} images" if run and run.pictures else ""
        columns[f"{section.title(name)} ({asked}{about})"] = partial(_score, section, name)
    if section.averaged:
        columns |= {"Acc": lambda line: _mean(section.accuracy(line))}
        columns |= {"Rel (%)": lambda line: one_decimal(section.relative(line))}
    done = {row.config["method"] for row in section.rows}
    simple = [name for name in SIMPLE_WAYS if name not in done] if len(done - {FULL, *SIMPLE_WAYS}) > 1 else []
    missing = f" Not run, and simpler than these methods: {', '.join(simple)}." if simple else ""
    mean = f" Acc: mean of {', '.join(map(section.title, section.averaged))}." if section.averaged else ""
    note = (
        f"Score ± half of its 95 % interval (bootstrap over images, {RESAMPLES} resamples). † p < 0.05 against "
        f"{ALL if section.against == FULL else section.against}, paired; ‡ also after Holm's correction.{mean}{missing}"
    )
    return tabulate(section, "Scores", columns | _costs(section, bench), note, section.lines)


def _score(section: Section, name: str, line: Line) -> str:
    return with_interval(section.cell(line, name))


def _mean(average: Mean | None) -> str:
    return ABSENT if average is None else f"{average.value:.1f}{half(average.bounds)}{mark(average.p, 1.0)}"


def differences(section: Section) -> Table:
    """Each method against one, at the same budget and with the same positions, paired by question."""
    tests: dict[str, Callable[[Line], Any]] = {
        section.title(name): partial(_test, section, name) for name in section.names
    }
    means = {f"mean of {len(section.averaged)}": section.difference} if len(section.averaged) > 1 else {}
    columns = {title: _difference(section, test) for title, test in {**tests, **means}.items()}
    note = (
        "Points with 95 % interval, paired by question; above zero the method of the line is better. p: exact, after "
        "Holm's correction over the methods of the block."
    )
    return tabulate(section, f"Difference to {section.against} with the same budget", columns, note, section.reduced)


def _test(section: Section, name: str, line: Line) -> Any:
    cell = section.cell(line, name)
    return None if cell is None else cell.test


def _difference(section: Section, test: Callable[[Line], Any]) -> Write:
    """Writes the differences of a column, p corrected over the lines under one heading."""
    tests = {(section.about(line), line.label): found for line in section.reduced if (found := test(line))}
    holm: dict[tuple[str, str], float] = {}
    for heading in {key[0] for key in tests}:
        holm |= corrected({key: found.p for key, found in tests.items() if key[0] == heading})

    def write(line: Line) -> str:
        key = section.about(line), line.label
        p = f", p {p_value(holm[key])}" if key in holm else ""
        return signed(tests[key].difference, tests[key].bounds) + p if key in tests else ABSENT

    return write


# ---- costs and CSV


def read_bench(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = read_json(path, AGAIN)
    rows = rows.get("rows") if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"method", "tokens"} <= row.keys() for row in rows
    ):
        raise DataError(f"{path}: not a list of rows with method and tokens. {AGAIN}")
    return rows


def frame(section: Section, bench: Bench = ()) -> "pd.DataFrame":
    times = [_times(section, line, bench) for line in section.lines]
    found = section.frame.copy()
    for key in COSTS:
        if key not in found:
            found[key] = [times[place].get(key) for place in found["line"]]
    return found


def _times(section: Section, line: Line, bench: Bench) -> Mapping[str, Any]:
    """The bench row about a line: the full model's, or that of its label or plain method with its budget."""
    names = {line.label, *(run.config["method"] for run in line.runs.values() if not run.config["changed"])}
    for row in bench:
        if row["method"] == FULL if line is section.full else row["tokens"] == line.tokens and row["method"] in names:
            return row
    return {}


def _costs(section: Section, bench: Bench) -> dict[str, Write]:
    """Columns of costs: means over the benchmarks that all lines have finished, absent unless known for each."""
    known = frame(section, bench)
    known = known[known["benchmark"].isin(section.common or section.names)]
    means = known.groupby("line")[list(COSTS)].agg(lambda values: values.astype(float).mean(skipna=False))

    def column(key: str, unit: float) -> Write:
        found = means[key].dropna().to_dict()
        return lambda line: number(unit)(found.get(section.lines.index(line)))

    return {title: column(key, unit) for key, (title, unit) in COSTS.items()}


def written(sections: Sequence[Section], bench: Bench = (), form: str = "markdown") -> str:
    """All tables in one of FORMATS: a part for every model, data and setting; CSV has every cell as a line."""
    import pandas as pd

    if form == "csv":
        found = [frame(section, bench).drop(columns="line") for section in sections]
        return pd.concat(found).to_csv(index=False, lineterminator="\r\n") if found else ""
    write, head = (engine.latex, "% ") if form == "latex" else (engine.markdown, "")
    parts = [engine.PACKAGES] if form == "latex" else []
    for section in sections:
        parts += [head + title(section), *map(write, section_tables(section, bench))]
    return "\n\n".join(parts) or NOTHING
