"""From the words of `benchctl trace` to options: numbers, lists and choices checked, each refusal naming its flag."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from traces.arrival_process import ArrivalProcess
from traces.errors import BenchctlError
from traces.formats.base import Counts, ImportOptions
from traces.likeness import shape_like
from traces.load import Trace, open_trace
from traces.shapes import SHAPES, Shape
from traces.synthesis import PrefixGroups, PrefixTree, SynthOptions, with_arrivals
from traces.transform import SliceOptions, factor_for_rate

Kind = Shape | PrefixGroups | PrefixTree

CHOICES = {
    "failed": ("skip", "keep-as-1", "error"),
    "spread": ("none", "uniform"),
    "time_unit": ("s", "ms", "us", "ns"),
}


def import_options(**given: Any) -> ImportOptions:
    """`given`: the parameters of `trace import`, by name. Raises BenchctlError."""
    for name, allowed in CHOICES.items():
        one_of(f"--{name.replace('_', '-')}", given[name], allowed)
    for name in ("block_size", "output_length", "shared_prefix", "limit"):
        at_least_one(f"--{name.replace('_', '-')}", given[name])
    positive("--burstiness", given["burstiness"])
    positive("--duration", given["duration"])
    columns = columns_of(given["map"] or [])
    if columns and given["format"] not in (None, "mapped"):
        raise BenchctlError("--map names columns and --format a known layout", fix="give one of the two")
    if given["format"] == "mapped" and not columns:
        raise BenchctlError("--format mapped needs --map", fix="--map arrival=COLUMN,input=COLUMN,output=COLUMN")
    tokenizer: Path | None = given["tokenizer"]
    return ImportOptions(
        format=given["format"],
        skip_bad=given["skip_bad"],
        failed=given["failed"],
        on_descent=given["on_descent"],
        spread=given["spread"],
        time_unit=given["time_unit"],
        request_rate=rate_of(given["request_rate"]),
        burstiness=given["burstiness"],
        seed=given["seed"],
        output_length=given["output_length"],
        block_size=given["block_size"],
        text=given["text"],
        count_tokens=None if tokenizer is None else token_counter(tokenizer),
        tokenizer=None if tokenizer is None else tokenizer.name,
        side_files=tuple(given["with_"] or ()),
        columns=columns,
        shared_prefix=given["shared_prefix"],
        single_turn=given["single_turn"],
        limit=given["limit"],
        duration_s=given["duration"],
        name=given["name"],
        licence=given["licence"],
    )


def columns_of(values: list[str]) -> dict[str, str]:
    """`arrival=ts,input=prompt_tokens` in one value or several. Raises BenchctlError."""
    out: dict[str, str] = {}
    for pair in (pair for value in values for pair in value.split(",") if pair.strip()):
        ours, equals, theirs = pair.strip().partition("=")
        if not equals or not ours or not theirs:
            raise BenchctlError(f"--map has {pair!r}", fix="ours=theirs, such as arrival=ts,input=prompt_tokens")
        if ours in out:
            raise BenchctlError(f"--map names {ours} twice", fix="give one column for it")
        out[ours.strip()] = theirs.strip()
    return out


def one_of(flag: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise BenchctlError(f"{flag} is {value!r}", fix=f"one of {', '.join(allowed)}")


def at_least_one(flag: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise BenchctlError(f"{flag} is {value}", fix="give 1 or more")


def positive(flag: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise BenchctlError(f"{flag} is {value}", fix="give a number above 0")


def rate_of(text: str | None) -> float | None:
    """Requests a second, or inf. Raises BenchctlError."""
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise BenchctlError(f"--request-rate is {text!r}", fix="requests a second, such as 4.5, or inf")
    return rate


def token_counter(folder: Path) -> Counts:
    """Counts with the tokenizer of a local model folder, without special tokens. Raises BenchctlError."""
    if not folder.is_dir():
        raise BenchctlError(
            f"{folder} is no folder", where="--tokenizer", fix="a local model folder with tokenizer.json"
        )
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for a folder that is no tokenizer
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BenchctlError(
            f"no tokenizer in {folder}: {reason:.120}", where="--tokenizer", fix="check the folder"
        ) from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def slice_options(**given: Any) -> SliceOptions:
    """The fields of SliceOptions. Raises BenchctlError."""
    share = given["keep_share"]
    if share is not None and not 0 < share <= 1:
        raise BenchctlError(f"--keep is {share}", fix="a share of the sessions, such as 0.1")
    start, end = given["start_s"], given["end_s"]
    if start is not None and end is not None and end <= start:
        raise BenchctlError(f"--end {end:g} is not after --start {start:g}", fix="give a later end")
    if given["max_model_len"] is not None and given["max_model_len"] < 2:
        raise BenchctlError(f"--max-model-len is {given['max_model_len']}", fix="give 2 or more")
    return SliceOptions(**given)


def scale_factor(trace: Trace, time_scale: float | None, speedup: float | None, rate: float | None) -> float:
    """One of the three, as a factor on gaps. Raises BenchctlError."""
    flags = {"--time-scale": time_scale, "--speedup": speedup, "--rate": rate}
    given = {flag: value for flag, value in flags.items() if value is not None}
    if len(given) != 1:
        raise BenchctlError(f"{' and '.join(given) or 'no scale'} given", fix="one of --time-scale, --speedup, --rate")
    flag, value = given.popitem()
    positive(flag, value)
    if flag == "--rate":
        return factor_for_rate(trace, value)
    return value if flag == "--time-scale" else 1 / value


def synth_plan(**given: Any) -> tuple[Kind, ArrivalProcess, SynthOptions]:
    """From the parameters of `trace synth`: what to make, when it arrives, how much. Raises BenchctlError."""
    for name in ("duration", "rate", "burstiness", "period", "on", "input_scale", "output_scale", "think_scale"):
        positive(f"--{name.replace('_', '-')}", given[name])
    for name in (
        "num_requests",
        "max_context",
        "num_groups",
        "per_group",
        "output_len",
        "suffix_len",
        "depth",
        "branches",
    ):
        at_least_one(f"--{name.replace('_', '-')}", given[name])
    kind, process = _kind_of(given)
    process = with_arrivals(
        process, rate=given["rate"], gap=given["gap"], shape=given["burstiness"], course=given["course"], rate_from=given["rate_from"],
        period_s=given["period"], amplitude=given["amplitude"], on_s=given["on"], off_s=given["off"],
    )  # fmt: skip
    if given["burstiness"] is not None and process.gap not in ("gamma", "weibull"):
        if given["gap"] is not None:
            raise BenchctlError(f"--burstiness says nothing of {process.gap} gaps", fix="--gap gamma or --gap weibull")
        process = with_arrivals(process, gap="gamma")
    all_of_them = kind.num_groups * kind.per_group if isinstance(kind, PrefixGroups) else 1000
    return kind, process, SynthOptions(
        num_requests=given["num_requests"] or all_of_them, duration_s=given["duration"], seed=given["seed"], input_scale=given["input_scale"],
        output_scale=given["output_scale"], think_scale=given["think_scale"], max_context=given["max_context"],
        priorities=priorities_of(given["priorities"]), name=given["name"],
    )  # fmt: skip


def _kind_of(given: dict[str, Any]) -> tuple[Kind, ArrivalProcess]:
    name: str = given["shape"]
    groups = {"prefix-repetition": (10, 100, 256, 256, 128), "generated-shared-prefix": (64, 16, 2048, 128, 256)}
    if name in groups:
        asked = [given[key] for key in ("num_groups", "per_group", "prefix_len", "suffix_len", "output_len")]
        sizes = [default if value is None else value for value, default in zip(asked, groups[name], strict=True)]
        number, each, prefix, suffix, output = sizes
        return PrefixGroups(
            number, each, prefix, suffix, output, range_ratio=given["range_ratio"], zipf=given["zipf"]
        ), ArrivalProcess(1.0)
    if name == "prefix-tree":
        tree = PrefixTree()
        changes = {"depth": given["depth"], "branches": given["branches"], "node_len": given["prefix_len"]}
        changes |= {"suffix_len": given["suffix_len"], "output_len": given["output_len"], "zipf": given["zipf"]}
        return replace(tree, **{key: value for key, value in changes.items() if value is not None}), ArrivalProcess(1.0)
    if name.startswith("like:"):
        shape = shape_like(open_trace(name.removeprefix("like:")))
    elif name in SHAPES:
        shape = SHAPES[name]
    else:
        known = ", ".join([*SHAPES, *groups, "prefix-tree", "like:TRACE"])
        raise BenchctlError(f"no shape named {name!r}", where="trace synth", fix=f"one of {known}")
    return shape, shape.arrivals


def priorities_of(text: str | None) -> tuple[tuple[int, float], ...]:
    """`0:0.9,10:0.1`. Raises BenchctlError."""
    out = []
    for pair in (pair for pair in (text or "").split(",") if pair.strip()):
        value, _, weight = pair.partition(":")
        try:
            entry = int(value), float(weight or 1)
        except ValueError:
            entry = 0, -1.0
        if not 0 < entry[1] < math.inf:
            raise BenchctlError(f"--priorities has {pair!r}", fix="value:weight, such as 0:0.9,10:0.1")
        out.append(entry)
    return tuple(out)
