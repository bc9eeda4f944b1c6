"""All tables of a folder of results, as Markdown, LaTeX or CSV. No torch, no model; pure functions of files.

`llava-consensus report --out results --write docs/results.md` puts them between the markers of a page. The paper's
layout is its Table 1: a block for each budget, the benchmarks, Acc (plain mean, MME perception / 20) and Rel (Acc in
percent of the full model's).

Times come from `bench.json` in the folder of results: rows with `method` (its name, or its label in tables), `tokens`,
`ttft_ms`, `tpot_ms`, `share` (the method's own part of the time to first token).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report import table as engine
from llava_consensus.evaluation.report.rows import ALL, FULL, Line, Row, by_setting
from llava_consensus.evaluation.report.section import Section, half, score, signed, with_interval
from llava_consensus.evaluation.report.stats import RESAMPLES, Mean, corrected, mark
from llava_consensus.evaluation.report.table import ABSENT, Table, groups, number, p_value

if TYPE_CHECKING:
    import pandas as pd

NOTHING = "No results yet: `make tables` measures them."
BENCH = "bench.json"
AGAIN = "Measure again, or move it away"
SIMPLE_WAYS = ("resize", "uniform_grid", "random")  # which no method is compared without
COSTS = {  # of `Section.frame` and of bench.json: title and unit of its column, which CSV has as it is
    "entering": ("entering", 1.0),
    "kept": ("kept", 1.0),
    "average": ("tokens per layer", 1.0),
    "flops": ("GFLOPs", 1e-9),
    "flips": ("flips (%)", 1.0),
    "kv_bytes": ("KV (MiB)", 2**-20),
    "ttft_ms": ("TTFT (ms)", 1.0),
    "tpot_ms": ("TPOT (ms)", 1.0),
    "share": ("selection (% of TTFT)", 100.0),
}
BESIDE = ("average", "flops", "flips")  # of these, beside the scores

Bench = Sequence[Mapping[str, Any]]
Write = Callable[[Line], str]  # the cell of a line


def in_sections(rows: Iterable[Row], against: str = FULL) -> list[Section]:
    """Runs in sections, those of all questions before those of the first few."""
    return sorted((Section(own, against) for own in by_setting(rows)), key=lambda section: bool(section.rows[0].part))


def title(section: Section) -> str:
    """Heading of a section: model, data and setting."""
    config = section.rows[0].config
    parts = {row.benchmark: row.part for row in section.rows if row.limited}
    limit = "".join(f", of {section.title(name)} {part}" for name, part in parts.items())
    if len({row.part for row in section.rows}) == 1 and section.rows[0].part:
        limit = f", {section.rows[0].part}"
    versions = config["versions"]
    where = f"{config['device']}, torch {versions.get('torch')}, transformers {versions.get('transformers')}"
    raised = {name: versions[name] for name in ("reduction", "host", "serving") if versions.get(name, 1) != 1}
    raised |= {row.benchmark: number for row in section.rows if (number := row.config.get("benchmark_version", 1)) != 1}
    where += "".join(f", {name} version {number}" for name, number in raised.items())
    return f"**{config['model']}** on `{config['data']}`{limit} ({where})"


def section_tables(section: Section, bench: Bench = (), layout: bool = True) -> list[Table]:
    """The tables of a section in order: the paper's layout where `layout` asks for it, each benchmark with its
    interval, costs, differences to the method that the section is compared against.
    """
    found = [scores(section)] if layout and section.papers else []
    found += [intervals(section, bench), costs(section, bench)]
    found += [differences(section)] if section.against != FULL else []
    return [table for table in found if table.groups]


def tabulate(section: Section, title: str, columns: Mapping[str, Write], note: str, lines: Iterable[Line]) -> Table:
    """Lines of a section under the headings of their budgets; without columns and lines that are empty."""
    cells = [(section.about(line), named(section, line), [write(line) for write in columns.values()]) for line in lines]
    used = [place for place in range(len(columns)) if any(row[place] != ABSENT for *_, row in cells)]
    found = [(head, (name, *(row[place] for place in used))) for head, name, row in cells if set(row) - {ABSENT}]
    return Table(title, ("method", *(list(columns)[place] for place in used)), groups(found), note)


def named(section: Section, line: Line) -> str:
    """Name of a line below its heading, which names the position policy."""
    return line.label.removesuffix(f", positions={line.policy}") if "positions=" in section.about(line) else line.label


def scores(section: Section) -> Table:
    """The paper's layout: bare scores, Acc, Rel."""
    columns = {section.title(name): _of(section, name, score) for name in section.papers}
    note = f"{_left_out(section)}{_marks(section)}"
    return tabulate(section, "Scores", columns | _means(section), note, section.lines)


