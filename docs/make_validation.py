"""Holds the bundled profiles against the runs in docs/validation/h200/held-out and writes docs/validation/simulator.md.

    python docs/make_validation.py            the page
    python docs/make_validation.py --save     and the errors into the bundled profiles, which every simulated run states

The copies were made by `benchctl validate PROFILE RUN... --copy DIR`, the traces are made anew by `benchmarks/workloads.py`
and found by their hash. Per round nothing is simulated; end to end each run's own command is, about 40 s in all.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchctl.held_out import METRICS, PERCENTILES, HeldOut, open_held_out  # noqa: E402
from benchctl.profiles import find_profile, load_profile, save_profile  # noqa: E402
from benchctl.validate import Validation, held_out_error, validate, worst_first  # noqa: E402
from engines.simulated.profile import Profile  # noqa: E402

FOLDER = ROOT / "docs" / "validation" / "h200"
PAGE = ROOT / "docs" / "validation" / "simulator.md"
GOALS = {50.0: 0.05, 90.0: 0.05, 99.0: 0.08}
ROUND_GOAL = 0.03
NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2E",
    "output_throughput": "output tokens/s",
    "duration": "duration",
}
TITLES = {
    "arrivals-20": "W4 at 20/s",
    "arrivals-50": "W4 at 50/s",
    "arrivals-10": "W4 at 10/s",
    "offline": "256 at once",
    "sharegpt-full": "sharegpt-full, 600 requests, 20 times as fast",
    "long-prompts": "long-prompts, twice as fast",
}
# Of these, runs of an earlier start were looked at while the formula was made; of the others none was.
SEEN = {
    ("qwen3-0.6b", "arrivals-20"), ("qwen3-0.6b", "arrivals-50"), ("qwen3-0.6b", "offline"),
    ("qwen3-8b", "arrivals-20"), ("qwen3-8b", "offline"),
}  # fmt: skip
HEAD = """# The simulator against measured runs

Made by `python docs/make_validation.py` from [the bundled profiles](../../engines/simulated/profiles) and the measured runs in
[h200/held-out](h200/held-out): their manifests, every round's features and device time, and their percentiles. Nothing here is
typed by hand but this text.

- **The profiles** were fitted on one start of a machine (NVIDIA H200, driver 580.159.04, torch 2.11.0): designed rounds
  ([h200](h200), `points-*.json.gz`) and a short trace (`calibration` of `benchmarks/workloads.py`) under both policies.
- **The runs below are of another start of such a machine, of traces that nothing was fitted on.** Formula and profiles were committed
  (e8c7c78) before any of them was looked at, and have not changed since but for these errors. The runs are spent as a hold-out for
  whoever changes the formula now. They began 2 to 7 minutes before that commit, which also changed how `issue` is told: the order rests on
  our word, and manifests cannot tell one start of a machine from another.
- **Five of the eight pairs of model and trace had been run before**, on an earlier start, and what those runs showed shaped the formula. The
  second table holds the other three apart: W4 at 50/s with `qwen3-8b`, `sharegpt-full`, `long-prompts`. Of the last but one's
  kind, conversations, a run of 10,000 other requests had been looked at as well.
- Admissions are free: nothing of a measured run reaches the simulation but its command, trace and pool. `simulated / measured - 1`;
  **bold**: beyond the goal (5% at p50 and p90, 8% at p99; 3% for the median round). The worst run first, none left out.
- Runs at once and `qwen3-8b` at 20/s drew their tokens at a temperature of 0.6, which no profile knows of: 0.1 ms of a round.
- `llama-3.1-8b` was held against nothing: no run of it was recorded on that start. Its fit is that of its
  [profile](../../engines/simulated/profiles/h200-llama-3.1-8b.json): fitted rounds within 1.4% at the median of each kind.
- In profiles and runs alike rounds of more than 2,048 tokens ran products of our own, which are out of the engine since: with the library's
  such rounds take 1 to 3% less at 8B ([performance](../performance.md), entry 13).
