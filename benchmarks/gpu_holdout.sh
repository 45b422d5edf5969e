#!/usr/bin/env bash
# What the bundled profiles are held against, on a CUDA device: traces that no profile was fitted on, admissions free, both
# policies. To be run on another start of the machine than gpu_calibrate.sh. Then, anywhere:
#   benchctl validate h200-MODEL OUT/MODEL/runs/*
# usage: benchmarks/gpu_holdout.sh OUT          (python3 is one with torch, polars and msgspec on its path)
# OUT gets a MODEL.tar.gz a model, as soon as it is done, and log.txt. Ends within LIMIT seconds; the important ones come first.
set -uo pipefail
out=$(realpath "$1")
limit=${LIMIT:-575} models=${MODELS:-qwen3-8b qwen3-0.6b llama-3.1-8b} shorten=${SHORTEN:-}
full=${FULL:-600} w10=${W10:-150} # requests of sharegpt-full, of W4 at 10/s
export PYTHONUNBUFFERED=1 PYTHONPATH=.:benchmarks${PYTHONPATH:+:$PYTHONPATH}
work=$(mktemp -d) began=$SECONDS
exec > >(tee "$out/log.txt") 2>&1
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader || true
python3 benchmarks/workloads.py "$work/w"
python3 -m traces.synthetic --full --out "$work/w" >/dev/null
cp traces/long-prompts.jsonl "$work/w/"
# About the seconds that a model's list takes: what is left is shared out by them.
need() { case $1 in *0.6b*) echo 175 ;; llama*) echo 100 ;; *) echo 240 ;; esac }
needed=0
for model in $models; do needed=$((needed + $(need "$model"))); done
for model in $models; do
  left=$((limit - 12 - (SECONDS - began)))
  share=$((left * $(need "$model") / needed)) needed=$((needed - $(need "$model")))
  ((share < 30)) && { echo "$model: no time left" && continue; }
  mkdir -p "$work/$model"
  flags="--model $model --max-model-len ${MAX_MODEL_LEN:-40960} --scheduler vllm --scheduler nano --records compact --no-report --json ${REPLAY:-} $shorten"
  w4() { echo "replay $work/w/arrivals-$1.jsonl $flags ${2:-} --out $work/$model/runs/w4-$1"; }
  long() { echo "replay $work/w/long-prompts.jsonl $flags --speedup 2 --out $work/$model/runs/long-prompts"; }
  # 2,000 requests, or the first of them; their own times are 15 minutes.
  full() { echo "replay $work/w/sharegpt-full.jsonl $flags --speedup 20 ${1:-} --out $work/$model/runs/sharegpt-full"; }
  # At the temperature of docs/performance.md, which takes its whole runs from here.
  offline() { echo "replay $work/w/offline.jsonl $flags --temperature 0.6 --out $work/$model/runs/offline"; }
  if [[ $model == llama* ]]; then
    { w4 50; offline; w4 20; } >"$work/list"
  else
    { full "--num-prompts $full"; w4 50; long; offline; w4 20 "$([[ $model == *8b* ]] && echo "--temperature 0.6")"; w4 10 "--num-prompts $w10"; } >"$work/list"
  fi
  echo "== $model: ${share} s of ${left} s"
  timeout -s INT -k 8 "$share" python3 benchmarks/commands.py --seconds $((share - 25)) "$work/list" >"$work/$model/out.json" || echo "$model: exit $?"
  # In pieces that can be carried: one archive a model, or several where it would be large.
  tar -C "$work" -czf "$work/$model.tar.gz" "$model"
  split -b 15M -d -a 1 "$work/$model.tar.gz" "$out/$model.tar.gz."
  ls -l "$out"
done
echo "done after $((SECONDS - began)) s"
