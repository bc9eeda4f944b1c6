"""The tables of a folder of results, as Markdown, LaTeX or CSV. No torch, no model; pure functions of files."""

from collections.abc import Iterable, Sequence

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.report import table as engine
from llava_consensus.evaluation.report.rows import FULL, Row, by_setting
from llava_consensus.evaluation.report.section import Bench, Section

NOTHING = "No results yet: `make tables` measures them."


def in_sections(rows: Iterable[Row], against: str = FULL, bench: Bench = ()) -> list[Section]:
    """Runs in sections, those of all questions before those of the first few. OptionError without runs of `against`."""
    found = [Section(own, against, bench) for own in by_setting(rows)]
    if found and against != FULL and not any(section.others for section in found):
        known = {section.words(line)[0] for section in found for line in section.reduced}
        raise OptionError(f"--against {against}: no such runs, only of {', '.join(sorted(known))}")
    return sorted(found, key=lambda section: bool(section.rows[0].part))


def title(section: Section) -> str:
    config, parts = section.rows[0].config, sorted({row.part for row in section.rows if row.limited})
    versions = {name: config["versions"].get(name) for name in ("torch", "transformers")}
    later = {name: config["versions"].get(name, 1) for name in ("reduction", "host", "serving")}
    later |= {row.benchmark: row.config.get("benchmark_version", 1) for row in section.rows}
    raised = {f"{name} version": number for name, number in later.items() if number != 1}
    where = [str(config["device"]), *(f"{name} {number}" for name, number in {**versions, **raised}.items())]
    return f"**{config['model']}** on `{config['data']}`{''.join(f', {part}' for part in parts)} ({', '.join(where)})"


def written(sections: Sequence[Section], form: str = "markdown") -> str:
    """All tables as `markdown`, `latex` or `csv`: a part for every setting; CSV has every cell as a line."""
    import pandas as pd

    if form == "csv":
        found = [section.frame.drop(columns="line") for section in sections]
        return pd.concat(found).to_csv(index=False, lineterminator="\r\n") if found else ""
    write, head = (engine.latex, "% ") if form == "latex" else (engine.markdown, "")
    parts = [engine.PACKAGES] if form == "latex" else []
    for section in sections:
        parts += [head + title(section), *map(write, section.tables())]
    return "\n\n".join(parts) or NOTHING
