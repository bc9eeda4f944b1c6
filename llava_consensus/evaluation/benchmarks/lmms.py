"""Tasks of lmms-eval, asked and recorded by our own harness: `lmms:NAME` for one of its own, `lmms:FOLDER/NAME.yaml`
for a task of local files.

The first time the questions and images of a task are written to DATA/eval/lmms/NAME, in LLaVA's layout, so that runs
resume, pair and name themselves as those of any benchmark. Answers are scored by the task's own filters, functions and
aggregation. A task must ask one question about images at a time, to be answered greedily.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from llava_consensus.errors import DataError, OptionError, missing_extra
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.files import Record, read_json, read_lines, replace, to_lines, write_json

PREFIX = "lmms:"
QUESTIONS, IMAGES, ORIGIN = "questions.jsonl", "images", "task.json"
MAX_NEW_TOKENS = 1024  # where a task sets no bound, as in lmms-eval's own models


def task_class(name: str) -> type[Benchmark]:
    """The benchmark of a task, given its name after `lmms:` or the path of its YAML file.

    Raises:
        OptionError: lmms-eval does not know it, or it asks in a way that is not asked here.
        MissingDependency: lmms-eval is not installed.
    """
    path = Path(name)
    include = path.parent if path.suffix in (".yaml", ".yml") else None
    return _class(name if include is None else path.stem, include)


@cache
def _class(name: str, include: Path | None) -> type[Benchmark]:
    manager = _manager(include)
    if name not in manager.all_subtasks:
        kind = "a group of tasks" if name in manager.all_tasks else "no task that lmms-eval knows"
        where = "" if include is None else f" with those in {include}"
        raise OptionError(f"{PREFIX}{name}: {kind}{where}. `lmms-eval --tasks list` names them; take a single one")
    config = manager._get_config(name)
    generation, output = config.get("generation_kwargs") or {}, config.get("output_type", "generate_until")
    if output != "generate_until":
        raise OptionError(f"{PREFIX}{name}: asks for {output}. Take a task that generates")
    if (
        generation.get("do_sample")
        or (generation.get("temperature") or 0) > 0
        or (generation.get("num_beams") or 1) > 1
    ):
        raise OptionError(f"{PREFIX}{name}: generation_kwargs={generation} is not greedy, as answers are here")
    metrics = config.get("metric_list") or [{"metric": "score"}]
    fixed = {
        "__module__": __name__,
        "name": f"{PREFIX}{name}",
        "title": name,
        "line": f"{name}, a task of lmms-eval",
        "folder": f"lmms/{name}",
        "task": name,
        "include": include,
        "metric": metrics[0]["metric"],
        "max_new_tokens": int(generation.get("max_new_tokens") or MAX_NEW_TOKENS),
        "until": tuple(filter(None, [generation.get("until")])) if isinstance(generation.get("until"), str) else tuple(
            generation.get("until") or ()
        ),
    }  # fmt: skip
    return dataclass(frozen=True, kw_only=True)(type(f"Task_{name}", (LmmsTask,), fixed))


@cache
def _manager(include: Path | None) -> Any:
    """lmms-eval's list of tasks, or that of a folder alone."""
    from PIL import ImageFile

    truncated = ImageFile.LOAD_TRUNCATED_IMAGES
    try:
        from lmms_eval.tasks import TaskManager
    except ImportError as error:
        raise missing_extra("lmms_eval", "lmms-eval") from error
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = truncated  # its import has every image of the process read, cut off or not
    if include is None:
        return TaskManager()
    return TaskManager(include_path=str(include), include_defaults=False)


@cache
def _task(name: str, include: Path | None) -> Any:
    from lmms_eval.tasks import get_task_dict

    try:
        (found,) = get_task_dict([name], _manager(include)).values()
    except Exception as error:  # of data sets, the hub, or the task's own functions
        raise DataError(f"{PREFIX}{name}: cannot be loaded ({' '.join(str(error).split())[:300]})") from error
    return found


