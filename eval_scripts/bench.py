"""What every method costs, measured side by side in one process: times, its own share, cache and memory, beside the
account.

Run it: make bench [TOKENS=64], or python eval_scripts/bench.py [--tokens 64 --methods consensusdrop random].
Sides take turns on every picture, so a busy moment hits all of them; compare the rows of one run only. The last line of
standard output is JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from llava_consensus import METHODS, load, make
from llava_consensus.errors import ConsensusError
from llava_consensus.hosts import Host, Prompt
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import MATCHES, Account, account, match
from llava_consensus.reduction.shape import Shape
from llava_consensus.runs import DATA, MODEL
from llava_consensus.runs.pictures import open_image
from llava_consensus.runs.timing import Measured, Side, measure

QUESTION = "Is there a dog in the image?\nAnswer the question using a single word or phrase."
HEAD = "method           T    in  kept  average   TTFT ms   TPOT ms   own ms  share %   KV MiB  peak MiB    GFLOP"


def sides(host: Host, given: argparse.Namespace, shape: Shape) -> dict[str, Side]:
    """Method and budget of each row; the full model once, a method that cannot have a budget is named and left out."""
    found: dict[str, Side] = {"full": (make("full"), Budget(shape.available))}
    for name in given.methods:
        for tokens in given.tokens if name != "full" else []:
            try:
                budget = match(make(name), Budget(tokens), shape, given.match)
                account(make(name), budget, shape)
                host.attach(make(name), budget).detach()  # or says what this model lacks for it
            except ConsensusError as error:
                print(f"{name} {tokens}: {error}")
                continue
            found[f"{name} {tokens}"] = (make(name), budget)
    return found


def line(name: str, one: Measured, found: Account, tokens: int) -> dict[str, Any]:
    """One row, printed and as JSON values."""
    cache = "-" if one.kv_bytes is None else f"{one.kv_bytes / 2**20:.3f}"
    peak = "-" if one.peak_bytes is None else f"{one.peak_bytes / 2**20:.1f}"
    total = "unknown" if found.flops.total is None else f"{found.flops.total / 1e9:.2f}"
    counts = f"{tokens:4} {found.entering:5} {found.kept:5} {found.average:8.2f}"
    times = f"{one.first.total:9.1f} {one.token_ms:9.2f} {one.own_ms:8.2f} {100 * one.first.share():8.2f}"
    print(f"{name:13} {counts} {times} {cache:>8} {peak:>9} {total:>8}")
    row = {"method": name, "tokens": tokens, "ttft_ms": one.first.total, "tpot_ms": one.token_ms}
    row |= {"own_ms": one.own_ms, "share": one.first.share(), "stages_ms": one.first.stages}
    return row | {"kv_bytes": one.kv_bytes, "peak_bytes": one.peak_bytes, "account": found.record()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--images", default=f"{DATA}/eval/gqa/data/images")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[64])
    parser.add_argument("--match", choices=MATCHES, default="kept")
    parser.add_argument("--pictures", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--length", type=int, default=9, help="tokens of the longer answer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, help="JSON file for `llava-consensus report`")
    given = parser.parse_args()
    host = load(given.model, given.device, given.dtype)
    pictures = [open_image(path) for path in sorted(Path(given.images).glob("*.jpg"))[: given.pictures]]
    text, question = host.rows(Prompt(QUESTION))
    shape = host.shape(text)._replace(question=question)
    chosen = sides(host, given, shape)
    found = measure(host, pictures, Prompt(QUESTION), list(chosen.values()), given.repeats, given.length)
    print(f"{given.model}: {len(pictures)} pictures of {shape.available} tokens, {text} rows of text, medians")
    print(HEAD)
    rows = []
    for (name, (method, budget)), one in zip(chosen.items(), found, strict=True):
        rows.append(line(name.partition(" ")[0], one, account(method, budget, shape), budget.tokens))
    result = json.dumps({"model": given.model, "shape": shape._asdict(), "match": given.match, "rows": rows})
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main()
