"""The command `bench`: time and memory of methods, on a checkpoint or random weights of a size."""

import argparse
import json
import os
import platform
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import canonical, write_json
from llava_consensus.evaluation.report.table import written
from llava_consensus.evaluation.runs import DATA, OUT
from llava_consensus.methods import known_methods
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.options import at_least, choose, numbers

if TYPE_CHECKING:
    from PIL.Image import Image

    from llava_consensus.evaluation.bench.timing import Setting
    from llava_consensus.evaluation.models import Loading, Runner
    from llava_consensus.reduction.method import Method

METHODS = "consensusdrop visionzip vispruner sparsevlm"  # of the paper's efficiency tables, and their budgets
TOKENS = "432 288 144 57 28"
QUESTION = "Is there a dog in the image?\nAnswer the question using a single word or phrase."
SYSTEM = "A chat between a curious human and an artificial intelligence assistant. " * 3  # of `--chat`
SIDE = 672  # pixels of the image of noise: four tiles of LLaVA-NeXT, 576 tokens of Qwen2.5-VL
PROCESSORS = Path("/proc/cpuinfo")


@command(
    "bench",
    *arguments.LOADED,
    arg("--shape", metavar="NAME", help="random weights of a published size in place of --model"),
    arg("--methods", default=METHODS, metavar="NAMES", help="methods, or all (%(default)s)"),
    arg("--tokens", default=TOKENS, metavar="NUMBERS", help="budgets (%(default)s)"),
    arguments.MATCH,
    arg("--images", type=Path, metavar="DIR", help=f"images (those of GQA in {DATA}, else noise)"),
    arg("--image-count", "--pictures", type=int, default=1, help="how many of them (%(default)s)"),
    arg("--repeats", type=int, default=5, help="measured rounds, after one that does not count (%(default)s)"),
    arg("--length", type=int, default=20, help="tokens of each answer (%(default)s)"),
    arg(
        "--out",
        type=Path,
        metavar="FILE",
        help="written after every round; the same command resumes where it stopped (bench.json, served.json or "
        f"break-even.json in {OUT}, with the name of the shape)",
    ),
    arg(
        "--serve",
        action="store_true",
        help="measure servers of vLLM, with each method and plain, over HTTP (docs/serving.md)",
    ),
    arg("--at-once", default="1 8 32", metavar="NUMBERS", help="with --serve: requests at once (%(default)s)"),
    arg("--requests", default=32, type=int, help="with --serve: of each load (%(default)s)"),
    arg(
        "--chat",
        action="store_true",
        help="with --serve: requests are chats of three questions after a system prompt, a third about two images",
    ),
    arg(
        "--break-even",
        nargs="?",
        const="1 2 4 8",
        metavar="NUMBERS",
        help="from how many visual tokens the first method pays here: requests of so many images (1 2 4 8), the first "
        "of them yours",
    ),
    arguments.FORMAT,
    examples=('bench --methods all --tokens "192 64"', "bench --break-even --tokens 64 --model MODEL"),
)
def bench(given: argparse.Namespace) -> Iterator[Any]:
    """Time, memory and FLOPs of methods, interleaved in one process."""
    from llava_consensus.evaluation.bench import efficiency
    from llava_consensus.evaluation.models import Prompt
    from llava_consensus.evaluation.report import efficiency as tables

    names = list(known_methods()) if given.methods == "all" else given.methods.split()
    made = {name: arguments.one_word_method(name) for name in names}
    budgets, loading = arguments.budgets(given.tokens), arguments.loading(given)
    kind = "served" if given.serve else "break-even" if given.break_even else "bench"
    given.out = given.out or Path(OUT) / f"{kind}{'-' * bool(given.shape)}{given.shape or ''}.json"
    _check(given)
    images, prompt = _images(given), Prompt(QUESTION, max_new_tokens=given.length)
    if given.serve:
        yield from _serving(given, made, budgets, images)
        return
    runner = _runner(given, loading)
    described = _description(given, loading, runner)
    if given.break_even:
        yield from _break_even(given, runner, (made[names[0]], budgets[0]), images[0], described)
        return
    shape = efficiency.prompt_shape(runner, prompt, images[0])
    cases, left_out = efficiency.cases_of(runner, names, budgets, shape, given.match, made.__getitem__)
    measured = efficiency.measure(
        runner, images, prompt, shape, cases, {**described, "left_out": left_out}, given.out, given.repeats
    )
    yield from written(given.format, tables.bench_tables(measured), tables.csv_rows(measured))


def _check(given: argparse.Namespace) -> None:
    from llava_consensus.reduction.costs import MATCHES

    choose("match", given.match, MATCHES)
    for name, least in (("image_count", 1), ("repeats", 1), ("length", 2)):
        at_least(name, getattr(given, name), least)
    for name, text in (("break_even", given.break_even), ("at_once", given.at_once)):
        if text is not None:
            at_least(name, int(min(numbers(name, text, whole=True), default=0)), 1)
    if given.out.is_dir():
        raise DataError(f"--out {given.out}: is a folder. Give the name of a file")


