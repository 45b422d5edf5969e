#!/usr/bin/env bash
# The engine held against plain torch on a CUDA device: what the device can do, memory, bfloat16, then a random campaign.
# usage: benchmarks/gpu_engine_check.sh OUT [SECONDS of the campaign, 420]
set -uo pipefail
out=$1 seconds=${2:-420}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
timeout 60 python3 -m benchctl doctor --measure --json >"$out/ceilings.json" 2>/dev/null; echo "doctor --measure: exit $?"
timeout 270 python3 -m pytest -m gpu -q -s -p no:cacheprovider tests/test_engine_memory.py tests/test_verify.py tests/test_measure.py 2>&1 | tail -25 | tee "$out/engine-tests.txt"
timeout $((seconds + 60)) python3 -m benchctl check-engine --seconds "$seconds" --seed 7 2>&1 | tail -15 | tee "$out/check-engine.txt"
