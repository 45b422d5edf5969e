"""Source formats of traces, one short module each: `FORMATS` is read top down, the first that recognizes a file takes it."""

from __future__ import annotations

from importlib.metadata import entry_points

from traces.errors import BenchctlError
from traces.formats import (
    aibrix,
    aiperf,
    azure,
    bailian,
    burstgpt,
    canonical,
    chats,
    copilot,
    lengths,
    llmservingsim,
    mapped,
    mooncake,
    openai,
    otel,
    payloads,
    ragpulse,
    servegen,
    servegen_clients,
    sglang_agentic,
    sharegpt,
    splitwise_sim,
    vidur,
    vllm_custom,
    weka,
)
from traces.formats.base import Format, Sample

ENTRY_POINTS = "benchctl.trace_formats"  # other people's packages: name = "package.module:FORMAT"

# From the most particular to the least: a key that only one format has comes before keys that several have.
FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT
    for module in (
        canonical, azure, burstgpt, vidur, lengths, splitwise_sim, servegen_clients,
        ragpulse, bailian, copilot, weka, otel, aibrix, llmservingsim, servegen, openai, sglang_agentic, sharegpt, chats, payloads, aiperf, mooncake,
        vllm_custom, mapped,
    )
}  # fmt: skip


def all_formats() -> dict[str, Format]:
    """Ours, and those that installed packages offer under the entry point `benchctl.trace_formats`. Raises BenchctlError."""
    found: dict[str, Format] = {}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            offered = point.load()
        except Exception as error:  # another package's import may raise anything
            raise BenchctlError(
                f"the trace format {point.name} cannot be loaded: {error}",
                where=f"entry point {point.value}",
                fix="mend or uninstall that package",
            ) from error
        if not isinstance(offered, Format):
            raise BenchctlError(f"{point.value} is no traces.formats.base.Format", where=f"entry point {point.name}")
        found[offered.name] = offered
    # Another package's format was installed on purpose: it is asked first.
    return {**found, **FORMATS}


def find_format(sample: Sample, name: str | None) -> Format:
    """The format of this name, or the one whose files look so. Raises BenchctlError that shows what was seen."""
    formats = all_formats()
    if name is not None:
        if name not in formats:
            raise BenchctlError(f"no format named {name!r}", where="--format", fix=", ".join(formats))
        return formats[name]
    for format in formats.values():
        if format.tell(sample):
            return format
    seen = ", ".join(sample.columns[:12]) if sample.kind == "csv" else ", ".join(list(sample.first)[:12])
    what = "columns" if sample.kind == "csv" else "keys"
    raise BenchctlError(
        f"no known format has these {what}: {seen or 'none'}",
        where=f"{sample.path}, line 1",
        fix="--format NAME, or name the columns: --map arrival=…,input=…,output=…",
    )
