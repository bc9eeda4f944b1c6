"""A run on disk: what was asked, what came back, and how to go on after a SIGKILL in the middle of a write.

A run is the folder `OUT/<benchmark>-<method>-<tokens>-<hash of the whole configuration>`, with `all` in place of the
number of tokens where nothing is reduced:

    config.json     written first; a folder whose config.json differs from the one asked for is never mixed with it
    answers.jsonl   one line per answer, LLaVA's keys in LLaVA's order, with a checksum; a batch is one append
    errors.jsonl    one line per question without an answer: its picture cannot be read, or the model fails at it
    scores.jsonl    each answer as it was scored, a line each; made again from the answers where it is missing
    metrics.json    written last, with digests of answers, scores and itself; a run is complete when it is there
    asking.json     while a single process asks: which questions, for the next process if this one dies of them
    lock            held while a process works on the run; the operating system lets go of it when the process dies

Answers stand in the order they came in until the run is complete, then in the order of the questions. Only the end of a
file that is appended to can be cut, so a cut last line is dropped and reported, and damage anywhere else stops with
file and line. Use: `with open_run(out, config, indexes) as run: run.add(answers); run.finish(metrics)`.
"""

import contextlib
import hashlib
import json
import marshal
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from zlib import crc32

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import (
    ANSWERS,
    CONFIG,
    DIGESTS,
    MAYBE_NUMBER,
    METRICS,
    NUMBER,
    SCORES,
    WRONG,
    Record,
    append,
    canonical,
    check_lock,
    check_shape,
    digest,
    gc_paused,
    parse,
    parse_lines,
    read_json,
    remove_leftovers,
    replace,
    take_lock,
    to_json,
    to_lines,
    whole_lines,
    write_json,
)
from llava_consensus.evaluation.runs.execution import DeviceFailed

ERRORS, LOCK, ASKING = "errors.jsonl", "lock", "asking.json"
ALL = "all"  # in place of a number of tokens: every token the model has
AGAIN = "Delete it; the same command makes it again"
MEND = "Remove the line; the same command asks that question again"
ANSWER_KEYS = ("question_id", "prompt", "text", "answer_id", "model_id", "metadata")
ERROR_KEYS = ("index", "question_id", "image", "error")
SUM = "sum"  # name of the checksum in the metadata of an answer
REDUCTION = ("method", "method_version", "options", "changed", "tokens", "merged", "match")  # keys of a configuration
PASSING = ("timing", "environment", DIGESTS)  # of metrics.json, not part of its own digest


def run_name(config: Mapping[str, object]) -> str:
    """`<benchmark>-<method>-<tokens>-<hash>`; the hash is taken over the whole configuration."""
    short = hashlib.sha256(canonical(config).encode()).hexdigest()[:12]
    tokens = ALL if config["tokens"] is None else config["tokens"]
    return f"{config['benchmark']}-{config['method']}-{tokens}-{short}"


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
        check_lock(self._lock, self.path / LOCK)
        append(self.path / ERRORS, errors)
        append(self.path / ANSWERS, [signed(record) for record in answers])
        self.errors.update((record["index"], record) for record in errors)
        self.answers.update((record["metadata"]["index"], record) for record in answers)

    def forget(self, indexes: Collection[int]) -> None:
        """Makes questions that were answered, or failed, questions that are still to be asked."""
        check_lock(self._lock, self.path / LOCK)
        (self.path / METRICS).unlink(missing_ok=True)
        for records in (self.errors, self.answers):
            for index in indexes:
                records.pop(index, None)
        self._rewrite()

    def metrics(self) -> Record | None:
        """What a complete run measured; None while the run is not complete."""
        path = self.path / METRICS
        return read_json(path, AGAIN, dict) if path.exists() else None

    @gc_paused()
    def finish(self, metrics: Mapping[str, object]) -> None:
        """Completes the run, records in the order of the questions; `report.extracted` goes to scores.jsonl."""
        check_lock(self._lock, self.path / LOCK)
        (self.path / METRICS).unlink(missing_ok=True)
        if any(list(records) != sorted(records) for records in (self.errors, self.answers)):
            self._rewrite()
        whole = dict(metrics)
        report = whole.get("report")
        scores = []
        if isinstance(report, dict):
            whole["report"] = report = dict(report)
            scores = report.pop("extracted", [])
        replace(self.path / SCORES, to_lines(scores))
        write_json(self.path / METRICS, {**whole, DIGESTS: digests(self.path, whole)})

    def _rewrite(self) -> None:
        for name, records in ((ERRORS, self.errors), (ANSWERS, self.answers)):
            ordered = (records[index] for index in sorted(records))
            replace(self.path / name, to_lines(ordered if name == ERRORS else map(signed, ordered)))

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


