#!/usr/bin/env bash
# The figures of docs/performance.md on a CUDA device: steps by benchmarks/engine.py, whole runs by `benchctl replay`.
# usage: benchmarks/gpu_measure.sh OUT
set -uo pipefail
out=$1
export PYTHONUNBUFFERED=1 PYTHONPATH=.:benchmarks${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/workloads.py "$out/w" >/dev/null
for model in qwen3-0.6b qwen3-8b; do
  timeout 90 python3 benchmarks/engine.py steps --model $model --repeats 3 --json "$out/steps-$model.json"
  timeout 150 python3 -m benchctl replay "$out/w/offline.jsonl" --model $model --temperature 0.6 --max-model-len 4096 --num-repeats 2 \
    --no-report --json --out "$out/runs/offline-$model" >"$out/offline-$model.json" 2>"$out/offline-$model.err"
done
timeout 90 python3 -m benchctl replay "$out/w/arrivals-20.jsonl" --model qwen3-8b --scheduler vllm --temperature 0.6 --max-model-len 4096 \
  --no-report --json --out "$out/runs/arrivals-20-qwen3-8b" >"$out/arrivals-20-qwen3-8b.json" 2>"$out/arrivals.err"
tail -2 "$out"/*.err