def intervals(section: Section, bench: Bench = ()) -> Table:
    """Every benchmark that was run, each score with its interval; tokens, FLOPs and flipped answers beside them."""
    columns = {}
    for name in section.names:
        run = next((row for row in section.rows if row.benchmark == name and row.metrics), None)
        asked = "no complete run" if run is None else f"{run.metrics['questions']} questions"  # type: ignore[index]
        about = f", {run.pictures} images" if run and run.pictures else ""
        columns[f"{section.title(name)} ({asked}{about})"] = _of(section, name, with_interval)
    done = {row.config["method"] for row in section.rows}
    simple = [name for name in SIMPLE_WAYS if name not in done] if len(done - {FULL, *SIMPLE_WAYS}) > 1 else []
    missing = f"Not run, and simpler than these methods: {', '.join(simple)}. " if simple else ""
    columns |= _means(section) if len(section.averaged) > 1 else {}
    note = f"{missing}{_left_out(section)}Score ± half of its 95 % interval (bootstrap over images). {_marks(section)}"
    columns |= _costs(section, bench, BESIDE)
    return tabulate(section, "Scores with 95 % intervals", columns, note, section.lines)


def costs(section: Section, bench: Bench = ()) -> Table:
    """What the lines of a section cost, beside FLOPs and tokens per layer."""
    over = ", ".join(map(section.title, section.common))
    note = f"Means over {over}; TTFT and TPOT as measured by `bench`." if over else ""
    keys = [key for key in COSTS if key not in BESIDE]
    return tabulate(section, "Costs", _costs(section, bench, keys), note, section.lines)


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


def _test(section: Section, name: str, line: Line) -> Any:
    cell = section.cell(line, name)
    return None if cell is None else cell.test


def _of(section: Section, name: str, write: Callable[[Any], str]) -> Write:
    return lambda line: write(section.cell(line, name))


def _means(section: Section) -> dict[str, Write]:
    """Acc and Rel, with the number of benchmarks if these are not all of the paper's."""
    few = "" if len(section.averaged) == len(paper.averaged()) else f" ({len(section.averaged)} benchmarks)"
    return {
        f"Acc{few}": lambda line: _mean(section.accuracy(line)),
        "Rel (%)": lambda line: engine.one_decimal(section.relative(line)),
    }


def _left_out(section: Section) -> str:
    """Why benchmarks are not averaged over."""
    reasons = (section.unjudged, "not judged"), (section.near_chance, "near chance with all tokens")
    return "".join(f"Not in Acc, {why}: {', '.join(map(section.title, names))}. " for names, why in reasons if names)


def _mean(average: Mean | None) -> str:
    """Acc with half of its interval, marked where it differs from the reference."""
    return ABSENT if average is None else f"{average.value:.1f}{half(average.bounds)}{mark(average.p, 1.0)}"


def _marks(section: Section) -> str:
    other = ALL if section.against == FULL else section.against
    return f"† p < 0.05 against {other}, paired; ‡ also after Holm's correction; {RESAMPLES} resamples."


# ---- costs and CSV


def read_bench(path: Path) -> list[dict[str, Any]]:
    """The rows of a bench file; none where there is no file. DataError for another kind of file."""
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
    """`Section.frame` with the measured times of each line."""
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


def _costs(section: Section, bench: Bench, keys: Iterable[str]) -> dict[str, Write]:
    """Columns of costs: means over the benchmarks that all lines have finished, absent unless known for each."""
    known = frame(section, bench)
    known = known[known["benchmark"].isin(section.common or section.names)]
    means = known.groupby("line")[list(COSTS)].agg(lambda values: values.astype(float).mean(skipna=False))

    def column(key: str, unit: float) -> Write:
        found = means[key].dropna().to_dict()
        return lambda line: number(unit)(found.get(section.lines.index(line)))

    return {COSTS[key][0]: column(key, COSTS[key][1]) for key in keys}


def as_csv(sections: Iterable[Section], bench: Bench = (), layout: bool = True) -> str:
    """Every cell of all sections as a line, with its costs, in whatever layout."""
    import pandas as pd

    found = [frame(section, bench).drop(columns="line") for section in sections]
    return pd.concat(found).to_csv(index=False, lineterminator="\r\n") if found else ""


def as_markdown(sections: Iterable[Section], bench: Bench = (), layout: bool = True) -> str:
    """All tables: one part for every model, data and setting."""
    parts = [
        part
        for section in sections
        for part in (title(section), *map(engine.markdown, section_tables(section, bench, layout)))
    ]
    return "\n\n".join(parts) if parts else NOTHING


def as_latex(sections: Iterable[Section], bench: Bench = (), layout: bool = True) -> str:
    """All tables, to be input into a document that uses booktabs."""
    parts = [engine.PACKAGES]
    for section in sections:
        parts += [f"% {title(section)}", *map(engine.latex, section_tables(section, bench, layout))]
    return "\n\n".join(parts)


FORMATS = {"markdown": as_markdown, "csv": as_csv, "latex": as_latex}
