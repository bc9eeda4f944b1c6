"""Tables of measurements of `llava-consensus bench`, and the same columns as the paper prints them.

The paper measured LLaVA-1.5 7B and 13B on one RTX 6000 Ada in float16. Compare speed-ups with its times; FLOPs and
cache are formulas (docs/accounting.md).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import LINEUP
from llava_consensus.evaluation.report.table import ABSENT, Table, grouped, number

TABLES = {"llava-1.5-7b": "efficiency_llava_1_5_7b", "llava-1.5-13b": "efficiency_llava_1_5_13b"}  # of a model
FALLBACK = "llava-1.5-7b"  # beside other models
FULL_TITLE, OURS = "Baseline", "ConsensusDrop (Ours)"  # their names in the paper
LABELS = {variant.method: variant.label for variant in LINEUP if not variant.options}
GB, MIB, TERA = 1e-9, 2**-20, 1e-12


class Column(NamedTuple):
    path: str  # in a row of a bench file
    title: str
    key: str  # in CSV, or of the paper's column
    unit: float = 1.0


MEASURED = (
    Column("ttft_ms", "TTFT (ms)", "ttft_ms"),
    Column("quartiles.ttft_ms", "quartiles", "ttft_ms_quartiles"),
    Column("speedup", "speed-up", "speedup"),
    Column("phases_ms.tower", "tower", "tower_ms"),
    Column("phases_ms.reduction", "reduction", "reduction_ms"),
    Column("phases_ms.prefill", "prefill", "prefill_ms"),
    Column("tpot_ms", "TPOT (ms)", "tpot_ms"),
    Column("quartiles.tpot_ms", "quartiles", "tpot_ms_quartiles"),
    Column("generation_ms", "generation (ms)", "generation_ms"),
    Column("account.flops.llm", "LLM TFLOPs", "llm_flops", TERA),
    Column("account.flops.total", "all TFLOPs", "flops", TERA),
    Column("account.kv_bytes", "KV by formula (MiB)", "kv_formula_bytes", MIB),
    Column("kv_bytes", "KV measured", "kv_bytes", MIB),
    Column("peak_bytes", "peak (GB)", "peak_bytes", GB),
)
BESIDE = (
    Column("ttft_ms", "TTFT (ms)", "ttft_ms"),
    Column("speedup", "speed-up", "speedup"),
    Column("paper.flops", "TFLOPs", "flops_t", TERA),
    Column("paper.kv_bytes", "KV (MiB)", "kv_mb", MIB),
    Column("peak_bytes", "peak (GB)", "gpu_mem_gb", GB),
    Column("generation_ms", "generation (ms)", "gen_time_ms"),
)

Row = Mapping[str, Any]


def label(row: Row) -> str:
    return LABELS.get(row["method"]) or str(row["title"])


def value(row: Row, column: Column) -> Any:
    """None if it was not measured."""
    found: Any = row
    for key in column.path.split("."):
        found = found and found.get(key)
    return found


def text(row: Row, column: Column) -> str:
    found = value(row, column)
    if isinstance(found, list):
        return f"{found[0]:.1f} to {found[1]:.1f}"
    return f"{found:.2f}" if column.key == "speedup" and found is not None else number(found, column.unit)


def bench_tables(content: Mapping[str, Any]) -> list[Table]:
    """Table of the measurements, and one with the paper's columns beside ours."""
    full, measured, beside = content["rows"][0]["tokens"], [], []
    for row in content["rows"]:
        heading = f"{row['tokens']} tokens" if row["tokens"] != full else f"All {full} tokens"
        printed = printed_row(content, row)
        measured.append((heading, (label(row), *(text(row, column) for column in MEASURED))))
        pairs = ((text(row, column), str(printed.get(column.key) or ABSENT)) for column in BESIDE)
        beside.append((heading, (label(row), *(cell for pair in pairs for cell in pair))))
    same = content["model"] in TABLES
    whose = content["model"] if same else f"{FALLBACK}, another model than ours: compare speed-ups only"
    titles = (f"{column.title}, {side}" for column in BESIDE for side in ("ours", "paper"))
    note = f"Paper: {whose}, RTX 6000 Ada, float16; TFLOPs and KV of both by its formulas (docs/accounting.md)."
    head = ("method", *(column.title for column in MEASURED))
    return [
        Table(f"Efficiency of {content['model']}", head, grouped(measured), protocol(content)),
        Table("The same beside the paper", ("method", *titles), grouped(beside), note),
    ]


def csv_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"method": label(row), "tokens": row["tokens"], **{column.key: value(row, column) for column in MEASURED}}
        | {f"paper_{column.key}": printed_row(content, row).get(column.key) for column in BESIDE}
        for row in content["rows"]
    ]


def protocol(content: Mapping[str, Any]) -> str:
    protocol, machine, loads = content["protocol"], content["machine"], content["load_average"]
    left_out = "".join(
        f" Not run: {one['method']} at {one['tokens']} ({one['reason']})." for one in content["left_out"]
    )
    return (
        f"{content['weights']}, {content['loading']['dtype']}, on {machine['device']} ({machine['processor']}, "
        f"{machine['threads']} threads), load {min(loads):.1f} to {max(loads):.1f}: medians of "
        f"{len(content['rows'][0]['samples'])} samples in {len(loads)} rounds after {protocol['warmup']} of warm-up, "
        f"{protocol['length']} tokens each. Peak: {content['memory']}.{left_out}"
    )


def printed_row(content: Mapping[str, Any], row: Row) -> Row:
    """The paper's row about a method and budget; of LLaVA-1.5-7B for a model that it did not measure."""
    rows = paper.printed_tables()[TABLES.get(content["model"], TABLES[FALLBACK])]
    name = {"full": FULL_TITLE, "consensusdrop": OURS}.get(row["method"], str(row["title"]))
    return next((one for one in rows if (one["method"], int(one["tokens"])) == (name, row["tokens"])), {})