@gc_paused()
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
    accounts: dict[bytes, Record] = {}  # most answers cost the same: equal accounts are in memory once
    for name, keys, found in ((ERRORS, ERROR_KEYS, run.errors), (ANSWERS, ANSWER_KEYS, run.answers)):
        path = run.path / name
        lines, end = whole_lines(path)
        whole = [name == ERRORS or _intact(line) for line in lines]
        for number, record in enumerate(parse_lines(path, lines, keys), start=1):
            index = record["index"] if name == ERRORS else _index(path, number, record, whole[number - 1])
            if index not in indexes:
                raise DataError(f"{path}, line {number}: index {index!r} is no question of this run. Remove the line")
            if index in run.answers or index in run.errors:
                raise DataError(
                    f"{path}, line {number}: question {index} is there a second time. Remove one of the two"
                )
            if name == ANSWERS and "account" in record["metadata"]:
                account = record["metadata"]["account"]
                spelled = marshal.dumps(account, 2)  # version 2 spells equal values alike, faster than repr
                record["metadata"]["account"] = accounts.setdefault(spelled, account)
            found[index] = record
        if end is not None:
            cut.append((path, end))
    for path, end in cut:
        os.truncate(path, end)
        run.repairs.append(f"{path}: the last line was cut in the middle of a write; dropped it, it is asked again")
    if run.done != set(indexes):
        (run.path / METRICS).unlink(missing_ok=True)


def _index(path: Path, number: int, record: Record, whole: bool) -> int:
    """The index of an answer's question. Takes the checksum out of the record: `signed` gives it back."""
    metadata = record["metadata"]
    if not isinstance(metadata, dict) or type(metadata.get("index")) is not int:
        raise DataError(f"{path}, line {number}: no index in metadata. {MEND}")
    if not whole:
        raise DataError(f"{path}, line {number}: damaged, it does not end with the checksum of the rest of it. {MEND}")
    del metadata[SUM]
    index: int = metadata["index"]
    return index


def signed(record: Record) -> Record:
    """The record of an answer with its checksum, as the last entry of its metadata."""
    total = f"{crc32(to_json(record).encode()):08x}"
    return record | {"metadata": record["metadata"] | {SUM: total}}


def _intact(line: bytes) -> bool:
    """Whether the line of an answer ends with the checksum of everything before it."""
    record, _, end = line.rpartition(b', "sum": "')
    return end == b'%08x"}}' % crc32(b"}}", crc32(record))


def digests(folder: Path, metrics: Mapping[str, object]) -> Record:
    """What metrics.json says of the files it was made from, and of itself."""
    steady = {name: value for name, value in metrics.items() if name not in PASSING}
    files = (CONFIG, ANSWERS, SCORES)
    found: Record = {name: digest(folder / name) if (folder / name).is_file() else None for name in files}
    return {**found, METRICS: hashlib.sha256(canonical(steady).encode()).hexdigest()}


