"""One run as the page's template draws it: facts, stop reasons, block grid, spikes, cache, device use, manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass

import polars as pl

from reports import glossary
from reports.blockmap import GRID_ROUNDS, MAX_BLOCKS, BlockGrid, block_grid
from reports.cache import CacheUse, cache_use
from reports.load import arrivals_text
from reports.page_pair import has_null_block
from reports.page_pool import pool_shares
from reports.roofline import Ceilings, Use, ceilings_of, device_use
from reports.run import Run
from reports.spikes import SlowStart, Spike, slow_starts, spikes
from reports.summary import Summary
from reports.terminal import number

LONGEST_TEXT = 120  # of an id or a cell
LONGEST_MANIFEST = 100_000


@dataclass(frozen=True, slots=True)
class RunView:
    """What the template needs of one run. `pool`: frames by owner class and by age, for pools too large for a map."""

    name: str
    index: int  # among the runs of the page
    place: int  # of its colour
    facts: list[tuple[str, str]]
    num_rounds: int
    grid: BlockGrid | None
    has_map: bool
    pool: tuple[pl.DataFrame, pl.DataFrame] | None
    stops: list[tuple[str, str, str, int, float]]  # loop, reason, meaning, rounds, share of the largest
    spikes: list[Spike]
    slow: SlowStart | None
    labels: dict[int, str]
    cache: CacheUse
    use: list[Use]
    ceilings: Ceilings | None
    differs: list[tuple[str, str]]  # setting, how it differs from the real system's default
    command: str
    manifest: str


def make_view(run: Run, name: str, place: int, summary: Summary, gaps: pl.DataFrame) -> RunView:
    """`gaps`: `metrics.itl` of the run, collected."""
    num_rounds = run.read("rounds").height
    manifest = json.dumps(run.manifest, indent=2, ensure_ascii=False, default=str)
    command, differs = run.manifest.get("command"), run.manifest.get("policy_differs")
    has_map = bool(run.has("blocks") and run.usable_blocks and run.usable_blocks <= MAX_BLOCKS and num_rounds)
    found = spikes(run, gaps=gaps)
    slow = slow_starts(run)
    named = {spike.request for spike in found} | set(slow.worst if slow else ())
    return RunView(
        name=name,
        index=place,
        place=place % 6,
        facts=_facts(run, summary),
        num_rounds=num_rounds,
        grid=block_grid(run) if has_map and num_rounds <= GRID_ROUNDS else None,
        has_map=has_map,
        pool=None if has_map else pool_shares(run),
        stops=_stops(summary),
        spikes=found,
        slow=slow,
        labels={request: shortened(run.labels.get(request, f"#{request}"), 40) for request in named},
        cache=cache_use(run, summary),
        use=device_use(run),
        ceilings=ceilings_of(run),
        differs=[(str(key), str(value)) for key, value in differs.items()] if isinstance(differs, dict) else [],
        command=" ".join(map(str, command)) if isinstance(command, list) else str(command or ""),
        manifest=manifest
        if len(manifest) <= LONGEST_MANIFEST
        else manifest[:LONGEST_MANIFEST] + "\n… cut here; the whole stands in manifest.json",
    )


def trace_name(run: Run) -> str:
    trace = run.manifest.get("trace")
    name = trace.get("name") or trace.get("path") if isinstance(trace, dict) else trace
    return shortened(str(name or run.path.parent.name))


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _facts(run: Run, summary: Summary) -> list[tuple[str, str]]:
    identity = summary["benchctl"]["run"]
    model = run.manifest.get("model")
    model = model.get("name") if isinstance(model, dict) else model
    budget = f"{number(run.token_budget)} tokens, {number(run.max_num_seqs)} sequences"
    facts = [
        ("policy", identity["policy"] or run.scheduler),
        ("engine", " · ".join(str(part) for part in (run.engine, model, run.manifest.get("dtype")) if part)),
        ("device", _device(run)),
        ("clock", run.clock),
        ("arrivals", arrivals_text(run)),
        ("weights", _weights(run)),
        ("outputs", _outputs(run)),
        ("KV pool", _pool(run)),
        ("budget", budget),
        ("cache", _cache_state(run)),
        ("status", run.status),
    ]
    return [(label, shortened(str(value), 200)) for label, value in facts if value not in (None, "")]


def _weights(run: Run) -> str | None:
    """Of an engine that computes: whether the model's own weights were loaded."""
    if run.engine != "torch":
        return None
    how = run.setting("load_format")
    return "random (--load-format dummy): times are real, tokens mean nothing" if how == "dummy" else how


def _outputs(run: Run) -> str | None:
    how = run.setting("outputs")
    if how == "forced":
        return "as many tokens as the trace says, fed from it (--outputs forced)"
    return None if how is None else str(how)


def _pool(run: Run) -> str:
    text = f"{number(run.usable_blocks)} blocks of {number(run.block_size)} tokens"
    return text + (", and the null block" if has_null_block(run) else "")


def _cache_state(run: Run) -> str | None:
    if run.setting("enable_prefix_caching") is False:
        return "prefix caching off"
    warm = run.setting("warm_cache")
    return None if warm is None else "warm at the start" if warm else "cold at the start"


def _device(run: Run) -> str | None:
    hardware = run.manifest.get("hardware")
    if not isinstance(hardware, dict) or run.engine in ("null", "simulated"):
        return None
    gpu = hardware.get("gpu")
    on_gpu = not str(run.manifest.get("device") or run.setting("device") or "cuda").startswith("cpu")
    if isinstance(gpu, dict) and on_gpu:
        return str(gpu.get("name"))
    return (
        " · ".join(
            str(part)
            for part in (hardware.get("cpu"), f"{hardware['cores']} cores" if hardware.get("cores") else None)
            if part
        )
        or None
    )


def _stops(summary: Summary) -> list[tuple[str, str, str, int, float]]:
    stops = summary["benchctl"]["stops"]
    most = max((count for counts in stops.values() for count in counts.values()), default=1)
    return [
        (loop, reason, glossary.STOPS.get(reason, ""), count, count / most)
        for loop, counts in stops.items()
        for reason, count in counts.items()
    ]
