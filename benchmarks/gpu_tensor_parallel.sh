#!/usr/bin/env bash
# Two ranks against one: logits in float32 and bfloat16, decode steps at 8 B with graphs, a replay that verifies itself.
# usage: benchmarks/gpu_tensor_parallel.sh OUT        on a machine with two cards (without: a rehearsal of tiny over gloo)
set -uo pipefail
out=$1
mkdir -p "$out"
# Multicast within the card's switch is left out: not every machine allows it, and two ranks gain nothing by it.
export PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} NCCL_NVLS_ENABLE=0
cards=$(nvidia-smi -L 2>/dev/null | wc -l)
small=qwen3-0.6b large=qwen3-8b batches=1,64,256 flags=()
if [ "$cards" -lt 2 ]; then
  echo "fewer than two cards: a rehearsal on the CPU"
  export CUDA_VISIBLE_DEVICES=
  small=tiny large=tiny batches=1,4 flags=(--context 64 --steps 20)
fi
run() { timeout "$1" python3 "${@:2}" 2>&1 | tail -12; }
run 35 benchmarks/tensor_parallel.py logits --model $small --dtype float32 --json "$out/tp-logits-float32.json"
run 30 benchmarks/tensor_parallel.py logits --model $small --dtype bfloat16 --json "$out/tp-logits-bfloat16.json"
run 60 benchmarks/tensor_parallel.py steps --model $large --batches $batches ${flags[@]+"${flags[@]}"} --json "$out/tp-steps.json"
timeout 40 python3 -m benchctl replay traces/sharegpt.jsonl --model $small -tp 2 --num-prompts 16 --request-rate inf -s vllm --verify 4 \
  --max-model-len 4096 --no-report --json --out "$out/replay" >"$out/tp-replay.json" 2>"$out/tp-replay.err"
echo "replay: exit $?"; grep -E "^verify|^Error" "$out/tp-replay.err"
