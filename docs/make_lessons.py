"""Runs every command of docs/lessons.md and writes its tables anew: `python docs/make_lessons.py [--check]`.

The page is the source: a table between `<!-- rounds -->` or `<!-- figures: NAME; NAME -->` and `<!-- end -->` is made
from the runs of the command above it. Nothing is drawn at random: the clocks are those of rounds and of the null engine,
so two machines write the same page. `--check` writes nothing and exits 1 where the page is not what the runs say.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl

from benchctl.cli import app
from reports import metrics
from reports.rounds import RoundText, round_texts
from reports.run import Run, open_runs

PAGE = Path(__file__).parent / "lessons.md"
COMMAND = re.compile(r"^benchctl (replay .*)$")
TABLE = re.compile(r"^<!-- (rounds|figures: (?P<names>.*)) -->$")
END = "<!-- end -->"


def replayed(command: str, folder: Path) -> list[Run]:
    """The runs of one command of the page, without the `benchctl` in front, in a folder of their own."""
    arguments = [*shlex.split(command), "--no-report", "--out", str(folder)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = app(arguments, standalone_mode=False)
    if code:
        raise SystemExit(f"exit code {code}: benchctl {command}\n{said.getvalue()}")
    return open_runs([folder])


# -- round tables


def round_tables(runs: list[Run]) -> Iterator[str]:
    """The table that the command prints, for each run; equal rounds in a row share a line."""
    for run in runs:
        yield f"**{run.scheduler}**"
        yield ""
        yield "| round | waiting before | running before | batch | why it stopped | free blocks |"
        yield "|---|---|---|---|---|---|"
        for first, last, text in merged(round_texts(run)):
            number = str(first) if first == last else f"{first}–{last}"
            cells = (number, text.waiting, text.running, text.batch, text.why, text.free)
            yield f"| {' | '.join(escaped(cell) for cell in cells)} |"
        yield ""


def merged(texts: Iterator[RoundText]) -> Iterator[tuple[int, int, RoundText]]:
    """(first round, last round, text) of each stretch of consecutive rounds that differ in nothing but their number."""
    held: tuple[int, int, RoundText] | None = None
    for text in texts:
        if held and text.round == held[1] + 1 and _words(text) == _words(held[2]):
            held = (held[0], text.round, held[2])
            continue
        if held:
            yield held
        held = (text.round, text.round, text)
    if held:
        yield held


def _words(text: RoundText) -> tuple[str, ...]:
    return (text.waiting, text.running, text.batch, text.why, text.free)


def escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")


# -- figures, one line each


def rounds_by_kind(run: Run) -> str:
    counts = dict(run.read("rounds").group_by("kind").len().iter_rows())
    return ", ".join(f"{counts.get(kind, 0)} {kind}" for kind in ("prefill", "decode", "mixed"))


def first_token_in_round(run: Run) -> str:
    return _each(run, run.read("tokens").filter(pl.col("index") == 0).select("request", "round"))


def longest_gap(run: Run) -> str:
    """Rounds between two tokens of a request, the longest; 1 where it got one in every round."""
    gaps = run.read("tokens").sort("request", "index").with_columns(pl.col("round").diff().over("request").alias("gap"))
    return _each(run, gaps.group_by("request", maintain_order=True).agg(pl.col("gap").max()))


def budget_unused(run: Run) -> str:
    """Tokens not given out in rounds whose waiting loop stopped at a prompt longer than what was left."""
    stopped = pl.col("stop_waiting").is_in(["not_first", "chunking_disabled"])
    return str(run.read("rounds").filter(stopped)["budget_left"].sum())


def admission_order(run: Run) -> str:
    rows = run.read("decisions").filter(pl.col("kind").is_in(["admit", "resume"])).sort("round", "order")
    return " ".join(
        run.labels[request] + (" (again)" if kind == "resume" else "")
        for request, kind in rows.select("request", "kind").iter_rows()
    )


def discarded(run: Run) -> str:
    return _per_request(run, "discarded_tokens")


def recomputed(run: Run) -> str:
    return _per_request(run, "recomputed_tokens")


def cache_hits(run: Run) -> str:
    """Hit tokens of every admission that had any."""
    rows = run.read("batches").filter(pl.col("cached_tokens") > 0).sort("round", "order")
    return _each(run, rows.select("request", "cached_tokens"))


def evicted_blocks(run: Run) -> str:
    rows = run.read("blocks").filter(pl.col("event") == "evict").sort("round", "order")
    by_round = rows.group_by("round", maintain_order=True).agg("block")
    return "; ".join(f"round {number}: {' '.join(map(str, found))}" for number, found in by_round.iter_rows()) or "none"


def ttft_of_long_prompts(run: Run) -> str:
    frame = metrics.per_request(run).filter(pl.col("id").str.starts_with("L")).sort("request").collect()
    values = frame["ttft"] * 1000
    return f"{', '.join(f'{value:.1f}' for value in values)} (mean {values.mean():.1f})"


def itl_percentiles(run: Run) -> str:
    """p50, p95, p99 and the longest, over the gaps of the decoding requests D1 … D8."""
    gaps = _decoders_itl(run)
    marks = [gaps.quantile(p, "linear") for p in (0.5, 0.95, 0.99)] + [gaps.max()]
    return ", ".join(f"{name} {value:.1f}" for name, value in zip(("p50", "p95", "p99", "longest"), marks, strict=True))


def gaps_over_100_ms(run: Run) -> str:
    gaps = _decoders_itl(run)
    return f"{(gaps > 100).sum()} of {len(gaps):,}"


def stalled_ms(run: Run) -> str:
    frame = run.read("requests").filter(pl.col("id").str.starts_with("D"))
    return f"{frame['stalled_s'].mean() * 1000:.1f}"  # type: ignore[operator]


def _decoders_itl(run: Run) -> pl.Series:
    """Gaps between consecutive tokens of the requests whose id begins with D, milliseconds."""
    decoders = [row for row, name in run.ids.items() if name.startswith("D")]
    gaps = metrics.itl(run).filter(pl.col("request").is_in(decoders))
    return gaps.select(pl.col("itl") * 1000).collect()["itl"]


def _per_request(run: Run, column: str) -> str:
    rows = run.read("requests").filter(pl.col(column) > 0).sort("request")
    return _each(run, rows.select("request", column)) or "0"


def _each(run: Run, rows: pl.DataFrame) -> str:
    return ", ".join(f"{run.labels[request]} {value}" for request, value in rows.iter_rows() if value is not None)


FIGURES: dict[str, Callable[[Run], str]] = {
    "rounds by kind": rounds_by_kind,
    "first token in round": first_token_in_round,
    "longest gap between two tokens, rounds": longest_gap,
    "budget left over while a prompt waited, tokens": budget_unused,
    "order of admission": admission_order,
    "computed tokens discarded": discarded,
    "tokens computed again": recomputed,
    "prefix hits, tokens": cache_hits,
    "evicted blocks": evicted_blocks,
    "TTFT of L1 … L4, ms": ttft_of_long_prompts,
    "ITL of D1 … D8, ms": itl_percentiles,
    "gaps of D1 … D8 over 100 ms": gaps_over_100_ms,
    "stalled, mean of D1 … D8, ms": stalled_ms,
}


def figure_table(runs: list[Run], names: list[str]) -> Iterator[str]:
    yield f"| | {' | '.join(run.scheduler for run in runs)} |"
    yield "|---" * (len(runs) + 1) + "|"
    for name in names:
        yield f"| {name} | {' | '.join(escaped(FIGURES[name](run)) for run in runs)} |"
    yield ""


# -- the page


def remade(page: str) -> str:
    """The page with every table made anew from the command above it."""
    lines: list[str] = []
    runs: list[Run] = []
    inside = False
    with tempfile.TemporaryDirectory() as folder:
        for line in page.splitlines():
            command, table = COMMAND.match(line), TABLE.match(line)
            if inside and line != END:
                continue
            inside = False
            lines.append(line)
            if command:
                runs = replayed(command[1], Path(folder) / str(len(lines)))
            elif table:
                inside = True
                names = table["names"]
                made = figure_table(runs, names.split("; ")) if names else round_tables(runs)
                lines += ["", *made]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python docs/make_lessons.py", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page would change")
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    made = remade(page)
    if options.check:
        if made != page:
            print(f"{PAGE} is not what the runs say: python docs/make_lessons.py", file=sys.stderr)
        return int(made != page)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
