"""Writes tests/golden/answer_versions.json: checksums of what methods, hosts and benchmarks give, with their versions.

A run's name holds these versions (`answer_version` of Method, HostEntry and Benchmark, and `REDUCTION` in
evaluation/runs/configuration.py for what all share). tests/evaluation/runs/test_answer_versions.py compares, so that
whoever changes answers raises the number. After that: PYTHONPATH=.:tests .venv/bin/python
tests/golden/make_answer_versions.py; with --inputs if only the tests' own inputs have changed.

Near ties are decided by rounding, which differs from one CPU to the next. So an entry is only written if it survives
noise of `NOISE`, far above rounding, in the inputs or weights.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hf_models import CASES, prompts
from judged_data import make_mmvet, make_msvd
from tiny_data import MADE, said
from units import unit

from llava_consensus import attach
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.runs import configuration
from llava_consensus.hosts import HOSTS
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Place

STORED = Path(__file__).with_name("answer_versions.json")
NOISE = 1e-5  # relative; code paths of CPUs differ by 1e-6
SHAKES = 4
TEXTS = ("yes", "no", "A", "B", "red", "a dog", "")
Known = dict[str, dict[str, Any]]


def checksum(*values: Any) -> str:
    """A short checksum of whole numbers and texts; floats would differ from one processor to the next."""
    plain = [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:12]


def shaken(value: Any, seed: int) -> Any:
    """A copy with relative noise in every floating-point tensor; unchanged if the seed is 0."""
    if isinstance(value, tuple):
        parts = [shaken(part, seed) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if seed == 0 or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value * (1 + NOISE * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)))


def answered(name: str, method: str, seed: int = 0) -> str:
    """Tokens kept and words answered by a tiny model of a host with a method attached."""
    case = CASES[name]
    model = case.build()
    for weights in model.parameters():
        weights.data = shaken(weights.data, seed)
    inputs = prompts([1, 5, 6, case.picture(0), 7, 8, 9, 10])
    with attach(model, method, case.tokens) as attached:
        words = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        outcomes = [(one.before, one.after, one.structural, one.entering) for one in attached.outcomes]
        owners = [reduction.owner.tolist() for one in attached.outcomes for _, reduction in one.reductions]
    return checksum(words, outcomes, owners)


def of_method(name: str, seed: int = 0) -> dict[str, Any]:
    """A method's entry: after the tower on random tokens, elsewhere on a tiny LLaVA of transformers."""
    method = make(name)
    if method.place is Place.TOKENS and method.reduces:
        # ten channels: past the rank of the tokens, CDPruner would choose by rounding
        reduced = method.reduce(shaken(unit(width=10), seed), Budget(8))
        return {"version": method.answer_version, "checksum": checksum(reduced.source, reduced.owner)}
    where = "qwen3_vl" if method.place is Place.CELLS else "llava"
    return {"version": method.answer_version, "checksum": answered(where, name, seed)}


def of_host(name: str, seed: int = 0) -> dict[str, Any]:
    """A host's entry: ConsensusDrop on a tiny model of the first class of it that the tests have."""
    case = next(kind for kind in CASES if kind.replace("mistral_3", "mistral3") in HOSTS[name].types)
    return {"version": HOSTS[name].answer_version, "checksum": answered(case, "consensusdrop", seed)}


def of_benchmark(name: str, data: Path) -> dict[str, Any]:
    """A benchmark's entry: questions it asks of tiny data, and its score of made-up answers."""
    {**MADE, "mmvet": make_mmvet, "msvd": make_msvd}[name](data)
    benchmark = benchmarks.make(name)
    questions = benchmark.load(data)
    score = benchmark.score(said(questions, lambda one: TEXTS[one.index % len(TEXTS)]), data).get(benchmark.metric)
    asked = [(one.question_id, one.images, one.text, one.prompt) for one in questions]
    rounded = None if score is None else round(score, 6)
    return {"version": benchmark.answer_version, "checksum": checksum(asked, rounded)}


def entries() -> Known:
    kinds = {kind.replace("mistral_3", "mistral3") for kind in CASES}
    found: Known = {f"method {name}": of_method(name) for name in METHODS}
    found |= {f"host {name}": of_host(name) for name, host in HOSTS.items() if kinds & set(host.types)}
    for name in (*MADE, "mmvet", "msvd"):
        with tempfile.TemporaryDirectory() as folder:
            found[f"benchmark {name}"] = of_benchmark(name, Path(folder))
    return {"reduction": {"version": configuration.REDUCTION}, **found}


def near_ties(found: Known) -> list[str]:
    """Entries of methods and hosts that noise changes."""
    make = {"method": of_method, "host": of_host}
    kinds = [(entry, *entry.partition(" ")[::2]) for entry in found]
    return [
        f"{entry}: its checksum depends on rounding. Take inputs with wider margins"
        for entry, kind, name in kinds
        if kind in make and any(make[kind](name, seed) != found[entry] for seed in range(1, SHAKES + 1))
    ]


def complaint(name: str, stored: Known, now: Mapping[str, Any], reduction: int = configuration.REDUCTION) -> str:
    """Which number to raise, where an entry's checksum has changed and neither its version nor the shared one has."""
    known = stored.get(name)
    raised = reduction != stored.get("reduction", {}).get("version") and not name.startswith("benchmark")
    if known is None or known["checksum"] == now["checksum"] or known["version"] != now["version"] or raised:
        return ""
    shared = "" if name.startswith("benchmark") else ", or REDUCTION in evaluation/runs/configuration.py where all do"
    return (
        f"{name}: gives other answers than version {now['version']} gave. Raise its `answer_version` to "
        f"{now['version'] + 1}{shared}, then run tests/golden/make_answer_versions.py"
    )


if __name__ == "__main__":
    before = json.loads(STORED.read_text()) if STORED.exists() else {}
    found = entries()
    wrong = [text for name, one in found.items() if "checksum" in one and (text := complaint(name, before, one))]
    if wrong and "--inputs" not in sys.argv:
        sys.exit("\n".join(wrong))
    if wrong := near_ties(found):
        sys.exit("\n".join(wrong))
    STORED.write_text(json.dumps(found, indent=1) + "\n")
