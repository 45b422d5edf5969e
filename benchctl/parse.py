"""From the words of a command line to options: numbers, lists and choices checked, each refusal naming its flag."""

from __future__ import annotations

import math
import sys
from typing import Any

from benchctl.config import KNOB_NAMES, ReplayOptions, flag
from traces.errors import BenchctlError

CHOICES: dict[str, tuple[str, ...]] = {
    "engine": ("auto", "torch", "null", "simulated"),
    "clock": ("wall", "virtual", "rounds", "recorded"),
    "arrivals": ("trace", "session"),
    "outputs": ("forced", "sampled"),
    "over_length": ("reject", "skip", "truncate", "error"),
    "records": ("none", "summary", "compact", "full"),
    "load_format": ("auto", "dummy"),
    "scheduling_policy": ("fcfs", "priority"),
}
AT_LEAST: dict[str, float] = {
    "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, "block_size": 1, "kv_cache_tokens": 1, "num_blocks": 1,
    "max_loras": 1, "long_prefill_token_threshold": 0, "max_concurrency": 1, "num_prompts": 1, "num_warmups": 0, "num_repeats": 1,
    "seed": 0, "tensor_parallel_size": 1, "verify": 0,
}  # fmt: skip
MAX_INT = 2**60  # of any integer but the seed: sums of two stay inside the record's int64
MAX_SEED = 2**63 - 1
MAX_SCALE = 1e12  # of --time-scale, and of 1 / --speedup
MIN_RATE = 1e-9  # requests a second
MIN_BURSTINESS = 1e-6
# Of --round-cost: seconds a round, a fed token, a token of context. Far beyond any device; a run's clock holds their sums.
MAX_ROUND_COST = (1e4, 1.0, 1e-3)
METRICS = ("ttft", "tpot", "itl", "e2el")


def replay_options(**given: Any) -> ReplayOptions:
    """`given`: the parameters of the command, by name. Raises BenchctlError."""
    for name, allowed in CHOICES.items():
        if given[name] is not None and given[name] not in allowed:
            raise BenchctlError(f"{flag(name)} is {given[name]!r}", fix=f"one of {', '.join(allowed)}")
    for name, least in AT_LEAST.items():
        if given[name] is not None and given[name] < least:
            raise BenchctlError(f"{flag(name)} is {given[name]}", fix=f"give {least:g} or more")
        most = MAX_SEED if name == "seed" else MAX_INT
        if given[name] is not None and given[name] > most:
            raise BenchctlError(f"{flag(name)} is {given[name]}", fix=f"give {most} or less")
    for name, value in given.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not is_unicode(text):
                raise BenchctlError(
                    f"the bytes of {text!r} are no UTF-8",
                    where="TRACE" if name == "trace" else flag(name),
                    fix="name it in UTF-8",
                )
    scale = _scale(given["time_scale"], given["speedup"])
    rate = _rate(given["request_rate"])
    if given["burstiness"] is not None and rate is None:
        raise BenchctlError("--burstiness shapes the gaps of --request-rate", fix="add --request-rate R")
    burstiness = 1.0 if given["burstiness"] is None else _positive("--burstiness", given["burstiness"])
    if burstiness < MIN_BURSTINESS:
        raise BenchctlError(f"--burstiness is {burstiness}", fix=f"give {MIN_BURSTINESS:g} or more")
    if rate is not None and scale is not None:
        raise BenchctlError("--request-rate replaces the gaps that --time-scale and --speedup change", fix="give one")
    if given["warm_cache"] and not given["num_warmups"]:
        raise BenchctlError("--warm-cache keeps the blocks of warm-ups, and there are none", fix="--num-warmups N")
    share = given["gpu_memory_utilization"]
    if share is not None and not 0 < share <= 1:
        raise BenchctlError(f"--gpu-memory-utilization is {share}", fix="a share of the card: 0.9")
    if not 0 <= given["temperature"] < math.inf:
        raise BenchctlError(f"--temperature is {given['temperature']}", fix="give 0 or more")
    metrics = tuple(_words(given["percentile_metrics"]))
    for metric in metrics:
        if metric not in METRICS:
            raise BenchctlError(f"no metric named {metric!r}", where="--percentile-metrics", fix=", ".join(METRICS))
    return ReplayOptions(
        trace=given["trace"],
        schedulers=tuple(given["scheduler"] or ()),
        engine=given["engine"],
        profile=given["profile"],
        model=given["model"],
        load_format=given["load_format"],
        dtype=given["dtype"],
        seed=given["seed"],
        outputs=given["outputs"],
        temperature=given["temperature"],
        attention_backend=given["attention_backend"],
        enforce_eager=given["enforce_eager"],
        tensor_parallel_size=given["tensor_parallel_size"],
        verify=given["verify"],
        overlap=given["overlap"],
        gpu_memory_utilization=share,
        knobs={name: given[name] for name in KNOB_NAMES if given.get(name) is not None},
        num_blocks=given["num_blocks"],
        kv_cache_tokens=given["kv_cache_tokens"],
        clock=given["clock"],
        round_cost=_round_cost(given["round_cost"], given["engine"]),
        round_seconds=_positive("--round-seconds", given["round_seconds"]),
        from_run=given["from_run"],
        arrivals=given["arrivals"],
        max_concurrency=given["max_concurrency"],
        request_rate=rate,
        burstiness=burstiness,
        time_scale=scale,
        num_prompts=given["num_prompts"],
        num_warmups=given["num_warmups"],
        warm_cache=given["warm_cache"],
        num_repeats=given["num_repeats"],
        over_length=given["over_length"],
        skip_bad=given["skip_bad"],
        validate_first=given.get("validate_first", True),
        records=given["records"],
        out=given["out"],
        force=given["force"],
        report=given["report"],
        json=given["json"],
        goodput=parse_goodput(given["goodput"] or []),
        percentile_metrics=metrics,
        metric_percentiles=_percentiles(given["metric_percentiles"]),
        command=tuple(["benchctl", *sys.argv[1:]]),
    )


