"""`benchctl check-scheduler`, behind its flags. Heavy imports stand inside."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchctl.app import app, exit_with, opt, out_opt
from benchctl.places import check_folder
from traces.errors import BenchctlError

MOST_EVIDENCE = 400  # characters of a fault's words in the terminal


@app.command("check-scheduler")
def check_scheduler(
    scheduler: Annotated[
        str,
        typer.Argument(
            help="nano, vllm, package.module:Class, or a name of the entry-point group.", show_default=False
        ),
    ],
    cases: Annotated[int, opt("--cases", panel="Options", help="Random cases. Default 100.")] = 100,
    seed: Annotated[int, opt("--seed", panel="Options", help="Of the cases. Default 0.")] = 0,
    out: Annotated[
        str | None,
        out_opt(
            "--out",
            "-o",
            panel="Options",
            folder=True,
            help="Folder for the traces of what breaks. Default: the one you stand in.",
        ),
    ] = None,
    as_json: Annotated[bool, opt("--json", panel="Options", help="Print the result as JSON.")] = False,
) -> None:
    """Hold a policy against the laws of a run in a random campaign, and make what breaks small.

    Exit 0: every law held; 1: one was broken, the trace and the command that shows it are printed.

    Example: benchctl check-scheduler examples.shortest_prompt_first:ShortestPromptFirst --cases 20
    """
    exit_with(lambda: run_check(scheduler, cases, seed, out, as_json))


def run_check(scheduler: str, cases: int, seed: int, out: str | None, as_json: bool) -> int:
    if cases < 1:
        raise BenchctlError(f"--cases is {cases}", fix="give 1 or more")
    if out is not None:
        check_folder(Path(out))
    from benchctl import check_scheduler as checks
    from benchctl.policies import find_policy
    from benchctl.shrink_rows import write_rows
    from traces.header import Header

    name = find_policy(scheduler)
    campaign = checks.check_scheduler(
        name, cases=cases, seed=seed, say=lambda text: print(text, file=sys.stderr, flush=True)
    )
    found = []
    for number, fault in enumerate(campaign.broken, 1):
        path = Path(out or ".") / f"{name}-fault-{number}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_rows(
                path,
                Header(salt="check"),
                fault.rows,
                name=path.stem,
                source=f"benchctl check-scheduler {scheduler} --seed {seed}",
            )
        except OSError as error:
            raise BenchctlError(
                f"{path} cannot be written: {error.strerror}", where="--out", fix="another folder"
            ) from None
        command = shlex.join(
            ["benchctl", "replay", str(path), "--scheduler", scheduler, "--engine", "null", *fault.case.flags]
        )
        found.append(
            {
                "what": fault.what,
                "evidence": fault.evidence,
                "case": fault.case.number,
                "requests": len(fault.rows),
                "trace": str(path),
                "command": command,
            }
        )
    if as_json:
        print(
            json.dumps(
                {
                    "benchctl_check": 1, "scheduler": name, "seed": seed, "cases": campaign.cases, "refused": campaign.refused,
                    "requests": campaign.requests, "rounds": campaign.rounds, "preemptions": campaign.preemptions, "broken": found,
                },
                indent=1,
            )
        )  # fmt: skip
        return 1 if found else 0
    refused = f", {campaign.refused} with limits that it refuses" if campaign.refused else ""
    print(
        f"{name}: {campaign.cases} cases{refused}: {campaign.requests:,} requests, {campaign.rounds:,} rounds, "
        f"{campaign.preemptions:,} preemptions; " + (f"{len(found)} kinds of fault" if found else "every law held")
    )
    for entry in found:
        evidence = str(entry["evidence"])
        if len(evidence) > MOST_EVIDENCE:
            evidence = f"{evidence[:MOST_EVIDENCE]} … (all of it in --json)"
        print(f"\n{entry['what']} (case {entry['case']}, {entry['requests']} requests): {evidence}")
        print(entry["command"])
    return 1 if found else 0
