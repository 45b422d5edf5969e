"""`benchctl trace sort|slice|scale|merge|shuffle-arrivals|synth`: traces changed and made. Parse → call → print."""

from __future__ import annotations

from typing import Annotated

import typer

from benchctl.commands_trace import OUTPUT, ROWS, TIMES, Out, Seed, Trace, app, opt, run_command


@app.command()
def sort(trace: Trace, out: Out) -> None:
    """Sort a trace of any size by arrival, ties in file order.

    Example: benchctl trace sort traces/burst.jsonl -o sorted.jsonl
    """

    def run() -> int:
        from benchctl.trace_print import print_change
        from traces.load import open_trace
        from traces.transform import sort_trace

        return print_change(sort_trace(open_trace(trace, any_order=True), out))

    run_command(run)


@app.command("slice")
def slice_(
    trace: Trace,
    out: Out,
    start: Annotated[float | None, opt("--start", panel=TIMES, help="From this second of the trace on.")] = None,
    end: Annotated[float | None, opt("--end", panel=TIMES, help="Up to, not including, this second.")] = None,
    keep_times: Annotated[
        bool,
        opt("--keep-times", panel=TIMES, help="Leave arrivals as they are. Default: the first row kept arrives at 0."),
    ] = False,
    first: Annotated[int | None, opt("--first", "-n", panel=ROWS, help="Only the first N that stay.")] = None,
    session: Annotated[list[str] | None, opt("--session", panel=ROWS, help="Only this session. Repeatable.")] = None,
    keep: Annotated[
        float | None, opt("--keep", panel=ROWS, help="Thin to this share of the sessions, whole ones: 0.1.")
    ] = None,
    seed: Annotated[int, opt("--seed", panel=ROWS, help="Of --keep. Default 0.")] = 0,
    min_input: Annotated[int | None, opt("--min-input", panel=ROWS, help="Prompts of at least N tokens.")] = None,
    max_input: Annotated[int | None, opt("--max-input", panel=ROWS, help="Prompts of at most N tokens.")] = None,
    min_output: Annotated[int | None, opt("--min-output", panel=ROWS, help="Outputs of at least N tokens.")] = None,
    max_output: Annotated[int | None, opt("--max-output", panel=ROWS, help="Outputs of at most N tokens.")] = None,
    max_model_len: Annotated[
        int | None,
        opt("--max-model-len", panel=ROWS, help="What to do with prompts of N tokens or more says --over-length."),
    ] = None,
    over_length: Annotated[
        str, opt("--over-length", panel=ROWS, help="skip, or truncate to the leading tokens. Default skip.")
    ] = "skip",
) -> None:
    """Keep a part of a trace: a window of time, the first N, sessions, a share of the sessions, lengths.

    Example: benchctl trace slice traces/sharegpt.jsonl --start 10 --end 20 -o part.jsonl
    """

    def run() -> int:
        from benchctl.trace_options import at_least_one, one_of, slice_options
        from benchctl.trace_print import print_change
        from traces.load import open_trace
        from traces.transform import slice_trace

        one_of("--over-length", over_length, ("skip", "truncate"))
        at_least_one("--first", first)
        options = slice_options(
            start_s=start, end_s=end, first=first, sessions=tuple(session or ()), keep_share=keep, seed=seed,
            input_range=(min_input, max_input), output_range=(min_output, max_output),
            max_model_len=max_model_len, over_length=over_length, rebase=not keep_times,
        )  # fmt: skip
        return print_change(slice_trace(open_trace(trace), out, options))

    run_command(run)


@app.command()
def scale(
    trace: Trace,
    out: Out,
    time_scale: Annotated[float | None, opt("--time-scale", help="Multiply the gaps.")] = None,
    speedup: Annotated[float | None, opt("--speedup", help="Divide the gaps.")] = None,
    rate: Annotated[float | None, opt("--rate", help="Scale the gaps so that the mean rate is R requests/s.")] = None,
) -> None:
    """Stretch or shorten a trace: one factor on all gaps and think times. The resulting span is printed.

    Example: benchctl trace scale traces/burst.jsonl --rate 10 -o faster.jsonl
    """

    def run() -> int:
        from benchctl.trace_options import scale_factor
        from benchctl.trace_print import print_change
        from traces.load import open_trace
        from traces.transform import scale_trace

        opened = open_trace(trace)
        return print_change(scale_trace(opened, out, scale_factor(opened, time_scale, speedup, rate)))

    run_command(run)


@app.command()
def merge(
    traces: Annotated[list[str], typer.Argument(help="Two traces or more.", metavar="TRACE...", show_default=False)],
    out: Out,
    align: Annotated[
        str | None,
        opt(
            "--align",
            help="origin: by each header's time_origin; start: all from 0. Default origin where all have one.",
        ),
    ] = None,
) -> None:
    """Merge traces by time. Ids, sessions, hash ids and segments get their trace's name in front.

    Example: benchctl trace merge traces/burst.jsonl traces/long-prompts.jsonl -o both.jsonl
    """

    def run() -> int:
        from benchctl.trace_options import one_of
        from benchctl.trace_print import print_change
        from traces.errors import BenchctlError
        from traces.load import open_trace
        from traces.merging import merge_traces

        one_of("--align", align, ("origin", "start"))
        if len(traces) < 2:
            raise BenchctlError("one trace is nothing to merge", fix="name two or more")
        return print_change(merge_traces([open_trace(name) for name in traces], out, align))  # type: ignore[arg-type]

    run_command(run)


