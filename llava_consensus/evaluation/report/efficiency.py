"""Tables of what was measured by `llava-consensus bench`, and of the same columns as the paper prints them.

The paper measured LLaVA-1.5 7B and 13B on one RTX 6000 Ada in float16, so its milliseconds are another machine's: what
can be compared are speed-ups, and FLOPs and cache, which are formulas (docs/accounting.md).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import LINEUP
from llava_consensus.evaluation.report.table import ABSENT, Cells, Column, Table, groups, number, retained, upper_bound

TABLES = {"llava-1.5-7b": "efficiency_llava_1_5_7b", "llava-1.5-13b": "efficiency_llava_1_5_13b"}  # of a model
FALLBACK = "llava-1.5-7b"  # beside other models
FULL_TITLE, OURS = "Baseline", "ConsensusDrop (Ours)"  # what the paper calls them
LABELS = {variant.method: variant.label for variant in LINEUP if not variant.options}

Row = Mapping[str, Any]


def read(*keys: str) -> Callable[[Row], Any]:
    """Getter of a nested value of a row; None where it is absent."""

    def value(row: Row) -> Any:
        found: Any = row
        for key in keys:
            found = None if found is None else found.get(key)
        return found

    return value


def label(row: Row) -> str:
    """Name of a row's method in tables."""
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
BESIDE = (  # ours, by the column of the paper that stands beside it
    Column("TTFT (ms)", read("ttft_ms"), number(), "ttft_ms"),
    Column("speed-up", read("speedup"), lambda value: ABSENT if value is None else f"{value:.2f}", "speedup"),
    Column("TFLOPs", read("paper", "flops"), number(TERA), "flops_t"),
    Column("KV (MiB)", read("paper", "kv_bytes"), number(MIB), "kv_mb"),
    Column("peak (GB)", read("peak_bytes"), number(GB), "gpu_mem_gb"),
    Column("generation (ms)", read("generation_ms"), number(), "gen_time_ms"),
)


def bench_tables(content: Mapping[str, Any]) -> list[Table]:
    """Table of the measurements, and one with the paper's columns beside ours."""
    rows = content["rows"]
    full = rows[0]["tokens"]

    def by_budget(cells_of: Callable[[Row], Cells]) -> list[tuple[str, Cells]]:
        headings = [upper_bound(full), *(retained(row["tokens"], full) for row in rows[1:])]
        return [(heading, cells_of(row)) for heading, row in zip(headings, rows, strict=True)]

    def beside(row: Row) -> Cells:
        found = printed_row(content, row)
        pairs = ((column.text(row), str(found.get(column.key) or ABSENT)) for column in BESIDE)
        return (label(row), *(cell for pair in pairs for cell in pair))

    measured = by_budget(lambda row: tuple(column.text(row) for column in MEASURED))
    titles = ("method", *(f"{column.title}, {whose}" for column in BESIDE for whose in ("ours", "paper")))
    same = content["model"] in TABLES
    whose = content["model"] if same else f"{FALLBACK}: another model than ours, so compare speed-ups alone"
    paper_note = (
        f"Paper: tables of {whose}, one RTX 6000 Ada, float16. TFLOPs and KV of both by the paper's formulas, with 50 "
        "rows of text and 20 decoded tokens (docs/accounting.md)."
    )
    head = tuple(column.title for column in MEASURED)
    return [
        Table(f"Efficiency of {content['model']}", head, groups(measured), protocol(content)),
        Table("The same beside the paper", titles, groups(by_budget(beside)), paper_note),
    ]


def csv_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every row as a line of CSV: unrounded, the paper's numbers beside it."""
    lines = []
    for row in content["rows"]:
        found = printed_row(content, row)
        line = {"tokens": row["tokens"], **{column.key or column.title: column.read(row) for column in MEASURED}}
        lines.append(line | {f"paper_{column.key}": found.get(column.key) for column in BESIDE})
    return lines


def protocol(content: Mapping[str, Any]) -> str:
    """The protocol as text."""
    protocol, machine, loads = content["protocol"], content["machine"], content["load_average"]
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


def printed_table(model: str) -> str:
    """Name of the paper's table for a model, or the fallback for one that it did not measure."""
    return TABLES.get(model, TABLES[FALLBACK])


def printed_name(row: Row) -> str:
    """Name of a row's method in the paper's tables."""
    return {"full": FULL_TITLE, "consensusdrop": OURS}.get(row["method"], str(row["title"]))


def printed_row(content: Mapping[str, Any], row: Row) -> Row:
    """The paper's row about a method and a budget; empty where it has none."""
    rows = paper.printed_tables()[printed_table(content["model"])]
    wanted = printed_name(row), row["tokens"]
    return next((one for one in rows if (one["method"], int(one["tokens"])) == wanted), {})