- Designed rounds of the 8B models were cut off at 30 s for each block size: 179 of 226 were measured of `qwen3-8b`, 184 and 187 of
  `llama-3.1-8b`. All 229 were of `qwen3-0.6b`. The missing ones lie mostly between others: numbers of decodes at contexts of 700 and 1,024, 32 decodes
  at 32,768, 256 and 1,024 tokens behind 32,000.
- Not measured for want of time: W4 at 10/s; `sharegpt-full` and `long-prompts` with `qwen3-8b`. Of `sharegpt-full` the first 600 requests.

## What is beyond the goals, and why

- **Another start is another card**: `qwen3-8b` came out 2 to 3% slower in simulation than it ran, decodes and all, on the card that
  was measured. Between starts whole runs of one and the same program moved as much.
- **Rounds with prefill and more than 256 sequences have no graph**: the host launches their kernels one by one, 11 to 21 ms for
  `qwen3-0.6b` (14.1 at the median of 68) where the profile says 11.3, the least that its own runs showed. They are the ITL's p99 of `sharegpt-full` under `vllm`, and its tail of
  TTFT; so is the one round of 3,597 tokens.
- **A host that is busy with prompts**: 256 prompts at once are hashed and laid out before the first round; `qwen3-0.6b` under `vllm` waited 20 to
  40 ms longer than its profile says. The same with `qwen3-8b` lies behind the device.
- **A single prompt on an idle device**, `long-prompts`: 7% of device time too little, and more of the host's than it took, of rounds
  of 2 to 6 ms.
