"""A run on disk: what was asked, what came back, and how to go on after a SIGKILL in the middle of a write.

A run is the folder `OUT/<benchmark>-<method>-<tokens>-<hash of the whole configuration>`, with `all` in place of the
number of tokens where nothing is reduced:

    config.json     written first; a folder whose config.json differs from the one asked for is never mixed with it
    answers.jsonl   one line per answer, LLaVA's keys in LLaVA's order; each batch is appended with a single write
    errors.jsonl    one line per question without an answer: its picture cannot be read, or the model fails at it
    shards/         of a run with several workers: what they have finished, a file for each range of questions, written
                    in one step; merged into the two files above, in the order of the questions, when all is there
    scores.jsonl    each answer as it was scored, a line each; made again from the answers where it is missing
    metrics.json    written last; a run is complete when it is there
    asking.json     while a single process asks: which questions, for the next process if this one dies of them
    lock            held while a process works on the run; the operating system lets go of it when the process dies

Only the end of a file that is appended to can be cut, so a cut last line is dropped and reported, and damage anywhere
else stops with file and line. Use: `with open_run(out, config, indexes) as run: run.add(answers); run.finish(metrics)`.
"""

import contextlib
import hashlib
import json
import marshal
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import (
    ANSWERS,
    CONFIG,
    METRICS,
    ROOM,
    SCORES,
    Record,
    append,
    canonical,
    parse,
    parse_lines,
    read_json,
    remove_leftovers,
    replace,
    to_lines,
    whole_lines,
    write_json,
    write_metrics,
)
from llava_consensus.evaluation.locks import check_lock, take_lock
from llava_consensus.evaluation.runs import checksums
from llava_consensus.evaluation.runs.collector import collector_rests

ERRORS, LOCK, SHARDS = "errors.jsonl", "lock", "shards"
ALL = "all"  # in place of a number of tokens: every token the model has
AGAIN = "Delete it; the same command makes it again"
ANSWER_KEYS = ("question_id", "prompt", "text", "answer_id", "model_id", "metadata")
ERROR_KEYS = ("index", "question_id", "image", "error")


def run_name(config: Mapping[str, Any]) -> str:
    """`<benchmark>-<method>-<tokens>-<hash>`; the hash is taken over the whole configuration."""
    digest = hashlib.sha256(canonical(config).encode()).hexdigest()[:12]
    tokens = ALL if config["tokens"] is None else config["tokens"]
    return f"{config['benchmark']}-{config['method']}-{tokens}-{digest}"


def write_shard(run: Path, name: str, answers: Sequence[Record], errors: Sequence[Record]) -> None:
    """One range of questions of the run in folder `run`, in one step; nothing where it is there already."""
    path = run / SHARDS / f"{name}.jsonl"
    if path.exists():
        return
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"{path.parent}: cannot be made ({error.strerror}). {ROOM}") from None
    replace(path, to_lines((*answers, *errors)))


