"""One side of `against_official.py`, in a process of its own: loads the model and waits; for every line it is sent it
says how many visual tokens each layer of the language model reads, measures, and prints a line of JSON.

A side is called as its own users call it; where LLaVA is under it, these are the same lines for every side. Files of an
official checkout come first on `sys.path`, so that its `llava` or `transformers` is the one that is imported. A
checkout is not changed on disk.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from llava_consensus.evaluation.bench.timing import give_back, peak_bytes, reset_peak
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

MARK = "measured: "  # a line of standard output that is ours, and not foreign code's
SIDE, PATCHES = 336, 576  # of the picture, in pixels and in visual tokens
PROMPT = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the human's questions. USER: <image>\nWhat is to the left of the red object? ASSISTANT:"
)


@dataclass(frozen=True)
class Task:
    """What one process measures.

    Args:
        name: `full`, `hf`, `tower`, `official/METHOD`, `ours/METHOD`; `current/METHOD` is ours on an interpreter of its
            own, `hf-ours/METHOD` ours on the model of transformers.
        model: folder of the checkpoint, in the layout the side reads.
        tower: folder of the vision tower's files.
        checkout: of the official repository; empty for the other names.
        tokens: budgets; the full model is measured once.
        warmup, repeats: answers at each budget that do not count, and that do.
        threads: of torch.
    """

    name: str
    model: str
    tower: str
    checkout: str = ""
    tokens: tuple[int, ...] = (192, 64, 32)
    warmup: int = 3
    repeats: int = 3
    threads: int = 1

    def text(self) -> str:
        """As JSON, for the command line of the process."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Measured:
    """A model that can be asked.

    Args:
        answer: from the picture in memory to the first token.
        budget: sets a number of visual tokens and says how.
        layers: of the language model.
        text_rows: rows of the prompt that are no visual tokens.
    """

    answer: Callable[[], Any]
    budget: Callable[[int], str]
    layers: Sequence[nn.Module]
    text_rows: int


