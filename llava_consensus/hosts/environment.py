"""Names that hosts share with the code that loads their models, without heavy imports, and how checkpoints load."""

from pathlib import Path
from typing import Any

# How LLaVA-NeXT lays out the tiles of an image, a base view and then a grid of tiles. `stock` follows the checkpoint:
# the grid that fits the image best, rows and columns of padding cut away, a newline after each row. `2880` is
# the layout behind the numbers of the paper, VisPruner and CDPruner: always 2 x 2 tiles, nothing cut away, no
# newlines, so that every image has 5 x 576 tokens and 640 of them are 128 of each tile.
STOCK, FIXED = LAYOUTS = ("stock", "2880")
# Types whose decoder reads images by cross attention: which hook of `hosts.cross_attention` acts at which module; of
# several modules, at the first that there is.
SIDES = {
    "blip": {"leave": "vision_model"},
    "vision-encoder-decoder": {"leave": "encoder"},
    "idefics": {"leave": "model.perceiver_resampler model.vision_model"},
    "pp_formulanet": {"leave": "model.encoder"},
    "pix2struct": {"leave": "encoder", "fit": "decoder"},
    "florence2": {"join": "model.language_model.encoder", "fit": "model.language_model.decoder"},
    "t5gemma2": {"join": "model.encoder.text_model", "fit": "model.decoder"},
    "mllama": {"shorten": "model.language_model"},
}
REMEDY = "Type: pip install 'transformers>=5.19,<{}'"  # for a version of transformers that is not adapted
OFFICIAL = f"{REMEDY.format('5.24')} && pip install --no-deps llava-torch==1.2.2.post1"  # its own pins are stale


def load_pretrained(kind: Any, name: str | Path | None, trust_remote_code: bool = False, **options: Any) -> Any:
    """Calls `kind.from_pretrained(name, **options)`, and is its only caller: of configurations, models, tokenizers and
    processors.

    If `trust_remote_code` is left open, transformers asks standard input whether a checkpoint's code may run, and
    `yes |` answers it. Here it is always given: without it such a checkpoint is refused with a ValueError.
    """
    return kind.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