def _images(given: argparse.Namespace) -> "list[Image]":
    """The requested images; seeded noise where there are none."""
    from PIL import Image

    from llava_consensus.evaluation.media import open_image

    folder = given.images or Path(DATA) / "eval" / "gqa" / "data" / "images"
    files = sorted(path for kind in ("*.jpg", "*.png") for path in folder.glob(kind))[: given.image_count]
    if files and (given.images or not given.shape):
        return [open_image(path) for path in files]
    if given.images:
        raise DataError(f"--images {given.images}: no .jpg or .png there")
    noise = random.Random(0)
    return [Image.frombytes("RGB", (SIDE, SIDE), noise.randbytes(3 * SIDE * SIDE)) for _ in range(given.image_count)]


def _runner(given: argparse.Namespace, loading: "Loading") -> "Runner":
    if given.shape is None:
        return arguments.load(given)
    from llava_consensus.evaluation.bench.timing import refuse_too_large
    from llava_consensus.evaluation.models import random_weights

    planned = random_weights.plan(given.shape, loading, arguments.host_options(given))
    refuse_too_large(given.shape, planned.weight_bytes, planned.cache_bytes, planned.device)
    return planned.runner()


def _description(given: argparse.Namespace, loading: "Loading", runner: "Runner") -> dict[str, Any]:
    """The setting of a measurement, as JSON has it."""
    import torch

    from llava_consensus.evaluation.runs.questions import versions

    device = runner.model.device
    found = re.search(r"model name\s*: (.+)", PROCESSORS.read_text()) if PROCESSORS.exists() else None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "model": given.shape or given.model,
        "weights": "random weights" if given.shape else "checkpoint",
        "loading": {**asdict(loading), "dtype": str(runner.model.dtype).removeprefix("torch.")},
        "host_options": arguments.host_options(given),
        "match": given.match,
        "pictures": given.image_count,
        "machine": {
            "device": name,
            "processor": found[1] if found else platform.processor(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
        "versions": versions(),
    }


def _break_even(
    given: argparse.Namespace, runner: "Runner", reduced: "Setting", image: "Image", described: dict[str, Any]
) -> Iterator[str]:
    """A line for each size of request and the answer; --out gets the numbers, and the curve beside it."""
    import pandas

    from llava_consensus.evaluation.bench import break_even
    from llava_consensus.evaluation.models import Prompt

    counts = sorted(int(word) for word in given.break_even.split())
    points = break_even.measure(runner, image, Prompt(QUESTION), reduced, counts, given.repeats)
    rows = [point._asdict() for point in points]
    yield f"medians of one request:\n{pandas.DataFrame(rows).round(1).to_string(index=False)}"
    yield break_even.sentence(points)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"break_even": break_even.break_even(points), "rows": rows}
    write_json(given.out, {**json.loads(canonical(described)), **found})
    title = f"{given.shape or Path(given.model).name}, {counts[0]} to {counts[-1]} images"
    break_even.plot(points, title).savefig(given.out.with_suffix(".png"))
    yield f"written to {given.out} and {given.out.with_suffix('.png').name}"


def _serving(
    given: argparse.Namespace, made: "dict[str, Method]", budgets: "list[Budget | Share]", images: "list[Image]"
) -> Iterator[str]:
    from llava_consensus.evaluation.bench import serving
    from llava_consensus.evaluation.bench.efficiency import stored
    from llava_consensus.evaluation.files import canonical, write_json
    from llava_consensus.evaluation.models import random_weights
    from llava_consensus.reduction.budget import amount, most_first
    from llava_consensus.serving.setting import Setting, config_of, setting_of
    from llava_consensus.serving.supported import check_version

    check_version()
    if not given.shape:
        Setting("full", 1).overrides(config_of(given.model))
    loads = [int(word) for word in given.at_once.split()]
    with tempfile.TemporaryDirectory() as folder:
        runner: Any = _runner(given, arguments.loading(given))
        described = _description(given, arguments.loading(given), runner)
        model = given.model
        if given.shape:
            runner.model.config.architectures = [type(runner.model).__name__]
            runner.model.config.save_pretrained(folder)
            if given.chat:
                runner.processor.chat_template = random_weights.CHAT
            runner.processor.save_pretrained(folder)
            model = folder
        on_cpu, dtype = runner.model.device.type == "cpu", described["loading"]["dtype"]
        cases, sizes = [serving.ServedCase("plain")], most_first(set(budgets))
        for name, method in made.items():
            own = [amount(size) for size in (sizes if method.reduces else sizes[:1])]
            overrides = setting_of(method, sizes[0]).overrides(runner.model.config)
            cases += [serving.ServedCase(name, overrides, size if method.reduces else None) for size in own]
        del runner
        asked = serving.ServedQuestion(QUESTION, images, given.length, given.requests)
        if given.chat:
            asked = asked._replace(turns=3, system=SYSTEM)
        further = f"--dtype {dtype} --max-model-len {2048 if given.chat else 1024}{' --enforce-eager' * on_cpu}"
        if given.shape:  # vLLM draws the weights
            further += " --load-format dummy --chat-template-content-format openai"
        described = json.loads(canonical({**described, "arguments": further, "length": given.length}))
        records = stored(given.out, described).get("measured", [])
        for record in serving.measure(model, cases, loads, asked, given.repeats, further, tuple(records)):
            records.append({**record, "load_average": os.getloadavg()[0]})
            write_json(given.out, {**described, "measured": records})
    yield from serving.lines(records)
    yield f"written to {given.out}"
