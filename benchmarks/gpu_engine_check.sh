#!/usr/bin/env bash
# The engine held against plain torch on a CUDA device: what the device can do, the gpu tests, a run that verifies itself, then a
# random campaign. One line a part: its exit code, its seconds, what it came to. The exit code is 1 if any part failed.
# usage: benchmarks/gpu_engine_check.sh OUT [SECONDS of the campaign, 420]      (python3 is one with torch, polars and pytest)
# All but the campaign end within BEFORE seconds (170), whatever they come to: a part that is stopped says so (exit 124 or 137), one
# that has no time left is named. OUT gets a file a part, written as it goes, and log.txt.
set -uo pipefail
out=$1 seconds=${2:-420} before=${BEFORE:-170}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
exec > >(tee "$out/log.txt") 2>&1
began=$SECONDS failed=0
left() { echo $((before - (SECONDS - began))); }

# NAME LIMIT COMMAND...: runs it for LIMIT seconds at most.
part() {
  local name=$1 limit=$2 start=$SECONDS rc=0 said
  shift 2
  ((limit < 5)) && { echo "$name: left out, no time left" && return 1; }
  timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1 || rc=$?
  if [[ " $* " == *" pytest "* ]]; then
    said=$(grep -E '^=+ .*(passed|failed|error|deselected).* in ' "$out/$name.txt" | tail -1 | tr -d '=')
    if [[ $rc == 124 || $rc == 137 || -z $said ]]; then
      said="STOPPED after $(grep -cE '(^| )PASSED' "$out/$name.txt") passed, $(grep -cE '(^| )FAILED' "$out/$name.txt") failed, in $(grep '^tests/' "$out/$name.txt" | tail -1 | cut -d ' ' -f 1)"
    fi
    grep -E '^(FAILED|ERROR) ' "$out/$name.txt" | cut -c 1-240
    grep -E 'tokens: measured in' "$out/$name.txt"
  else
    said=$(grep -vE '^ *$|^[]} ]*,?$' "$out/$name.txt" | tail -1 | cut -c 1-240)
  fi
  echo "$name: exit $rc, $((SECONDS - start)) s: $said"
  grep -hE '^(verify|[0-9]+ cases in|case [0-9]+)' "$out/$name.txt" | cut -c 1-240
  return $((rc != 0))
}

# One at a time, as they read the device's free memory; and what is run by itself below.
alone=(tests/test_engine_torch.py::test_kv_tokens_on_a_card_fit_beside_the_worst_rounds)
itself=(tests/test_measure.py::test_a_card_is_measured tests/test_verify.py::test_a_campaign_on_a_card_holds_for_half_a_minute)
tests=(python3 -m pytest -o addopts= -m gpu -v --strict-markers --tb=short --durations=12 -p no:cacheprovider)
engine=()
for file in tests/test_engine_*.py tests/test_measure.py tests/test_verify.py; do
  [[ $file != tests/test_engine_memory.py ]] && engine+=("$file")
done
echo "left out of the tests, being parts of their own: ${itself[*]}"

part doctor 40 python3 -m benchctl doctor --measure --json || failed=1
part memory $(($(left) - 50)) "${tests[@]}" -s tests/test_engine_memory.py "${alone[@]}" -k "not bfloat16" || failed=1
# Side by side: they look at results alone.
skip=() jobs=()
for name in "${alone[@]}" "${itself[@]}"; do skip+=(--deselect "$name"); done
time_left=$(left)
part tests-graphs "$time_left" "${tests[@]}" "${engine[@]}" "${skip[@]}" -k "triton and not eager" & jobs+=($!)
part tests-others "$time_left" "${tests[@]}" "${engine[@]}" "${skip[@]}" -k "not triton or eager" & jobs+=($!)
part tests-bfloat16 "$time_left" "${tests[@]}" -s tests/test_engine_memory.py -k bfloat16 & jobs+=($!)
runs=$(mktemp -d)
part verify "$time_left" python3 -m benchctl replay traces/sharegpt.jsonl --scheduler nano --scheduler vllm --num-prompts 60 --request-rate inf \
  --max-model-len 4096 --kv-cache-tokens 16384 --verify 8 --no-report --out "$runs/verify" & jobs+=($!)
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
rm -rf "$runs"
part campaign $((seconds + 30)) python3 -m benchctl check-engine --seconds "$seconds" --seed 7 || failed=1
echo "done after $((SECONDS - began)) s, $((failed)) failed"
exit $failed
