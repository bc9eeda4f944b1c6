#!/bin/bash
# tgif: eight frames of a video, Video-LLaVA's question files. DATA=playground/data TOKENS=64 bash eval_scripts/video/tgif.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
exec make --no-print-directory eval-tgif MODEL="${CKPT:-checkpoints/llava-mini}" TOKENS="${TOKENS:-64}" \
    METHOD="${METHOD:-consensusdrop}" DATA="${DATA:-playground/mini}" ARGS="$*"
