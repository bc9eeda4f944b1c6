"""The account of tokens of every method: on a model, and by analysis on LLaVA-1.5 and LLaVA-NeXT beside the paper.

Run it: python eval_scripts/account.py [--tokens 64 --model checkpoints/llava-mini]. On the model, every method answers
one question, and the counts and the cache it left stand beside the formulas. The last line of standard output is JSON.
docs/accounting.md says what is counted and how the paper's columns come about.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from llava_consensus import METHODS, load, make
from llava_consensus.cli import arguments
from llava_consensus.errors import ConsensusError
from llava_consensus.evaluation.models import Host, Prompt
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES, Account, account, kv_bytes, paper_flops, vision_flops
from llava_consensus.reduction.method import Shape

PAPER = Path(__file__).parents[1] / "llava_consensus" / "evaluation" / "report" / "paper.json"
QUESTION = "Is there a dog in the image?\nAnswer the question using a single word or phrase."
BUDGETS: dict[str, tuple[int, ...]] = {
    "llava-1.5-7b": (576, 192, 128, 64, 32),
    "llava-1.5-13b": (576, 192, 128, 64, 32),
    "llava-next-7b": (2880, 640, 320, 160),
}
TABLES = (  # of the paper, with the sizes and the rows of text its columns mean (docs/accounting.md)
    ("llava_1_5_7b", "llava-1.5-7b", 66),
    ("efficiency_llava_1_5_7b", "llava-1.5-7b", 50),
    ("efficiency_llava_1_5_13b", "llava-1.5-13b", 50),
)
REGISTERED = {"ConsensusDrop": "consensusdrop", "ConsensusDrop (Ours)": "consensusdrop", "VisionZip": "visionzip"}
REGISTERED |= {"VisPruner": "vispruner", "FastV": "fastv", "SparseVLM": "sparsevlm"}
INSIDE = {"FastV", "SparseVLM"}  # cut inside the language model
WHY = {
    "FastV": "no one rule: with its cut after layer 2 the column means 198, 141, 96, 64 kept of 192, 128, 64, 32",
    "SparseVLM": "no one rule fits the column; the official schedules cache 206.5, 145.4, 82.3 for 192, 128, 64",
    "VisPruner": "the row holds the vision tower (0.38 T), the others do not",
}
ROUNDED = "matches to rounding"
TOWER = vision_flops(SHAPES["llava-1.5-7b"]._replace(projector=0), [576] * 24) / 1e12  # CLIP ViT-L/14-336


def line(name: str, tokens: int, found: Account) -> dict[str, Any]:
    """One account, printed and as JSON values."""
    flops = found.flops
    own = "unknown" if flops.method is None else f"{flops.method / 1e9:9.3f}"
    total = "unknown" if flops.total is None else f"{flops.total / 1e9:9.2f}"
    counts = f"{found.entering:5} {found.kept:5} {found.average:8.2f}"
    spent = f"{flops.llm / 1e9:9.2f} {flops.vision / 1e9:8.2f} {own:>9} {total:>9}"
    print(f"{name:14} {tokens:5} {counts}  {spent} {found.kv_bytes / 2**20:9.3f}  {found.note}")
    return {"method": name, "tokens": tokens, **found.record()}


def accounts(shape: Shape, budgets: Iterable[int]) -> list[dict[str, Any]]:
    """The account of every registered method at every budget; a method that cannot have one says why."""
    print("method             T    in  kept  average        LLM    tower    method  all GFLOP    KV MiB")
    rows = []
    for tokens in budgets:
        for name in METHODS:
            try:
                rows.append(line(name, tokens, account(make(name), Budget(tokens), shape)))
            except ConsensusError as error:
                print(f"{name:14} {tokens:5} {error}")
                rows.append({"method": name, "tokens": tokens, "error": str(error)})
    return rows


def measured(host: Host, rows: list[dict[str, Any]]) -> None:
    """Puts what a real prefill entered and cached beside each row of the model's own account."""
    side = round((host.shape().patches * host.shape().patch_values / 3) ** 0.5)
    picture, prompt = Image.effect_noise((side, side), 64).convert("RGB"), Prompt(QUESTION, max_new_tokens=1)
    for row in rows:
        if "error" in row:
            continue
        try:
            with host.attach(make(row["method"]), Budget(row["tokens"])):
                (answer,) = host.answer([host.encode([picture])], [prompt])
        except ConsensusError as error:  # a method this model has no parts for
            row["unmeasured"] = str(error)
            print(f"{row['method']:14} not measured: {error}")
            continue
        if answer.prefill is None:
            continue
        cached, counts = sum(answer.prefill.kv_bytes), answer.prefill.entering
        equal = cached == row["kv_bytes"] and (counts[0], counts[-1]) == (row["entering"], row["kept"])
        row["measured"] = {"kv_bytes": cached, "layers": counts, "kv_layers": answer.prefill.kv_bytes, "equal": equal}
        print(f"{row['method']:14} cache {cached / 2**20:.3f} MiB, {'as' if equal else 'NOT as'} the formula says")


