"""Tables of what `llava-consensus bench` measured, and the same columns as the paper prints them.

The paper measured LLaVA-1.5 7B and 13B on one RTX 6000 Ada in float16. Compare speed-ups with its times; FLOPs and
cache are formulas (docs/accounting.md).
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import LINEUP
from llava_consensus.evaluation.report.table import ABSENT, Table, groups, number

TABLES = {"llava-1.5-7b": "efficiency_llava_1_5_7b", "llava-1.5-13b": "efficiency_llava_1_5_13b"}  # of a model
FALLBACK = "llava-1.5-7b"  # beside other models
FULL_TITLE, OURS = "Baseline", "ConsensusDrop (Ours)"  # what the paper calls them
LABELS = {variant.method: variant.label for variant in LINEUP if not variant.options}
GB, MIB, TERA = 1e-9, 2**-20, 1e-12
MEASURED = {  # path in a row of a bench file: title and unit of its column, key in CSV
    "ttft_ms": ("TTFT (ms)", 1.0, "ttft_ms"),
    "quartiles.ttft_ms": ("quartiles", 1.0, "ttft_ms_quartiles"),
    "speedup": ("speed-up", 1.0, "speedup"),
    "phases_ms.tower": ("tower", 1.0, "tower_ms"),
    "phases_ms.reduction": ("reduction", 1.0, "reduction_ms"),
    "phases_ms.prefill": ("prefill", 1.0, "prefill_ms"),
    "tpot_ms": ("TPOT (ms)", 1.0, "tpot_ms"),
    "quartiles.tpot_ms": ("quartiles", 1.0, "tpot_ms_quartiles"),
    "generation_ms": ("generation (ms)", 1.0, "generation_ms"),
    "account.flops.llm": ("LLM TFLOPs", TERA, "llm_flops"),
    "account.flops.total": ("all TFLOPs", TERA, "flops"),
    "account.kv_bytes": ("KV by formula (MiB)", MIB, "kv_formula_bytes"),
    "kv_bytes": ("KV measured", MIB, "kv_bytes"),
    "peak_bytes": ("peak (GB)", GB, "peak_bytes"),
}
BESIDE = {  # the same, with the key of the paper's column
    "ttft_ms": ("TTFT (ms)", 1.0, "ttft_ms"),
    "speedup": ("speed-up", 1.0, "speedup"),
    "paper.flops": ("TFLOPs", TERA, "flops_t"),
    "paper.kv_bytes": ("KV (MiB)", MIB, "kv_mb"),
    "peak_bytes": ("peak (GB)", GB, "gpu_mem_gb"),
    "generation_ms": ("generation (ms)", 1.0, "gen_time_ms"),
}

Row = Mapping[str, Any]


def label(row: Row) -> str:
    return LABELS.get(row["method"]) or str(row["title"])


def flat(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a bench file with nested values under their paths; None for what was not measured."""
    rows = pd.json_normalize(content["rows"]).reindex(columns=["tokens", *MEASURED, *BESIDE]).astype(object)
    rows = rows.loc[:, ~rows.columns.duplicated()]
    found: list[dict[str, Any]] = rows.where(rows.notna(), None).to_dict("records")
    return found


def bench_tables(content: Mapping[str, Any]) -> list[Table]:
    """Table of the measurements, and one with the paper's columns beside ours."""
    full, measured, beside = content["rows"][0]["tokens"], [], []
    for row, values in zip(content["rows"], flat(content), strict=True):
        heading = f"{row['tokens']} tokens" if row["tokens"] != full else f"All {full} tokens"
        printed = printed_row(content, row)
        measured.append(
            (heading, (label(row), *(text(values[path], unit, path) for path, (_, unit, _) in MEASURED.items())))
        )
        pairs = ((text(values[path], unit, path), printed.get(key)) for path, (_, unit, key) in BESIDE.items())
        beside.append((heading, (label(row), *(str(cell or ABSENT) for pair in pairs for cell in pair))))
    same = content["model"] in TABLES
    whose = content["model"] if same else f"{FALLBACK}, another model than ours: compare speed-ups only"
    titles = (f"{title}, {side}" for title, _, _ in BESIDE.values() for side in ("ours", "paper"))
    head = ("method", *(title for title, _, _ in MEASURED.values()))
    return [
        Table(f"Efficiency of {content['model']}", head, groups(measured), protocol(content)),
        Table(
            "The same beside the paper",
            ("method", *titles),
            groups(beside),
            f"Paper: {whose}, RTX 6000 Ada, float16; TFLOPs and KV of both by its formulas (docs/accounting.md).",
        ),
    ]


def text(value: Any, unit: float, path: str) -> str:
    if path == "speedup" and value is not None:
        return f"{value:.2f}"
    return f"{value[0]:.1f} to {value[1]:.1f}" if isinstance(value, list) else number(unit)(value)


def csv_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for row, values in zip(content["rows"], flat(content), strict=True):
        printed = printed_row(content, row)
        own = {key: values[path] for path, (_, _, key) in MEASURED.items()}
        beside = {f"paper_{key}": printed.get(key) for _, _, key in BESIDE.values()}
        lines.append({"method": label(row), "tokens": row["tokens"], **own, **beside})
    return lines


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


def printed_table(model: str) -> str:
    """Name of the paper's table for a model, or the fallback for one that it did not measure."""
    return TABLES.get(model, TABLES[FALLBACK])


def printed_row(content: Mapping[str, Any], row: Row) -> Row:
    rows = paper.printed_tables()[printed_table(content["model"])]
    name = {"full": FULL_TITLE, "consensusdrop": OURS}.get(row["method"], str(row["title"]))
    return next((one for one in rows if (one["method"], int(one["tokens"])) == (name, row["tokens"])), {})
