"""`benchctl replay`: its flags, and which way of replaying they mean. Heavy imports stand inside, so that --help answers at once."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from benchctl.app import app, exit_with, opt, out_opt
from traces.errors import BenchctlError

SCHEDULING, POOL, ENGINE, ARRIVALS, CLOCK, OUTPUT = (
    "Scheduling", "KV cache", "Engine", "Arrivals and requests", "Clock", "Output",
)  # fmt: skip


@app.command()
def replay(
    ctx: typer.Context,
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="A trace (JSONL, Mooncake JSONL; may be gzipped), or a bundled one by name. With --from: that run's, if left out.",
            show_default=False,
        ),
    ] = None,
    scheduler: Annotated[
        list[str] | None,
        opt("--scheduler", "-s", panel=SCHEDULING, help="nano or vllm; repeat it for several. Without it: both."),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        opt("--max-num-seqs", panel=SCHEDULING, help="Sequences in a round (nano) or running (vllm). Default 512."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, opt("--max-num-batched-tokens", panel=SCHEDULING, help="Token budget of a round. Default 16384.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        opt(
            "--max-model-len",
            panel=SCHEDULING,
            help="Longest sequence, prompt and output. Default: the model's; none with --engine null. For nano outputs are cut where vllm would stop.",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        opt(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            panel=SCHEDULING,
            help="Reuse blocks of equal prefixes. Default on.",
        ),
    ] = None,
    enable_chunked_prefill: Annotated[
        bool | None,
        opt(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            panel=SCHEDULING,
            help="vllm: split prompts over rounds. Default on.",
        ),
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None,
        opt(
            "--long-prefill-token-threshold",
            panel=SCHEDULING,
            help="vllm: most tokens for one request in a round while others exist. Default 0: no cap.",
        ),
    ] = None,
    scheduling_policy: Annotated[
        str | None, opt("--scheduling-policy", panel=SCHEDULING, help="vllm: fcfs or priority. Default fcfs.")
    ] = None,
    scheduler_reserve_full_isl: Annotated[
        bool | None,
        opt(
            "--scheduler-reserve-full-isl/--no-scheduler-reserve-full-isl",
            panel=SCHEDULING,
            help="vllm: admit only where the whole known sequence fits the free blocks. Default off here, on in vLLM 0.33.0.",
        ),
    ] = None,
    watermark: Annotated[
        float | None,
        opt("--watermark", panel=SCHEDULING, help="vllm: share of the pool kept from newcomers. Default 0."),
    ] = None,
    max_loras: Annotated[
        int | None,
        opt("--max-loras", panel=SCHEDULING, help="vllm: different adapters among the running. Default: no limit."),
    ] = None,
    block_size: Annotated[
        int | None, opt("--block-size", panel=POOL, help="Tokens of a block. Default 256 for nano, 16 for vllm.")
    ] = None,
    kv_cache_tokens: Annotated[
        int | None,
        opt(
            "--kv-cache-tokens",
            panel=POOL,
            help="Usable tokens of KV cache, the same for every policy; a multiple of each block size.",
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        opt(
            "--num-blocks",
            "--num-gpu-blocks-override",
            panel=POOL,
            help="Blocks of one policy, vllm's null block included.",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        opt(
            "--gpu-memory-utilization",
            panel=POOL,
            help="Share of a card's memory to use where nothing sets the pool. Default 0.9.",
        ),
    ] = None,
    engine: Annotated[
        str,
        opt(
            "--engine",
            panel=ENGINE,
            help="auto, torch, simulated or null. Default auto: torch on CUDA, else torch on the CPU. null schedules only.",
        ),
    ] = "auto",
    profile: Annotated[
        str | None,
        opt(
            "--profile",
            panel=ENGINE,
            help="With --engine simulated: h200-qwen3-8b or another name of `benchctl profiles`, or a file that `benchctl calibrate` made.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        opt(
            "--model",
            panel=ENGINE,
            help="tiny, qwen3-0.6b, qwen3-8b, llama-3.1-8b (random weights), or a local Hugging Face folder. Default: qwen3-0.6b on CUDA, tiny on the CPU.",
        ),
    ] = None,
    load_format: Annotated[
        str, opt("--load-format", panel=ENGINE, help="auto, or dummy for random weights. Default auto.")
    ] = "auto",
    dtype: Annotated[
        str | None, opt("--dtype", panel=ENGINE, help="auto, float32, bfloat16 or float16. Default auto.")
    ] = None,
    seed: Annotated[
        int, opt("--seed", panel=ENGINE, help="Of dummy weights, --request-rate, warm-ups and sampling. Default 0.")
    ] = 0,
    outputs: Annotated[
        str,
        opt(
            "--outputs",
            panel=ENGINE,
            help="forced: the trace's outputs are appended; sampled: what the model says. Default forced.",
        ),
    ] = "forced",
    temperature: Annotated[
        float, opt("--temperature", panel=ENGINE, help="Of the model's choice. Default 0: the likeliest token.")
    ] = 0.0,
    attention_backend: Annotated[
        str,
        opt(
            "--attention-backend",
            panel=ENGINE,
            help="auto, triton (fused kernels, CUDA graphs) or reference (plain torch). Default auto: triton on CUDA.",
        ),
    ] = "auto",
    enforce_eager: Annotated[
        bool, opt("--enforce-eager", panel=ENGINE, help="Capture no CUDA graphs. Default: graphs, with triton.")
    ] = False,
    tensor_parallel_size: Annotated[
        int,
        opt(
            "--tensor-parallel-size",
            "-tp",
            panel=ENGINE,
            help="Split the model over N processes, one a card (without a card: of the CPU). Default 1.",
        ),
    ] = 1,
    verify: Annotated[
        int,
        opt(
            "--verify",
            panel=ENGINE,
            help="At a run's end compute N requests anew in float32 and compare logits: preempted, cached and chunked ones first. Beyond tolerance the exit code is 1. Default 0.",
        ),
    ] = 0,
    overlap: Annotated[
        bool | None,
        opt(
            "--overlap/--no-overlap",
            panel=ENGINE,
            help="Schedule the next round while the device works on this one. Default: on CUDA, where outputs are forced and no decision depends on it.",
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        opt(
            "--arrivals",
            panel=ARRIVALS,
            help="trace: at the times of the trace; session: each turn think_s after its parent finished. Default trace where every row has a time.",
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        opt("--max-concurrency", panel=ARRIVALS, help="Closed loop: at most N requests in the scheduler at a time."),
    ] = None,
    request_rate: Annotated[
        str | None,
        opt(
            "--request-rate",
            panel=ARRIVALS,
            help="Replace the trace's arrivals: R a second on average; inf: all at once.",
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        opt("--burstiness", panel=ARRIVALS, help="Shape of the gamma gaps of --request-rate. Default 1: Poisson."),
    ] = None,
    time_scale: Annotated[
        float | None, opt("--time-scale", panel=ARRIVALS, help="Multiply the gaps between arrivals, and think times.")
    ] = None,
    speedup: Annotated[
        float | None, opt("--speedup", panel=ARRIVALS, help="Divide the gaps between arrivals, and think times.")
    ] = None,
    num_prompts: Annotated[int | None, opt("--num-prompts", panel=ARRIVALS, help="Only the first N requests.")] = None,
    num_warmups: Annotated[
        int,
        opt(
            "--num-warmups",
            panel=ARRIVALS,
            help="Requests run beforehand, without a prefix in common with the trace. Default 0.",
        ),
    ] = 0,
    warm_cache: Annotated[
        bool, opt("--warm-cache", panel=ARRIVALS, help="Keep the warm-ups' blocks in the prefix cache.")
    ] = False,
    num_repeats: Annotated[
        int, opt("--num-repeats", panel=ARRIVALS, help="Run each policy N times, interleaved A B B A. Default 1.")
    ] = 1,
    over_length: Annotated[
        str,
        opt(
            "--over-length",
            panel=ARRIVALS,
            help="Requests that can never fit: reject (exit 1), skip, truncate or error (exit 2). Default reject.",
        ),
    ] = "reject",
    skip_bad: Annotated[
        bool, opt("--skip-bad", panel=ARRIVALS, help="Leave faulty rows of the trace out, and count them.")
    ] = False,
    validate_first: Annotated[
        bool | None,
        opt(
            "--validate-first/--no-validate-first",
            panel=ARRIVALS,
            help="Check the whole trace before anything runs, or its rows while it is replayed. Default: traces of 32 MB and more are checked on the way.",
        ),
    ] = None,
    map: Annotated[
        list[str] | None,
        opt(
            "--map",
            panel=ARRIVALS,
            help="TRACE is a log of your own: import it first, its columns named so: arrival=ts,input=prompt_tokens,output=n.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        opt(
            "--format",
            panel=ARRIVALS,
            help="TRACE is of another format: import it first. auto, or a name of `benchctl trace formats`.",
        ),
    ] = None,
    clock: Annotated[
        str | None,
        opt(
            "--clock",
            panel=CLOCK,
            help="wall, virtual, rounds or recorded. Default wall with torch, virtual with null.",
        ),
    ] = None,
    round_cost: Annotated[
        str | None,
        opt(
            "--round-cost",
            panel=CLOCK,
            help="A,B,C of the null engine: a round takes A + B·tokens + C·Σcontext seconds. Default 5e-3,20e-6,2e-9.",
        ),
    ] = None,
    round_seconds: Annotated[
        float,
        opt(
            "--round-seconds",
            panel=CLOCK,
            help="With --clock rounds: seconds of arrival_s that make a round. Default 1.",
        ),
    ] = 1.0,
    from_run: Annotated[
        str | None,
        opt(
            "--from",
            panel=CLOCK,
            help="A recorded run, once more: with --set and flags for what is to be different, or with --clock recorded by its admissions.",
        ),
    ] = None,
    set: Annotated[
        list[str] | None,
        opt(
            "--set",
            panel=CLOCK,
            help="With --from: a setting of the run and its new value, such as num_blocks=2048. Repeat it for several.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        out_opt(
            "--out",
            "-o",
            panel=OUTPUT,
            folder=True,
            help="Folder; a run goes to DIR/<scheduler>/. Default runs/<trace>-<time>/.",
        ),
    ] = None,
    force: Annotated[bool, opt("--force", panel=OUTPUT, help="Replace earlier runs in --out.")] = False,
    records: Annotated[
        str,
        opt(
            "--records",
            panel=OUTPUT,
            help="none, summary (no batches, decisions, blocks, tokens), compact or full. Default full.",
        ),
    ] = "full",
    goodput: Annotated[
        list[str] | None,
        opt(
            "--goodput",
            panel=OUTPUT,
            help="An SLO such as ttft:200 or e2el:3s (ms unless it says s); repeat it for several.",
        ),
    ] = None,
    percentile_metrics: Annotated[
        str, opt("--percentile-metrics", panel=OUTPUT, help="Of ttft,tpot,itl,e2el. Default all.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, opt("--metric-percentiles", panel=OUTPUT, help="Default 50,90,95,99.")
    ] = "50,90,95,99",
    report: Annotated[
        bool, opt("--report/--no-report", panel=OUTPUT, help="Write DIR/report.html. Default on.")
    ] = True,
    json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print the summary as JSON.")] = False,
) -> None:
    """Replay a trace under one or both schedulers, record every round, and print a summary.

    Example: benchctl replay traces/walkthrough.jsonl --scheduler nano --engine null --clock rounds
    """
    given = dict(locals())
    typed = {name for name in given if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    del given["ctx"]

    def run() -> int:
        from benchctl.parse import replay_options

        if set and from_run is None:
            raise BenchctlError("--set changes a recorded run, and none is named", fix="--from RUN, or the flag itself")
        if trace is None and from_run is None:
            raise BenchctlError("Missing argument 'TRACE'", fix="benchctl replay TRACE, or --from RUN")
        if from_run is not None and (set or clock != "recorded"):
            from benchctl.what_if import ask, run_what_if

            question = ask(given, typed, replay)
            baseline = None if question.baseline is None else replay_options(**question.baseline)
            return run_what_if(question, replay_options(**question.given), baseline)
        if trace is None:
            from benchctl.what_if import trace_of

            given["trace"] = trace_of(str(from_run))
        options = replay_options(**given)
        if map or format:
            from benchctl.import_first import import_first

            found = import_first(str(trace), format, map, skip_bad=skip_bad, seed=seed, out=out)
            options = dataclasses.replace(options, trace=found)
        from benchctl.command import run_replay

        return run_replay(options)

    exit_with(run)
