"""From the words of `benchctl trace` to options: numbers, lists and choices checked, each refusal naming its flag."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from traces.errors import BenchctlError
from traces.formats.base import Counts, ImportOptions

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
