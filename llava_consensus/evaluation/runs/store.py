"""A run on disk: its questions and answers, and how to resume after a SIGKILL in the middle of a write.

A run is the folder `OUT/<benchmark>-<method>-<tokens>-<hash of the whole configuration>`, with `all` in place of the
number of tokens if nothing is reduced:

    config.json     written first; a folder whose config.json differs from the one asked for is never mixed with it
    answers.jsonl   one line per answer, LLaVA's keys in LLaVA's order; a batch is one append
    errors.jsonl    one line per question without an answer: its image cannot be read, or the model fails at it
    scores.jsonl    each answer as it was scored, a line each; made again from the answers if it is missing
    metrics.json    written last; a run is complete when it is there
    asking          the questions of each batch, written before it is asked; goes when the run is complete
    lock            held while a process works on the run; the operating system releases it when the process dies

Answers are in the order they came in until the run is complete, then in the order of the questions. Only the end of a
file that is appended to can be cut, so a cut last line is dropped and reported, and damage anywhere else stops with
file and line. Use: `with open_run(out, config, indexes) as run: run.add(answers); run.finish(metrics)`.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import shortuuid

from llava_consensus.errors import ConsensusError, DataError, Interrupted
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import (
    ANSWERS,
    CONFIG,
    METRICS,
    Record,
    append,
    canonical,
    misread,
    parse_lines,
    read_json,
    remove_leftovers,
    replace,
    take_lock,
    to_lines,
    whole_lines,
    write_json,
    write_metrics,
)
from llava_consensus.evaluation.runs.execution import DeviceFailed
from llava_consensus.evaluation.runs.workers import WorkerError

ERRORS, LOCK, ASKING = "errors.jsonl", "lock", "asking"
ALL = "all"  # in place of a number of tokens: every token the model has
AGAIN = "Delete it; the same command makes it again"
MEND = "Remove the line; the same command asks that question again"
ANSWER_KEYS = ("question_id", "prompt", "text", "answer_id", "model_id", "metadata")
ERROR_KEYS = ("index", "question_id", "image", "error")
REDUCTION = ("method", "method_version", "options", "changed", "tokens", "merged", "match")  # keys of a configuration


def run_name(config: Mapping[str, object]) -> str:
    """`<benchmark>-<method>-<tokens>-<hash>`; the hash is taken over the whole configuration."""
    short = hashlib.sha256(canonical(config).encode()).hexdigest()[:12]
    tokens = ALL if config["tokens"] is None else config["tokens"]
    return f"{config['benchmark']}-{config['method']}-{tokens}-{short}"


def answer_record(run: str, question: Question, model: str, text: str, metadata: Record) -> Record:
    """A line of answers.jsonl, as LLaVA writes it. The id follows from the name of the run and the question, so that a
    run done twice gives the same bytes.
    """
    return {
        "question_id": question.question_id,
        "prompt": question.text if question.prompt is None else question.prompt,
        "text": text,
        "answer_id": shortuuid.uuid(f"{run}/{question.index}"),
        "model_id": Path(model).name,
        "metadata": {"index": question.index, **metadata},
    }


class Run:
    """An open run: its answers and errors, and the only way to add to them.

    Made by `open_run`; holds its lock until closed.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.answers: dict[int, Record] = {}  # by question index, in file order
        self.errors: dict[int, Record] = {}
        self.repairs: list[str] = []  # descriptions of lines dropped from cut files
        self._lock = lock

    @property
    def done(self) -> set[int]:
        return self.answers.keys() | self.errors.keys()

    def add(self, answers: Sequence[Record] = (), errors: Sequence[Record] = ()) -> None:
        append(self.path / ERRORS, errors)
        append(self.path / ANSWERS, answers)
        self.errors.update((record["index"], record) for record in errors)
        self.answers.update((record["metadata"]["index"], record) for record in answers)

    def forget(self, indexes: Collection[int]) -> None:
        (self.path / METRICS).unlink(missing_ok=True)
        for records in (self.errors, self.answers):
            for index in indexes:
                records.pop(index, None)
        self._rewrite()

    def metrics(self) -> Record | None:
        path = self.path / METRICS
        return read_json(path, AGAIN, dict) if path.exists() else None

    def finish(self, metrics: Mapping[str, object]) -> None:
        """Completes the run, records in the order of the questions; `report.extracted` goes to scores.jsonl."""
        if any(list(records) != sorted(records) for records in (self.errors, self.answers)):
            self._rewrite()
        whole = dict(metrics)
        report, scores = whole.get("report"), []
        if isinstance(report, dict):
            whole["report"] = report = dict(report)
            scores = report.pop("extracted", [])
        write_metrics(self.path, whole, scores)
        (self.path / ASKING).unlink(missing_ok=True)

    def _rewrite(self) -> None:
        for name, records in ((ERRORS, self.errors), (ANSWERS, self.answers)):
            replace(self.path / name, to_lines(records[index] for index in sorted(records)))

    @contextlib.contextmanager
    def asking(self, total: int) -> Iterator[None]:
        """Ctrl-C in the body becomes Interrupted; an error before the first answer leaves no folder."""
        try:
            yield
        except (DeviceFailed, WorkerError):  # the list of questions stays
            raise
        except KeyboardInterrupt:
            (self.path / ASKING).unlink(missing_ok=True)
            count = f"{len(self.done)} of {total}"
            raise Interrupted(f"stopped after {count} questions. The same command resumes: {self.path}") from None
        except ConsensusError:
            (self.path / ASKING).unlink(missing_ok=True)
            if not any((self.path / name).stat().st_size for name in (ANSWERS, ERRORS)):
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(out: Path, config: Mapping[str, object], indexes: Collection[int]) -> Run:
    """Opens the run of a configuration, new or begun, and takes its lock.

    Args:
        out: folder of all runs, made if absent.
        config: the whole configuration, JSON values only.
        indexes: the questions of the run; a record of any other question is damage.
    Raises:
        BusyError: another process works on this run.
        DataError: the folder belongs to another configuration, a file is damaged, or `out` cannot be written.
    """
    path = out / run_name(config)
    try:
        path.mkdir(parents=True, exist_ok=True)
        run = Run(path, take_lock(path / LOCK, "this run"))
        try:
            remove_leftovers(path)
            _check_config(path, json.loads(canonical(config)))
            _load(run, indexes)
        except BaseException:
            run.close()
            raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read and written ({error.strerror}). Choose another --out") from None
    return run