class Run:
    """An open run: what it holds, and the only way to add to it. Made by `open_run`; holds its lock until closed."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.answers: dict[int, Record] = {}  # by question index, in file order
        self.errors: dict[int, Record] = {}
        self.repairs: list[str] = []  # what was dropped from a cut file, in words
        self._lock = lock

    @property
    def done(self) -> set[int]:
        """Indexes of the questions that need not be asked again."""
        return self.answers.keys() | self.errors.keys()

    def add(self, answers: Sequence[Record] = (), errors: Sequence[Record] = ()) -> None:
        """Appends a batch; when this returns it is on the disk."""
        self._check_lock()
        append(self.path / ERRORS, errors)
        append(self.path / ANSWERS, answers)
        self.errors.update((record["index"], record) for record in errors)
        self.answers.update((record["metadata"]["index"], record) for record in answers)

    def add_shard(self, name: str, answers: Sequence[Record], errors: Sequence[Record]) -> None:
        """Takes over what a worker has finished; `write_shard` makes the file, here or in the worker's process."""
        self._check_lock()
        write_shard(self.path, name, answers, errors)
        self.errors.update((record["index"], record) for record in errors)
        self.answers.update((record["metadata"]["index"], record) for record in answers)

    def metrics(self) -> Record | None:
        """What a complete run measured; None while the run is not complete."""
        path = self.path / METRICS
        if not path.exists():
            return None
        metrics: Record = read_json(path, AGAIN, dict)
        return metrics

    @property
    def scored(self) -> bool:
        """Whether every answer is there as it was scored."""
        return (self.path / SCORES).exists()

    @collector_rests()
    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Completes the run, records in the order of the questions; `report.extracted` goes to scores.jsonl."""
        self._check_lock()
        self._settle()
        report = dict(metrics.get("report", {}))
        scores = report.pop("extracted", [])
        whole = {**metrics, "report": report} if "report" in metrics else dict(metrics)
        write_metrics(self.path, whole, scores, lambda: {checksums.DIGESTS: checksums.digests(self.path, whole)})

    def _check_lock(self) -> None:
        check_lock(self._lock, self.path / LOCK)

    def forget(self, indexes: Collection[int]) -> None:
        """Makes questions that were answered, or failed, questions that are still to be asked."""
        self._check_lock()
        (self.path / METRICS).unlink(missing_ok=True)
        for name, records in ((ERRORS, self.errors), (ANSWERS, self.answers)):
            for index in indexes:
                records.pop(index, None)
            replace(self.path / name, to_lines(records[index] for index in sorted(records)))
        shutil.rmtree(self.path / SHARDS, ignore_errors=True)

    def _settle(self) -> None:
        """Brings records into the order of their questions, and those of workers into the files of one process."""
        for name, records in ((ERRORS, self.errors), (ANSWERS, self.answers)):
            if (self.path / SHARDS).is_dir() or list(records) != sorted(records):
                replace(self.path / name, to_lines(records[index] for index in sorted(records)))
        shutil.rmtree(self.path / SHARDS, ignore_errors=True)

    def leave_nothing(self) -> None:
        """Removes a folder in which nothing was asked, as where the model could not be loaded."""
        with contextlib.suppress(OSError):  # somebody else has removed it
            filled = {path.name for path in self.path.iterdir() if path.is_dir() or path.stat().st_size}
            if filled <= {CONFIG, LOCK}:
                shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Lets the next process have the run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@collector_rests()
def open_run(out: Path, config: Mapping[str, Any], indexes: Collection[int]) -> Run:
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
            for folder in (path, path / SHARDS):
                remove_leftovers(folder)
            _check_config(path, json.loads(canonical(config)))
            _load(run, indexes)
        except BaseException:
            run.close()
            raise
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read and written ({error.strerror}). Choose another folder with --out"
        ) from None
    return run


def _check_config(path: Path, config: Record) -> None:
    """Writes config.json into a new folder; in an old one it must be the same."""
    file = path / CONFIG
    if not file.exists():
        stray = [name for name in (ANSWERS, ERRORS, METRICS) if (path / name).exists() and (path / name).stat().st_size]
        if stray:
            raise DataError(
                f"{path}: has {', '.join(stray)} but no {CONFIG}, so nobody knows what was asked. Move the folder away"
            )
        write_json(file, config)
        return
    stored = read_json(file, "Move the folder away, or give another --out.")
    if stored != config:
        stored = stored if isinstance(stored, dict) else {}
        keys = [key for key in sorted(stored.keys() | config.keys()) if stored.get(key) != config.get(key)]
        differences = "; ".join(f"{key}: {stored.get(key)!r} there, {config.get(key)!r} asked for" for key in keys)
        raise DataError(
            f"{file}: made by another configuration ({differences}). Move the folder away, or give another --out"
        )


def _load(run: Run, indexes: Collection[int]) -> None:
    """Reads what the run holds, then mends what was cut; damage stops it before it changes anything."""
    cut = []
    once: dict[Any, Any] = {}
    for name, keys in ((ERRORS, ERROR_KEYS), (ANSWERS, ANSWER_KEYS)):
        path = run.path / name
        lines, end = whole_lines(path)
        intact = [checksums.intact(line) for line in lines]
        for number, record in enumerate(parse_lines(path, lines, keys), 1):
            index = record["index"] if name == ERRORS else _index(path, number, record, intact[number - 1])
            if index not in indexes:
                raise DataError(f"{path}, line {number}: index {index!r} is no question of this run. Remove the line")
            if index in run.answers or index in run.errors:
                raise DataError(
                    f"{path}, line {number}: question {index} is there a second time. Remove one of the two"
                )
            if name == ANSWERS:
                _share(record, once)
            (run.errors if name == ERRORS else run.answers)[index] = record
        if end is not None:
            cut.append((path, end))
    _load_shards(run, indexes)
    for path, end in cut:
        os.truncate(path, end)
        run.repairs.append(f"{path}: the last line was cut in the middle of a write; dropped it, it is asked again")
    if run.done != set(indexes):
        (run.path / METRICS).unlink(missing_ok=True)


def _share(record: Record, once: dict[Any, Any]) -> None:
    """Most answers of a run say what one before did, about the same picture, at the same cost: what is equal is in
    memory once.
    """
    metadata = record["metadata"]
    for entries, name in ((record, "text"), (record, "model_id"), (metadata, checksums.PICTURES)):
        if isinstance(entries.get(name), str):
            entries[name] = once.setdefault(entries[name], entries[name])
    if "account" in metadata:
        spelled = marshal.dumps(metadata["account"], 2)  # version 2 spells equal values alike, faster than repr
        metadata["account"] = once.setdefault(spelled, metadata["account"])


def _load_shards(run: Run, indexes: Collection[int]) -> None:
    """Adds what workers had finished when the run was stopped. If it was stopped while their files were merged into
    answers.jsonl, a record is in both places: the one that was read first, from answers.jsonl, is kept.
    """
    for path in sorted((run.path / SHARDS).glob("[0-9]*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            failed = "error" in parse(path, number, line, ("question_id",))
            record = parse(path, number, line, ERROR_KEYS if failed else ANSWER_KEYS)
            index = record["index"] if failed else _index(path, number, record, checksums.intact(line))
            if index not in indexes:
                raise DataError(f"{path}, line {number}: index {index!r} is no question of this run. Remove the file")
            (run.errors if failed else run.answers).setdefault(index, record)


def _index(path: Path, number: int, record: Record, intact: bool) -> int:
    metadata = record["metadata"]
    if not isinstance(metadata, dict) or type(metadata.get("index")) is not int:
        raise DataError(f"{path}, line {number}: no index in metadata. Remove the line; the question is asked again")
    if not intact:
        checksums.check(path, number, record)
    return metadata["index"]
