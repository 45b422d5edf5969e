#!/usr/bin/env bash
# What is run on a CUDA device before a release: the gpu tests, then both schedulers on the bundled trace, then the laws.
# usage: benchmarks/gpu_check.sh OUT        (python3 is one with torch, and polars on its path)
set -uo pipefail
out=$1
export PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -m pytest -m gpu -q -p no:cacheprovider tests/test_engine_*.py 2>&1 | tail -15 | tee "$out/gpu-tests.txt"
python3 -m pytest -q -p no:cacheprovider tests/test_kernels_*.py 2>&1 | tail -3 | tee -a "$out/gpu-tests.txt"
python3 -m benchctl replay traces/sharegpt.jsonl --scheduler nano --scheduler vllm --no-report --out "$out/sharegpt" 2>&1 | tee "$out/sharegpt.txt"
python3 - "$out/sharegpt" <<'P' 2>&1 | tee -a "$out/sharegpt.txt"
import sys
from pathlib import Path
from tests.laws import assert_laws
for name in ("nano", "vllm"):
    run = assert_laws(Path(sys.argv[1]) / name)
    print(f"laws hold: {name}, {run.read('rounds').height} rounds, digest {run.manifest['digest']}, record share {run.manifest['record']['share_of_wall']:.4f}")
P
