"""Show that `tokens=T` is T for pictures of any size on models that cut them into tiles.

    python tools/tile_budgets.py            # a table; exit code 1 where a picture keeps another number than it should
    .venv-vllm/bin/python tools/tile_budgets.py    # with vLLM's own processors

Twenty sizes, seven families with the tiles of their published processors (weights are tiny and random), T = 16, 64 and
256: visual tokens left by `attach` (as its outcomes count them, of a real call); where the family is served, by the
plan of a server and, with vLLM, as placeholders of its processor for a picture of that size; and by the account of
FLOPs. Right is T, or all tokens of a picture that has fewer.
"""

import copy
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serving"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import hf_models  # type: ignore[import-not-found]
from hf_models import END, IMAGE, START, TAG, TEXT

from llava_consensus import attach
from llava_consensus.hosts import view_of
from llava_consensus.hosts.images import Call, anyres
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES
from llava_consensus.serving.plan import Plan
from llava_consensus.serving.setting import Setting
from llava_consensus.serving.supported import FAMILIES as SERVED
from llava_consensus.serving.supported import TOKENS, installed

BUDGETS = 16, 64, 256
SIZES = [
    (224, 224), (336, 336), (448, 448), (640, 480), (480, 640), (448, 900), (900, 448), (500, 1500), (1500, 500),
    (800, 600), (1024, 768), (768, 1024), (1200, 300), (300, 1200), (1280, 720), (720, 1280), (1000, 1000),
    (1920, 1080), (2000, 2000), (3000, 1000),
]  # fmt: skip  # width, height


class Family(NamedTuple):
    """A tiled model: what its published checkpoints say of tiles."""

    case: str  # of `hf_models`
    vision: dict[str, Any]
    config: dict[str, Any]
    processor: str = ""
    words: Any = MappingProxyType({})


def _grid(size: int, most: int) -> list[list[int]]:
    return [[size * a, size * b] for a in range(1, most + 1) for b in range(1, most + 1)]


NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
CUT = {"crop_to_patches": True, "min_patches": 1}
FAMILIES = [
    Family("llava_next", {"image_size": 336}, {"image_grid_pinpoints": NEXT}),
    Family(
        "llava_onevision",
        {"image_size": 384},
        {"image_grid_pinpoints": _grid(384, 6), "vision_aspect_ratio": "anyres_max_9"},
    ),
    Family(
        "internvl",
        {"image_size": [448, 448]},
        {},
        "GotOcr2ImageProcessor",
        {"size": {"height": 448, "width": 448}, "max_patches": 12, **CUT},
    ),
    Family(
        "smolvlm",
        {"image_size": 384},
        {"scale_factor": 3},
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
    ),
    Family(
        "idefics3",
        {"image_size": 364},
        {"scale_factor": 2},
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    ),
    Family(
        "aya_vision",
        {"image_size": 364},
        {},
        "GotOcr2ImageProcessor",
        {"size": {"height": 364, "width": 364}, "max_patches": 12, **CUT},
    ),
    Family(
        "ovis2",
        {"image_size": 448},
        {},
        "GotOcr2ImageProcessor",  # its own needs torchvision; the grids are alike, up to 9 tiles
        {"size": {"height": 448, "width": 448}, "max_patches": 9, **CUT},
    ),
]


class Shown(NamedTuple):
    """One picture: what a call of the model is given, its tiles, and its visual tokens."""

    inputs: dict[str, Any]
    tiles: int
    rows: Any  # where its tokens stand, for vLLM's plan


def build(family: Family) -> Any:
    """The tiny model with the tower grid and tiles of the published one."""
    tiny = hf_models.CASES[family.case].build()
    config = copy.deepcopy(tiny.config)
    for target, values in ((config.vision_config, family.vision), (config, family.config)):
        for name, value in values.items():
            setattr(target, name, value)
    return hf_models.ready(type(tiny), config)


def picture(family: Family, view: Any, width: int, height: int) -> Shown:
    """A picture of noise, in a prompt with words around it."""
    side = family.vision["image_size"]
    side = side if isinstance(side, int) else side[0]
    if not family.processor:
        sizes = torch.tensor([[height, width]])
        inputs = {"image_sizes": sizes, "pixel_values": torch.randn(1, 1, 3, side, side)}
        none, false = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        tile, token, count = anyres(Call(view.inner, inputs, none, false, "image", sizes))[0]
        inputs["pixel_values"] = torch.randn(1, count, 3, side, side)
        ids = [IMAGE] * len(token)
    else:
        found = getattr(transformers, family.processor)(**family.words).get_number_of_image_patches(height, width, {})
        count = found if isinstance(found, int) else found[0]
        tile = [IMAGE] * view.tower.tokens
        separate = {"smolvlm": True, "idefics3": True, "aya_vision": True}.get(family.case, False)
        parts = [[30 + place, *tile] if separate else tile for place in range(count - 1)]
        last = [TAG, *tile] if separate else tile
        between = [TAG] if family.case == "ovis2" else []
        ids = [START, *(word for part in parts for word in (*part, *between)), *last, *between, END]
        pixels = torch.randn(count, 3, side, side)
        inputs = {"pixel_values": pixels[None] if family.case in ("smolvlm", "idefics3") else pixels}
    (rows,) = view.images("image", inputs, np.array([ids]))
    shown = {"input_ids": torch.tensor([[1, 5, *ids, 7, 8, 9]]), **inputs}
    return Shown(shown | {"attention_mask": torch.ones_like(shown["input_ids"])}, count, rows)


