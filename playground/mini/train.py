"""Train the embedded model from nothing: `make train-mini`, or

    python -m playground.mini.train [--device cpu] [--threads N] [--out checkpoints/llava-mini] [--quick]

Stages, each resumable (state under checkpoints/llava-mini/.work): draw a pool of training scenes; the vision tower and,
at the same time on a second core, the language model on symbolic prefixes; the projector and the joint stage; the stage
on all 576 patches only; export, and CLIP's text side. Every stage prints its progress and, on validation scenes, the
accuracy per kind of question. `--quick` runs a few steps of everything, to see that it works, and exports to a scratch
folder. Delete the .work folder to start again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from llava.model.language_model.llava_llama import LlavaLlamaForCausalLM

from playground.mini import connect, full_prefix, language, pool, text, tower
from playground.mini.export import export
from playground.mini.paths import CHECKPOINT, ROOT, WORK


def finish(folder: Path, tag: str = full_prefix.NAME, scenes: int = text.SCENES, steps: int = text.STEPS) -> None:
    """Export the state of the last stage, and train CLIP's text side for its tower."""
    eyes, model = connect.trained_tower(), LlavaLlamaForCausalLM(language.language_config())
    project = connect.projector(language.HIDDEN)
    state = torch.load(WORK / f"{tag}.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    project.load_state_dict(state["project"])
    export(model, project, eyes.clip, folder)
    text.add_text(folder / "vision_tower", scenes, steps)
    print(f"wrote {folder}", flush=True)


def draw_pools(quick: bool) -> None:
    """Draw the pools that the tower and the joint stage read."""
    for kind, count in (("dense", 14_000), ("signs", 5_000), ("scene", connect.SCENES)):
        for number in range(1 if quick else count // pool.SHARD):
            print(f"pool {pool.draw_shard(WORK, kind, number).name}", flush=True)


def both(device: str, threads: int) -> None:
    """The tower and the language model side by side, in two processes; on a GPU one after the other."""
    options = ["--device", device, "--threads", str(max(1, threads // 2))]
    commands = [[sys.executable, "-m", f"playground.mini.{name}", *options] for name in ("tower", "language")]
    running = []
    for command in commands:
        running.append(subprocess.Popen(command, cwd=ROOT))
        if device != "cpu" and running[-1].wait():
            raise SystemExit(f"failed: {' '.join(command)}")
    if any([process.wait() for process in running]):
        raise SystemExit("a stage failed; run the same command again to go on where it stopped")


def rehearse(device: str, out: Path) -> None:
    """A few steps of every stage on a few scenes."""
    pool.SHARD = 64
    draw_pools(quick=True)
    tower.train_tower([("dense+signs", 12, 4, 2, 1e-3), ("signs+scene", 24, 2, 1, 1e-3)], device, log_every=1)
    language.train_language(3, device, size=2)
    connect.train_joint(device, (connect.Round("joint3", 2, 1e-4, 0.5, size=2),), pool.SHARD)
    full_prefix.train_full(device, steps=2)
    finish(out, scenes=8, steps=2)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads in all")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="where the checkpoint goes")
    parser.add_argument("--quick", action="store_true", help="a few steps of every stage, as a test of the pipeline")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick and "MINI_WORK" not in os.environ:  # never on top of a real run's states
        with tempfile.TemporaryDirectory() as scratch:
            out = options.out if options.out != CHECKPOINT else Path(scratch) / "llava-mini"
            command = [sys.executable, "-m", "playground.mini.train", "--quick", "--device", options.device]
            env = {**os.environ, "MINI_WORK": scratch}
            raise SystemExit(subprocess.run([*command, "--out", str(out)], cwd=ROOT, env=env).returncode)
    WORK.mkdir(parents=True, exist_ok=True)
    started = time.time()
    if options.quick:
        rehearse(options.device, options.out)
    else:
        draw_pools(quick=False)
        both(options.device, options.threads)
        connect.train_joint(options.device)
        full_prefix.train_full(options.device)
        finish(options.out)
    print(f"trained in {(time.time() - started) / 60:.0f} minutes; measure it: make eval-gqa")


if __name__ == "__main__":
    main()
