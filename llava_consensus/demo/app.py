"""The web page of `llava-consensus demo`: one image and question, and two methods side by side.

Nothing is fetched from elsewhere: fonts are the system's and analytics are off.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from llava_consensus.demo.seen import card, counted, seen_by
from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.evaluation.bench.timing import first_token
from llava_consensus.evaluation.benchmarks import make as make_benchmark
from llava_consensus.evaluation.benchmarks.base import SHORT
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Prompt, Runner
from llava_consensus.evaluation.runs import DRAWINGS, knows_drawings_alone
from llava_consensus.methods import known_methods, make
from llava_consensus.reduction.budget import Budget

if TYPE_CHECKING:
    from gradio import Blocks

EXAMPLES = {"gqa": 4, "textvqa": 2}  # images of each benchmark
REPEATS = 3
INTRO = """# ConsensusDrop: fewer visual tokens, the same answer?
A vision-language model reads an image as hundreds of **visual tokens**, one for each small patch. A reduction method
keeps some of them and merges or drops the rest, so that the model answers sooner. Ask with two methods."""


def build(runner: Runner, model: str, data: Path) -> "Blocks":
    """The page about one model, ready to be launched.

    Args:
        runner: of the model.
        model: its name, for the heading.
        data: folder of the benchmarks that examples come from; there are none if it is empty.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    methods = sorted(known_methods(), key=lambda name: (name == "full") - (name == "consensusdrop"))

    def ask(path: str | None, question: str, left: str, right: str, tokens: float) -> list[Any]:
        try:
            return [part for side in (left, right) for part in answered(runner, path, side, question, int(tokens))]
        except ConsensusError as error:  # a visitor knows the name of a file, not its folder
            text = str(error).replace(str(path), Path(path or "").name)
            raise gradio.Error(text, duration=None, print_exception=False) from error

    pairs = examples(data)
    first_image, first_question = pairs[0] if pairs else (None, "")
    with gradio.Blocks(title="ConsensusDrop", analytics_enabled=False, delete_cache=(3600, 3600)) as blocks:
        note = f" {DRAWINGS[0].upper()}{DRAWINGS[1:]}." if knows_drawings_alone(model) else ""
        gradio.Markdown(f"{INTRO}\n\nModel: `{model}`, {runner.visual_tokens} visual tokens per image.{note}")
        with gradio.Row():
            image = gradio.Image(first_image, type="filepath", sources=["upload"], label="Image", height=320)
            with gradio.Column():
                question = gradio.Textbox(first_question, label="Question", max_length=400)
                with gradio.Row():
                    left = gradio.Dropdown(methods, value=methods[0], label="Method on the left")
                    right = gradio.Dropdown(methods, value=methods[-1], label="Method on the right")
                most = runner.visual_tokens
                tokens = gradio.Slider(1, most, min(64, most), step=1, label="Visual tokens")
                button = gradio.Button("Ask", variant="primary")
        with gradio.Row():
            shown: list[Any] = []
            for _ in range(2):
                with gradio.Column():
                    shown += [gradio.Textbox(show_label=False, lines=4), gradio.Image(show_label=False)]
        if pairs:
            gradio.Examples(pairs, [image, question], cache_examples=False)
        # one model has one method attached at a time, so visitors are served one after the other
        gradio.on(
            [button.click, question.submit, tokens.release],
            ask,
            [image, question, left, right, tokens],
            shown,
            concurrency_limit=1,
        )
    return blocks


def launch(blocks: "Blocks", address: str, port: int | None, megabytes: float = 20.0) -> str:
    """Serves a page in background threads; returns its address.

    Args:
        address, port: where it is served; None is the first free port from 7860 on.
        megabytes: of an upload at most.
    Raises:
        OptionError: if the port is taken or the machine lacks the address.
    """
    import gradio

    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    try:
        _, url, _ = blocks.launch(
            server_name=address,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            max_file_size=int(megabytes * 2**20),
            footer_links=[],
            ssr_mode=False,
            enable_monitoring=False,
            theme=theme,
        )
    except OSError as error:
        raise OptionError(f"--address {address} --port {port}: {error}. Take another --port") from error
    return str(url)


def answered(runner: Runner, path: str | None, method: str, question: str, tokens: int) -> tuple[str, Image | None]:
    """One side: the answer with its tokens and times, and the drawing of `ask --overlay`.

    Raises:
        ConsensusError: for a missing or unreadable image, no question, or a method this model cannot have.
    """
    if not path:
        raise OptionError("no image yet: upload one, or pick one of the examples")
    if not question.strip():
        raise OptionError("no question yet: type one, or pick one of the examples")
    image, budget, prompt = open_image(path, upright=True), Budget(tokens), Prompt(question.strip() + SHORT)
    chosen = make(method)
    with runner.attach(chosen, budget):
        encoded, answer = runner.ask([image], prompt)
    reduced, full = first_token(runner, image, prompt, [(chosen, budget), (make("full"), budget)], REPEATS)
    lines = [
        f"{method}: {answer.text}",
        f"{answer.after} of {answer.before} visual tokens",
        f"first token: {reduced:.0f} ms, with all tokens {full:.0f} ms (median of {REPEATS})",
        *answer.notes,
    ]
    try:
        seen = seen_by(runner, [image], encoded, answer)
    except OptionError as error:  # tokens of this model form no grid
        return "\n".join([*lines, str(error)]), None
    return "\n".join(lines), card(seen, question, [f"answer: {answer.text}", f"{method}; {counted(seen)}"])


def examples(data: Path) -> list[list[str]]:
    found = []
    for name, count in EXAMPLES.items():
        benchmark = make_benchmark(name)
        try:
            questions = [one for one in benchmark.load(data) if len(one.images) == 1]
        except ConsensusError:
            continue
        folder = benchmark.place(data) / benchmark.images
        first = {one.images[0]: one for one in reversed(questions)}  # the first question about each image
        for one in sorted(first.values(), key=lambda one: one.index)[:count]:
            found.append([str(folder / one.images[0]), one.text.removesuffix(SHORT).split("\n")[0]])
    return found
