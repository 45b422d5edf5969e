"""Time and size of the report page: a run of 100,000 rounds and 10,000 requests, drawn and opened in headless Chromium.

    python benchmarks/report.py [--rounds 100000] [--requests 10000] [--json FILE]

Prints seconds and peak memory of making the page, its bytes, the time until the first picture and the whole page stand, and how
long after a keystroke in the search the rounds found are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser import CHROMIUM, Browser  # noqa: E402

OPENINGS = 3
ROUND_S = 5.0e-3  # of the null engine, about: sets the arrivals so that the run has about so many rounds


def make_run(folder: Path, requests: int, rounds: int) -> Path:
    """A replay of random lengths by the null engine under vllm's policy, with a pool that it feels."""
    from benchctl.cli import app

    draw = random.Random(7)
    at, trace = 0.0, folder / "trace.jsonl"
    with trace.open("w") as file:
        for i in range(requests):
            at += draw.expovariate(requests / (rounds * ROUND_S * 1.1))
            prompt = max(4, min(2048, round(draw.lognormvariate(4.8, 1.1))))
            output = max(4, min(1024, round(draw.lognormvariate(4.6, 0.9))))
            row = {"id": f"req-{i:05d}", "arrival_s": round(at, 4), "input_length": prompt, "output_length": output}
            file.write(json.dumps(row) + "\n")
    argv = ["replay", str(trace), "-s", "vllm", "--engine", "null", "--kv-cache-tokens", "16384", "--out", str(folder / "run"), "--no-report"]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app(argv, standalone_mode=False)
    return folder / "run" / "vllm"


SEARCHES = ("preempted", "req-01234", "budget", "41234", "blocks evict")
# Milliseconds from each keystroke of each search to the frame that shows what was found.
TYPE = """(async () => {
  const box = document.querySelector('#why-find'), took = [];
  for (const text of %s) {
    for (let k = 1; k <= text.length; k++) {
      const began = performance.now();
      box.value = text.slice(0, k);
      box.dispatchEvent(new Event('input'));
      document.body.offsetHeight;
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      took.push([performance.now() - began, text.slice(0, k)]);
    }
  }
  return took;
})()"""

MAKE = "import sys; from reports.page import write_report; write_report([sys.argv[1]], sys.argv[2])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        run = make_run(here, options.requests, options.rounds)
        from reports.run import open_run

        page = here / "report.html"
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", MAKE, str(run), str(page)], check=True, cwd=ROOT)
        took, usage = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        found: dict[str, float | int | str] = {
            "rounds": open_run(run).read("rounds").height,
            "requests": options.requests,
            "make_s": round(took, 2),
            "make_cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
            "peak_mb": usage.ru_maxrss // 1024,
            "bytes": page.stat().st_size,
        }
        if CHROMIUM is not None:
            browser = Browser(here / "profile")
            first, whole, typed = [], [], []
            for _ in range(OPENINGS):
                began = time.perf_counter()
                with browser.page(page) as tab:
                    whole.append(time.perf_counter() - began)
                    tab.evaluate("document.querySelector('#why').scrollIntoView()")
                    typed += tab.evaluate(TYPE % json.dumps(SEARCHES))
                    first.append(tab.evaluate("performance.getEntriesByName('first-figure')[0].startTime") / 1000)
            browser.close()
            slowest = max(typed)
            found |= {
                "keystroke_ms": round(median(ms for ms, _ in typed), 1),
                "slowest_keystroke_ms": round(slowest[0], 1),
                "slowest_keystroke": slowest[1],
            }
            found |= {"first_figure_s": round(median(first), 2), "whole_s": round(median(whole), 2)}
    for name, value in found.items():
        print(f"{name:15} {value if isinstance(value, str) else f'{value:,}'}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
