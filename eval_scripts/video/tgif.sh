#!/bin/bash
# CKPT=liuhaotian/llava-v1.5-7b DATA=playground/data TOKENS=64 METHOD=consensusdrop bash eval_scripts/video/tgif.sh
exec "$(dirname "$0")/../run.sh" tgif "$@"
