"""Benchmarks with a handful of questions each, in the official layout and file formats; a video; a checkpoint."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MINI = Path(__file__).parents[1] / "checkpoints" / "llava-mini"
SUFFIX = "\nAnswer the question using a single word or phrase."


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def said(questions: Iterable[Any], text: Callable[[Any], str] = lambda _: "yes") -> list[dict[str, Any]]:
    """Answers to questions, as LLaVA's scripts write them."""
    return [
        {"question_id": one.question_id, "prompt": one.prompt or one.text, "text": text(one)}
        | {"metadata": {"index": one.index}}
        for one in questions
    ]


def make_gqa(data: Path) -> Path:
    """Four questions: two to verify (yes), two open (dog, red); each entails the others."""
    asked, gold = [], {}
    for number, (text, answer, structural) in enumerate(
        [
            ("Is it overcast?", "yes", "verify"),
            ("Which animal is it?", "dog", "query"),
            ("Is the dog brown?", "yes", "verify"),
            ("What colour is the car?", "red", "query"),
        ]
    ):
        asked.append({"question_id": str(number), "image": "n1.jpg", "text": text + SUFFIX, "category": "default"})
        gold[str(number)] = {
            "question": text,
            "answer": answer,
            "isBalanced": True,
            "imageId": "n1",
            "types": {"structural": structural, "semantic": "obj", "detailed": "existC"},
            "groups": {"global": "animal" if number == 1 else None, "local": "l"},
            "semantic": [{"operation": "exist", "argument": "?", "dependencies": []}],
            "entailed": [str(number), str((number + 1) % 4), str((number + 2) % 4)],
        }
    write_lines(data / "eval/gqa/llava_gqa_testdev_balanced.jsonl", asked)
    path = data / "eval/gqa/data/testdev_balanced_questions.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(gold))
    return data


def make_pope(data: Path) -> Path:
    """Twelve questions a category, in LLaVA's order of categories; labels alternate yes, no."""
    asked = []
    for start, category in ((1, "adversarial"), (10_000_001, "random"), (20_000_001, "popular")):
        labels = []
        for number in range(12):
            image = f"COCO_val2014_{number // 6:012}.jpg"
            text = f"Is there a {category} thing number {number} in the imange?"
            labels.append({"question_id": number + 1, "image": image, "text": text, "label": ("yes", "no")[number % 2]})
            asked.append({"question_id": start + number, "image": image, "text": text + SUFFIX, "category": category})
        write_lines(data / f"eval/pope/coco/coco_pope_{category}.json", labels)
    write_lines(data / "eval/pope/llava_pope_test.jsonl", asked)
    return data


def make_textvqa(data: Path) -> Path:
    """Six questions on three images; question_id is the image id and repeats."""
    asked: list[dict[str, Any]] = []
    gold: list[dict[str, Any]] = []
    for picture in ("im1", "im2", "im3"):
        for text, answers in (
            ("What Brand is it?", ["dakota"] * 6 + ["digital"] * 4),
            ("What year?", ["1999"] * 5 + ["two"] * 5),
        ):
            prompt = f"{text}\nReference OCR token: A, B{SUFFIX}"
            asked.append({"question_id": picture, "image": f"{picture}.jpg", "text": prompt, "category": "default"})
            gold.append({"question_id": len(gold), "image_id": picture, "question": text.lower(), "answers": answers})
    write_lines(data / "eval/textvqa/llava_textvqa_val_v051_ocr.jsonl", asked)
    (data / "eval/textvqa/TextVQA_0.5.1_val.json").write_text(json.dumps({"data": gold}))
    return data


def make_mme(data: Path) -> Path:
    """Two images in each of two tasks, the second laid out with images/; two questions each: yes, then no."""
    asked, folder = [], data / "eval/MME"
    for task, inner, texts in (("color", "", ""), ("scene", "images/", "questions_answers_YN/")):
        for number in (1, 2):
            image = f"{task}/{inner}{number:04}.jpg"
            gold = folder / "MME_Benchmark_release_version" / task / f"{texts}{number:04}.txt"
            gold.parent.mkdir(parents=True, exist_ok=True)
            (folder / "MME_Benchmark_release_version" / task / inner).mkdir(exist_ok=True)
            space = " " * number  # some official questions have two spaces here
            lines = []
            for what, label in (("red", "Yes"), ("blue", "No")):
                lines.append(f"Is {number} {what}?{space}Please answer yes or no.\t{label}")
                text = f"Is {number} {what}?{SUFFIX}"
                asked.append({"question_id": image, "image": image, "text": text, "category": task})
            gold.write_text("\n".join(lines) + "\n")
    write_lines(folder / "llava_mme.jsonl", asked)
    return data


def make_vqav2(data: Path, annotated: bool = True) -> Path:
    """Three questions of test-dev with ten answers each, and a fourth that only test2015 has."""
    asked, gold = [], []
    for number, (text, answer, kind) in enumerate(
        [("Is it red?", "yes", "yes/no"), ("How many?", "2", "number"), ("What is it?", "dog", "other")]
    ):
        asked.append({"question_id": 10 + number, "image": "COCO_test2015_1.jpg", "text": text + SUFFIX})
        people = [{"answer": answer if n < 8 else "a Cat.", "answer_id": n + 1} for n in range(10)]
        gold.append({"question_id": 10 + number, "question_type": "what", "answer_type": kind, "answers": people})
    folder = data / "eval/vqav2"
    asked = [{**one, "category": "default"} for one in asked]
    write_lines(folder / "llava_vqav2_mscoco_test-dev2015.jsonl", asked)
    write_lines(folder / "llava_vqav2_mscoco_test2015.jsonl", [*asked, {**asked[0], "question_id": 99}])
    if annotated:
        (folder / "v2_mscoco_test-dev2015_annotations.json").write_text(json.dumps({"annotations": gold}))
    return data