@app.command("shuffle-arrivals")
def shuffle(trace: Trace, out: Out, seed: Seed = 0) -> None:
    """Keep the process of arrivals and draw anew which session starts when; turns keep their distance to their first.

    Example: benchctl trace shuffle-arrivals traces/sharegpt.jsonl -o shuffled.jsonl
    """

    def run() -> int:
        from benchctl.trace_print import print_change
        from traces.load import open_trace
        from traces.transform import shuffle_arrivals

        return print_change(shuffle_arrivals(open_trace(trace), out, seed))

    run_command(run)


ARRIVALS, SHAPE, GROUPS = "Arrivals", "Lengths", "Prefix groups and trees"


@app.command()
def synth(
    shape: Annotated[
        str,
        typer.Argument(
            help="sharegpt, sharegpt-single, azure-conv, azure-code, mooncake-agents, rag, long-context, reasoning, "
            "prefix-repetition, generated-shared-prefix, prefix-tree, or like:TRACE.",
            show_default=False,
        ),
    ],
    out: Out,
    num_requests: Annotated[
        int | None, opt("--num-requests", "-n", help="Default 1000; of prefix groups all of them.")
    ] = None,
    duration: Annotated[float | None, opt("--duration", help="Stop at this second, if that comes first.")] = None,
    seed: Seed = 0,
    name: Annotated[str | None, opt("--name", panel=OUTPUT, help="The trace's name. Default: the shape's.")] = None,
    rate: Annotated[
        float | None, opt("--rate", panel=ARRIVALS, help="Starts a second. Default: the shape's own.")
    ] = None,
    gap: Annotated[
        str | None,
        opt("--gap", panel=ARRIVALS, help="poisson, gamma, weibull, constant or empirical. Default: the shape's own."),
    ] = None,
    burstiness: Annotated[
        float | None, opt("--burstiness", panel=ARRIVALS, help="Shape of gamma and Weibull gaps; smaller is burstier.")
    ] = None,
    course: Annotated[
        str | None, opt("--course", panel=ARRIVALS, help="Of the rate: steady, ramp, diurnal or onoff. Default steady.")
    ] = None,
    rate_from: Annotated[
        float | None, opt("--rate-from", panel=ARRIVALS, help="Where a ramp begins. Default 0.")
    ] = None,
    period: Annotated[
        float | None, opt("--period", panel=ARRIVALS, help="Seconds of a ramp, or of a day. Default 86400.")
    ] = None,
    amplitude: Annotated[
        float | None, opt("--amplitude", panel=ARRIVALS, help="Of a day, as a share of the rate. Default 0.8.")
    ] = None,
    on: Annotated[float | None, opt("--on", panel=ARRIVALS, help="onoff: seconds with arrivals. Default 60.")] = None,
    off: Annotated[float | None, opt("--off", panel=ARRIVALS, help="onoff: seconds without. Default 60.")] = None,
    input_scale: Annotated[
        float, opt("--input-scale", panel=SHAPE, help="Multiplies new prompt tokens. Default 1.")
    ] = 1.0,
    output_scale: Annotated[float, opt("--output-scale", panel=SHAPE, help="Multiplies outputs. Default 1.")] = 1.0,
    think_scale: Annotated[float, opt("--think-scale", panel=SHAPE, help="Multiplies think times. Default 1.")] = 1.0,
    max_context: Annotated[
        int | None, opt("--max-context", panel=SHAPE, help="Longest prompt and output; a session ends before it.")
    ] = None,
    priorities: Annotated[
        str | None, opt("--priorities", panel=SHAPE, help="Values with weights: 0:0.9,10:0.1.")
    ] = None,
    num_groups: Annotated[
        int | None, opt("--num-groups", "--num-prefixes", panel=GROUPS, help="Default 10 (SGLang: 64).")
    ] = None,
    per_group: Annotated[
        int | None, opt("--per-group", panel=GROUPS, help="Prompts of a group. Default 100 (SGLang: 16).")
    ] = None,
    prefix_len: Annotated[
        int | None,
        opt("--prefix-len", panel=GROUPS, help="Shared tokens of a group, or of a node. Default 256 (SGLang: 2048)."),
    ] = None,
    suffix_len: Annotated[
        int | None, opt("--suffix-len", panel=GROUPS, help="Tokens of its own. Default 256 (SGLang and tree: 128).")
    ] = None,
    output_len: Annotated[int | None, opt("--output-len", panel=GROUPS, help="Default 128 (SGLang: 256).")] = None,
    range_ratio: Annotated[
        float, opt("--range-ratio", panel=GROUPS, help="Suffix and output uniform in 1 ± ratio. Default 0.")
    ] = 0.0,
    zipf: Annotated[
        float | None,
        opt("--zipf", panel=GROUPS, help="Draw the group with this exponent. Default: every group alike; a tree: 1."),
    ] = None,
    depth: Annotated[int | None, opt("--depth", panel=GROUPS, help="Nodes of a tree's path. Default 3.")] = None,
    branches: Annotated[int | None, opt("--branches", panel=GROUPS, help="Children of a node. Default 4.")] = None,
) -> None:
    """Make a trace by seed, after the statistics of a public one, of prefix groups, or of a trace of your own.

    Example: benchctl trace synth azure-conv --num-requests 2000 -o azure-like.jsonl
    """
    given = dict(locals())

    def run() -> int:
        from benchctl.trace_options import synth_plan
        from benchctl.trace_print import print_synth
        from traces.synthesis import synthesize

        kind, process, options = synth_plan(**given)
        return print_synth(synthesize(kind, process, options, out))

    run_command(run)
