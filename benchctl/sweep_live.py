"""What a sweep says while it runs: a table that stays in place on a terminal, a line a cell anywhere else. On stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from benchctl.sweep_spec import Cell
from benchctl.sweep_workers import Result

BEST = 10  # rows of the live table
SHOWN = (("output_throughput", "tokens/s"), ("p99_ttft_ms", "p99 TTFT, ms"), ("p99_itl_ms", "p99 ITL, ms"))


class SweepProgress:
    """Follows a sweep of `total` cells. Mutable; a context manager owned by the command."""

    def __init__(self, total: int, varied: Sequence[str], slo: bool) -> None:
        self._total, self._varied, self._slo = total, list(varied), slo
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._rows: list[tuple[float, Cell, Result]] = []
        self.done = self.failed = self.kept = 0
        self._reason: str | None = None
        self._began = time.monotonic()

    def __enter__(self) -> SweepProgress:
        if self._live is not None:
            self._live.start()
            self._live.update(self._picture())
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self._picture())
            self._live.stop()

    def saw(self, cell: Cell, result: Result, earlier: bool) -> None:
        self.done += 1
        self.kept += earlier
        if result["status"] != "complete":
            self.failed += 1
            self._reason = f"{self.name(cell)}: {result['reason']}"
        if result["status"] == "complete":
            self._rows.append((self._worth(result), cell, result))
            self._rows.sort(key=lambda row: -row[0])
            del self._rows[BEST:]
        if self._live is not None:
            self._live.update(self._picture())
            return
        if earlier:
            return  # said in one line at the end
        reason = f": {result['reason']}" if result.get("reason") else ""
        print(
            f"{self.done}/{self._total} {result['status']}: {self.name(cell)}{self._figures_text(result)}{reason}",
            file=sys.stderr,
            flush=True,
        )

    def name(self, cell: Cell) -> str:
        """The settings that vary, as text."""
        return " ".join(f"{n}={cell.settings[n]}" for n in self._varied if n in cell.settings) or cell.text()

    def _worth(self, result: Result) -> float:
        judged = result.get("judged") or {}
        value = judged.get("request_goodput") if self._slo else result["figures"].get("output_throughput")
        return float(value or 0.0)

    def _figures_text(self, result: Result) -> str:
        texts = []
        if (share := (result.get("judged") or {}).get("attainment")) is not None:
            texts.append(f"{share:.1%} meet the SLOs")
        for key, label in SHOWN:
            if (value := result["figures"].get(key)) is not None:
                texts.append(f"{label.split(',')[0]} {value:,.4g}" + (" ms" if ", ms" in label else ""))
        return f" ({', '.join(texts)})" if texts else ""

    def _picture(self) -> Group:
        spent = time.monotonic() - self._began
        fresh = self.done - self.kept
        left = spent / fresh * (self._total - self.done) if fresh else None
        words = [f"{self.done} of {self._total} cells"]
        if self.kept:
            words.append(f"{self.kept} from an earlier call")
        if self.failed:
            words.append(f"{self.failed} failed or incomplete")
        words.append(
            f"{spent:,.0f} s" + (f", about {left:,.0f} s left" if left is not None and self.done < self._total else "")
        )
        head = ["goodput, requests/s", "meet the SLOs"] if self._slo else []
        table = Table(*self._varied, box=None, pad_edge=False, header_style="bold")
        for label in [*head, *(label for _, label in SHOWN)]:
            table.add_column(label, justify="right")
        for _, cell, result in self._rows:
            judged = result.get("judged") or {}
            numbers = [judged.get("request_goodput"), judged.get("attainment")] if self._slo else []
            texts = [
                "–" if value is None else f"{value:.1%}" if self._slo and i == 1 else f"{value:,.4g}"
                for i, value in enumerate([*numbers, *(result["figures"].get(key) for key, _ in SHOWN)])
            ]
            table.add_row(*(Text(str(cell.settings.get(n, "–"))) for n in self._varied), *texts)
        bar = ProgressBar(total=self._total, completed=self.done, width=40)
        best = Text("best so far by " + ("goodput" if self._slo else "output tokens/s"), style="dim")
        line = Table.grid(padding=(0, 2))
        line.add_row(bar, Text(" · ".join(words)))
        if self._reason is not None:
            line.add_row("", Text(f"last failure: {self._reason}", style="yellow"))
        return Group(line, best, table) if self._rows else Group(line)


def probe_printer() -> Callable[[str], None]:
    """A line a probe, at once."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return say


def varied(cells: Sequence[Cell]) -> list[str]:
    """The settings that differ between cells, those by which repeats differ left out."""
    names = dict.fromkeys(name for cell in cells for name in cell.settings)
    missing: Any = object()
    return [name for name in names if name != "seed" and len({cell.settings.get(name, missing) for cell in cells}) > 1]