def _check_config(path: Path, config: Record) -> None:
    """Writes config.json into a new folder; in an old one it must be the same."""
    file = path / CONFIG
    if not file.exists():
        if any((path / name).exists() and (path / name).stat().st_size for name in (ANSWERS, ERRORS, METRICS)):
            raise DataError(f"{path}: has no {CONFIG}, so the questions of this run are unknown. Move the folder away")
        write_json(file, config)
        return
    stored = read_json(file, "Move the folder away, or give another --out.")
    if stored != config:
        raise DataError(f"{file}: made by another configuration. Move the folder away, or give another --out")


def _load(run: Run, indexes: Collection[int]) -> None:
    """Reads the run's files, then repairs cut ones; damage stops it before it changes anything."""
    cut = []
    for name, keys, found in ((ERRORS, ERROR_KEYS, run.errors), (ANSWERS, ANSWER_KEYS, run.answers)):
        path = run.path / name
        lines, end = whole_lines(path)
        for number, record in enumerate(parse_lines(path, lines, keys), start=1):
            index = record["index"] if name == ERRORS else _index(record)
            where = f"{path}, line {number}"
            if index is None:
                raise DataError(f"{where}: no index in metadata. {MEND}")
            if index not in indexes:
                raise DataError(f"{where}: index {index!r} is no question of this run. Remove the line")
            if index in run.answers or index in run.errors:
                raise DataError(f"{where}: question {index} is there a second time. Remove one of the two")
            found[index] = record
        if end is not None:
            cut.append((path, end))
    for path, end in cut:
        os.truncate(path, end)
        run.repairs.append(f"{path}: the last line was cut in the middle of a write; dropped it, it is asked again")
    if run.done != set(indexes):
        (run.path / METRICS).unlink(missing_ok=True)


def _index(record: Record) -> int | None:
    metadata = record["metadata"]
    index = metadata.get("index") if isinstance(metadata, dict) else None
    return index if type(index) is int else None


def full_score(out: Path, config: Mapping[str, Any]) -> float | None:
    """The score with all tokens: of the finished run in a folder of runs that differs from a configuration in method
    and budget only, else the one kept with the embedded questions; None without either.

    Raises:
        DataError: a file of such a run is damaged.
    """
    setting = _without_reduction(config)
    for file in sorted(out.glob(f"*/{CONFIG}")):
        path = file.parent / METRICS
        if _without_reduction(read_json(file, "Move its folder away", dict)) != setting or not path.exists():
            continue
        metrics = read_json(path, AGAIN, dict)
        with misread(str(path), AGAIN):
            if metrics["tokens"]["before"] == metrics["tokens"]["after"] and metrics["score"] is not None:
                return float(metrics["score"])
    return _kept_score(config)


def _kept_score(config: Mapping[str, Any]) -> float | None:
    file = Path(config["data"]) / "scores.json"
    if not file.is_file():
        return None
    kept = read_json(file, "Delete it", dict)
    entry = kept["benchmarks"].get(config["benchmark"])
    same = entry is not None and entry["questions"] == config["questions"] and "sample" not in config
    if not same or any(config.get(key) != value for key, value in kept["setting"].items()):
        return None
    return float(entry["score"])


def _without_reduction(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in REDUCTION}
