#!/bin/bash
# run.sh BENCHMARK ...: one benchmark with LLaVA's protocol; further words go to `llava-consensus eval`
set -euo pipefail
cd "$(dirname "$0")/.."
exec make --no-print-directory "eval-${1:?which benchmark}" MODEL="${CKPT:-checkpoints/llava-mini}" TOKENS="${TOKENS:-64}" \
    METHOD="${METHOD:-consensusdrop}" DATA="${DATA:-playground/mini}" ARGS="${*:2}"
