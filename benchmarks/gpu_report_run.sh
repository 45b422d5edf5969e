#!/usr/bin/env bash
# A long run of both policies on a CUDA device, packed to be reported on elsewhere: 10,000 requests of conversations, about a
# minute each, every decision recorded.
# usage: benchmarks/gpu_report_run.sh OUT [REPLAY-FLAGS…]      (python3 is one with torch, and polars on its path)
#   rehearsals: benchmarks/gpu_report_run.sh OUT --engine null
#               REQUESTS=60 RATE=8 KV=16384 benchmarks/gpu_report_run.sh OUT --engine torch --model tiny --dtype float32
# OUT/run10k.tar.gz, or its parts and their sums: at most 6 files (else the runs are made again with --records compact).
# Then, anywhere: benchctl report OUT/run10k.tar.gz
set -euo pipefail
out=$1
shift
: "${REQUESTS:=10000}" "${RATE:=170}" "${KV:=393216}" "${SPLIT:=15MiB}"
export PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
flags=("$@")
if [ $# -eq 0 ]; then
    flags=(--engine torch --model qwen3-0.6b --dtype bfloat16 --load-format dummy --num-warmups 64)
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out"

# Shorter turns than ShareGPT's, so that 10,000 of them pass in a minute.
python3 -m benchctl trace synth sharegpt -n "$REQUESTS" --input-scale 0.3 --output-scale 0.25 -o "$scratch/conversations.jsonl"

make_and_pack() { # RECORDS
    rm -rf "$scratch/runs" "$out"/run10k.tar.gz*
    # Exit code 1: some requests were refused, which the report says; the runs are there.
    python3 -m benchctl replay "$scratch/conversations.jsonl" --scheduler nano --scheduler vllm --request-rate "$RATE" \
        --kv-cache-tokens "$KV" --records "$1" --no-report --out "$scratch/runs" "${flags[@]}" \
        >"$out/run10k.txt" 2>"$scratch/err" || [ $? -eq 1 ] || { cat "$scratch/err" >&2; exit 1; }
    du -sh "$scratch/runs"/*
    python3 -m benchctl pack "$scratch/runs" -o "$out/run10k.tar.gz" --split "$SPLIT"
}

make_and_pack full
if [ "$(ls "$out"/run10k.tar.gz* | wc -l)" -gt 5 ]; then # and run10k.txt
    make_and_pack compact
fi
tail -n 3 "$out/run10k.txt"
