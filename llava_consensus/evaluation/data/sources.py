"""URLs of the official files of each benchmark, and their places below DATA/eval. SOURCES is the only list.

Addresses are those of LLaVA's docs/Evaluation.md, and of the pages it names. Sizes are those that the publishers state;
the server's size is printed before a transfer and checked after it. Hashes of known versions are with the benchmarks
(`DataFile.sha256`) and are compared by `data check`.
"""

from typing import NamedTuple

DRIVE = "https://drive.usercontent.google.com/download?id={}&export=download&confirm=t"
COCO = "http://images.cocodataset.org/zips/"  # has no https certificate for its name
GQA = "https://downloads.cs.stanford.edu/nlp/data/gqa/"
POPE = "https://raw.githubusercontent.com/AoiDragon/POPE/e3e39262c85a6a83f26cf5094022a782cb0df58d/output/coco/"
SQA_IMAGES = "https://scienceqa.s3.us-west-1.amazonaws.com/images/"
SQA = "https://raw.githubusercontent.com/lupantech/ScienceQA/main/data/scienceqa/"
TEXTVQA = "https://dl.fbaipublicfiles.com/textvqa/"
MMVET = "https://github.com/yuweihao/MM-Vet/releases/download/v1/"
SEED = "https://huggingface.co/datasets/AILab-CVC/SEED-Bench/resolve/main/"
REFCOCO = "https://ofasys-wlcb.oss-cn-wulanchabu.aliyuncs.com/Qwen-VL/evaluation/refcoco/"
MMBENCH = "https://download.openmmlab.com/mmclassification/datasets/mmbench/"


class Source(NamedTuple):
    name: str  # of the file in DATA/downloads
    url: str
    to: str  # folder below DATA/eval; of a zip, the folder it is unpacked to
    size: str = ""  # as its publisher writes it
    only: str = ""  # of a zip, the members whose names match this pattern; empty: all of them
    without: str = ""  # of a zip, the leading folder of its members that is left out
    md5: str = ""  # if one is known


EVAL = Source("eval.zip", DRIVE.format("1atZSBBrAX54yYpxtVVW33zFvcnaHeFPy"), "")
VAL2014 = Source("val2014.zip", f"{COCO}val2014.zip", "pope", "6 GB", md5="a3d79f5ed8d289b7a7554ce06a5782b3")
SOURCES: dict[str, tuple[Source, ...]] = {
    "vqav2": (EVAL, Source("test2015.zip", f"{COCO}test2015.zip", "vqav2", "12 GB")),
    "gqa": (
        EVAL,
        Source("questions1.2.zip", f"{GQA}questions1.2.zip", "gqa/data", "1.4 GB", "*testdev_balanced_questions.json"),
        Source("gqa-images.zip", f"{GQA}images.zip", "gqa/data", "20.3 GB"),
    ),
    "sqa": (
        EVAL,
        Source("problems.json", f"{SQA}problems.json", "scienceqa"),
        Source("pid_splits.json", f"{SQA}pid_splits.json", "scienceqa"),
        Source("scienceqa-test.zip", f"{SQA_IMAGES}test.zip", "scienceqa/images"),
    ),
    "textvqa": (
        EVAL,
        Source("TextVQA_0.5.1_val.json", f"{TEXTVQA}data/TextVQA_0.5.1_val.json", "textvqa"),
        Source("train_val_images.zip", f"{TEXTVQA}images/train_val_images.zip", "textvqa", "6.6 GB"),
    ),
    "pope": (
        EVAL,
        *(
            Source(f"coco_pope_{kind}.json", f"{POPE}coco_pope_{kind}.json", "pope/coco")
            for kind in ("random", "popular", "adversarial")
        ),
        VAL2014,
    ),
    "mme": (EVAL,),
    "mmbench": (Source("mmbench_dev_20230712.tsv", f"{MMBENCH}mmbench_dev_20230712.tsv", "mmbench"),),
    "mmbench_cn": (Source("mmbench_dev_cn_20231003.tsv", f"{MMBENCH}mmbench_dev_cn_20231003.tsv", "mmbench_cn"),),
    "mmvet": (EVAL, Source("mm-vet.zip", f"{MMVET}mm-vet.zip", "mm-vet", without="mm-vet/")),
    "seed": (EVAL, Source("SEED-Bench-image.zip", f"{SEED}SEED-Bench-image.zip", "seed_bench")),
    "refcoco": (
        Source("refcoco_val.jsonl", f"{REFCOCO}refcoco_val.jsonl", "refcoco"),
        Source("train2014.zip", f"{COCO}train2014.zip", "refcoco", "13 GB"),
    ),
    "tgif": (Source("TGIF_Zero_Shot_QA.zip", DRIVE.format("1so6L9rg_gdC8Segur7rKML-ffd4Ix_I6"), "GPT_Zero_Shot_QA"),),
    "msvd": (Source("MSVD_Zero_Shot_QA.zip", DRIVE.format("1_q4eiSdb7i8P3Hmh4lCfgY1uBGyzU_7X"), "GPT_Zero_Shot_QA"),),
    "msrvtt": (
        Source("MSRVTT_Zero_Shot_QA.zip", DRIVE.format("1yXh9lz7flQ5Ui2IRSd6Qi6RqSEeUJwl3"), "GPT_Zero_Shot_QA"),
    ),
}
BY_HAND = {  # data without a public address
    "mme": "images and right answers: on request from the authors of MME, as their repository says "
    "(github.com/BradyFU/Awesome-Multimodal-Large-Language-Models, branch Evaluation)",
    "seed": "SEED-Bench.json in its first revision, and the videos' middle frames, made from videos under licences of "
    "their own: DATASET.md of github.com/AILab-CVC/SEED-Bench, extract_video_frames.py of eval.zip",
}
