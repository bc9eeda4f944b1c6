"""All tables of a folder of results, as Markdown, LaTeX or CSV. No torch, no model; only the command line imports this.

`llava-consensus report --out results --write docs/results.md` puts them between the markers
`<!-- results:begin -->` and `<!-- results:end -->`. From files to text: `rows.py` (runs), `samples.py` and `stats.py`
(intervals, tests), `section.py` (runs of one setting), `columns.py`, `layout.py` and `costs.py` (tables as data),
`markdown.py`, `latex.py`, `tidy.py` (text).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from llava_consensus.evaluation.files import CONFIG
from llava_consensus.evaluation.report import costs, latex, layout, tidy
from llava_consensus.evaluation.report import markdown as marked
from llava_consensus.evaluation.report.catalogue import Catalogue, Facts
from llava_consensus.evaluation.report.columns import Table
from llava_consensus.evaluation.report.costs import Bench
from llava_consensus.evaluation.report.judged import join, read_judged
from llava_consensus.evaluation.report.markdown import BEGIN, END, replace_block
from llava_consensus.evaluation.report.rows import LINEUP, RANDOM, Row, Variant, by_setting, full_score, read_row
from llava_consensus.evaluation.report.section import Section

__all__ = [  # what others use: they need not know in which file it is
    "BEGIN",
    "END",
    "FORMATS",
    "LINEUP",
    "RANDOM",
    "Catalogue",
    "Facts",
    "Row",
    "Section",
    "Variant",
    "full_score",
    "in_sections",
    "read_row",
    "read_rows",
    "replace_block",
]

NOTHING = "No results yet: `make tables` measures them."


def read_rows(out: Path, fallback: Catalogue | None = None) -> list[Row]:
    """Every run below a folder of results that has an answer, with a judge's score where it needs one and has it.

    Args:
        out: the folder of results.
        fallback: what methods and benchmarks are called that no finished run there says itself.
    Raises:
        DataError: a file is not what a run writes; it is named.
    """
    judged = read_judged(out)
    rows = [read_row(path.parent) for path in sorted(out.glob(f"*/{CONFIG}"))]
    catalogue = (fallback or Catalogue()).told_by((row.config, row.metrics) for row in rows)
    begun_rows = [replace(row, catalogue=catalogue) for row in rows if row.answered or row.metrics]
    return [judged_row for row in begun_rows for judged_row in join(row, judged)]


def in_sections(rows: Iterable[Row]) -> list[Section]:
    """Runs in sections, those of all questions before those of the first few."""
    return sorted(map(Section, by_setting(rows)), key=lambda section: section.rows[0].config["limit"] is not None)


def markdown(sections: Iterable[Section], bench: Bench = ()) -> str:
    """All tables: one part for every model, data and setting."""
    parts = [
        "\n\n".join([title(section), *(marked.table(table) for table in shown)])
        for section, shown in _each_once(sections, bench)
    ]
    return "\n\n".join(parts) if parts else NOTHING


def brief(sections: Iterable[Section], bench: Bench = ()) -> str:
    """Complete lines of scores, Acc and Rel alone, of the runs of all questions where there are any."""
    sections = list(sections)
    unlimited = [one for one in sections if any(row.config["limit"] is None for row in one.rows)] or sections
    parts = [
        "\n\n".join([title(section), marked.table(layout.scores(section, complete=True) or layout.intervals(section))])
        for section in unlimited
    ]
    return "\n\n".join(parts) if parts else NOTHING


def tex(sections: Iterable[Section], bench: Bench = ()) -> str:
    """All tables as LaTeX, to be input into a document that uses booktabs."""
    parts = ["% needs \\usepackage{booktabs}; written by llava-consensus report"]
    for section, shown in _each_once(sections, bench):
        parts += [f"% {title(section)}", *(latex.table(table) for table in shown)]
    return "\n\n".join(parts)


def comma_separated(sections: Iterable[Section], bench: Bench = ()) -> str:
    """Every cell as a line of CSV."""
    return tidy.table(sections, bench)


FORMATS = {"markdown": markdown, "csv": comma_separated, "latex": tex, "brief": brief}


def tables(section: Section, bench: Bench = ()) -> list[Table]:
    """The tables of a section in order: ours and the paper's in the same layout, costs, intervals, what needs a judge,
    differences.
    """
    parts: list[Table | None] = [layout.scores(section), *layout.printed(section)]
    parts += [costs.comparison(section, bench), layout.intervals(section)]
    parts += [layout.unjudged(section), layout.differences(section)]
    return [table for table in parts if table is not None]


def _each_once(sections: Iterable[Section], bench: Bench) -> Iterator[tuple[Section, list[Table]]]:
    """Each section with its tables, without those that stood under one before: the paper's."""
    before: list[Table] = []
    for section in sections:
        shown = [table for table in tables(section, bench) if table not in before]
        before += shown
        yield section, shown


def title(section: Section) -> str:
    """Which model, data and setting a section is about."""
    config = section.rows[0].config
    limits = {row.benchmark: row.config["limit"] for row in section.rows if row.limited}
    limit = "".join(f", of {section.title(name)} the first {count} questions" for name, count in limits.items())
    if {row.config["limit"] for row in section.rows} == {config["limit"]}:
        limit = "" if config["limit"] is None else f", first {config['limit']} questions"
    versions = config["versions"]
    where = f"{config['device']}, torch {versions.get('torch')}, transformers {versions.get('transformers')}"
    return f"**{config['model']}** on `{config['data']}`{limit} ({where})"
