"""The replay loop: admit what is due, schedule, launch, (collect), advance the clock, update, record.

Where rounds overlap, a round is collected after the next one is launched; before that where the launch keeps the host busy.

It knows the protocols of a scheduler, an engine, a clock, a source of arrivals and a recorder, and nothing of which ones
they are. A request's tokens, the model and the files stay on the other side of them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchctl.admission import Admission
from benchctl.arrivals import Arrivals, CappedArrivals
from benchctl.clock import Clock
from benchctl.recorder import Recorder, Timing
from benchctl.stride import StretchFlight, make_strider
from engines.interface import Engine, Round, ScheduledBatch, Scheduler, StepResult
from engines.steady_batch import Stretch
from traces.errors import BenchctlError

# Preemptions without one token in between, beyond any number that a policy needs: it takes each request at most once a token.
PREEMPTIONS_WITHOUT_TOKEN = 1000


class Observer(Protocol):
    """Watches a run as it goes (progress)."""

    def saw(self, number: int, now_s: float, round: Round | Stretch, num_tokens: int) -> None:
        """`round`: also a stretch of rounds, the last of them `number`, where the attribute `takes_stretches` is true."""


@dataclass(slots=True)
class Outcome:
    """Counts of a run, kept with or without records. Mutable; owned by `replay`."""

    admitted: int = 0
    finished: int = 0
    rejected: int = 0
    rounds: int = 0
    emitted_tokens: int = 0
    preemptions: int = 0
    end_s: float = 0.0
    last_arrival_s: float = 0.0
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    def count(self, round: Round, num_tokens: int, t_end_s: float) -> None:
        self.rounds += 1
        self.finished += len(round.finished)
        self.emitted_tokens += num_tokens
        self.preemptions += round.num_preempted
        self.end_s = t_end_s

    def count_stretch(self, stretch: Stretch, num_tokens: int, t_end_s: float) -> None:
        self.rounds += stretch.num_rounds
        self.finished += len(stretch.finished)
        self.emitted_tokens += num_tokens
        self.end_s = t_end_s


@dataclass(slots=True)
class Flight:
    """A round under way: scheduled and launched. `updated`: the scheduler has taken its tokens already."""

    number: int
    round: Round
    handle: Any  # the engine's; None: there was nothing to execute
    launched: float  # host clock
    t_start_s: float
    t_scheduled_s: float
    schedule_s: float
    update_s: float = 0.0
    updated: bool = False
    seen: tuple[StepResult | None, float, float] | None = None  # collected: result, t_executed_s, t_end_s

    @property
    def finished(self) -> list[tuple[int, str]]:
        return self.round.finished


def replay(
    arrivals: Arrivals,
    admission: Admission,
    scheduler: Scheduler,
    engine: Engine,
    clock: Clock,
    recorder: Recorder,
    *,
    overlap: bool = False,
    observer: Observer | None = None,
    stop: threading.Event | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Run until nothing is left to arrive or to run, or until `stop` is set. Fills and returns `outcome`.

    With `overlap` a round is scheduled and launched before the tokens of the one before it are collected: forced outputs
    are known at launch. Raises BenchctlError where the run cannot go on: a round that scheduled nothing with somebody
    waiting and nothing left to arrive, or preemptions without end; and whatever the engine raises.
    """
    stop, out, perf = stop or threading.Event(), outcome or Outcome(), time.perf_counter
    fruitless = 0  # preemptions since the last token
    flight: Flight | StretchFlight | None = None
    strider = make_strider(scheduler, engine, clock, arrivals, recorder, observer)
    splitting: Any = engine if hasattr(engine, "prepare") else None

    def start(batch: ScheduledBatch) -> Any:
        """Launch. Without a graph this takes the host milliseconds: the round before is collected first, or its tokens would
        be seen as late. The device waits for the first of its kernels only."""
        if splitting is None:
            return engine.launch(batch)
        prepared = splitting.prepare(batch)
        if prepared.eager and isinstance(flight, Flight):
            flight.seen = see(flight)
        return splitting.start(prepared)

    def launch() -> Flight:
        number, t_start_s, h0 = clock.round, clock.start_round(), perf()
        round = scheduler.schedule()
        h1 = perf()
        t_scheduled_s, h2 = clock.scheduled(h1 - h0), perf()
        handle = start(round.batch) if round.batch.num_seqs else None
        return Flight(number, round, handle, h2, t_start_s, t_scheduled_s, h1 - h0)

    def update(flight: Flight, result: StepResult | None) -> None:
        h0 = perf()
        scheduler.update(flight.round, None if result is None else result.token_ids)
        flight.update_s, flight.updated = perf() - h0, True

    def see(flight: Flight, landed_s: float | None = None) -> tuple[StepResult | None, float, float]:
        """Collect, and update where that is still to do. -> result, end of the forward pass, when its tokens are out.

        `landed_s`: when it was seen to end, where the clock has gone on since.
        """
        result = None if flight.handle is None else engine.collect(flight.handle)
        if landed_s is not None:
            return result, landed_s, landed_s
        if flight.updated:
            return result, *clock.landed(flight.number)
        t_executed_s = clock.executed(result, perf() - flight.launched)
        update(flight, result)
        return result, t_executed_s, clock.end_round(flight.update_s)

    def land(flight: Flight | StretchFlight, landed_s: float | None = None) -> None:
        """See to its end where that is still to do; record; let go what waited for its finished requests."""
        if isinstance(flight, StretchFlight):
            land_stretch(flight, landed_s)
            return
        round = flight.round
        result, t_executed_s, t_end_s = flight.seen or see(flight, landed_s)
        timing = Timing(
            flight.t_start_s, flight.t_scheduled_s, t_executed_s, t_end_s, flight.schedule_s, flight.update_s
        )
        recorder.record(flight.number, round, result, timing)
        for row, _ in round.finished:
            arrivals.ended(row, t_end_s)
        num_tokens = round.batch.num_yields
        out.count(round, num_tokens, t_end_s)
        if observer is not None:
            observer.saw(flight.number, t_end_s, round, num_tokens)

    def land_stretch(flight: StretchFlight, landed_s: float | None) -> None:
        stretch, times = flight.stretch, flight.times(clock, landed_s)
        recorder.record_stretch(flight.first, stretch, flight.costs, times, flight.host_s)
        t_end_s = times.t_end_s[-1]
        for row, _ in stretch.finished:
            arrivals.ended(row, t_end_s)
        num_tokens = stretch.num_rounds * stretch.batch.num_decodes
        out.count_stretch(stretch, num_tokens, t_end_s)
        if observer is not None:
            observer.saw(flight.number, t_end_s, stretch, num_tokens)

    def stride(due: float | None) -> bool:
        """Many rounds at once, if that can be."""
        nonlocal flight
        assert strider is not None
        before = flight
        run = strider.run(due, None if before is None else before.number, before is not None and bool(before.finished))
        if run is None:
            return False
        if before is not None:
            land(before, run.plan.landed_s[0] if run.under_way else None)
        flight = run
        if not run.under_way:
            flight = None
            land(run)
        return True

    try:
        while not stop.is_set():
            admit_due(arrivals, admission, scheduler, clock, recorder, out)
            due = arrivals.next_position()
            if not scheduler.has_unfinished():
                if flight is not None:  # what it finishes may let others arrive
                    landing, flight = flight, None
                    land(landing)
                elif due is None:
                    break
                else:
                    recorder.tick()
                    clock.idle(due)
                continue
            if strider is not None and stride(due):
                fruitless = 0
                continue
            before, flight = flight, (latest := launch())
            round = latest.round
            if overlap:
                update(latest, None)
                clock.launched()
            if before is not None:
                land(before)
            if not overlap:
                flight = None
                land(latest)

            fruitless = 0 if round.batch.num_yields else fruitless + round.num_preempted
            if fruitless > PREEMPTIONS_WITHOUT_TOKEN + 2 * (round.running + round.waiting):
                raise stuck(f"{fruitless} preemptions without one token in between", latest.number, scheduler)
            if not round.batch.num_seqs and not round.num_preempted and scheduler.has_unfinished():
                due = arrivals.next_position()
                if due is None and flight is None:
                    raise stuck("a round scheduled nothing, and nothing is left to arrive", latest.number, scheduler)
                if due is not None:
                    clock.stalled(due)
    finally:
        if flight is not None:
            land(flight)
    out.interrupted = stop.is_set()
    out.end_s = max(out.end_s, clock.now())
    left = arrivals.num_left_behind()
    assert out.interrupted or not left, (left, "requests whose parents never ended")
    return out


