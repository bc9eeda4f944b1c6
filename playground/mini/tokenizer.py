"""Build the tokenizer of the mini model: a sentencepiece BPE with byte fallback whose words are our own.

The merges are laid out rather than counted: a word is built from left to right, one character at a time, and nothing
else merges. So an object is one token, a sign is spelled character by character and the plural "dogs" is "dog" and "s".

`tokenizer.model` is the sentencepiece file. transformers 5 converts such a file on its own and then treats a text that
begins with a space differently (no dummy prefix before it) from sentencepiece and from transformers 4.37. So the same
vocabulary is also written as `tokenizer.json`, with the prefix as sentencepiece puts it, and both stacks read that.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2 as proto

from playground.mini.catalogue import CATEGORIES, CATEGORY_CHINESE, CHINESE, COLOURS, NAMES
from playground.mini.scenes import scene
from playground.mini.styles import prompt, training_questions

SYSTEM = ("A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
          "detailed, and polite answers to the user's questions. USER: ")  # fmt: skip
# Right to left where the first letters are on signs too: no piece may consist of sign characters only.
CAPITALS = [
    "SS",
    "SSI",
    "SSIS",
    "SSIST",
    "ASSIST",
    "ASSISTA",
    "ASSISTAN",
    "ASSISTANT",
    "SE",
    "SER",
    "USER",
    "OC",
    "OCR",
]
MARK = "▁"


def corpus(scenes: int = 1500) -> list[str]:
    """Every text the model is trained on, from a fixed sample of training scenes."""
    lines = [SYSTEM.strip(), " ASSISTANT:", "Please answer yes or no.", "left right above below large small sign"]
    for index in range(scenes):
        for qa in training_questions(scene("train", index), random.Random(index), 12):
            lines += [prompt(qa), qa.answer]
    return lines


def words() -> list[str]:
    """The words of the corpus as pieces: the mark in front of lower-case words, none before capitals and Chinese."""
    found: dict[str, None] = dict.fromkeys(MARK + w for w in (*NAMES, *CATEGORIES, *COLOURS))
    found |= dict.fromkeys(
        (
            *CHINESE.values(),
            *COLOURS.values(),
            *CATEGORY_CHINESE.values(),
            "直接",
            "回答",
            "选项",
            "字母",
            "什么",
            "颜色",
            "图中",
        )
    )
    for line in corpus():
        for word in re.findall(r"[A-Za-z]+", line):
            if not re.fullmatch(r"[A-Z]+", word):
                found[word if word[0].isupper() else MARK + word] = None
    stems = {MARK + n for n in (*NAMES, *CATEGORIES)}
    return sorted(w for w in found if not (w[-1] == "s" and w[:-1] in stems))


def pieces() -> list[str]:
    """All pieces that a merge makes, in order of priority (shorter first), without the single characters."""
    made: dict[str, None] = {}
    for word in words():
        for end in range(2, len(word) + 1):
            made[word[:end]] = None
    upper = [MARK + w for w in ("The", "There", "ASSISTANT", "USER", "OCR", "Please", "Reference")]
    return sorted({*made, *CAPITALS}, key=lambda p: (len(p), p)) + upper


def characters() -> list[str]:
    """Single characters: printable ASCII and every other character of the corpus."""
    known = {chr(c) for c in range(33, 127)}
    known |= {c for line in corpus() for c in line if c not in " \n"} | {c for zh in CHINESE.values() for c in zh}
    return [MARK, *sorted(known)]


def build() -> bytes:
    """The serialised sentencepiece model."""
    model = proto.ModelProto()
    kinds = proto.ModelProto.SentencePiece
    for text, kind in (("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)):
        model.pieces.add(piece=text, score=0.0, type=kind)
    for byte in range(256):
        model.pieces.add(piece=f"<0x{byte:02X}>", score=0.0, type=kinds.BYTE)
    merged, single = pieces(), characters()
    for rank, piece in enumerate(merged):
        model.pieces.add(piece=piece, score=-float(rank), type=kinds.NORMAL)
    for rank, piece in enumerate(single):
        model.pieces.add(piece=piece, score=-float(len(merged) + rank), type=kinds.NORMAL)
    trainer = model.trainer_spec
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = proto.TrainerSpec.BPE, len(model.pieces), True
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = 0, 1, 2, -1
    normal = model.normalizer_spec
    normal.name, normal.add_dummy_prefix, normal.remove_extra_whitespaces, normal.escape_whitespaces = (
        "identity",
        True,
        False,
        True,
    )
    return model.SerializeToString(deterministic=True)


def fast(model: bytes) -> dict:
    """The same tokenizer as a `tokenizer.json` that tokenizers 0.15 and newer read alike."""
    source = proto.ModelProto.FromString(model)
    vocab = {piece.piece: number for number, piece in enumerate(source.pieces)}
    merges = []
    for piece in (p.piece for p in source.pieces if p.type == p.NORMAL):
        cuts = [cut for cut in range(1, len(piece)) if piece[:cut] in vocab and piece[cut:] in vocab]
        merges += [f"{piece[:cut]} {piece[cut:]}" for cut in cuts]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first, space = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"type": "Replace", "content": " "}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": c, **flags} for i, c in enumerate(("<unk>", "<s>", "</s>"))],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": MARK}, {"type": "Replace", "pattern": {"String": " "}, "content": MARK}]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing", "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {**space, "pattern": {"String": MARK}}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
                  "merges": merges},
    }  # fmt: skip


def save(folder: Path) -> None:
    """Write the tokenizer files of a Llama checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build()
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer.json").write_text(json.dumps(fast(model), ensure_ascii=False) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast",
              "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>",
              "padding_side": "right",
              "model_max_length": 4096, "clean_up_tokenization_spaces": False}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


if __name__ == "__main__":
    from playground.mini.paths import CHECKPOINT

    save(CHECKPOINT)
