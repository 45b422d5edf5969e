"""From a command's options to everything a run is made of: trace, engine, scheduler, clock, arrivals, record. The only wiring.

Which engine, and how one is built, stands in engine_choice.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchctl.admission import Admission, Sizes
from benchctl.arrivals import Arrivals, CappedArrivals
from benchctl.clock import Clock, RecordedClock, RoundClock, VirtualClock, WallClock
from benchctl.config import (
    PolicySettings,
    ReplayOptions,
    check_equal_pools,
    check_flags,
    chosen_schedulers,
    recorded_settings,
    settle,
)
from benchctl.describe import describe
from benchctl.engine_choice import EngineChoice, build_engine, choose_engine
from benchctl.profiles import check_block_size
from benchctl.recorded import as_recorded, num_recorded, open_earlier, run_for_each
from benchctl.recorder import SMALL_POOL
from benchctl.runner import RunParts
from benchctl.simulated_clock import OverlappedClock
from benchctl.sources import (
    build_arrivals,
    check_arrivals,
    num_to_replay,
    open_for,
    recorded_admissions,
    recorded_arrivals,
    recorded_times,
    requests_of,
)
from engines.interface import Engine, EngineLimits, NewRequest, Scheduler
from engines.null_engine import NullEngine
from engines.simulated.engine import SimulatedEngine
from reports.run import Run
from traces.errors import BenchctlError
from traces.keys import BlockKeys
from traces.load import Trace
from traces.prefix import bound_by_hash_ids, prefix_upper_bound
from traces.tokens import TokenMaker

# Tokens of KV cache where nothing sets the pool and no card gives its free memory: small enough that the bundled
# conversations feel it (both policies preempt), large enough for its longest request.
DEFAULT_KV_TOKENS = 6144
BOUND_MAX_TOKENS = 20_000_000  # of a trace, up to which its prefix bound is computed


@dataclass(frozen=True, slots=True)
class Command:
    """A replay command, settled: what all of its runs share."""

    options: ReplayOptions
    trace: Trace
    engine: EngineChoice
    policies: tuple[PolicySettings, ...]
    clock: str
    arrivals: str
    num_requests: int | None  # None: not known before the trace is read to its end
    earlier: Mapping[str, Run]  # of --clock recorded: policy -> the run that it repeats; else empty
    notes: tuple[str, ...]


def build_command(options: ReplayOptions) -> Command:
    """Check the options against each other, open the trace, choose the engine, settle every policy. Raises BenchctlError."""
    check_together(options)
    trace = open_for(options)
    earlier: dict[str, Run] = {}
    if options.from_run is not None:
        earlier = run_for_each(options.from_run, open_earlier(options.from_run, trace), options.schedulers)
    names = tuple(earlier) or chosen_schedulers(options.schedulers)
    notes = check_flags(options, names) + trace.notes
    if earlier:
        options = as_recorded(options, earlier, notes)
    engine = choose_engine(options, trace)
    notes += engine.notes + without_effect(options, engine, trace)
    clock = options.clock or ("virtual" if engine.kind in ("null", "simulated") else "wall")
    kinds = [str(run.manifest.get("arrivals")) for run in earlier.values()]  # the same in all
    kind = kinds[0] if kinds else check_arrivals(trace, options, clock)
    if options.outputs == "sampled" and kind != "session" and any(r.carry for r in requests_of(trace, options, clock)):
        raise BenchctlError(
            "turns carry their parent's output, which --outputs sampled does not know beforehand",
            fix="--arrivals session, or --outputs forced",
        )
    policies = settle_all(options, names, trace, engine, earlier)
    check_equal_pools(options, policies)
    for policy in policies:
        policy.info.build(policy.config)  # refuses, before anything runs, what no run of it could have
    if engine.profile is not None:
        for policy in policies:
            check_block_size(engine.profile, policy.config.block_size, policy.name)
    if engine.kind == "null" and options.round_cost is not None:
        NullEngine(EngineLimits(1, 1), options.round_cost)
    if policies[0].settings["num_blocks"].source == "default":
        notes.append(
            f"nothing sets the KV pool: {DEFAULT_KV_TOKENS} tokens, small enough that the bundled conversations feel it; "
            "--kv-cache-tokens N gives another"
        )
    num = num_to_replay(options, trace)
    if earlier:
        num = max(num_recorded(run) for run in earlier.values())
    return Command(options, trace, engine, tuple(policies), clock, kind, num, earlier, tuple(notes))


def check_together(options: ReplayOptions) -> None:
    """Options that exclude or need each other. Raises BenchctlError."""
    if options.clock == "recorded" and options.from_run is None:
        raise BenchctlError("--clock recorded needs the run whose admissions it repeats", fix="--from RUN")
    if options.from_run is not None and options.clock != "recorded":
        raise BenchctlError("--from is for --clock recorded", fix="add --clock recorded, or leave --from out")
    if (options.engine == "simulated") != (options.profile is not None):
        given = options.profile is not None
        raise BenchctlError(
            f"--profile is for --engine simulated, not {options.engine}"
            if given
            else "which device is to be simulated?",
            where="--engine",
            fix="--engine simulated"
            if given
            else "--profile FILE, made by benchctl calibrate RUN... -o FILE, or a name of benchctl profiles: h200-qwen3-8b",
        )
    if options.engine == "simulated" and options.clock == "wall":
        raise BenchctlError(
            "simulated rounds take no real time", where="--clock wall", fix="leave --clock out: the clock is virtual"
        )
    if options.engine in ("null", "simulated"):
        for name, given in (
            ("--tensor-parallel-size", options.tensor_parallel_size > 1),
            ("--verify", options.verify > 0),
        ):
            if given:
                raise BenchctlError(f"the {options.engine} engine runs no model", where=name, fix="--engine torch")
    if options.outputs == "sampled" and options.engine in ("null", "simulated"):
        raise BenchctlError(
            f"the {options.engine} engine chooses no tokens", where="--outputs sampled", fix="--engine torch"
        )
    if options.from_run is not None:
        for name, value in (
            ("--request-rate", options.request_rate),
            ("--arrivals", options.arrivals),
            ("--max-concurrency", options.max_concurrency),
            ("--time-scale or --speedup", options.time_scale),
            ("--num-prompts", options.num_prompts),
        ):
            if value is not None:
                raise BenchctlError(f"{name} changes arrivals, which --clock recorded repeats", fix="leave it out")


def without_effect(options: ReplayOptions, engine: EngineChoice, trace: Trace) -> list[str]:
    """Flags of a model or a card that were given where there is none: allowed, so that a command can be carried over, and said."""
    of_model = {
        # Of texts the model's folder has the tokenizer; a profile's model is held against the one that is named.
        "--model": options.model is not None and engine.profile is None and not trace.has_text,
        "--dtype": options.dtype is not None,
        "--load-format": options.load_format != "auto",
        "--attention-backend": options.attention_backend != "auto",
        "--enforce-eager": options.enforce_eager,
        "--temperature": options.temperature != 0.0,
        "--overlap": bool(options.overlap) and engine.profile is None,
    }
    given = [name for name, is_given in of_model.items() if is_given and engine.model is None]
    if options.gpu_memory_utilization is not None and (engine.model is None or engine.model.device.type != "cuda"):
        given.insert(0, "--gpu-memory-utilization")
    what = "no model and no card" if engine.model is None else "no card"
    return [f"{', '.join(given)}: without effect, the {engine.kind} engine has {what} here"] if given else []


def settle_all(
    options: ReplayOptions, names: tuple[str, ...], trace: Trace, engine: EngineChoice, earlier: Mapping[str, Run]
) -> list[PolicySettings]:
    """Every policy's settings; where nothing sets the pool all get the same usable tokens."""
    recorded = {name: recorded_settings(earlier[name].manifest, name) if name in earlier else None for name in names}

    def settle_with(default: Callable[[int], tuple[int, str]]) -> list[PolicySettings]:
        return [
            settle(
                options, name, trace.header.limits, recorded[name],
                default_tokens=default, model_max_len=engine.max_model_len,
            )
            for name in names
        ]  # fmt: skip

    if engine.profile is not None:
        tokens, why = engine.profile.kv_cache_tokens, "profile"
    elif engine.model is None or engine.model.device.type != "cuda":
        tokens, why = DEFAULT_KV_TOKENS, "default"
    else:
        # The budget and the seats bound the largest pass, so they are needed before the pool: settle them on any pool.
        first = settle_with(lambda block_size: (engine.max_model_len or 2**20, "device memory"))
        if not any(p.settings["num_blocks"].source == "device memory" for p in first):
            return first
        from engines.torch_engine.memory import max_kv_tokens

        tokens = max_kv_tokens(
            engine.model,
            gpu_memory_utilization=options.gpu_memory_utilization or 0.9,
            max_num_batched_tokens=max(p.config.max_num_batched_tokens for p in first),
            max_num_seqs=max(p.config.max_num_seqs for p in first),
            max_model_len=max(p.config.max_model_len or 0 for p in first) or None,
            attention=engine.attention or "reference",
            block_size=min(p.config.block_size for p in first),
            temperature=options.temperature,
            enforce_eager=options.enforce_eager,
        )
        why = "device memory"
    policies = settle_with(lambda block_size: (max(tokens, block_size), why))
    shared = math.lcm(*(p.config.block_size for p in policies))
    if len({p.usable_tokens for p in policies}) > 1 and all(p.settings["num_blocks"].source == why for p in policies):
        tokens = max(tokens // shared, 1) * shared
        policies = settle_with(lambda block_size: (tokens, why))
    return policies


# -- one run


def build_run(
    command: Command, policy: PolicySettings, folder: Path | None, stop: threading.Event | None = None
) -> RunParts:
    """Everything for one run of `policy`; its engine holds memory until `close`. `stop` ends warm-ups. Raises BenchctlError."""
    options, trace, notes = command.options, command.trace, list[str]()
    engine = build_engine(command.engine, options, policy)
    # What is not written is not gathered; a policy of the user's own may know only the two answers.
    log: bool | str = folder is not None
    if options.records == "summary" and policy.info.place is None:
        log = "preemptions"
    scheduler: Scheduler = policy.info.build(policy.config, log_decisions=log)
    maker = TokenMaker(trace, vocab_size=command.engine.vocab_size, tokenizer=command.engine.tokenizer)
    eos = () if command.engine.model is None else command.engine.model.config.eos_token_ids
    admission = Admission(
        prompt_length=maker.prompt_length,
        token_ids=maker.token_ids,
        by_row=trace.by_row,
        sizes=Sizes(
            policy.usable_blocks,
            policy.config.block_size,
            policy.settings["max_model_len"].value,
            cut_outputs="max_model_len" not in policy.info.knobs,
        ),
        over_length=options.over_length,
        forced=options.outputs == "forced",
        eos_token_ids=frozenset(eos),
        trace=str(trace.path),
        block_keys=block_keys(command, policy).of,
    )
    if options.num_warmups:
        warmed = scheduler if options.warm_cache else policy.info.build(policy.config, log_decisions=False)
        warm_up(command, warmed, engine, admission, stop or threading.Event())
    arrivals: Arrivals
    if policy.name in command.earlier:
        arrivals = recorded_arrivals(trace, command.earlier[policy.name])
    else:
        arrivals = build_arrivals(trace, options, command.arrivals, command.clock, notes)
    overlap = may_overlap(command, policy, arrivals)
    return RunParts(
        folder=folder,
        name=policy.name,
        scheduler=scheduler,
        engine=engine,
        arrivals=arrivals,
        admission=admission,
        start_clock=simulated_clock(engine)
        if overlap and isinstance(engine, SimulatedEngine) and command.clock == "virtual"
        else clock_of(command, policy),
        usable_blocks=policy.usable_blocks,
        records=options.records,
        overlap=overlap,
        manifest=describe(command, policy, notes),
    )


def block_keys(command: Command, policy: PolicySettings) -> BlockKeys:
    return BlockKeys(
        command.trace,
        block_size=policy.config.block_size,
        vocab_size=command.engine.vocab_size,
        by_row=command.trace.by_row,
    )


def may_overlap(command: Command, policy: PolicySettings, arrivals: Arrivals) -> bool:
    """Whether a round may be scheduled before the tokens of the one before it are seen, with nothing decided otherwise.

    Outputs have to be known beforehand. In a count of rounds a turn or a seat that waits for a finished request would come
    one round later. The free list of a small pool is recorded as it stands at a round's end, which is past by then.
    """
    options, model, profile = command.options, command.engine.model, command.engine.profile
    if (model is None and profile is None) or options.outputs != "forced":
        return False
    # On the CPU a launch is over when it returns: there is nothing to overlap with, and tokens would only be seen later.
    usual = profile.overlapped if profile is not None else model.device.type == "cuda"
    if not (usual if options.overlap is None else options.overlap):
        return False
    if options.records != "none" and policy.usable_blocks <= SMALL_POOL:
        return False
    # On an overlapped virtual clock turns and seats come as late as on a real one.
    if profile is not None and command.clock == "virtual":
        return True
    return command.clock == "wall" or (command.arrivals == "trace" and not isinstance(arrivals, CappedArrivals))


def simulated_clock(engine: SimulatedEngine) -> Callable[[threading.Event], Clock]:
    """Starts a virtual clock on which rounds overlap as on the profile's device."""
    return lambda stop: OverlappedClock(engine.pop_cost, engine.fit.host.arrive_s)


def clock_of(command: Command, policy: PolicySettings) -> Callable[[threading.Event], Clock]:
    """Starts the command's clock. The event ends a wall clock's sleep."""
    if command.clock == "recorded":
        earlier = command.earlier[policy.name]
        times, admitted_s = recorded_times(earlier), recorded_admissions(earlier)
        return lambda stop: RecordedClock(times, admitted_s)
    if command.clock == "rounds":
        return lambda stop: RoundClock()
    if command.clock == "virtual":
        return lambda stop: VirtualClock(count_host=command.engine.model is not None)
    return WallClock


def warm_up(
    command: Command, scheduler: Scheduler, engine: Engine, admission: Admission, stop: threading.Event
) -> None:
    """Run the sizes of the first `--num-warmups` requests with ids that share no prefix with the trace, all at once.

    Their rows are negative, so none is a row of the trace. What the scheduler refuses is left out.
    """
    seed, top = command.options.seed, command.engine.vocab_size or 2**62

    def ids(number: int, length: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([seed, 0x77617265, number]).integers(0, top, length, dtype=np.int64)

    for number, request in enumerate(
        islice(requests_of(command.trace, command.options, command.clock), command.options.num_warmups), 1
    ):
        new, rejection = admission.prepare(request, 0.0)
        prompt, output = new.num_prompt_tokens, new.num_output_tokens
        if rejection is None:
            # Made when looked at: a scheduler refuses by the lengths alone what no memory would hold.
            make = partial(ids, number, prompt + output)
            scheduler.add(NewRequest(-number, f"warm-up {number}", prompt, output, make))
    while scheduler.has_unfinished() and not stop.is_set():
        round = scheduler.schedule()
        result = engine.collect(engine.launch(round.batch)) if round.batch.num_seqs else None
        assert round.batch.num_seqs or round.num_preempted, "a warm-up round that scheduled nothing"
        scheduler.update(round, None if result is None else result.token_ids)


def prefix_bound(command: Command, block_size: int) -> dict[str, int] | None:
    """What an unbounded prefix cache with blocks of this size would hit; None for traces beyond BOUND_MAX_TOKENS.

    Prompts as the trace states them, in the order in which they are due. Tokens are made only where lengths and hash ids do
    not tell it.
    """
    trace = command.trace
    maker = TokenMaker(trace, vocab_size=command.engine.vocab_size, tokenizer=command.engine.tokenizer)
    if maker.digits <= block_size:
        if trace.sharing == "none":
            queried = (
                trace.sum_prompts
                if command.options.num_prompts is None
                else sum(r.input_length or 0 for r in requests_of(trace, command.options, command.clock))
            )
            return {"queried_tokens": queried, "hit_tokens": 0, "block_size": block_size}
        if trace.sharing == "hash_ids" and trace.header.block_size % block_size == 0:
            found = bound_by_hash_ids(
                requests_of(trace, command.options, command.clock),
                trace.header.block_size,
                trace.header.hash_scope == "session",
                block_size,
            )
            return (
                None
                if found is None
                else {"queried_tokens": found[0], "hit_tokens": found[1], "block_size": block_size}
            )
    if command.options.num_prompts is None and trace.sum_prompts > BOUND_MAX_TOKENS:
        return None  # known without making the first one
    total = 0

    def arrays() -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        nonlocal total
        for request in requests_of(trace, command.options, command.clock):
            total += maker.prompt_length(request) + (request.output_length or 1)
            if total > BOUND_MAX_TOKENS:
                return
            yield maker.prompt_length(request), maker.token_ids(request)

    queried, hit = prefix_upper_bound(arrays(), block_size)
    return (
        None if total > BOUND_MAX_TOKENS else {"queried_tokens": queried, "hit_tokens": hit, "block_size": block_size}
    )
