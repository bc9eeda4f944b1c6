"""How a run is carried out: the questions of a batch, the processes, the engine they run on. `Execution(batch=32)`."""

from dataclasses import dataclass

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.runs.failures import Bound
from llava_consensus.evaluation.runs.workers import check_engine


@dataclass(frozen=True)
class Execution:
    """How a run is carried out. Nothing of it changes an answer, so nothing of it is in the run's name.

    Args:
        batch: questions answered together.
        workers: processes, each with a model of its own, on a device of its own where there are several.
        engine: name in ENGINES, where the processes are; looked at only where there are several.
        progress: whether a bar with questions per second is shown.
        retry_errors: whether questions that failed before are asked again.
        fail_on_error: how many questions may fail, a number or a share, see `failures.Bound`; None is any number.
        allow_outside: whether pictures and videos may lie outside the folder of the benchmark's pictures.
    """

    batch: int = 16
    workers: int = 1
    engine: str = "local"
    progress: bool = True
    retry_errors: bool = False
    fail_on_error: str | None = None
    allow_outside: bool = False

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
        _ = self.bound  # or says what is wrong with it

    @property
    def bound(self) -> Bound | None:
        """How many questions may fail; None is any number."""
        return None if self.fail_on_error is None else Bound.parse(self.fail_on_error)
