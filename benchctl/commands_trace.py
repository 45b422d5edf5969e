"""`benchctl trace …`: parse → call → print. The work is done in `traces`; heavy imports stand inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchctl.cli import app as benchctl_app
from benchctl.cli import exit_with

app = typer.Typer(name="trace", help="Import, look at, make and change traces.", no_args_is_help=True)
benchctl_app.add_typer(app)

READ, TIMES, ROWS, OUTPUT = "Reading", "Times", "Rows", "Output"


def opt(*names: str, panel: str | None = None, help: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, show_default=False, **more)


Out = Annotated[Path, opt("--out", "-o", panel=OUTPUT, help="The trace to write; packed where it ends in .gz.")]
Json = Annotated[bool, opt("--json", panel=OUTPUT, help="Print the result as JSON.")]
SkipBad = Annotated[bool, opt("--skip-bad", panel=READ, help="Leave faulty rows out, and count them.")]
Seed = Annotated[int, opt("--seed", help="Of everything that is drawn. Default 0.")]


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

    exit_with(run)


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

    exit_with(run)