def problems(folder: Path) -> list[str]:
    """Everything in the folder of a run that is not as it was written, a line each: `llava-consensus report verify`.

    Raises:
        DataError: it is no folder of a run.
    """
    if not (folder / CONFIG).is_file():
        raise DataError(f"{folder}: no {CONFIG}, so it is no folder of a run")
    found, path = [], folder / ANSWERS
    if not path.is_file():
        found.append(f"{path}: missing")
    else:
        lines, end = whole_lines(path)
        for number, line in enumerate(lines, start=1):
            try:
                _index(path, number, parse(path, number, line, ANSWER_KEYS, MEND), _intact(line))
            except DataError as error:
                found.append(str(error))
        if end is not None:
            found.append(f"{path}: the last line is cut; the same command asks for it again")
    path = folder / METRICS
    if not path.is_file():
        return [*found, f"{path}: missing: the run is not complete, or the same command makes it again"]
    try:
        metrics = read_json(path, AGAIN, dict)
        now, stored = digests(folder, metrics), metrics.get(DIGESTS)
    except (DataError, ValueError) as error:
        return [*found, str(error)]
    if isinstance(stored, dict) and CONFIG not in stored:
        del now[CONFIG]  # of a run that was finished before it was told
    changed = [name for name in now if not isinstance(stored, dict) or stored.get(name) != now[name]]
    remedies = {CONFIG: "Move the folder away: its answers are those of another configuration"}
    usual = f"Delete {METRICS} to score the answers again"
    said = (f"{folder / name}: changed since the run was finished. {remedies.get(name, usual)}" for name in changed)
    return [*found, *said]


def full_score(out: Path, config: Mapping[str, Any]) -> float | None:
    """The score of the finished run in a folder of runs that keeps every token and differs from a configuration in
    method and budget only; None without one.

    Raises:
        DataError: a file of such a run is damaged.
    """
    setting = _without_reduction(config)
    for file in sorted(out.glob(f"*/{CONFIG}")):
        path = file.parent / METRICS
        if _without_reduction(read_json(file, "Move its folder away", dict)) != setting or not path.exists():
            continue
        metrics = read_json(path, AGAIN, dict)
        check_shape(metrics, {"score": MAYBE_NUMBER, "tokens": {"before": NUMBER, "after": NUMBER}}, path, AGAIN)
        known = metrics.get(DIGESTS)
        if isinstance(known, dict) and known.get(CONFIG) not in (None, digest(file)):
            raise DataError(f"{file}: changed since the run was finished: its numbers are not of this")
        if metrics["tokens"]["before"] == metrics["tokens"]["after"] and metrics["score"] is not None:
            score: float = metrics["score"]
            return score
    return None


def _without_reduction(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in REDUCTION}


class Deaths:
    """What was being asked when former processes of a run died, and the note of what this one asks: asking.json.

    A crash in native code, the system's memory killer or a device that no longer answers end the whole process, and so
    does anybody who kills it. The next process finds in the note what was being asked, and asks each of these questions
    alone. One at which it dies again is asked by a process apart: if that dies too while this one lives, the question
    kills. A process that stops in order leaves a note of suspects alone.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ASKING
        self._suspects: set[int] = set()  # to be asked alone
        self._apart: set[int] = set()  # and by a process apart
        try:
            note = read_json(self._path, kind=dict)
            asking, suspects, apart = (set(map(int, note[name])) for name in ("asking", "suspects", "apart"))
        except (DataError, *WRONG):  # none, or cut: nobody died of anything
            return
        self._apart = apart | (asking & suspects if len(asking) == 1 else set())
        self._suspects = (suspects | asking) - self._apart

    def suspects(self, questions: Sequence[Question]) -> list[Question]:
        """Those that were being asked when a process died, to be asked alone."""
        return [question for question in questions if question.index in self._suspects | self._apart]

    def apart(self, questions: Sequence[Question]) -> list[Question]:
        """Those at which another process died that asked them alone."""
        return [question for question in questions if question.index in self._apart]

    @contextlib.contextmanager
    def asking(self, questions: Sequence[Question]) -> Iterator[None]:
        """Notes what is asked in the block, and that it was asked once the block ends in order."""
        self._write([question.index for question in questions])
        try:
            yield
        except DeviceFailed:  # as good as dead: the next process must know
            raise
        except BaseException:
            self._write([])
            raise
        for known in (self._suspects, self._apart):
            known.difference_update(question.index for question in questions)

    def forget(self) -> None:
        """Removes the note: everything was asked."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _write(self, asking: Sequence[int]) -> None:
        """In place and not synced: it is for a process that dies, not for a machine that does."""
        note = {"asking": asking, "suspects": sorted(self._suspects), "apart": sorted(self._apart)}
        with contextlib.suppress(OSError):  # a run can do without
            self._path.write_text(json.dumps(note))