@dataclass(frozen=True, kw_only=True)
class LmmsTask(Benchmark):
    """A task of lmms-eval; `task_class` makes the class of each."""

    task: ClassVar[str]
    include: ClassVar[Path | None] = None  # folder of its YAML file, where it is none of lmms-eval's own
    until: ClassVar[tuple[str, ...]] = ()  # texts before which an answer ends

    images = IMAGES

    @property
    def files(self) -> tuple[DataFile, ...]:
        return (DataFile(QUESTIONS, f"the task {self.task} of lmms-eval"),)

    def load(self, data: Path) -> list[Question]:
        """The questions, written anew where the task is another than they were made of.

        Raises:
            DataError: the task or its data set cannot be loaded.
            OptionError: it shows something else than pictures.
        """
        place, origin = self.place(data), self._origin()
        known = read_json(place / ORIGIN) if (place / ORIGIN).is_file() else None
        if known != origin:
            (place / IMAGES).mkdir(parents=True, exist_ok=True)
            replace(place / QUESTIONS, to_lines(self._questions(place)))
            write_json(place / ORIGIN, origin)
        rows = read_lines(place / QUESTIONS, ("question_id", "text", "images"))
        return [Question(index, index, tuple(row["images"]), row["text"]) for index, row in enumerate(rows)]

    def _origin(self) -> Record:
        """What the written questions follow from."""
        config = _manager(self.include)._get_config(self.task)
        text = json.dumps(
            config, sort_keys=True, default=lambda value: getattr(value, "__qualname__", str(type(value)))
        )
        data = [
            Path(one) for one in _strings((config.get("dataset_kwargs") or {}).get("data_files")) if Path(one).is_file()
        ]
        contents = [hashlib.sha256(one.read_bytes()).hexdigest() for one in data]
        return {"task": self.task, "config": hashlib.sha256(text.encode()).hexdigest(), "files": contents}

    def _questions(self, place: Path) -> Iterator[Record]:
        """The lines of the question file; images are stored by their content, once each."""
        from PIL import Image

        task = _task(self.task, self.include)
        for index, document in enumerate(task.eval_docs):
            names = []
            for picture in task.doc_to_visual(document) or ():
                if not isinstance(picture, Image.Image):
                    raise OptionError(f"{self.name}: shows {type(picture).__name__}; images are asked about")
                file = io.BytesIO()
                picture.convert("RGB").save(file, "PNG")
                names.append(f"{hashlib.sha256(file.getvalue()).hexdigest()[:32]}.png")
                if not (place / IMAGES / names[-1]).exists():
                    replace(place / IMAGES / names[-1], file.getvalue())
            yield {"question_id": index, "text": task.doc_to_text(document), "images": names}

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Scores by the task's own functions. Where the headline is the mean of its answers' values, these are the rows
        that reports pair.
        """
        joined, task = base.join(records, self.load(data)), _task(self.task, self.include)
        documents, values, extracted = task.eval_docs, list[Any](), []
        for index, record in joined.answers.items():
            text = record["text"]
            for end in self.until:
                text = text.split(end)[0]
            asked = SimpleNamespace(resps=[text.strip()], filtered_resps={}, doc=documents[index])
            for ensemble in task._filters:
                ensemble.apply([asked], [documents[index]])
            said = next(iter(asked.filtered_resps.values()), text)
            found = task.process_results(documents[index], said if isinstance(said, list) else [said])
            values.append(found[self.metric] if self.metric in found else next(iter(found.values())))
            extracted.append({"index": index, "extracted": str(said), "correct": values[-1]})
        aggregate = task.aggregation().get(self.metric, base.mean)
        headline = float(aggregate(values)) if values else None
        plain = all(isinstance(value, bool | int | float) and 0 <= value <= 1 for value in values)
        if headline is None or not plain or abs(base.mean(map(float, values)) - headline) > 1e-9:
            rows = [{name: value for name, value in row.items() if name != "correct"} for row in extracted]
            return base.report(self.name, joined, {self.metric: headline}, rows)
        return base.report(self.name, joined, {self.metric: 100 * headline}, extracted)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(one)
