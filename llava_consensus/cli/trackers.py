"""`--log wandb|mlflow|tensorboard`: configuration and numbers of a finished run, told to a tracker of experiments.

TRACKERS is the only list: a tracker is one function here. It is told after a run is complete and changes nothing of it;
where it says itself that it cannot be reached, its own settings (WANDB_MODE, MLFLOW_TRACKING_URI) are looked at.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import missing_extra

if TYPE_CHECKING:
    from llava_consensus.evaluation.runs.loop import RunResult

PROJECT = "llava-consensus"
Numbers = Mapping[str, float]


def add(parser: argparse.ArgumentParser) -> None:
    """The argument of commands that run."""
    line = "also tell a tracker of experiments about finished runs: wandb, mlflow, tensorboard"
    parser.add_argument("--log", choices=TRACKERS, metavar="TRACKER", help=line)


def check(name: str | None) -> None:
    """Raises MissingDependency, before anything is asked, for a tracker that is not installed."""
    if name is not None and find_spec(name) is None:
        raise missing_extra(f"--log {name}", name)


def tell(name: str | None, result: "RunResult") -> None:
    """Tells the tracker about a run, if there is one to tell."""
    if name is not None:
        config = json.loads((result.path / "config.json").read_bytes())
        TRACKERS[name](result.path, config, numbers(result.metrics))


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested mapping, a path for each: `tokens/after`."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = float(value)
    return found


def _wandb(run: Path, config: Mapping[str, Any], values: Numbers) -> None:
    """One run of Weights & Biases, under the run's own name, so that telling twice makes no second one."""
    wandb = import_module("wandb")
    told = wandb.init(project=PROJECT, name=run.name, id=run.name, config=dict(config), resume="allow")
    told.log(dict(values))
    told.finish()


def _mlflow(run: Path, config: Mapping[str, Any], values: Numbers) -> None:
    """One run of MLflow; parameters are texts there."""
    mlflow = import_module("mlflow")
    mlflow.set_experiment(PROJECT)
    with mlflow.start_run(run_name=run.name):
        mlflow.log_params({key: str(value)[:500] for key, value in config.items()})
        mlflow.log_metrics(dict(values))


def _tensorboard(run: Path, config: Mapping[str, Any], values: Numbers) -> None:
    """An event file in the folder `tensorboard` beside the runs."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(run.parent / "tensorboard" / run.name)
    writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")
    for key, value in values.items():
        writer.add_scalar(key, value, 0)
    writer.close()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], Numbers], None]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
}
