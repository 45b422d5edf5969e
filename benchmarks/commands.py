"""Several benchctl commands in one process, so that a model is loaded and its kernels are compiled once.

    python benchmarks/commands.py --seconds 200 LIST      LIST: a command a line, without `benchctl`; # begins a comment

A command that would begin after `--seconds` is left out and named; one that fails is named, and the next one goes on. Ends
with 1 if any was left out or failed. What each took is written to stderr.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
from pathlib import Path

import engines.model.load as load
from benchctl.cli import app
from traces.errors import BenchctlError


def run(argv: list[str]) -> str | None:
    """What went wrong, or None. An interrupt ends the run that is under way, and then this process."""
    try:
        app(argv)
    except SystemExit as end:
        if end.code == 130:
            raise KeyboardInterrupt from None
        return None if not end.code else f"exit {end.code}"
    except BenchctlError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the others shall still run
        return repr(error)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    load.load_model = functools.lru_cache(maxsize=1)(load.load_model)
    began, bad = time.perf_counter(), 0
    for line in args.list.read_text().splitlines():
        argv = shlex.split(line, comments=True)
        if not argv:
            continue
        at = time.perf_counter() - began
        try:
            wrong = "left out: the time is up" if at > args.seconds else run(argv)
        except KeyboardInterrupt:
            print(f"[{at:6.1f} s] {line}: interrupted", file=sys.stderr, flush=True)
            sys.exit(130)
        bad += wrong is not None
        print(
            f"[{at:6.1f} s + {time.perf_counter() - began - at:5.1f} s] {line}: {wrong or 'done'}",
            file=sys.stderr,
            flush=True,
        )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