def plan(model: Any, method: str, tokens: int) -> Plan:
    """vLLM's plan of a server with this method."""
    made = object.__new__(Plan)
    made.setting, made.method = Setting(method, tokens), make(method)
    made.config, made.folder = model.config, ""
    return made


class Server:
    """vLLM's own processor of a family, with the reduction in it and without an engine."""

    def __init__(self, family: Family, model: Any, method: str) -> None:
        import small  # type: ignore[import-not-found]
        from vllm.config import ModelConfig
        from vllm.multimodal import MULTIMODAL_REGISTRY

        from llava_consensus.serving import register

        register()
        side, pins = family.vision["image_size"], family.config["image_grid_pinpoints"]
        words = small.tokenizer({"<image>": IMAGE, "<video>": hf_models.VIDEO})
        if family.case == "llava_next":
            one = {"shortest_edge": side}
            pictures = transformers.LlavaNextImageProcessor(
                size=one, crop_size={"height": side, "width": side}, image_grid_pinpoints=pins
            )
            processor = transformers.LlavaNextProcessor(
                pictures, words, patch_size=14, vision_feature_select_strategy="default", image_token="<image>",
                num_additional_image_tokens=1,
            )  # fmt: skip
        else:
            size = {"height": side, "width": side}
            processor = transformers.LlavaOnevisionProcessor(
                transformers.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pins), words,
                transformers.LlavaOnevisionVideoProcessor(size=size), num_image_tokens=(side // 14) ** 2,
                vision_feature_select_strategy="full",
            )  # fmt: skip
        small.ready()
        self.folder = tempfile.TemporaryDirectory()
        model.config.save_pretrained(self.folder.name)
        processor.save_pretrained(self.folder.name)
        setting, limit = Setting(method, 1, max(BUDGETS)), {"image": 1}
        config = ModelConfig(self.folder.name, dtype="float32", hf_overrides=setting, limit_mm_per_prompt=limit)
        self.processor = MULTIMODAL_REGISTRY.create_processor(config)

    def left(self, width: int, height: int, tokens: int) -> int:
        """Placeholders of a picture of this size, those of newlines among them."""
        import small

        items = self.processor.info.parse_mm_data({"image": [small.picture(0, (width, height))]})
        made = self.processor("w5 <image> w7 w8", items, hf_processor_mm_kwargs={TOKENS: tokens})
        (place,) = made["mm_placeholders"]["image"]
        return int(place.get_num_embeds())


@torch.no_grad()
def counted(family: Family, sizes: list[tuple[int, int]], budgets: tuple[int, ...], method: str) -> list[list[Any]]:
    """Lines of the table: family, size, tiles, tokens; T, and what `attach`, the plan, vLLM and the account leave."""
    torch.manual_seed(0)
    model, lines = build(family), []
    view, kind = view_of(model), model.config.model_type
    server = Server(family, model, method) if kind in SERVED and installed() else None
    for width, height in sizes:
        shown = picture(family, view, width, height)
        before = int((shown.rows.token >= 0).sum())
        for tokens in budgets:
            with attach(model, method, tokens) as attached:
                model(**shown.inputs, logits_to_keep=1)
                (outcome,) = attached.outcomes
            planned: Any = "-"
            placed: Any = "-"
            newlines = int((shown.rows.token < 0).sum())
            if kind in SERVED:
                own = plan(model, method, tokens)
                planned = own.left(own.image("image", shown.inputs, len(shown.rows.token)), Budget(tokens)) - newlines
            if server is not None:
                placed = server.left(width, height, tokens) - newlines
            shape = SHAPES["llava-next-7b"]._replace(tiles=shown.tiles, patches=view.tower.tokens)
            account = make(method).entering(Budget(tokens), before, shape.layers)[0]
            if tokens < shape.available:
                units = make(method).units(shape, Budget(tokens))
                assert sum(min(budget.tokens, size) for budget, size in units) == tokens
            counts = [outcome.after, planned, placed, account]
            lines.append([family.case, f"{width}x{height}", shown.tiles, before, tokens, *counts])
    return lines


def wrong(line: list[Any]) -> bool:
    """Whether any of the counts of a line is another than T, or all tokens of a picture that has fewer."""
    before, tokens, *counts = line[3:]
    return any(count not in ("-", min(tokens, before)) for count in counts)


def main() -> int:
    """Print the table; 1 where a line is wrong."""
    head = ["family", "size", "tiles", "tokens", "T", "attach", "plan", "vLLM", "account"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    assert TEXT["vocab_size"] > END
    bad = 0
    for family in FAMILIES:
        for line in counted(family, SIZES, BUDGETS, "consensusdrop"):
            bad += wrong(line)
            print("| " + " | ".join(map(str, line)) + " |" + (" WRONG" if wrong(line) else ""), flush=True)
    print(f"{bad} of {len(FAMILIES) * len(SIZES) * len(BUDGETS)} lines are wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
