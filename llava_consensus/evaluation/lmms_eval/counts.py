"""What answers cost, where lmms-eval has room for it: `token_counts` of every logged sample, `throughput` of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from lmms_eval.api.instance import TokenCounts
from lmms_eval.models.model_utils.gen_metrics import log_metrics

from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.models import Answer


@dataclass
class AnswerCounts(TokenCounts):
    """Counts of one answer: lmms-eval's own, then ours, whose names are those of docs/accounting.md."""

    reduction: dict[str, float | None] = field(default_factory=dict)  # None: not known
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; lmms-eval writes them beside the answer."""
        return {**super().to_dict(), **self.reduction, "notes": list(self.notes)}


def counts(answer: Answer, account: Record, output_tokens: int, first_token_ms: float | None) -> AnswerCounts:
    """The counts of one answer.

    Args:
        answer: of a host.
        account: what it cost as `runs.costs` counts it; empty where the host does not tell what it read.
        output_tokens: of its text.
        first_token_ms: milliseconds from the pictures in memory to the first token of its batch, vision tower included.
    """
    measured, flops = account.get("measured", {}), account.get("flops", {}).get("total")
    reduction = {
        "visual_before": answer.before,
        "visual_after": answer.after,
        "visual_structural": answer.structural,
        "visual_entering": measured.get("entering"),
        "visual_average": measured.get("average"),
        "gflops": None if flops is None else flops / 1e9,
        "kv_bytes": sum(measured["kv_bytes"]) if measured else None,
        "first_token_ms": first_token_ms,
    }
    read = answer.prefill.text + answer.prefill.entering[0] if measured and answer.prefill else None
    return AnswerCounts(read, output_tokens, reduction=reduction, notes=answer.notes)


def log_run(answered: Sequence[AnswerCounts], seconds: float) -> None:
    """Hands lmms-eval the means over the answers that were given; those from its cache have no counts."""
    output = sum(one.output_tokens or 0 for one in answered)
    means = {}
    for name in answered[0].reduction:
        known = [value for value in (one.reduction[name] for one in answered) if value is not None]
        if len(known) == len(answered):
            means[name] = mean(known)
    log_metrics(seconds, output, output / seconds, {**means, "num_requests": len(answered)})
