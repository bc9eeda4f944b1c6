"""What every step of a training does, whichever Trainer runs it: the method is attached with the budget of the step,
states hold what is trained and nothing else, and a training goes on from the last one that is complete.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import DataError, OptionError
from llava_consensus.hosts import wrap
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.training.plan import Plan, drawn
from llava_consensus.training.state import WEIGHTS, State, mark_complete

LABELS, IGNORE = "labels", -100
_Trainer: Any = object  # whose attributes only the class that is made of both has
log = logging.getLogger(__name__)


class Session:
    """A plan at work on one model: what is attached to it now, and the Trainer that runs.

    Args:
        plan: what is trained.
        state: its folder.
    """

    def __init__(self, plan: Plan, state: State) -> None:
        self.plan, self.state = plan, state
        self.trainer: Any = None
        self.attachment: Any = None
        self.budgets: list[Budget | Share] = []  # of the steps of this process

    def check(self, model: nn.Module) -> None:
        """Attaches and detaches every budget once, so that what cannot be attached is said before the first step.

        Raises:
            OptionError: for a method the model has no parts for, or a budget above the tokens of a picture.
        """
        for budget in self.plan.budgets if self.plan.method is not None else ():
            self._attach(model, budget)
            view = self.attachment.model
            self.detach()
            most = view.most_tiles * view.tower.tokens
            if isinstance(budget, Budget) and budget.tokens > most:
                raise OptionError(
                    f"tokens={budget.tokens}: a picture of this model has {most} visual tokens. Give at most that"
                )

    def _attach(self, model: nn.Module, budget: Budget | Share) -> None:
        assert self.plan.method is not None  # else nothing is attached
        if self.attachment is None or self.attachment.budget != budget:
            self.detach()
            self.attachment = wrap(inner(model)).attach(self.plan.method, budget)

    def detach(self) -> None:
        """Gives the model back without the method."""
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None

    @contextlib.contextmanager
    def step(self, model: nn.Module, number: int) -> Iterator[Any]:
        """One forward and backward pass of step `number`: a call of the attached method. Yields the attachment."""
        if self.plan.method is None:
            yield None
            return
        budget = drawn(self.plan.budgets, self.plan.seed, number)
        self.budgets.append(budget)
        self._attach(model, budget)
        with self.attachment.call():
            yield self.attachment


def inner(model: Any) -> Any:
    """The model that a host adapts, out of what wraps it: processes, DeepSpeed, adapters, a compiler."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name; shared ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class Steps(_Trainer):
    """Put in front of a `Trainer`. The class that is made of both has `session` and `plain`, the Trainer's own class of
    transformers, whose way of storing states is used.
    """

    session: Session
    plain: Any

    def training_step(self, model: Any, inputs: Any, *more: Any) -> Tensor:
        """One forward and backward pass with the method attached.

        Raises:
            DataError: for a batch in which no row has an answer, whose loss is not a number.
        """
        if not bool((inputs[LABELS] != IGNORE).any()):
            raise DataError(
                "no row of a batch has an answer left: its conversations are cut to model_max_length before their "
                "answers. Raise it behind the `--`: -- --model_max_length 4096"
            )
        with self.session.step(model, self.state.global_step):
            loss: Tensor = super().training_step(model, inputs, *more)
        return loss

    def train(self, resume_from_checkpoint: Any = None, **more: Any) -> Any:
        """Trains from the last state that is complete, whatever the caller has found."""
        last = self.session.state.last()
        if last is not None:
            log.info(f"going on from {last}")
        with _readable():
            result = super().train(resume_from_checkpoint=None if last is None else str(last), **more)
        self.session.detach()
        return result

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Stores what is trained."""
        from safetensors.torch import save_file

        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = self.model
        known = dict(model.named_parameters()) if state_dict is None else state_dict
        tensors = {name: known[name].detach().cpu().contiguous() for name in trained(model)}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Reads what was trained back, in place.

        Raises:
            DataError: where the state is one of other parameters.
        """
        from safetensors.torch import load_file

        model = self.model if model is None else model
        file = Path(resume_from_checkpoint) / WEIGHTS
        stored, parameters = load_file(file), trained(model)
        if stored.keys() != parameters.keys():
            raise DataError(f"{file}: holds other parameters than are trained now. Remove the folder to begin anew")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stored[name])

    def _save_checkpoint(self, model: Any, trial: Any, *more: Any, **options: Any) -> None:
        """Stores a state; it counts from the moment that every process has stored its part."""
        self.plain._save_checkpoint(self, model, trial, *more, **options)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            mark_complete(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")
        self.accelerator.wait_for_everyone()

    def log(self, logs: dict[str, float], *more: Any) -> None:
        """Tells step, loss and budget."""
        super().log(logs, *more)
        if "loss" in logs:
            last = self.session.budgets[-1] if self.session.budgets else None
            tokens = "all" if last is None else getattr(last, "tokens", last)
            log.info(f"step {self.state.global_step}: loss {float(logs['loss']):.4f}, {tokens} tokens")


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Lets torch read the states of numpy's generator that Trainers store, which transformers 4.37 does not ask for."""
    import numpy

    core: Any = getattr(numpy, "_core" if int(numpy.__version__.split(".")[0]) > 1 else "core")
    kinds = [core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
    with torch.serialization.safe_globals(kinds):
        yield
