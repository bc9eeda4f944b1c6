#!/bin/bash
# LoRA of a LLaVA-1.5 with fewer tokens, on several GPUs, as LLaVA's script of this name. Not run on the machine it was written on.
# CKPT=checkpoints/llava-v1.5-7b DATA_PATH=llava_v1_5_mix665k.json IMAGES=data OUT=checkpoints/llava-v1.5-7b-64 bash eval_scripts/v1_5/finetune_lora.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
exec torchrun --nproc_per_node "${GPUS:-8}" -m llava_consensus.cli train --model "${CKPT:?}" --data-path "${DATA_PATH:?}" \
    --images "${IMAGES:?}" --out "${OUT:?}" --tune lora --method "${METHOD:-consensusdrop}" --tokens "${TOKENS:-64}" \
    --steps "${STEPS:-5198}" --batch 16 --learning-rate 2e-4 --dtype bfloat16 --checkpointing --attn "${ATTN:-sdpa}" \
    --deepspeed eval_scripts/zero2.json --save-every 500 \
    -- --lora_r 128 --lora_alpha 256 --mm_projector_lr 2e-5 --tf32 True --dataloader_num_workers 4 "$@"