"""


def validations(*, end_to_end: bool = True, only: Sequence[str] = ()) -> list[tuple[Profile, HeldOut, Validation]]:
    """All copies (or those named) against the profile of their model."""
    profiles = {p.model.name: p for p in map(load_profile, ("h200-qwen3-0.6b", "h200-qwen3-8b", "h200-llama-3.1-8b"))}
    held = [h for h in open_held_out([str(FOLDER / "held-out")]) if not only or Path(h.path).name in only]
    with tempfile.TemporaryDirectory() as traces, contextlib.redirect_stdout(io.StringIO()):
        from benchmarks.workloads import write
        from traces.synthetic import main as write_bundled

        write(Path(traces))
        write_bundled(["--full", "--out", traces])
        out = []
        for run in held:
            profile = profiles[str(run.manifest["model"])]
            out.append((profile, run, validate(profile, run, traces, end_to_end=end_to_end, worst=5)))
    return out


def title(v: Validation) -> str:
    repeat = Path(v.run).name.rpartition("-")[2]
    return f"{v.model}, {v.scheduler}, {TITLES.get(v.trace, v.trace)}" + (f", run {repeat}" if repeat.isdigit() else "")


def share(value: float, goal: float | None, *, signed: bool = True) -> str:
    text = f"{value:+.1%}" if signed else f"{value:.1%}"
    return f"**{text}**" if goal is not None and abs(value) > goal else text


def end_to_end_row(v: Validation) -> str:
    errors = {(e.metric, e.percentile): e.error for e in v.end_to_end}
    cells = [
        ", ".join(share(errors[m, p], GOALS[p]) if (m, p) in errors else "-" for p in PERCENTILES) for m in METRICS
    ]
    return "| " + " | ".join([title(v), *cells, share(errors["output_throughput", None], 0.05)]) + " |"


def round_row(v: Validation) -> str:
    by_kind = {k.kind: k for k in v.kinds}
    cells = []
    for kind in ("decode", "mixed", "prefill"):
        k = by_kind.get(kind)
        cells.append(
            f"{share(k.p50, ROUND_GOAL, signed=False)}, {k.p95:.1%}, {k.bias:+.1%} of {k.rounds:,}" if k else "-"
        )
    return "| " + " | ".join([title(v), *cells, f"{v.device_share:+.1%}", f"{v.host_p50:.0%}"]) + " |"


def summary(results: Sequence[Validation], of: str = "") -> list[str]:
    lines = ["| percentile | figures | median error | within the goal | largest |", "|---|---|---|---|---|"]
    for p in PERCENTILES:
        errors = sorted(
            (abs(e.error), f"{NAMES[e.metric]}, {title(v)}") for v in results for e in v.end_to_end if e.percentile == p
        )
        values = [value for value, _ in errors]
        within = sum(value <= GOALS[p] for value in values)
        lines.append(
            f"| p{p:g}{of} | {len(values)} | {values[len(values) // 2]:.1%} | {within} ({GOALS[p]:.0%}) | {values[-1]:.1%}: {errors[-1][1]} |"
        )
    return lines


def detail(run: HeldOut, v: Validation) -> list[str]:
    lines = [f"### {title(v)}", "", *(f"- {note}" for note in v.notes)]
    config, counts = run.given("seed"), run.manifest.get("counts") or {}
    lines += [
        f"- started {run.manifest.get('started')}, benchctl {run.manifest.get('benchctl')}, seed {config}, "
        f"{counts.get('rounds'):,} rounds; trace sha256 {str(run.trace.get('sha256'))[:12]}; "
        f"[manifest](h200/held-out/{Path(v.run).name}/held-out.json)",
        "",
        "| figure | measured | simulated | error |",
        "|---|---|---|---|",
    ]
    for e in v.end_to_end:
        name = NAMES[e.metric] + ("" if e.percentile is None else f" p{e.percentile:g}")
        unit = {"output_throughput": "", "duration": " s"}.get(e.metric, " ms")
        lines.append(
            f"| {name} | {e.measured:,.3f}{unit} | {e.simulated:,.3f}{unit} | {share(e.error, GOALS.get(e.percentile or 50.0))} |"
        )
    if v.worst:
        lines += [
            "",
            "| worst rounds | kind | measured | predicted | sequences | tokens | context |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {w.round} | {w.kind} | {w.measured_s * 1e3:.3f} ms | {w.predicted_s * 1e3:.3f} ms | {w.num_seqs} | {w.num_tokens} | "
            f"{w.context_tokens:,} |"
            for w in v.worst
        ]
    return [*lines, ""]


def page(found: Sequence[tuple[Profile, HeldOut, Validation]]) -> str:
    of = {v.run: run for _, run, v in found}
    results = worst_first([v for _, _, v in found])
    fresh = [v for v in results if (v.model, v.trace) not in SEEN]
    lines = [HEAD, "## End to end, all runs together", "", *summary(results), ""]
    lines += ["Of traces that no earlier run of the model had been looked at:", "", *summary(fresh, ", not seen"), ""]
    lines += [
        "## End to end, run by run",
        "",
        "Errors at p50, p90, p99.",
        "",
        "| run | TTFT | TPOT | ITL | E2E | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    lines += [end_to_end_row(v) for v in results]
    lines += ["", "## Round by round", "", "Device time of a round: median error, p95, median of the signed error, number of rounds. Runs whose batches were not kept are",
              "not here. `device`: all device time of the run; `host`: median error of host time before a launch.", "",
              "| run | decode | mixed | prefill | device | host |", "|---|---|---|---|---|---|"]  # fmt: skip
    lines += [round_row(v) for v in sorted(results, key=lambda v: -max((k.p50 for k in v.kinds), default=0)) if v.kinds]
    lines += ["", "## Each run", ""]
    for v in results:
        lines += detail(of[v.run], v)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    found = validations()
    PAGE.write_text(page(found))
    if "--save" in sys.argv[1:]:
        for name in sorted({profile.name for profile, _, _ in found}):
            results = [v for profile, _, v in found if profile.name == name]
            save_profile(replace(load_profile(name), held_out=held_out_error(results)), find_profile(name))
    print(PAGE)


if __name__ == "__main__":
    main()