def cells() -> list[dict[str, Any]]:
    """Every KV and FLOPs cell the paper prints, with ours and whether they agree."""
    tables = json.loads(PAPER.read_text(encoding="utf-8"))["tables"]
    found = []
    for table, model, text in TABLES:
        shape = SHAPES[model]._replace(text=text)
        for row in tables[table]:
            columns = [column for column in ("kv_mb", "flops_t") if row.get(column) is not None]
            found += [{"table": table, "column": column, **cell(row, column, shape)} for column in columns]
    for one in found:
        ours = "     -" if one["ours"] is None else f"{one['ours']:8.3f}"
        print(
            f"{one['table']:25} {one['column']:8} {one['method']:21} {one['tokens']:4} {one['printed']:8} {ours}",
            end="",
        )
        print(f"  {one['verdict']}")
    return found


def cell(row: dict[str, Any], column: str, shape: Shape) -> dict[str, Any]:
    """One cell: the paper's number, ours by the paper's own rule, and the verdict."""
    name, tokens, printed = row["method"], int(row["tokens"]), float(row[column])
    layers: tuple[int, ...] | None = (tokens,) * shape.layers
    if name in INSIDE:
        key = REGISTERED[name]
        layers = account(make(key), Budget(tokens), shape).layers if key in METHODS else None
    ours = None
    if layers is not None:
        ours = kv_bytes(shape, layers) / 2**20 if column == "kv_mb" else paper_flops(shape, layers) / 1e12
    return {
        "method": name,
        "tokens": tokens,
        "printed": printed,
        "ours": ours,
        "verdict": verdict(name, column, printed, ours),
    }


def verdict(name: str, column: str, printed: float, ours: float | None) -> str:
    """Whether a cell agrees; where it cannot, why."""
    if ours is None:
        return f"cannot: {WHY[name]} (not registered here)"
    rounding, near = (0.5, 0.5) if column == "kv_mb" else (0.005, 0.0101)
    if abs(ours - printed) <= near:
        return ROUNDED if abs(ours - printed) <= rounding else "matches within 0.01 T"
    tower = f"; with it {ours + TOWER:.2f}" if name == "VisPruner" and column == "flops_t" else ""
    return f"cannot: {WHY.get(name, 'unexplained')}{tower}"


def main() -> None:
    """Prints the three parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for one in arguments.LOADED:
        parser.add_argument(*one.flags, **one.settings)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64])
    given = parser.parse_args()
    host = load(given.model, arguments.loading(given))
    text, question = host.rows(Prompt(QUESTION))
    shape = host.shape(text)._replace(question=question)
    print(f"{given.model}: one picture of {shape.available} tokens, {text} rows of text")
    result: dict[str, Any] = {"model": {"name": given.model, "rows": accounts(shape, given.tokens)}}
    measured(host, result["model"]["rows"])
    for name, budgets in BUDGETS.items():
        print(f"\n{name}: analysis, {SHAPES[name].text} rows of text")
        result[name] = accounts(SHAPES[name], budgets)
    print("\nthe paper's cells: as printed, ours by its own rule")
    result["paper"] = cells()
    verdicts = Counter(one["verdict"].partition(":")[0] for one in result["paper"])
    print(", ".join(f"{count} {what}" for what, count in verdicts.most_common()), f"of {len(result['paper'])} cells")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
