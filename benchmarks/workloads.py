"""Writes the workloads of docs/performance.md as traces, so that `benchctl replay` runs them: `python benchmarks/workloads.py DIR`.

offline.jsonl: nano-vLLM's bench (256 requests at once, 142,827 tokens in, 133,966 out).
arrivals-RATE.jsonl: 400 Poisson arrivals with lognormal lengths (93,866 tokens in, 79,682 out), at 10, 20 and 50 a second.
calibration.jsonl: what profiles take their host times from, in 12 s: single arrivals with idle time between, then 40 a second, then
160 at once. No draw of it is one of the others'.
Lengths and times are those of the generators; token ids are the trace's own.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def offline() -> list[dict[str, object]]:
    rng = random.Random(0)
    prompts = []
    for _ in range(256):
        length = rng.randint(100, 1024)
        for _ in range(length):
            rng.randint(0, 10_000)  # the ids are drawn from the same stream as the lengths
        prompts.append(length)
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    return [{"arrival_s": 0, "input_length": p, "output_length": o} for p, o in zip(prompts, outputs, strict=True)]


def arrivals(rate: float) -> list[dict[str, object]]:
    rng, now, rows = random.Random(1234), 0.0, []
    for _ in range(400):
        now += rng.expovariate(1) / rate
        prompt = max(4, min(2048, round(rng.lognormvariate(4.8, 1.1))))
        output = max(4, min(1024, round(rng.lognormvariate(4.9, 0.9))))
        rows.append({"arrival_s": round(now, 6), "input_length": prompt, "output_length": output})
    return rows


def calibration() -> list[dict[str, object]]:
    rng, now, rows = random.Random(4321), 0.0, []

    def add(prompt: float, output: float) -> None:
        rows.append({"arrival_s": round(now, 6), "input_length": round(prompt), "output_length": round(output)})

    while (now := now + rng.expovariate(1) / 6) < 4:
        add(max(4, min(2048, rng.lognormvariate(5.2, 1.2))), max(2, min(60, rng.lognormvariate(2.5, 0.8))))
    while (now := now + rng.expovariate(1) / 40) < 10:
        add(max(4, min(4096, rng.lognormvariate(5.0, 1.2))), max(4, min(600, rng.lognormvariate(4.3, 0.9))))
    now = 12.0
    for _ in range(160):
        add(rng.randint(30, 600), rng.randint(40, 240))
    return rows


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in [
        ("offline", offline()),
        ("calibration", calibration()),
        *((f"arrivals-{rate}", arrivals(rate)) for rate in (10, 20, 50)),
    ]:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(
            name,
            len(rows),
            sum(r["input_length"] for r in rows),
            sum(r["output_length"] for r in rows),
            rows[-1]["arrival_s"],
        )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
