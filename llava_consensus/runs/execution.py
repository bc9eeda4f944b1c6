"""How a run is carried out: the questions of a batch, the processes, the engine they run on. `Execution(batch=32)`."""

from dataclasses import dataclass

from llava_consensus.errors import OptionError
from llava_consensus.runs.workers import check_engine


@dataclass(frozen=True)
class Execution:
    """How a run is carried out. Nothing of it changes an answer, so nothing of it is in the run's name.

    Args:
        batch: questions answered together.
        workers: processes, each with a model of its own, on a device of its own where there are several.
        engine: name in ENGINES, where the processes are; looked at only where there are several.
        progress: whether a bar with questions per second is shown.
    """

    batch: int = 16
    workers: int = 1
    engine: str = "local"
    progress: bool = True

    def check(self) -> None:
        """Checks what needs no model.

        Raises:
            OptionError: for a number below 1 or an unknown engine.
            MissingDependency: for an engine whose packages are not installed.
        """
        for name in ("batch", "workers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} must be at least 1")
        check_engine(self.engine)
