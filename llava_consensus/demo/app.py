"""The page, in Gradio: widgets wired to the plain functions of `desk.py` and `markup.py`.

Nothing is fetched from elsewhere: fonts are the system's and analytics are off. Requests of other pages are refused by
Gradio itself (`strict_cors`, its default).
"""

import os
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from llava_consensus.demo import desk, markup
from llava_consensus.demo.desk import DemoPicture, Desk, Form, SideAnswer, offered
from llava_consensus.errors import ConsensusError, OptionError, missing_extra
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Runner
from llava_consensus.evaluation.runs import DRAWINGS, knows_drawings_alone

if TYPE_CHECKING:
    from gradio import Blocks, Dropdown

MEGABYTES = 20  # of an upload at most
SHOW = "() => document.getElementById('message').scrollIntoView()"
INTRO = """<p class="cd-intro">A vision-language model reads a picture as hundreds of <b>visual tokens</b>, one for each
small patch. A reduction method keeps a few of them and merges or drops the rest, so that the model answers sooner. Pick
a picture and a question, compare two methods (or two questions), and move the slider to give the model fewer tokens.
</p>"""
PICKED = "The first question was picked because the methods differ on it, which proves nothing."
KEY = """<p class="cd-key"><span><i style="background:radial-gradient(circle at 70% 30%,#ffd43b 22%,transparent 24%),
linear-gradient(#5aaae6 60%,#468c46 60%);border:2px solid #1e1e1e"></i>kept as it is</span>
<span><i style="background:linear-gradient(90deg,#abd9f4 50%,#f2cf80 50%)"></i>merged: one tint, one token; a dot marks
its anchor, a ring one outside the picture</span>
<span><i style="background:#f6f6f6;border:1px solid #bbb"></i>dropped</span>
<span><i style="background:linear-gradient(90deg,#440154,#21918c,#fde725)"></i>saliency: dark little, bright much</span>
</p>"""


def build(runner: Runner, model: str, samples: Sequence[DemoPicture], megabytes: float = MEGABYTES) -> "Blocks":
    """The page about one model, ready to be launched.

    Args:
        runner: of the model.
        model: its name, for the heading.
        samples: pictures to try.
        megabytes: of an upload at most.
    Raises:
        MissingDependency: without gradio.
    """
    gradio = _gradio()
    with gradio.Blocks(title="ConsensusDrop", analytics_enabled=False, delete_cache=(3600, 3600)) as blocks:
        gradio.Markdown("# ConsensusDrop: fewer visual tokens, the same answer?")
        methods, differ = offered(runner), False
        if {desk.OURS, desk.OTHER} <= set(methods):
            tokens = min(desk.TOKENS, runner.visual_tokens)
            samples, differ = desk.telling_first(runner, samples, desk.OTHER, tokens)
        about = f"The model: {escape(model)}, {runner.visual_tokens} visual tokens a picture."
        gradio.HTML(f"{INTRO}<p>{about} {PICKED if differ else ''}</p>")
        note = DRAWINGS if knows_drawings_alone(model) else ""
        _Page(gradio, runner, methods, samples, megabytes, note).wire(blocks)
    return blocks


def launch(blocks: "Blocks", address: str, port: int | None, megabytes: float = MEGABYTES) -> str:
    """Serves a page in threads of its own; returns its address.

    Args:
        blocks: the page.
        address, port: where it is served; None is the first free port from 7860 on.
        megabytes: of an upload at most.
    Raises:
        OptionError: for a port that is taken, or an address this machine does not have.
    """
    gradio = _gradio()
    head = f"<script>{_text('page.js')}</script>"
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    try:
        _, url, _ = blocks.launch(
            server_name=address,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            inbrowser=False,
            max_file_size=int(megabytes * 2**20),
            footer_links=[],
            ssr_mode=False,
            pwa=False,
            enable_monitoring=False,
            theme=theme,
            css=_text("page.css"),
            head=head,
        )
    except OSError as error:
        raise OptionError(f"--address {address} --port {port}: {error}. Take another --port") from error
    return str(url)