def make_seed(data: Path) -> Path:
    """Two questions about images, one id twice with the same words, and one about a video's middle frame."""
    asked, gold = [], []
    for number, (key, kind, answer) in enumerate(
        [(101, "image", "A"), (102, "image", "B"), (102, "image", "B"), ("v0", "video", "C")]
    ):
        options = "".join(f"\n{letter}. thing {letter}" for letter in "ABCD")
        text = f"Which thing is {key}?{options}\nAnswer with the option's letter from the given choices directly."
        asked.append(
            {"question_id": key, "image": f"SEED-Bench-image/{key}", "text": text, "category": "Scene Understanding"}
        )
        gold.append(
            {"question_id": str(key), "question_type_id": 10 if kind == "video" else 1, "data_type": kind}
            | {"answer": answer, "question": f"Which thing is {key}?", "data_id": str(number)}
        )
    write_lines(data / "eval/seed_bench/llava-seed-bench.jsonl", asked)
    types = {"Scene Understanding": 1, "Action Recognition": 10}
    (data / "eval/seed_bench/SEED-Bench.json").write_text(json.dumps({"questions": gold, "question_type": types}))
    return data


def make_refcoco(data: Path) -> Path:
    boxes = [("1.jpg", "a dog", [10, 10, 60, 40]), ("1.jpg", "a cat", [0, 0, 20, 50]), ("2.jpg", "a mug", [5, 5, 9, 9])]
    rows = [{"image": i, "sent": sent, "bbox": box, "width": 100, "height": 50} for i, sent, box in boxes]
    write_lines(data / "eval/refcoco/refcoco_val.jsonl", rows)
    return data


def make_mmbench(data: Path, chinese: bool = False) -> Path:
    """Two questions in every rotation (three options, two options), each with its own red or blue picture."""
    import base64
    import io

    from PIL import Image

    columns = "index question hint A B C D answer category image source l2-category comment split"
    lines = [columns.replace(" ", "\t")]
    questions = [
        (5, "What is it?", "", ["cat", "dog", "bird"], "ocr", "coarse_perception", (255, 0, 0)),
        (6, "图中？", "提示", ["猫", "狗"], "action", "logic_reasoning", (0, 0, 255)),
    ]
    for index, question, hint, options, category, ability, colour in questions:
        content = io.BytesIO()
        Image.new("RGB", (8, 8), colour).save(content, "PNG")
        image = base64.b64encode(content.getvalue()).decode()
        for turn in range(len(options)):
            own = options[turn:] + options[:turn]
            answer = "ABCD"[own.index(options[0])]
            cells = [str(index + 1_000_000 * turn), question, hint, *own, *[""] * (4 - len(own)), answer]
            lines.append("\t".join([*cells, category, image, "made", ability, "", "dev"]))
    folder = data / "eval" / ("mmbench_cn" if chinese else "mmbench")
    folder.mkdir(parents=True)
    name = "mmbench_dev_cn_20231003.tsv" if chinese else "mmbench_dev_20230712.tsv"
    (folder / name).write_text("\n".join(lines) + "\n")
    return data


def make_sqa(data: Path) -> Path:
    """Four questions in the official order of the split, two of them about an image; right: A, B, C, A."""
    asked: list[dict[str, Any]] = []
    problems = {}
    for key, picture, answer in (("4", False, 0), ("5", True, 1), ("11", True, 2), ("15", False, 0)):
        text = f"Which is {key}?\nA. one\nB. two\nC. three"
        said = {"from": "gpt", "value": "ABC"[answer]}
        row: dict[str, Any] = {"id": key, "conversations": [{"from": "human", "value": text}, said]}
        if picture:
            row["image"] = f"{key}/image.png"
            row["conversations"][0]["value"] = f"<image>\nContext: a hint\n{text}"
        asked.append(row)
        problems[key] = {"question": text, "choices": ["one", "two", "three"], "answer": answer}
    folder = data / "eval/scienceqa"
    folder.mkdir(parents=True)
    (folder / "llava_test_CQM-A.json").write_text(json.dumps(asked))
    (folder / "problems.json").write_text(json.dumps(problems | {"1": {"choices": ["a"], "answer": 0}}))
    (folder / "pid_splits.json").write_text(json.dumps({"test": list(problems), "train": ["1"]}))
    return data


def mini_checkpoint(folder: Path, **changes: Any) -> Path:
    """A copy of the embedded model with another configuration."""
    shutil.copytree(MINI, folder, ignore=shutil.ignore_patterns(".work"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


WRITERS = (make_gqa, make_mmbench, make_mme, make_pope, make_refcoco, make_seed, make_sqa, make_textvqa, make_vqav2)
MADE: dict[str, Callable[..., Path]] = {one.__name__.removeprefix("make_"): one for one in WRITERS}


def write_mp4(path: Path, count: int, size: tuple[int, int] = (64, 48), codec: str = "mpeg4") -> Path:
    """A video whose frame n is gray of value 10 n; needs PyAV."""
    import av
    import numpy as np

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=5)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(count):
            gray = np.full((size[1], size[0], 3), 10 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(gray, format="rgb24")))
        container.mux(stream.encode())
    return path