def picture() -> Image.Image:
    """Noise, always the same, of the tower's size."""
    noise = torch.randint(0, 256, (SIDE, SIDE, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Image.frombytes("RGB", (SIDE, SIDE), bytes(noise.flatten().tolist()))


def of_llava(model: Any, tokenizer: Any, processor: Any, budget: Callable[[int], str]) -> Measured:
    """A model that is called as LLaVA's own scripts call it, with whichever `llava` was imported."""
    from llava.constants import IMAGE_TOKEN_INDEX
    from llava.mm_utils import process_images, tokenizer_image_token

    seen = picture()

    def ids() -> torch.Tensor:
        found: torch.Tensor = tokenizer_image_token(PROMPT, tokenizer, IMAGE_TOKEN_INDEX, return_tensors="pt")
        return found.unsqueeze(0)

    def answer() -> Any:
        pixels = process_images([seen], processor, model.config)
        with torch.inference_mode():
            return model.generate(
                ids(), images=pixels, image_sizes=[seen.size], do_sample=False, max_new_tokens=1, use_cache=True
            )

    return Measured(answer, budget, model.model.layers, ids().shape[1] - 1)


def of_transformers(model: Any, processor: Any, layers: Any, budget: Callable[[int], str]) -> Measured:
    """A `LlavaForConditionalGeneration`, called as its page says."""
    seen = picture()

    def inputs() -> Any:
        return processor(images=seen, text=PROMPT, return_tensors="pt")

    def answer() -> Any:
        with torch.inference_mode():
            return model.generate(**inputs(), do_sample=False, max_new_tokens=1, use_cache=True)

    ids = inputs()["input_ids"]
    return Measured(answer, budget, layers, int((ids != model.config.image_token_index).sum()))


def rounded(model: Any) -> Any:
    """The weights as LLaVA's loader reads them, in half precision, held as float32."""
    return model.half().float().eval()


def stock(task: Task) -> tuple[Any, Any, Any]:
    """Model, tokenizer and image processor by LLaVA's own loader."""
    from llava_consensus.evaluation.models.llava import load_official
    from llava_consensus.evaluation.models.loading import Loading

    model, tokenizer, processor = load_official(task.model, Loading("cpu"))
    return rounded(model), tokenizer, processor


def own_class(task: Task, module: str, name: str, **given: Any) -> tuple[Any, Any, Any]:
    """Model, tokenizer and image processor with a class of the checkout."""
    import transformers

    model = getattr(importlib.import_module(module), name).from_pretrained(
        task.model, torch_dtype=torch.float32, mm_vision_tower=task.tower, **given
    )
    tower = model.get_vision_tower()
    tower.load_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(task.model, use_fast=False)
    return rounded(model), tokenizer, tower.image_processor


def full(task: Task) -> Measured:
    """Official LLaVA as it is."""
    return of_llava(*stock(task), lambda tokens: "all visual tokens")


def tower_alone(task: Task) -> Measured:
    """The blocks of the vision tower that the features of every side come from, and nothing else: what each answer
    takes at least. No layer of the language model reads anything.
    """
    from llava.mm_utils import process_images

    model, _, processor = stock(task)
    tower = model.get_vision_tower().vision_tower
    tower = getattr(tower, "vision_model", tower)  # of transformers 4
    tower.encoder.layers = tower.encoder.layers[: model.config.mm_vision_select_layer + 1]
    seen = picture()

    def answer() -> Any:
        with torch.inference_mode():
            pixels = process_images([seen], processor, model.config)
            return tower.encoder(inputs_embeds=tower.pre_layrnorm(tower.embeddings(pixels)))[0]

    return Measured(answer, lambda tokens: f"{len(tower.encoder.layers)} blocks of the vision tower", (), 0)


def attaching(model: Any, method: str) -> Callable[[int], str]:
    """Attaches our method with each budget in turn."""
    from llava_consensus import attach

    attached: list[Any] = []

    def budget(tokens: int) -> str:
        while attached:
            attached.pop().detach()
        attached.append(attach(model, method, tokens=tokens))
        return f"attach(model, {method!r}, tokens={tokens})"

    return budget


def ours(task: Task) -> Measured:
    """Official LLaVA with a method of this repository attached."""
    model, tokenizer, processor = stock(task)
    return of_llava(model, tokenizer, processor, attaching(model, method_of(task)))


def hugging_face(task: Task) -> Measured:
    """The installed transformers, without us or (`hf-ours/METHOD`) with a method attached."""
    import transformers

    model = rounded(transformers.LlavaForConditionalGeneration.from_pretrained(task.model, dtype=torch.float32))
    processor = transformers.AutoProcessor.from_pretrained(task.model)
    budget = attaching(model, method_of(task)) if "/" in task.name else lambda tokens: "all visual tokens"
    return of_transformers(model, processor, model.model.language_model.layers, budget)


def visionzip(task: Task) -> Measured:
    """`visionzip(model, dominant, contextual)` on official LLaVA; the class token is one of the dominant tokens."""
    model, tokenizer, processor = stock(task)
    patch = importlib.import_module("visionzip").visionzip
    tower = model.get_vision_tower().vision_tower
    plain, blocks = type(tower), len(tower.vision_model.encoder.layers)

    def budget(tokens: int) -> str:
        tower.__class__ = plain
        dominant, contextual = Budget(tokens).split(PATCHES + 1)
        patch(model, dominant=dominant, contextual=contextual)
        tower.r = [0] * (blocks - 2) + [1, 0]  # which block's keys are read; as it is for 24 blocks
        return f"visionzip(model, dominant={dominant}, contextual={contextual})"

    return of_llava(model, tokenizer, processor, budget)


def vispruner(task: Task) -> Measured:
    """Their `LlavaLlamaForCausalLM`, with the ratio of their scripts."""
    given = {"visual_token_num": PATCHES, "important_ratio": 0.5}
    model, tokenizer, processor = own_class(
        task, "llava.model.language_model.llava_llama", "LlavaLlamaForCausalLM", **given
    )

    def budget(tokens: int) -> str:
        model.visual_token_num = tokens
        return f"visual_token_num={tokens}, important_ratio=0.5"

    return of_llava(model, tokenizer, processor, budget)


def fastv(task: Task) -> Measured:
    """Their `LlavaForConditionalGeneration`, in their copy of transformers, with the kernel their page asks for."""
    import transformers

    started = {"use_fastv": True, "image_token_length": PATCHES}
    model = rounded(
        transformers.LlavaForConditionalGeneration.from_pretrained(
            task.model, torch_dtype=torch.float32, attn_implementation="eager", fastv_config=started
        )
    )
    tokenizer = transformers.LlamaTokenizer.from_pretrained(Path(task.model, "official"))
    tokenizer.add_tokens("<image>", special_tokens=True)
    processor = transformers.LlavaProcessor(transformers.CLIPImageProcessor.from_pretrained(task.tower), tokenizer)
    layers = model.language_model.model.layers
    (ids,) = processor(images=picture(), text=PROMPT, return_tensors="pt")["input_ids"].tolist()

    def budget(tokens: int) -> str:
        (cut,) = make("fastv").plan(tokens, PATCHES, len(layers))  # type: ignore[attr-defined]
        told = {"fastv_k": cut.layer, "fastv_r": 1 - tokens / PATCHES}
        start = ids.index(model.config.image_token_index)
        model.config.fastv_config = {**started, **told, "image_token_start_index": start}
        return f"fastv_k={cut.layer}, fastv_r={told['fastv_r']:.4f}: {tokens} tokens behind the cut"

    return of_transformers(model, processor, layers, budget)


def sparsevlm(task: Task) -> Measured:
    """Their `LlavaLlamaDynamicForCausalLM`. Its table of budgets holds 192, 128, 96 and 64 and says to write others
    into it; cuts stand where they are in our method, which are the published ones in 32 layers.
    """
    module = "llava.model.language_model.sparse_llava_llama"
    model, tokenizer, processor = own_class(task, module, "LlavaLlamaDynamicForCausalLM")
    without_cuda()
    schedule = importlib.import_module("llava.model.language_model.score")

    def budget(tokens: int) -> str:
        cuts = make("sparsevlm").plan(tokens, PATCHES, len(model.model.layers))  # type: ignore[attr-defined]
        places, kept = [cut.layer - 1 for cut in cuts], [cut.kept for cut in cuts]
        schedule.RETAIN_TOKN, schedule.sparse_token_dict[tokens] = tokens, kept  # type: ignore[attr-defined]
        schedule.layer_dict = {place: number for number, place in enumerate(places)}  # type: ignore[attr-defined]
        model.model.pruning_loc = places
        return f"RETAIN_TOKN={tokens}, pruning_loc={places}, sparse_token_dict[{tokens}]={kept}"

    return of_llava(model, tokenizer, processor, budget)


def without_cuda() -> None:
    """Their forward times itself with CUDA events, which are let go here."""

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self) -> None: ...

        def elapsed_time(self, _: Any) -> float:
            return 0.0

    torch.cuda.Event, torch.cuda.synchronize = Event, lambda *_: None  # type: ignore[assignment, misc]


SOURCES = {  # what is measured of a repository, and the folder of a checkout that comes first on sys.path
    "visionzip": (visionzip, "."),
    "vispruner": (vispruner, "."),
    "fastv": (fastv, "src/FastV/llava-hf/transformers/src"),
    "sparsevlm": (sparsevlm, "."),
}


def method_of(task: Task) -> str:
    """The method behind the slash of a name."""
    return task.name.partition("/")[2]


def prepare(task: Task) -> Measured:
    """The side of a task, loaded. ModuleNotFoundError and the like where a checkout does not run here."""
    kind = task.name.partition("/")[0]
    known = {
        "full": full,
        "tower": tower_alone,
        "ours": ours,
        "current": ours,
        "hf": hugging_face,
        "hf-ours": hugging_face,
    }
    if kind in known:
        return known[kind](task)
    make_side, folder = SOURCES[method_of(task)]
    sys.path.insert(0, str(Path(task.checkout, folder).resolve()))
    return make_side(task)


@contextmanager
def rows_read(layers: Sequence[nn.Module]) -> Iterator[list[int]]:
    """How many rows each layer was handed in the body, in the order they ran."""
    rows: list[int] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        rows.append(hidden.shape[1])

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def measure(side: Measured, tokens: int, warmup: int, repeats: int) -> dict[str, Any]:
    """One budget: how it was set, visual tokens of each layer, milliseconds and memory."""
    how = side.budget(tokens)
    with rows_read(side.layers) as rows:
        side.answer()
    for _ in range(warmup - 1):
        side.answer()
    wall, processor = [], []
    give_back()
    reset_peak()
    before = peak_bytes()
    for _ in range(repeats):
        begun, used = time.perf_counter(), time.process_time()
        side.answer()
        wall.append(1e3 * (time.perf_counter() - begun))
        processor.append(1e3 * (time.process_time() - used))
    peak = peak_bytes()
    own = None if peak is None or before is None else peak - before
    layers = [count - side.text_rows for count in rows]
    return {
        "tokens": tokens, "how": how, "layers": layers, "text_rows": side.text_rows,
        "ttft_ms": wall, "processor_ms": processor, "peak_bytes": peak, "answer_bytes": own,
    }  # fmt: skip


def main() -> None:
    """Loads the task of the command line, and measures it each time a line comes in."""
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(task.threads)
    side = prepare(task)
    budgets = (PATCHES,) if task.name in ("full", "hf", "tower") else tuple(task.tokens)
    versions = {"torch": torch.__version__, "transformers": sys.modules["transformers"].__version__}
    for _ in sys.stdin:
        found = [measure(side, tokens, task.warmup, task.repeats) for tokens in budgets]
        print(MARK + json.dumps({"rows": found, "versions": versions, "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
