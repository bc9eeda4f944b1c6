"""Whether what a file holds has the shape that its reader expects, said in one line where it has not.

check_shape(metrics, {"score": NUMBER, "tokens": {"before": NUMBER}}, path, "Move the folder away")

with misread(f"{folder}: a file of gqa"): ...  # code that looks things up in what files hold
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llava_consensus.errors import ConsensusError, DataError

NUMBER = (int, float)
MAYBE_NUMBER = (int, float, type(None))
COUNT_OR_NONE = (int, type(None))
WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)  # that odd values lead to


def check_shape(value: Any, shape: Any, place: Path, remedy: str, name: str = "") -> None:
    """Raises DataError for the first value that is missing or of another type.

    Args:
        value: what was read.
        shape: a type, a tuple of types, or the shapes of an object's values by their name; others may be there too.
        place, remedy: for the message.
        name: of the value within the file.
    """
    kinds = dict if isinstance(shape, Mapping) else shape
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        wrong = f"{name or 'the content'} is of the wrong type ({type(value).__name__})"
        raise DataError(f"{place}: {wrong}. {remedy}")
    if isinstance(shape, Mapping):
        for key, inner in shape.items():
            full = f"{name}.{key}" if name else key
            if key not in value:
                raise DataError(f"{place}: no {full} in it. {remedy}")
            check_shape(value[key], inner, place, remedy, full)


@contextlib.contextmanager
def misread(what: str, remedy: str = "Fetch it again") -> Iterator[None]:
    """Raises DataError for an error that a value of another type than expected leads to in the block; `what` says where
    the value may be.
    """
    try:
        yield
    except ConsensusError:
        raise
    except WRONG as error:
        said = f"{type(error).__name__}: {error}"[:200]
        raise DataError(f"{what}: a value is missing, or is not what it must be ({said}). {remedy}") from error
