"""How many requests a second the simulator replays, on one process: prints a table and writes a JSON file.

    python benchmarks/simulator.py [--profile FILE] [--requests N] [--million] [--mooncake FILE] [--json FILE]

A  5,000 requests of 500 prompt and 200 output tokens, Poisson near saturation (95 % of what the policy serves when all are
   there at once), block 16, 24,000 blocks, 256 sequences, a budget of 8,192 tokens.
B  1,200 rows of the Mooncake conversation trace (--mooncake FILE; else a made trace of its shape), at its own times.
M  --million: a million requests of A's shape, near saturation and at twice that, where the queue grows. Each in a process of
   its own, for its memory.

Of each: the replay alone (the trace is open, the run folder there; records are written and closed), in wall and in processor
seconds, of all threads; stretches against rounds one by one; each way of keeping records. `split`: microseconds a request,
from runs that leave a part out. Other work on the machine slows both: the best of --repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import benchctl.replay
from benchctl.build import build_command, build_run
from benchctl.config import ReplayOptions
from benchctl.profiles import save_profile
from benchctl.runner import run_one
from traces.load import open_trace
from traces.tokens import TokenMaker

LIMITS = {"num_blocks": 24_000, "knobs": {"block_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 8192}}
POLICIES = ("nano", "vllm")
MAKE_STRIDER = benchctl.replay.make_strider


def stand_in_profile(path: Path) -> Path:
    """Durations of about one H200 with qwen3-0.6b, by hand: how fast the simulator is does not depend on how right they are."""
    import msgspec

    from benchctl.calibrate_rounds import shape_of
    from engines.model.config import PRESETS
    from engines.simulated.features import graph_sizes
    from engines.simulated.profile import Curve, DecodeCost, Fit, HostCost, PrefillCost, Profile

    def flat(value: float) -> Curve:
        return Curve(at=(1,), value=(value,))

    fit = Fit(
        block_size=16, bytes_per_s=4.26e12, flops_per_s=795e12, ceilings="by hand", tile_tokens=64,
        decode=DecodeCost(
            rest=Curve(at=(1, 256), value=(0.6e-3, 0.9e-3)), per_key=flat(2.7e-8), per_longest_key=flat(5e-8), unhidden=0.3
        ),
        prefill=PrefillCost(
            rest=Curve(at=(0, 8192), value=(1.3e-3, 4e-3)), per_seq_s=2e-6, per_tile_s=1e-7, per_own_key_s=1e-9,
            per_older_key_s=1e-9, per_block_key_s=1e-9, per_chunk_key_s=1e-7, per_key_s=2.7e-8, per_longest_key_s=5e-8,
            unhidden_chunk=0.3, unhidden_single=0.3,
        ),
        host=HostCost(
            launch_intercept_s=2e-4, launch_per_seq_s=2e-7, launch_per_token_s=2e-8, launch_per_known_token_s=1e-8,
            after_intercept_s=1e-4, after_per_seq_s=2e-7, gap_s=1e-5, wake_s=1e-4, arrive_s=1e-4,
        ),
        buckets=(), ranges=(), residuals=(), sources=(),
    )  # fmt: skip
    profile = Profile(
        name="stand-in", created="2026-11-30T00:00:00+00:00", device="about an H200", driver=None, versions={},
        attention_backend="triton", overlapped=True, kv_cache_tokens=383_984, max_num_seqs=256, max_num_batched_tokens=8192,
        model=shape_of("qwen3-0.6b", PRESETS["qwen3-0.6b"], 2), graphs=graph_sizes(256, 8192), fits=(fit,),
    )  # fmt: skip
    save_profile(msgspec.convert(msgspec.to_builtins(profile), Profile), path)
    return path


def write_a(path: Path, num_requests: int, rate: float | None) -> Path:
    """A's requests; `rate` None: all at once."""
    draw, at = random.Random(0), 0.0
    with path.open("w") as file:
        for _ in range(num_requests):
            at += draw.expovariate(rate) if rate else 0.0
            file.write(f'{{"arrival_s":{at:.6f},"input_length":500,"output_length":200}}\n')
    return path


def write_b(path: Path, mooncake: Path | None) -> Path:
    header = '{"benchctl_trace": 1, "block_size": 512}\n'
    if mooncake is not None:
        path.write_text(header + mooncake.read_text())
        return path
    subprocess.run(
        [sys.executable, "-m", "benchctl", "trace", "synth", "mooncake-agents", "-n", "1200", "-o", str(path)],
        check=True,
    )
    return path


def replay_once(trace: Path, policy: str, profile: Path, records: str, *, stride: bool = True) -> dict[str, float]:
    """Wall and processor seconds of one replay, and what it did."""
    benchctl.replay.make_strider = MAKE_STRIDER if stride else lambda *parts: None
    options = ReplayOptions(
        trace=str(trace),
        schedulers=(policy,),
        engine="simulated",
        profile=str(profile),
        records=records,
        report=False,
        **LIMITS,
    )  # type: ignore[arg-type]
    command = build_command(options)
    with tempfile.TemporaryDirectory() as folder:
        run = None if records == "none" else Path(folder) / "run"
        if run is not None:
            run.mkdir()
        parts = build_run(command, command.policies[0], run)
        wall, cpu = time.perf_counter(), time.process_time()
        result = run_one(parts, None, threading.Event())
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if result.error is not None:
        raise result.error
    out = result.outcome
    assert out.finished + out.rejected == command.num_requests, out
    return {
        "wall_s": wall, "cpu_s": cpu, "requests": out.finished + out.rejected, "rounds": out.rounds,
        "output_tokens": out.emitted_tokens, "simulated_s": out.end_s, "digest": result.manifest.get("digest"),
    }  # fmt: skip


