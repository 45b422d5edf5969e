"""`benchctl check-engine`, behind its flags. Heavy imports stand inside."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from benchctl.app import app, exit_with, opt
from traces.errors import BenchctlError


@app.command("check-engine")
def check_engine(
    seconds: Annotated[
        float | None, opt("--seconds", panel="Options", help="Go on for that long. Default: --cases alone counts.")
    ] = None,
    cases: Annotated[
        int | None, opt("--cases", panel="Options", help="Random cases. Default 20, without --seconds.")
    ] = None,
    seed: Annotated[int, opt("--seed", panel="Options", help="Of the cases. Default 0.")] = 0,
    case: Annotated[
        int | None, opt("--case", panel="Options", help="Only that one: what a campaign printed for a fault.")
    ] = None,
    attention_backend: Annotated[
        str,
        opt(
            "--attention-backend",
            panel="Options",
            help="auto, triton or reference. Default auto: on a card mostly triton.",
        ),
    ] = "auto",
    as_json: Annotated[bool, opt("--json", panel="Options", help="Print the result as JSON.")] = False,
) -> None:
    """Hold the engine's logits against plain torch in a random campaign: models, block sizes, policies, tight memory.

    Each case is replayed twice, overlapped with CUDA graphs and plainly; batches have to be equal, logits within tolerance.
    Exit 0: all held; 1: a case broke, and the command that repeats it is printed.

    Example: benchctl check-engine --cases 3 --seed 7
    """
    exit_with(lambda: run_check(seconds, cases, seed, case, attention_backend, as_json))


def run_check(
    seconds: float | None, cases: int | None, seed: int, case: int | None, backend: str, as_json: bool
) -> int:
    for name, value, least in (
        ("--seconds", seconds, 0),
        ("--cases", cases, 1),
        ("--seed", seed, 0),
        ("--case", case, 0),
    ):
        if value is not None and not least <= value < 2**60:
            raise BenchctlError(f"{name} is {value:g}", fix=f"give {least} or more")
    if backend not in ("auto", "triton", "reference"):
        raise BenchctlError(
            f"no attention backend is called {backend!r}", where="--attention-backend", fix="auto, triton or reference"
        )
    try:
        import torch  # noqa: F401
    except ImportError:
        raise BenchctlError("the torch engine needs torch, which is not installed", fix="pip install torch") from None
    from benchctl import check_engine as checks

    if seconds is None and cases is None:
        cases = 20
    found = checks.check_engine(
        seed=seed,
        seconds=seconds,
        cases=cases,
        only=case,
        backend=backend,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if as_json:
        print(json.dumps({"benchctl_check_engine": 1, **found.as_json()}, indent=1))
        return 1 if found.broken else 0
    counts = found.counts
    told = ("resumed", "prefix hits", "chunks", "mixed rounds", "graph rounds", "eager rounds")
    print(
        f"{found.cases} cases in {found.seconds:.0f} s (seed {seed}): {counts['positions']:,} positions of {counts['requests']:,} requests; "
        + ", ".join(f"{counts[name]:,} {name}" for name in told)
    )
    for dtype, error in sorted(found.max_error.items()):
        print(f"{dtype}: largest relative error of logits {error:.2g}")
    for entry in found.broken:
        print(f"\ncase {entry['case']} ({entry['text']}): {entry['what']}")
        again = "" if backend == "auto" else f" --attention-backend {backend}"
        print(f"benchctl check-engine --seed {seed} --case {entry['case']}{again}")
    return 1 if found.broken else 0
