"""A training from its plan to its checkpoint."""

import os
from importlib import import_module
from typing import Any

from llava_consensus import hosts
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.runs.fingerprint import fingerprint, place, versions
from llava_consensus.reduction.budget import Budget
from llava_consensus.training import support
from llava_consensus.training.data import Conversations, read
from llava_consensus.training.export import export
from llava_consensus.training.plan import Plan
from llava_consensus.training.state import State
from llava_consensus.training.steps import Session

OFFICIAL, TRANSFORMERS = "llava", "llava_consensus.hosts.hf"  # name of a host, package of others


def prepare(plan: Plan, name: str) -> tuple[Record, Conversations]:
    """Everything that needs no weights, checked: the description of the training, and its data.

    Args:
        plan: what is trained.
        name: of its method.
    Raises:
        ConsensusError: for a model, data or method that cannot be trained, or a package that is not installed.
    """
    data = read(plan.conversations, plan.images)
    support.check(plan, name, data)
    host = hosts.name_of(plan.model)
    checkpoint = hosts.find(plan.model)
    if host == OFFICIAL:
        from llava_consensus.training import official

        official.check(plan, checkpoint.folder)
        _check_budgets(plan, official.visual_tokens(checkpoint.folder))
    elif hosts.HOSTS[host].package != TRANSFORMERS:
        raise OptionError(
            f"model={plan.model!r} is run by code of its own ({host}), which has no training here. Adapted: official "
            "LLaVA and models of transformers"
        )
    else:
        import_module("llava_consensus.training.transformers_model").check(plan)
    model = {"name": place(plan.model), "host": host, "fingerprint": fingerprint(checkpoint.files())}
    return {
        **plan.description(name),
        "model": model,
        "data": data.description,
        "processes": processes(),
        "versions": versions("accelerate", "peft", "deepspeed"),
    }, data


def train(plan: Plan, name: str) -> Record:
    """Trains a plan, or goes on where it was stopped; what is said of the training at its end.

    Args:
        plan: what is trained.
        name: of its method.
    Raises:
        ConsensusError: see `prepare`; or a folder that holds another training.
    """
    description, data = prepare(plan, name)
    state, first = State(plan.out), int(os.environ.get("RANK", 0)) == 0
    with state.opened(description, first):
        if state.result is not None:
            return state.result
        session = Session(plan, state)
        folder = hosts.find(plan.model).folder
        if description["model"]["host"] == OFFICIAL:
            from llava_consensus.training import official

            official.run(plan, folder, session)
        else:
            from llava_consensus.training import transformers_model

            transformers_model.run(plan, data, session)
        trainer = session.trainer
        result = {**description, "steps_done": trainer.state.global_step, "losses": losses(trainer)}
        export(trainer.model, folder, plan.out, result, first)
    return result


def losses(trainer: Any) -> list[float]:
    """The loss of every step."""
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def processes() -> int:
    """Processes that train together, as torchrun and accelerate say it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _check_budgets(plan: Plan, available: int | None) -> None:
    for budget in plan.budgets if plan.method is not None else ():
        if available is not None and isinstance(budget, Budget) and budget.tokens > available:
            raise OptionError(
                f"tokens={budget.tokens}: a picture of {plan.model} has {available} visual tokens. Give at most that"
            )
