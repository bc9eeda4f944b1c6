"""Names of other modules that are others for a while, and what old versions of transformers ask of new packages."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from llava_consensus.evaluation.files import Record

LOADER = ("dispatch_batches", "split_batches", "even_batches", "use_seedable_sampler")  # options of loaders


def accelerator(made: Callable[..., Any], **options: Any) -> Any:
    """accelerate has taken options of loaders in one object since 1.0, which transformers 4.37 does not know; nor does
    that version ask for the same order of the data in one process and in several, as later ones do.
    """
    loader = {name: options.pop(name) for name in LOADER if name in options}
    if loader:
        from accelerate.utils import DataLoaderConfiguration

        loader.setdefault("use_seedable_sampler", True)
        options["dataloader_config"] = DataLoaderConfiguration(**loader)
    return made(**options)


@contextlib.contextmanager
def named(owner: Any, values: Record) -> Iterator[None]:
    """Names of a module are others while the body runs."""
    absent = object()
    before = {name: vars(owner).get(name, absent) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is absent:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def command_line(arguments: list[str]) -> Iterator[None]:
    """What LLaVA's parser reads."""
    before = sys.argv
    sys.argv = ["llava.train.train", *arguments]
    try:
        yield
    finally:
        sys.argv = before