def parse_goodput(values: list[str]) -> dict[str, float]:
    """SLOs in milliseconds: `ttft:200`, `e2el:3s`; several in one value may stand apart by spaces or commas."""
    out: dict[str, float] = {}
    for text in (word for value in values for word in _words(value)):
        name, colon, amount = text.partition(":")
        name = {"e2e": "e2el"}.get(name, name)
        scale = 1.0
        for suffix, factor in (("ms", 1.0), ("s", 1000.0)):
            if amount.endswith(suffix):
                amount, scale = amount.removesuffix(suffix), factor
                break
        try:
            limit = float(amount) * scale
        except ValueError:
            limit = math.nan
        if name not in METRICS or not colon or not 0 < limit < math.inf:
            raise BenchctlError(f"no SLO: {text!r}", where="--goodput", fix="ttft:200, tpot:50 or e2el:3s")
        if name in out:
            raise BenchctlError(f"two SLOs for {name}", where="--goodput", fix="give one")
        out[name] = limit
    return out


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise BenchctlError(f"{name} is {value}", fix="give a number above 0")
    return value


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8: arguments whose bytes were no UTF-8 hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _scale(time_scale: float | None, speedup: float | None) -> float | None:
    if time_scale is not None and speedup is not None:
        raise BenchctlError("--time-scale multiplies the gaps and --speedup divides them", fix="give one of the two")
    if speedup is not None:
        if _positive("--speedup", speedup) < 1.0 / MAX_SCALE:
            raise BenchctlError(f"--speedup is {speedup}", fix=f"give {1.0 / MAX_SCALE:g} or more")
        return 1.0 / speedup
    if time_scale is not None and _positive("--time-scale", time_scale) > MAX_SCALE:
        raise BenchctlError(f"--time-scale is {time_scale}", fix=f"give {MAX_SCALE:g} or less")
    return time_scale


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise BenchctlError(f"--request-rate is {text!r}", fix="requests a second, such as 4.5, or inf")
    if rate < MIN_RATE:
        raise BenchctlError(f"--request-rate is {text!r}", fix=f"give {MIN_RATE:g} requests a second or more")
    return rate


def _round_cost(text: str | None, engine: str) -> tuple[float, float, float] | None:
    if text is None:
        return None
    if engine != "null":
        raise BenchctlError("--round-cost is what a round of the null engine takes", fix="add --engine null")
    try:
        a, b, c = (float(word) for word in text.split(","))
    except ValueError:
        raise BenchctlError(f"--round-cost is {text!r}", fix="three numbers of seconds: 5e-3,20e-6,2e-9") from None
    if any(cost > most for cost, most in zip((a, b, c), MAX_ROUND_COST, strict=True)):
        most = "at most {:g} s a round, {:g} a token, {:g} a token of context".format(*MAX_ROUND_COST)
        raise BenchctlError(
            f"--round-cost is {text!r}, far beyond any device", fix=f"{most}; 5e-3,20e-6,2e-9 is the default"
        )
    return a, b, c


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(word) for word in _words(text))
    except ValueError:
        values = ()
    if not values or not all(0 < value < 100 for value in values):
        raise BenchctlError(f"--metric-percentiles is {text!r}", fix="numbers between 0 and 100: 50,90,95,99")
    return values