class _Page:
    """The widgets, and what happens when they are used."""

    def __init__(
        self,
        gradio: ModuleType,
        runner: Runner,
        methods: Sequence[str],
        samples: Sequence[DemoPicture],
        megabytes: float,
        note: str = "",
    ) -> None:
        self.gradio, self.samples, self.megabytes, self.desk = gradio, samples, megabytes, Desk(runner)
        self.note = note  # about pictures that are none of the samples
        self.picture, self.answers = gradio.State(None), gradio.State(())
        with gradio.Row():
            with gradio.Column(scale=2, min_width=280):
                self._pictures()
            with gradio.Column(scale=3, min_width=300):
                self._questions(desk.choices(methods), runner.visual_tokens)
        self.message = gradio.HTML(elem_id="message")
        self.results = gradio.HTML(elem_id="results")
        self.view = gradio.Radio(
            list(desk.VIEWS), value=next(iter(desk.VIEWS)), label="What the pictures show", elem_id="view"
        )
        gradio.HTML(KEY)

    def _pictures(self) -> None:
        gradio = self.gradio
        self.thumbnail = gradio.HTML(elem_id="thumbnail")
        self.gallery = gradio.Gallery(
            [_small(sample.picture) for sample in self.samples],
            label="Examples",
            show_label=False,
            container=False,
            columns=6,
            object_fit="cover",
            format="jpeg",
            allow_preview=False,
            interactive=False,
            buttons=[],
            elem_id="examples",
            visible=bool(self.samples),
        )
        label = f"Upload your own picture (at most {self.megabytes:g} MB)"
        self.upload = gradio.UploadButton(label, file_types=["image"], size="sm", elem_id="upload")

    def _questions(self, methods: list[tuple[str, str]], most: int) -> None:
        gradio = self.gradio
        known = {value for _, value in methods}
        right = desk.OTHER if desk.OTHER in known else methods[-1][1]
        with gradio.Row():
            self.first = _asked(gradio, "Question: pick one, or type your own", "first")
            self.second = _asked(gradio, "Another question on the right, or none", "second")
        with gradio.Row():
            self.left = _choice(gradio, methods, methods[0][1], "Method on the left", "left")
            self.right = _choice(gradio, methods, right, "Method on the right", "right")
        tokens = min(desk.TOKENS, most)
        self.tokens = gradio.Slider(1, most, tokens, step=1, label=f"Visual tokens, of {most}", elem_id="tokens")
        with gradio.Accordion("More", open=False):
            self.alpha = gradio.Slider(
                0, 1, desk.ALPHA, step=0.05, label="alpha of ConsensusDrop: 0 question alone, 1 vision alone"
            )
            self.positions = gradio.Radio(
                list(desk.POSITIONS), value=desk.POSITIONS[0], label="Positions of the tokens that are left"
            )
            self.short = gradio.Checkbox(True, label="Ask for a single word or phrase")
        self.ask = gradio.Button("Ask", variant="primary", elem_id="ask")

    @property
    def form(self) -> list[Any]:
        """The widgets a `Form` is made of, in its order."""
        return [
            self.picture,
            self.first,
            self.second,
            self.left,
            self.right,
            self.tokens,
            self.alpha,
            self.positions,
            self.short,
        ]

    def wire(self, blocks: "Blocks") -> None:
        """Connects the widgets to their callbacks."""
        shown = [self.answers, self.results, self.message]
        chosen = [self.picture, self.thumbnail, self.first, self.second]
        once = {"concurrency_limit": 1, "concurrency_id": "model", "show_progress": "minimal"}
        asked: list[Callable[..., Any]] = [self.ask.click, self.tokens.release, self.alpha.release]
        asked += [one.input for one in (self.left, self.right, self.positions, self.short, self.first, self.second)]
        seen = []
        for event in asked:
            seen.append(event(self.answer, [*self.form, self.view], shown, trigger_mode="always_last", **once))
        again = self.gallery.select(self.picks(), None, chosen)
        again.then(self.answer, [*self.form, self.view], shown, **once)
        # hidden: Gradio would cover what an error leaves as it was, the questions too
        taken = self.upload.upload(
            self.take, [self.upload, self.first], [*chosen, self.message], show_progress="hidden"
        )
        seen.append(taken.success(self.answer, [*self.form, self.view], shown, **once))
        for answered in (seen[0], seen[-1]):  # of `Ask` and of an upload; a moved slider must stay in view
            answered.success(js=SHOW)
        self.view.change(markup.results, [self.answers, self.view], self.results, show_progress="hidden")
        if self.samples:
            first = blocks.load(lambda: self._chosen(0), None, chosen)
            first.then(self.answer, [*self.form, self.view], shown, **once)

    def answer(self, *values: Any) -> tuple[tuple[SideAnswer, ...], str, str]:
        """Both answers, drawn, and what the visitor must know."""
        *form, view = values
        try:
            answers = self.desk.ask(desk.request(Form(*form), self.samples))
        except ConsensusError as error:
            return (), "", markup.message(str(error))
        strange = form[0] not in {str(sample.picture) for sample in self.samples}
        return answers, markup.results(answers, view), markup.message(self.note if strange else "")

    def picks(self) -> Callable[..., Any]:
        """Callback that picks one of the examples. Gradio reads from the annotation which event it hands over."""

        def pick(event: Any) -> tuple[Any, ...]:
            return self._chosen(event.index)

        pick.__annotations__["event"] = self.gradio.SelectData
        return pick

    def _chosen(self, index: int) -> tuple[Any, ...]:
        path, questions, first = desk.picked(self.samples, index)
        choose = self.gradio.Dropdown
        return (
            path,
            markup.thumbnail(open_image(path)),
            choose(choices=questions, value=first),
            choose(choices=["", *questions], value=""),
        )

    def take(self, path: str | None, question: str | None) -> tuple[Any, ...]:
        """Callback of an upload: the picture, without the samples' questions. An unreadable one is an error, and the
        picture before it stays.
        """
        try:
            picture = desk.uploaded(path)
        except ConsensusError as error:
            raise self.gradio.Error(str(error), duration=None) from error
        choose = self.gradio.Dropdown
        known = any(question in sample.questions for sample in self.samples)
        asked = question if question and not known else desk.OF_ANY
        thumbnail = markup.thumbnail(open_image(picture, upright=True))
        return picture, thumbnail, choose(choices=[desk.OF_ANY], value=asked), choose(choices=[""], value=""), ""


def _asked(gradio: ModuleType, label: str, name: str) -> "Dropdown":
    return gradio.Dropdown([], value="", label=label, allow_custom_value=True, elem_id=name, min_width=240)


def _choice(gradio: ModuleType, methods: list[tuple[str, str]], value: str, label: str, name: str) -> "Dropdown":
    return gradio.Dropdown(methods, value=value, label=label, elem_id=name, min_width=240)


def _small(path: Path) -> Image:
    image = open_image(path)
    image.thumbnail((240, 240))
    return image


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _gradio() -> ModuleType:
    """Gradio, silent; MissingDependency with the line to type where it is not there."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise missing_extra("the page (gradio)", "demo") from error
    return gradio
