#!/bin/bash
# sqa with LLaVA's protocol. CKPT=liuhaotian/llava-v1.5-7b DATA=playground/data TOKENS=64 bash eval_scripts/v1_5/sqa.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
exec make --no-print-directory eval-sqa MODEL="${CKPT:-checkpoints/llava-mini}" TOKENS="${TOKENS:-64}" \
    METHOD="${METHOD:-consensusdrop}" DATA="${DATA:-playground/mini}" ARGS="$*"
