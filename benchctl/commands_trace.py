"""`benchctl trace …`: parse → call → print. The work is done in `traces`; heavy imports stand inside the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchctl.app import app as benchctl_app
from benchctl.app import exit_with, out_opt
from benchctl.places import check_file

app = typer.Typer(name="trace", help="Import, look at, make and change traces.", no_args_is_help=True)
benchctl_app.add_typer(app)

READ, TIMES, ROWS, OUTPUT = "Reading", "Times", "Rows", "Output"


def opt(*names: str, panel: str | None = None, help: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, show_default=False, **more)


Out = Annotated[
    Path, out_opt("--out", "-o", panel=OUTPUT, kind=Path, help="The trace to write; packed where it ends in .gz.")
]
Json = Annotated[bool, opt("--json", panel=OUTPUT, help="Print the result as JSON.")]
SkipBad = Annotated[bool, opt("--skip-bad", panel=READ, help="Leave faulty rows out, and count them.")]
Seed = Annotated[int, opt("--seed", help="Of everything that is drawn. Default 0.")]


def run_command(run: Callable[[], int]) -> None:
    """End the command with the exit code of `run`."""
    exit_with(run)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="The source file; gzip is recognized by content.", show_default=False)],
    out: Out,
    format: Annotated[
        str | None,
        opt("--format", "-f", panel=READ, help="Of `benchctl trace formats`. Default: told from the content."),
    ] = None,
    map: Annotated[
        list[str] | None,
        opt("--map", panel=READ, help="Columns of a file in no known format: arrival=ts,input=prompt_tokens,output=n."),
    ] = None,
    with_: Annotated[
        list[Path] | None, opt("--with", panel=READ, help="A file that belongs to it (RAGPulse, ServeGen). Repeatable.")
    ] = None,
    skip_bad: SkipBad = False,
    block_size: Annotated[
        int | None, opt("--block-size", panel=READ, help="Tokens of a hash id. Default: the format's own.")
    ] = None,
    time_unit: Annotated[
        str | None, opt("--time-unit", panel=TIMES, help="s, ms, us or ns. Default: the format's own.")
    ] = None,
    on_descent: Annotated[
        str,
        opt(
            "--on-descent",
            panel=TIMES,
            help="Where time goes back by a second or more: error, sort, or fold=SECONDS. Default error.",
        ),
    ] = "error",
    spread: Annotated[
        str, opt("--spread", panel=TIMES, help="uniform: draw times inside each tick of a coarse clock. Default none.")
    ] = "none",
    request_rate: Annotated[
        str | None,
        opt(
            "--request-rate",
            panel=TIMES,
            help="Of sources without times: starts a second, or inf. Default 1; batches inf.",
        ),
    ] = None,
    burstiness: Annotated[
        float, opt("--burstiness", panel=TIMES, help="Shape of the gamma gaps of drawn starts. Default 1: Poisson.")
    ] = 1.0,
    seed: Annotated[int, opt("--seed", panel=TIMES, help="Of everything that is drawn. Default 0.")] = 0,
    duration: Annotated[
        float | None,
        opt("--duration", panel=TIMES, help="Seconds to draw of ServeGen client data. Default: all its windows."),
    ] = None,
    failed: Annotated[
        str,
        opt(
            "--failed",
            panel=ROWS,
            help="Failed requests: skip, keep-as-1 (lengths of 0 become 1) or error. Default skip.",
        ),
    ] = "skip",
    output_length: Annotated[
        int | None, opt("--output-length", panel=ROWS, help="For rows whose source has no output length.")
    ] = None,
    shared_prefix: Annotated[
        int | None, opt("--shared-prefix", panel=ROWS, help="Azure: the first N tokens of all prompts are the same.")
    ] = None,
    text: Annotated[
        bool | None,
        opt(
            "--text/--no-text",
            panel=ROWS,
            help="Keep texts, or only lengths and what is shared. Default: the format's own way.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        opt(
            "--tokenizer",
            panel=ROWS,
            help="A local model folder to count tokens with. Default: characters / 4, which the header says.",
        ),
    ] = None,
    single_turn: Annotated[
        bool,
        opt(
            "--single-turn", panel=ROWS, help="Conversations: the first question only, with vLLM bench's length filter."
        ),
    ] = False,
    limit: Annotated[int | None, opt("--limit", panel=ROWS, help="Stop after N requests.")] = None,
    name: Annotated[str | None, opt("--name", panel=OUTPUT, help="The trace's name. Default: the file's.")] = None,
    licence: Annotated[str | None, opt("--licence", panel=OUTPUT, help="Of the data, for the header.")] = None,
    json: Json = False,
) -> None:
    """Import a trace of another format. What was drawn, assumed, dropped and counted stands in the new header.

    Example: benchctl trace import AzureLLMInferenceTrace_conv.csv -o azure-conv.jsonl
    """
    given = dict(locals())

    def run() -> int:
        from benchctl.trace_options import import_options
        from benchctl.trace_print import print_import
        from traces.importing import import_trace

        return print_import(import_trace(file, out, import_options(**given)), json)

    run_command(run)


@app.command()
def formats() -> None:
    """List the formats that `trace import` reads, in the order in which they are tried.

    Example: benchctl trace formats
    """

    def run() -> int:
        from traces.formats import all_formats

        for name, format in all_formats().items():
            print(f"{name:18} {format.title}")
        return 0

    run_command(run)


Trace = Annotated[str, typer.Argument(help="A trace, or a bundled one by name.", show_default=False)]


@app.command()
def info(
    trace: Trace,
    block_size: Annotated[
        int, opt("--block-size", help="Of the engine, for the token figures of the prefix cache. Default 16.")
    ] = 16,
    max_model_len: Annotated[
        int | None, opt("--max-model-len", help="Say how many requests are longer, and the longest.")
    ] = None,
    skip_bad: Annotated[bool, opt("--skip-bad", help="Leave faulty rows out, and count them.")] = False,
    html: Annotated[
        Path | None, out_opt("--html", kind=Path, panel=OUTPUT, help="Draw the distributions into one offline page.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what a trace is like: arrivals, lengths, sessions, and what a prefix cache could save.

    Example: benchctl trace info traces/sharegpt.jsonl --max-model-len 2048
    """

    def run() -> int:
        from benchctl.trace_options import at_least_one
        from benchctl.trace_print import print_info
        from traces.info import describe
        from traces.load import open_trace

        at_least_one("--block-size", block_size)
        at_least_one("--max-model-len", max_model_len)
        if html is not None:
            check_file(html, "--html", in_place=True)
        found = describe(open_trace(trace, skip_bad=skip_bad), block_size=block_size, max_model_len=max_model_len)
        if html is not None:
            from benchctl.trace_page import write_trace_page

            write_trace_page(found, html)
        return print_info(found, json, html)

    run_command(run)


