"""The command `train`: adapts a model to fewer visual tokens, or trains a scorer (docs/training.md)."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.evaluation.runs import MODEL


@command(
    "train",
    arg("--model", default=MODEL, help="checkpoint that is adapted (%(default)s)"),
    arg("--data-path", type=Path, required=True, metavar="FILE", help="conversations, LLaVA's format"),
    arg("--images", type=Path, required=True, metavar="DIR", help="folder of their images"),
    arg("--out", type=Path, required=True, metavar="DIR", help="the adapted checkpoint; the same one resumes"),
    arg("--method", default="consensusdrop", help="attached in every step; full for none (%(default)s)"),
    arg("--tokens", default="64", help="budgets, one of which is drawn for each step (%(default)s)"),
    arguments.OPTION,
    arg("--tune", default="projector", help="projector, lora, full (%(default)s)"),
    arg("--steps", type=int, default=100, help="optimiser steps (%(default)s)"),
    arg("--batch", type=int, default=8, help="conversations of a process in one pass (%(default)s)"),
    arg("--accumulate", type=int, default=1, help="passes of a step (%(default)s)"),
    arg("--learning-rate", type=float, help="peak of the schedule (LLaVA's own for what is tuned)"),
    arg("--seed", type=int, default=0, help="seed of data, budgets and dropout (%(default)s)"),
    arg("--save-every", type=int, default=50, help="steps between checkpoints to resume from (%(default)s)"),
    arg("--dtype", default="float32", help="float32, bfloat16, float16 (%(default)s)"),
    arg("--checkpointing", action="store_true", help="compute layers again in the backward pass"),
    arg("--attn", default="auto", metavar="KERNEL", help="sdpa, flash_attention_2, eager (the model's)"),
    arg("--device", default="auto", help="auto, cpu, cuda (%(default)s)"),
    arg("--deepspeed", type=Path, metavar="FILE", help="configuration, such as eval_scripts/zero2.json"),
    arg("more", nargs="*", metavar="scorer | -- ARGUMENT", help="train a scorer; what LLaVA's own parser takes"),
    examples=(
        "train --data-path train.json --images images --tokens '64 32' --out checkpoints/adapted",
        "train scorer --model checkpoints/llava-hf --data-path train.json --images images --out scorer.safetensors",
    ),
)
def train(given: argparse.Namespace) -> Iterator[str]:
    """Adapt a model to fewer visual tokens: projector, LoRA or all of it."""
    from llava_consensus.evaluation.models import Loading
    from llava_consensus.methods import make
    from llava_consensus.training.plan import TrainingPlan

    if given.more[:1] == ["scorer"]:
        given.tune, given.method, given.more = "scorer", "full", given.more[1:]
    method = make(given.method, **arguments.options(given.option))
    own = {name: value for name, value in vars(given).items() if name in TrainingPlan.__dataclass_fields__}
    own |= {
        "conversations": given.data_path,
        "method": method if method.reduces else None,
        "budgets": tuple(arguments.budgets(given.tokens)) if method.reduces or given.tune == "scorer" else (),
        "device": Loading(given.device).resolved().device,
        "precision": given.dtype,
        "attention": given.attn,
        "arguments": tuple(given.more),
    }
    plan = TrainingPlan(**own)
    if plan.tune == "scorer":
        from llava_consensus.training.scorer import train_scorer

        losses = train_scorer(plan)[-10:]
        yield f"{plan.out}: loss {sum(losses) / len(losses):.4f} at the end"
        measured = f"--method scorer --option weights={plan.out} --tokens {given.tokens.split()[0]}"
        yield f"measure it: llava-consensus eval gqa --model {plan.model} {measured}"
        return
    from llava_consensus.training.run import train as run

    result = run(plan, given.method)
    tail = result["losses"][-10:]
    yield f"{plan.out}: {result['steps_done']} steps, loss {sum(tail) / max(1, len(tail)):.4f} at the end"
    tokens = f" --tokens {given.tokens.split()[0]}" if plan.budgets else ""
    yield f"measure it: llava-consensus eval gqa --model {plan.out} --method {given.method}{tokens}"