def best(repeat: int, *args: Any, **options: Any) -> dict[str, Any]:
    """The least of each of the two clocks over `repeat` runs."""
    runs = [replay_once(*args, **options) for _ in range(repeat)]
    found = dict(runs[0]) | {clock: min(run[clock] for run in runs) for clock in ("wall_s", "cpu_s")}
    found["requests_per_wall_s"] = found["requests"] / found["wall_s"]
    found["requests_per_cpu_s"] = found["requests"] / found["cpu_s"]
    return found


def near_saturation(folder: Path, policy: str, profile: Path) -> float:
    """Requests a second: 95 % of what 2,000 of A's take when all are there at once."""
    run = replay_once(write_a(folder / "at-once.jsonl", 2000, None), policy, profile, "none")
    return 0.95 * run["requests"] / run["simulated_s"]


def split_of(trace: Path, policy: str, profile: Path, found: dict[str, Any], repeat: int) -> dict[str, float]:
    """Processor microseconds a request: where they go. What a part costs is what runs without it save."""
    per = {name: run["cpu_s"] / run["requests"] * 1e6 for name, run in found.items()}
    opened = min(_timed(lambda: open_trace(trace)) for _ in range(repeat))
    reading = min(_timed(lambda: sum(1 for _ in open_trace(trace).requests())) for _ in range(repeat)) - opened
    num = found["none"]["requests"]
    return {
        "checking the trace, beforehand": opened / num * 1e6,
        "reading its rows": reading / num * 1e6,
        "admission, scheduling, durations": per["none"] - reading / num * 1e6,
        "summary tables": per["summary"] - per["none"],
        "decision log, its digest, all tables": per["full"] - per["summary"],
        "not spent: making ids": _ids(trace, num),
    }


def _ids(trace: Path, num: int) -> float:
    """What spelling out the ids of all requests would cost, µs a request (of the first 500)."""
    opened = open_trace(trace)
    maker = TokenMaker(opened, vocab_size=151_936)
    requests = [request for request, _ in zip(opened.requests(), range(min(num, 500)), strict=False)]
    return _timed(lambda: [maker.token_ids(request) for request in requests]) / len(requests) * 1e6


def _timed(work: Any) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def million(policy: str, load: float, profile: Path, folder: Path, num_requests: int) -> dict[str, Any]:
    """`benchctl replay`, start to end, in a process of its own."""
    rate = near_saturation(folder, policy, profile) * load
    trace = write_a(folder / f"million-{load:g}.jsonl", num_requests, rate)
    argv = [
        sys.executable, "-m", "benchctl", "replay", str(trace), "--engine", "simulated", "--profile", str(profile), "--scheduler",
        policy, "--block-size", "16", "--num-blocks", "24000", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192",
        "--records", "summary", "--no-report", "--json", "--out", str(folder / f"m-{policy}-{load:g}"),
    ]  # fmt: skip
    begun = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "requests": num_requests, "rate": rate, "status": os.waitstatus_to_exitcode(status),
        "wall_s": time.perf_counter() - begun, "cpu_s": cpu, "peak_memory_mb": usage.ru_maxrss / 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--num-million", type=int, default=1_000_000)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {
        "python": platform.python_version(), "machine": platform.processor() or platform.machine(), "cpus": os.cpu_count(),
        "load_average": os.getloadavg(), "profile": str(args.profile or "a stand-in, by hand"), "repeat": args.repeat,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = args.profile or stand_in_profile(folder / "profile.json")
        b = write_b(folder / "b.jsonl", args.mooncake)
        for policy in POLICIES:
            rate = near_saturation(folder, policy, profile)
            a = write_a(folder / f"a-{policy}.jsonl", args.requests, rate)
            print(f"{policy}  A at {rate:.0f} requests/s")
            for workload, trace in (("A", a), ("B", b)):
                found = {
                    records: best(args.repeat, trace, policy, profile, records)
                    for records in ("none", "summary", "compact", "full")
                }
                for records in ("summary", "full"):
                    found[f"{records}, one by one"] = best(args.repeat, trace, policy, profile, records, stride=False)
                assert len({run["digest"] for run in found.values()} - {None}) == 1
                for records, run in found.items():
                    print(
                        f"{policy}  {workload}  {records:20}  {run['requests_per_wall_s']:9,.0f} requests/s wall  "
                        f"{run['requests_per_cpu_s']:9,.0f} processor  {run['rounds']:,} rounds"
                    )
                ratio = {
                    records: found[f"{records}, one by one"]["cpu_s"] / found[records]["cpu_s"]
                    for records in ("summary", "full")
                }
                print("      many rounds at once against one by one: " + ", ".join(f"{name} {x:.2f} times as fast" for name, x in ratio.items()))  # fmt: skip
                split = split_of(trace, policy, profile, found, args.repeat)
                print("      µs a request: " + ", ".join(f"{part} {us:.1f}" for part, us in split.items()))
                results[f"{policy} {workload}"] = {
                    "rate": rate if workload == "A" else None,
                    "runs": found,
                    "stride_over_step": ratio,
                    "split_us": split,
                }
            if args.million:
                for load in (1.0, 2.0):
                    run = results[f"{policy} million, load {load:g}"] = million(
                        policy, load, profile, folder, args.num_million
                    )
                    print(
                        f"{policy}  {run['requests']:,} at {run['rate']:.0f}/s  {run['wall_s']:.1f} s wall  {run['cpu_s']:.1f} s "
                        f"processor  {run['peak_memory_mb']:,.0f} MB"
                    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