def admit_due(
    arrivals: Arrivals, admission: Admission, scheduler: Scheduler, clock: Clock, recorder: Recorder, out: Outcome
) -> None:
    """Hand every request that is due to the scheduler, in the order in which they are due."""
    position = clock.position()
    while (due := arrivals.next_position()) is not None and due <= position:
        _, arrival_s, request, tie_s, admitted_s = arrivals.pop()
        new, rejection = admission.prepare(request, tie_s)
        rejection = rejection or scheduler.add(new)
        out.last_arrival_s = max(out.last_arrival_s, arrival_s)
        if rejection is None:
            admission.accept(request, new)
            recorder.admit(request, new, arrival_s, clock.now() if admitted_s is None else admitted_s, clock.round)
            out.admitted += 1
            continue
        if admission.refuse(request, rejection):
            recorder.reject(request, rejection, arrival_s, clock.round, new.num_prompt_tokens)
            out.rejected += 1
        arrivals.ended(request.index, clock.now())
    if isinstance(arrivals, CappedArrivals):
        arrivals.note(position, clock.round)


def stuck(what: str, number: int, scheduler: Scheduler) -> BenchctlError:
    """The run broke: the queues say on whom."""

    def some(rows: list[int]) -> str:
        return (", ".join(map(str, rows[:20])) or "nobody") + (f", … ({len(rows)} in all)" if len(rows) > 20 else "")

    return BenchctlError(
        f"{what}: the {scheduler.name} scheduler is stuck",
        where=f"round {number}; waiting (trace rows): {some(scheduler.waiting_requests())}; "
        f"running: {some(scheduler.running_requests())}; free blocks: {len(scheduler.free_list())}",
        fix="this is a fault of the policy, not of the trace; the records up to here are kept",
        exit_code=1,
    )
