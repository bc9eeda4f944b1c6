"""Make a venv in steps, and say what is done and how far it is. Standard library only; run by `make`.

    python3 requirements/set_up.py main .venv            # what answering questions needs
    python3 requirements/set_up.py dev .venv             # tests, style, figures, further hosts: into the same venv
    python3 requirements/set_up.py demo .venv            # the page in the browser: into the same venv
    python3 requirements/set_up.py pinned .venv-pinned   # LLaVA's own pins
    python3 requirements/set_up.py vllm .venv-vllm       # vLLM on the CPU

Everything but torch is installed by hash. What is there already is not installed again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
STAGES = {  # the lock files of a stage, and whether torch and this project come with it
    "main": (("main.lock", "llava.lock"), True),
    "dev": (("dev.lock", "lmms-eval.lock"), False),
    "demo": (("demo.lock",), False),
    "pinned": (("pinned.lock", "llava.lock"), True),
    "vllm": (("vllm.lock", "llava.lock"), True),
}
# torchvision's wheel is built for CUDA: beside torch for the CPU it has no operators, and fails where it describes them
DECLARED = """

if not _has_ops():  # added by set_up.py
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
TAIL = 40  # lines of a failed step that are shown


def steps(stage: str) -> list[tuple[str, list[str], int]]:
    """What a step is called, the arguments of its `pip install`, and how many packages it may install; 0 is unknown."""
    files, whole = STAGES[stage]
    locks = [f"--requirement={HERE / name}" for name in files]
    count = sum(len(re.findall(r"^[\w.-]+==", (HERE / name).read_text(), re.MULTILINE)) for name in files)
    locked = (f"{stage}: packages, by hash", ["--no-deps", "--require-hashes", *locks], count)
    if not whole:
        return [locked]
    project = ["--no-deps", "--no-build-isolation", f"--editable={HERE.parent}"]
    return [(f"{TORCH}, the largest by far", [TORCH], 0), locked, ("this project", project, 0)]


def install(python: Path, title: str, arguments: list[str], count: int) -> None:
    """One `pip install`, with what it is at on one line that is written over in a terminal. Ends the program where pip
    fails, with the end of what it said.
    """
    terminal, said, packages = sys.stdout.isatty(), [], 0
    begun = time.monotonic()
    command = [str(python), "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if not terminal:
        print(f"{title} ...", flush=True)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            packages += line.startswith(("Collecting", "Requirement already satisfied"))
            if terminal and not line.startswith("WARNING"):
                share = f" ({packages} of at most {count})" if count else ""
                print(f"\r\033[K{title}{share}: {line.strip()[:70]}", end="", flush=True)
    end = "\r\033[K" if terminal else ""
    if process.returncode:
        sys.exit(
            f"{end}{''.join(said[-TAIL:])}\n{title}: pip failed, its last lines are above. The same command goes on"
        )
    print(f"{end}{title}: {time.monotonic() - begun:.0f} s", flush=True)


def declare_operators(venv: Path) -> None:
    """Lets torchvision be imported without its operators, which no image processor calls."""
    (file,) = venv.glob("lib/python*/site-packages/torchvision/extension.py")
    text = file.read_text()
    if DECLARED not in text:
        file.write_text(text + DECLARED)


def main() -> None:
    """The venv, if there is none, and every step of a stage."""
    if len(sys.argv) != 3 or sys.argv[1] not in STAGES:
        sys.exit(f"usage: set_up.py {'|'.join(STAGES)} VENV")
    stage, venv = sys.argv[1], Path(sys.argv[2])
    python = venv / "bin" / "python"
    todo = steps(stage)
    print(f"setting up {venv} for {stage}, {len(todo)} step{'s' if len(todo) > 1 else ''}", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    for number, (title, arguments, count) in enumerate(todo, 1):
        install(python, f"[{number}/{len(todo)}] {title}", arguments, count)
    if stage == "vllm":
        declare_operators(venv)


if __name__ == "__main__":
    main()
