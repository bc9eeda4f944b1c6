"""Tables of what was measured by `llava-consensus bench`, and of the same columns as the paper prints them.

The paper measured LLaVA-1.5 7B and 13B on one RTX 6000 Ada in float16, so its milliseconds are another machine's: what
can be compared are speed-ups, and FLOPs and cache, which are formulas (docs/accounting.md).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.columns import ABSENT, Column, Group, Table, heading, upper_bound
from llava_consensus.evaluation.report.costs import number
from llava_consensus.evaluation.report.rows import LINEUP

TABLES = {"llava-1.5-7b": "efficiency_llava_1_5_7b", "llava-1.5-13b": "efficiency_llava_1_5_13b"}  # of a model
FALLBACK = "llava-1.5-7b"  # beside other models
FULL_TITLE, OURS = "Baseline", "ConsensusDrop (Ours)"  # what the paper calls them
LABELS = {variant.method: variant.label for variant in LINEUP if not variant.options}

Row = Mapping[str, Any]


def read(*keys: str) -> Callable[[Row], Any]:
    """Reads a value that stands so deep in a row; None where it is not there."""

    def value(row: Row) -> Any:
        found: Any = row
        for key in keys:
            found = None if found is None else found.get(key)
        return found

    return value


def label(row: Row) -> str:
    """What tables call the method of a row."""
    return LABELS.get(row["method"]) or str(row["title"])


def spread(name: str) -> Column:
    """First and third quartile of a time."""

    def quartiles(pair: Sequence[float] | None) -> str:
        return ABSENT if pair is None else f"{pair[0]:.1f} to {pair[1]:.1f}"

    return Column("quartiles", read("quartiles", name), quartiles, f"{name}_quartiles")


GB, MIB, TERA = 1e-9, 2**-20, 1e-12
MEASURED = (
    Column("method", label),
    Column("TTFT (ms)", read("ttft_ms"), number(), "ttft_ms"),
    spread("ttft_ms"),
    Column("speed-up", read("speedup"), lambda value: f"{value:.2f}", "speedup"),
    Column("tower", read("phases_ms", "tower"), number(), "tower_ms"),
    Column("reduction", read("phases_ms", "reduction"), number(), "reduction_ms"),
    Column("prefill", read("phases_ms", "prefill"), number(), "prefill_ms"),
    Column("TPOT (ms)", read("tpot_ms"), number(), "tpot_ms"),
    spread("tpot_ms"),
    Column("generation (ms)", read("generation_ms"), number(), "generation_ms"),
    Column("LLM TFLOPs", read("account", "flops", "llm"), number(TERA), "llm_flops"),
    Column("all TFLOPs", read("account", "flops", "total"), number(TERA), "flops"),
    Column("KV by formula (MiB)", read("account", "kv_bytes"), number(MIB), "kv_formula_bytes"),
    Column("KV measured", read("kv_bytes"), number(MIB), "kv_bytes"),
    Column("peak (GB)", read("peak_bytes"), number(GB), "peak_bytes"),
)
BESIDE = (  # title, ours, how it is written, the paper's column
    ("TTFT (ms)", read("ttft_ms"), number(), "ttft_ms"),
    ("speed-up", read("speedup"), lambda value: ABSENT if value is None else f"{value:.2f}", "speedup"),
    ("TFLOPs", read("paper", "flops"), number(TERA), "flops_t"),
    ("KV (MiB)", read("paper", "kv_bytes"), number(MIB), "kv_mb"),
    ("peak (GB)", read("peak_bytes"), number(GB), "gpu_mem_gb"),
    ("generation (ms)", read("generation_ms"), number(), "gen_time_ms"),
)


def tables(content: Mapping[str, Any]) -> list[Table]:
    """What was measured, and the paper's columns beside the same of ours."""
    rows = content["rows"]
    return [
        Table(f"Efficiency of {content['model']}", _titles(MEASURED), _groups(rows, _cells), note(content)),
        Table("The same beside the paper", _beside_titles(), _groups(rows, _beside(content)), _paper_note(content)),
    ]


def cells(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every row as a line of CSV: unrounded, the paper's numbers beside it."""
    printed, lines = _printed(content), []
    for row in content["rows"]:
        line = {"tokens": row["tokens"], **{column.key or column.title: column.read(row) for column in MEASURED}}
        found = printed(row)
        lines.append({**line, **{f"paper_{key}": found.get(key) for _, _, _, key in BESIDE}})
    return lines


def note(content: Mapping[str, Any]) -> str:
    """The protocol in words."""
    protocol, machine = content["protocol"], content["machine"]
    loads = content["load_average"]
    parts = [
        f"{content['weights']}, {content['loading']['dtype']}, on {machine['device']} ({machine['processor']}, "
        f"{machine['threads']} threads).",
        f"Medians of {len(content['rows'][0]['samples'])} samples in {len(loads)} rounds after {protocol['warmup']} of "
        f"warm-up, methods in turn; {protocol['length']} tokens each; load of the machine {min(loads):.1f} to "
        f"{max(loads):.1f}.",
        f"Peak: {content['memory']}.",
        *(f"Left out: {one['method']} at {one['tokens']} ({one['reason']})." for one in content["left_out"]),
    ]
    return " ".join(parts)


def _titles(columns: Sequence[Column]) -> tuple[str, ...]:
    return tuple(column.title for column in columns)


def _cells(row: Row) -> tuple[str, ...]:
    return tuple(column.format(column.read(row)) for column in MEASURED)


def _beside_titles() -> tuple[str, ...]:
    return ("method", *(f"{title}, {whose}" for title, _, _, _ in BESIDE for whose in ("ours", "paper")))


def _beside(content: Mapping[str, Any]) -> Callable[[Row], tuple[str, ...]]:
    printed = _printed(content)

    def line(row: Row) -> tuple[str, ...]:
        found = printed(row)
        pairs = [(write(ours(row)), found.get(key)) for _, ours, write, key in BESIDE]
        return (label(row), *(cell for ours, theirs in pairs for cell in (ours, str(theirs or ABSENT))))

    return line


def _printed(content: Mapping[str, Any]) -> Callable[[Row], Row]:
    """The paper's row about a method and a budget; empty where it has none."""
    known = {(row["method"], int(row["tokens"])): row for row in paper.tables()[_table(content)]}

    def find(row: Row) -> Row:
        names = {"full": FULL_TITLE, "consensusdrop": OURS}
        return known.get((names.get(row["method"], row["title"]), row["tokens"]), {})

    return find


def _table(content: Mapping[str, Any]) -> str:
    return TABLES.get(content["model"], TABLES[FALLBACK])


def _paper_note(content: Mapping[str, Any]) -> str:
    same = content["model"] in TABLES
    whose = content["model"] if same else f"{FALLBACK}: another model than ours, so compare speed-ups alone"
    return (
        f"Paper: tables of {whose}, one RTX 6000 Ada, float16. TFLOPs and KV of both by the paper's formulas, with 50 "
        "rows of text and 20 decoded tokens (docs/accounting.md)."
    )


def _groups(rows: Sequence[Row], cells_of: Callable[[Row], tuple[str, ...]]) -> tuple[Group, ...]:
    """Rows under the heading of their budgets."""
    full = rows[0]["tokens"]
    lines: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        title = upper_bound(full) if row is rows[0] else heading(row["tokens"], full)
        lines.setdefault(title, []).append(cells_of(row))
    return tuple(Group(title, tuple(group)) for title, group in lines.items())
