#!/bin/bash
# vqav2 with LLaVA's protocol. CKPT=liuhaotian/llava-v1.5-7b DATA=playground/data TOKENS=64 bash eval_scripts/v1_5/vqav2.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
exec make --no-print-directory eval-vqav2 MODEL="${CKPT:-checkpoints/llava-mini}" TOKENS="${TOKENS:-64}" \
    METHOD="${METHOD:-consensusdrop}" DATA="${DATA:-playground/mini}" ARGS="$*"
