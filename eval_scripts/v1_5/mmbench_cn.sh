#!/bin/bash
# CKPT=liuhaotian/llava-v1.5-7b DATA=playground/data TOKENS=64 METHOD=consensusdrop bash eval_scripts/v1_5/mmbench_cn.sh
exec "$(dirname "$0")/../run.sh" mmbench_cn "$@"
