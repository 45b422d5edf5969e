"""What is going on, on stderr while a run goes: one live line where stderr is a terminal, nothing otherwise.

Must not know how a run is made; it sees rounds. Looking costs a clock reading a round, drawing happens four times a second.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from engines.interface import Round
from engines.steady_batch import Stretch

INTERVAL_S = 0.25
BAR = 20


class Progress:
    """A context manager around one run; its `saw` is the loop's observer. Mutable; owned by one run."""

    def __init__(self, console: Console, title: str, usable_blocks: int) -> None:
        self._title, self._blocks = title, usable_blocks
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next = self._since = time.perf_counter()
        self._rounds = self._tokens = 0
        self._stop = ""

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    takes_stretches = True

    def saw(self, number: int, now_s: float, round: Round | Stretch, num_tokens: int) -> None:
        if self._live is None:
            return
        self._rounds += round.num_rounds if isinstance(round, Stretch) else 1
        self._tokens += num_tokens
        self._stop = round.stop_waiting or round.stop_running or self._stop
        at = time.perf_counter()
        if at < self._next:
            return
        span = max(at - self._since, 1e-9)
        self._live.update(self.line(number, now_s, round, self._rounds / span, self._tokens / span), refresh=True)
        self._next, self._since = at + INTERVAL_S, at
        self._rounds = self._tokens = 0

    def line(self, number: int, now_s: float, round: Round | Stretch, rounds_per_s: float, tokens_per_s: float) -> Text:
        free = round.free_blocks_end
        filled = BAR - (BAR * free + self._blocks - 1) // max(self._blocks, 1)
        return Text(
            f"{self._title}  {now_s:8.2f} s  round {number:,}  {rounds_per_s:,.0f} rounds/s  {tokens_per_s:,.0f} tok/s  "
            f"running {round.running}  waiting {round.waiting}  blocks [{'█' * filled}{'·' * (BAR - filled)}] {free:,} free  "
            f"{self._stop}",
            no_wrap=True,
            overflow="ellipsis",
        )
