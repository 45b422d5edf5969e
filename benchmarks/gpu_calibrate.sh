#!/usr/bin/env bash
# What the bundled profiles are fitted from, on a CUDA device: designed rounds and a short trace under both policies, for
# three models. Fit afterwards, anywhere:
#   benchctl calibrate OUT/MODEL/points.json OUT/MODEL/runs -o engines/simulated/profiles/h200-MODEL.json
# usage: benchmarks/gpu_calibrate.sh OUT        (python3 is one with torch, polars and msgspec on its path)
# OUT gets one MODEL.tar.gz a model, as soon as it is done, and log.txt. Ends within LIMIT seconds.
set -uo pipefail
out=$(realpath "$1")
limit=${LIMIT:-560} models=${MODELS:-qwen3-0.6b qwen3-8b llama-3.1-8b} seconds=${SECONDS_A_BLOCK_SIZE:-45}
export PYTHONUNBUFFERED=1 PYTHONPATH=.:benchmarks${PYTHONPATH:+:$PYTHONPATH}
work=$(mktemp -d) began=$SECONDS
exec > >(tee "$out/log.txt") 2>&1
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader || true
python3 benchmarks/workloads.py "$work/w"
count=$(wc -w <<<"$models")
for model in $models; do
  left=$((limit - 12 - (SECONDS - began)))
  share=$((left / count)) count=$((count - 1))
  ((share < 30)) && { echo "$model: no time left" && continue; }
  mkdir -p "$work/$model"
  cat >"$work/list" <<L
calibrate --measure --model $model --max-model-len ${MAX_MODEL_LEN:-40960} --max-seconds $seconds -o $work/$model/points.json
replay $work/w/calibration.jsonl --model $model --max-model-len ${MAX_MODEL_LEN:-40960} --scheduler vllm --scheduler nano --no-report --json ${REPLAY:-} --out $work/$model/runs
L
  echo "== $model: ${share} s of ${left} s"
  # INT: a run that is under way ends as one that was interrupted, and is whole up to there.
  timeout -s INT -k 8 "$share" python3 benchmarks/commands.py "$work/list" >"$work/$model/out.json" || echo "$model: exit $?"
  tar -C "$work" -czf "$out/$model.tar.gz" "$model"
  ls -l "$out/$model.tar.gz"
done
echo "done after $((SECONDS - began)) s"