@app.command()
def validate(
    trace: Trace,
    strict: Annotated[bool, opt("--strict", help="Unknown keys are faults too.")] = False,
    json: Json = False,
) -> None:
    """List every fault of a trace, not the first alone. Exit code 2 where there is one.

    Example: benchctl trace validate traces/burst.jsonl
    """

    def run() -> int:
        from benchctl.trace_print import print_validation
        from traces.validation import validate as check

        return print_validation(check(trace, strict=strict), json)

    run_command(run)


@app.command()
def export(
    trace: Trace,
    out: Out,
    to: Annotated[str, opt("--to", "-t", help="mooncake, vllm-custom or canonical.")],
    block_size: Annotated[
        int | None, opt("--block-size", help="Mooncake: tokens of the hash ids that have to be made. Default 512.")
    ] = None,
    vocab_size: Annotated[
        int | None, opt("--vocab-size", help="vllm-custom: make token ids below N for rows without text.")
    ] = None,
) -> None:
    """Write a trace in another format. What that format has no place for is counted.

    Example: benchctl trace export traces/sharegpt.jsonl --to mooncake -o mooncake.jsonl
    """

    def run() -> int:
        from benchctl.trace_options import at_least_one, one_of
        from benchctl.trace_print import print_export
        from traces.exporting import EXPORTERS, export_trace
        from traces.load import open_trace

        one_of("--to", to, tuple(EXPORTERS))
        at_least_one("--block-size", block_size)
        at_least_one("--vocab-size", vocab_size)
        return print_export(export_trace(open_trace(trace), out, to, block_size=block_size, vocab_size=vocab_size))

    run_command(run)
