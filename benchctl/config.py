"""A command's options, and what each setting of each policy comes to: flag > earlier run > trace header > default, with its source.

Must not know an engine or a file: what depends on a device (the pool's default size) is handed in. Every refusal names the
flag. The knobs, their names and defaults are those of `engines.interface.SchedulerConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from benchctl.policies import BUILTIN, find_policy
from engines.interface import SchedulerConfig
from engines.schedulers.registry import SCHEDULERS, PolicyInfo
from traces.errors import BenchctlError

# Defaults of vLLM 0.33.0 that a `vllm` run here does not have, and what they are there.
VLLM_DIFFERS: dict[str, str] = {
    "scheduler_reserve_full_isl": "off here, on in vLLM 0.33.0: there the whole known sequence must fit at admission",
    "async_scheduling": "off here, on in vLLM where it is supported: there round n + 1 is scheduled before round n's tokens are "
    "seen, so a finished request holds its seat and blocks for one round more",
    "max_num_seqs": "512 here; vLLM derives its default from the device and the way it is started",
    "max_num_batched_tokens": "16384 here; vLLM derives its default from the device and the way it is started",
    "max_model_len": "unset here with an engine that has no model; vLLM takes the model's",
    "num_blocks": "given by --kv-cache-tokens or --num-blocks here; vLLM measures free device memory",
}

MAX_BLOCKS = 2**26
MAX_LIMIT = 2**60  # of a limit in a trace's header, as of the flags
POOL_KEYS = ("num_blocks", "kv_cache_tokens")
KNOB_NAMES = tuple(f.name for f in fields(SchedulerConfig) if f.name != "num_blocks")
_DEFAULTS = {f.name: f.default for f in fields(SchedulerConfig)}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from: flag, recorded run, trace header, default, or what it was derived from."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """`benchctl replay` as given. None: not given."""

    trace: str
    schedulers: tuple[str, ...] = ()
    engine: str = "auto"
    profile: str | None = None  # of the simulated engine: a file, or a name
    model: str | None = None
    load_format: str = "auto"
    dtype: str | None = None
    seed: int = 0
    outputs: str = "forced"
    temperature: float = 0.0
    attention_backend: str = "auto"
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    verify: int = 0  # requests computed anew at the end of a run
    overlap: bool | None = None  # None: where the engine works beside the host
    gpu_memory_utilization: float | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)  # knob -> value, those given only
    num_blocks: int | None = None
    kv_cache_tokens: int | None = None
    clock: str | None = None
    round_cost: tuple[float, float, float] | None = None
    round_seconds: float = 1.0
    from_run: str | None = None
    arrivals: str | None = None
    max_concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    time_scale: float | None = None
    num_prompts: int | None = None
    num_warmups: int = 0
    warm_cache: bool = False
    num_repeats: int = 1
    over_length: str = "reject"
    skip_bad: bool = False
    validate_first: bool | None = True  # False: rows are checked while they are replayed; None: so for large files
    records: str = "full"
    out: str | None = None
    force: bool = False
    report: bool = True
    json: bool = False
    goodput: Mapping[str, float] = field(default_factory=dict)  # ttft, tpot, itl, e2el -> ms
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    metric_percentiles: tuple[float, ...] = (50, 90, 95, 99)
    command: tuple[str, ...] = ()
    inherited: frozenset[str] = frozenset()  # settings that are an earlier run's, not the command line's
    what_if: Mapping[str, Any] | None = None  # the run that is asked about, and what is different

    def source_of(self, *names: str) -> str:
        """Whose word a given setting is: the command line's, or an earlier run's."""
        return "recorded run" if names and self.inherited.issuperset(names) else "flag"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """One policy of a command, settled. `usable_tokens`: KV tokens that requests can hold."""

    name: str
    info: PolicyInfo
    config: SchedulerConfig
    settings: Mapping[str, Setting]
    notes: tuple[str, ...]

    @property
    def usable_blocks(self) -> int:
        return self.config.num_blocks - self.info.null_blocks

    @property
    def usable_tokens(self) -> int:
        return self.usable_blocks * self.config.block_size


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def chosen_schedulers(names: tuple[str, ...]) -> tuple[str, ...]:
    """The policies of a command: those named, or all. Raises BenchctlError."""
    names = tuple(find_policy(name) for name in names)
    if len(set(names)) < len(names):
        raise BenchctlError(
            "a scheduler is named twice", where="--scheduler", fix="name each once; --num-repeats N runs each N times"
        )
    return names or BUILTIN


def check_flags(options: ReplayOptions, names: tuple[str, ...]) -> list[str]:
    """Refuse what none of the chosen policies has; say to which of them a flag applies. Raises BenchctlError."""
    notes = []
    for knob in options.knobs:
        having = [name for name in names if knob in SCHEDULERS[name].knobs or knob == "max_model_len"]
        if not having:
            owners = [name for name, info in SCHEDULERS.items() if knob in info.knobs]
            raise BenchctlError(
                f"{flag(knob)} is no setting of {' or '.join(names)}",
                fix=f"leave it out, or add --scheduler {owners[0]}",
            )
        if len(having) < len(names):
            notes.append(f"{flag(knob)} applies to {', '.join(having)} only")
    if options.num_blocks is not None and options.kv_cache_tokens is not None:
        raise BenchctlError(
            "--num-blocks and --kv-cache-tokens both set the pool",
            fix="give one: --kv-cache-tokens is the same for every policy",
        )
    return notes


def settle(
    options: ReplayOptions,
    name: str,
    header: Mapping[str, Any],
    recorded: Mapping[str, Any] | None,
    *,
    default_tokens: Callable[[int], tuple[int, str]],
    model_max_len: int | None = None,
) -> PolicySettings:
    """Every setting of policy `name`.

    `header`: the trace header's `limits`. `recorded`: settings of an earlier run (`recorded_settings`), or None.
    `default_tokens(block_size)`: the pool where nothing sets it, and why that. `model_max_len`: None without a model.
    Raises BenchctlError.
    """
    info, notes = SCHEDULERS[name], list[str]()
    own, common = header.get(name) or {}, header.get("common") or {}
    for place, limits in (("common", common), (name, own)):
        for key in limits:
            if key not in KNOB_NAMES and key not in POOL_KEYS:
                notes.append(f"the trace header's limits.{place}.{key} is no setting of benchctl: ignored")

    def lookup(key: str) -> Setting | None:
        if options.knobs.get(key) is not None:
            return Setting(options.knobs[key], options.source_of(key))
        if recorded is not None and recorded.get(key) is not None:
            return Setting(recorded[key], "recorded run")
        for limits in (own, common):
            if limits.get(key) is not None:
                return Setting(_checked(key, limits[key]), "trace header")
        return None

    settings: dict[str, Setting] = {}
    for key in KNOB_NAMES:
        if key in info.knobs or key == "max_model_len":
            default = info.default_block_size if key == "block_size" else _DEFAULTS[key]
            settings[key] = lookup(key) or Setting(default, "default")
    block_size = settings["block_size"].value
    if block_size < 1:
        raise BenchctlError(f"--block-size is {block_size}", fix="give 1 or more")
    settings["num_blocks"] = _pool(options, info, block_size, own, common, recorded, default_tokens)
    if settings["num_blocks"].value > MAX_BLOCKS:
        raise BenchctlError(
            f"a pool of {settings['num_blocks'].value} blocks is beyond what is kept in memory here ({MAX_BLOCKS})",
            fix="a smaller --kv-cache-tokens or --num-blocks, or a larger --block-size",
        )
    usable = (settings["num_blocks"].value - info.null_blocks) * block_size
    length = settings["max_model_len"]
    if model_max_len is not None:
        settings["max_model_len"] = length = _model_length(length, model_max_len, usable, notes)
    elif length.value is not None and usable < length.value:
        notes.append(
            f"the pool holds {usable} tokens, less than one request of max_model_len ({length.value}): "
            "longer ones are refused when they arrive"
        )
    config = SchedulerConfig(
        # nano has no max_model_len: there it is kept by `Admission`, before a request reaches the scheduler.
        **{key: s.value for key, s in settings.items() if key in info.knobs or key in ("num_blocks", "max_model_len")}
    )
    return PolicySettings(name, info, config, settings, tuple(notes))


def _pool(
    options: ReplayOptions,
    info: PolicyInfo,
    block_size: int,
    own: Mapping[str, Any],
    common: Mapping[str, Any],
    recorded: Mapping[str, Any] | None,
    default_tokens: Callable[[int], tuple[int, str]],
) -> Setting:
    """num_blocks, the null block included."""
    pool = {"num_blocks": options.num_blocks, "kv_cache_tokens": options.kv_cache_tokens}
    given: list[tuple[Mapping[str, Any], str]] = [
        (pool, options.source_of(*(key for key in pool if pool[key] is not None))),
        (recorded or {}, "recorded run"),
        (own, "trace header"),
        (common, "trace header"),
    ]
    for place, source in given:
        if place.get("num_blocks") is not None:
            return Setting(_checked("num_blocks", place["num_blocks"]), source)
        if place.get("kv_cache_tokens") is not None:
            tokens = _checked("kv_cache_tokens", place["kv_cache_tokens"])
            return Setting(_blocks(tokens, block_size, info), source)
    tokens, why = default_tokens(block_size)
    return Setting(tokens // block_size + info.null_blocks, why)


def _blocks(tokens: int, block_size: int, info: PolicyInfo) -> int:
    if tokens < 1 or tokens % block_size:
        near = max(tokens // block_size, 1) * block_size
        raise BenchctlError(
            f"--kv-cache-tokens {tokens} is no multiple of the block size {block_size}",
            fix=f"--kv-cache-tokens {near}, or another --block-size",
        )
    return tokens // block_size + info.null_blocks


def _model_length(length: Setting, model_max_len: int, usable: int, notes: list[str]) -> Setting:
    if length.value is not None:
        if length.value > model_max_len:
            raise BenchctlError(
                f"--max-model-len {length.value} is beyond the model's {model_max_len}",
                fix=f"--max-model-len {model_max_len} or less",
            )
        if length.value > usable:
            raise BenchctlError(
                f"the pool holds {usable} tokens, less than one request of --max-model-len {length.value}",
                fix=f"--max-model-len {usable}, or a larger --kv-cache-tokens",
            )
        return length
    if model_max_len > usable:
        notes.append(
            f"max_model_len is {usable}, not the model's {model_max_len}: the pool holds no more for one request"
        )
        return Setting(usable, "pool")
    return Setting(model_max_len, "model")


def check_equal_pools(options: ReplayOptions, policies: list[PolicySettings]) -> None:
    """`--num-blocks` counts blocks of one size: refuse it for policies with two. Raises BenchctlError."""
    sizes = {p.config.block_size for p in policies}
    if options.num_blocks is not None and len(sizes) > 1:
        sizes_text = ", ".join(f"{p.name} {p.config.block_size}" for p in policies)
        raise BenchctlError(
            f"--num-blocks would give unequal pools: block sizes differ ({sizes_text})",
            fix="--kv-cache-tokens N gives every policy N usable tokens",
        )


def recorded_settings(manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Settings of an earlier run for policy `name`: all of them for its own policy, those that both have for another."""
    config = {key: e.get("value") for key, e in (manifest.get("config") or {}).items() if isinstance(e, dict)}
    for key, value in config.items():
        if value is not None and key in KNOB_NAMES:
            _checked(key, value, f"{key} of the earlier run", "its manifest.json")
    keys = [key for key in KNOB_NAMES if key in SCHEDULERS[name].knobs or key == "max_model_len"]
    limits = manifest.get("limits") or {}
    if manifest.get("scheduler") == name:
        return {key: config.get(key) for key in keys} | {"num_blocks": limits.get("num_blocks")}
    out = {key: config.get(key) for key in keys if key != "block_size"}
    out["kv_cache_tokens"] = limits.get("usable_blocks", 0) * limits.get("block_size", 0)
    return out


def _checked(key: str, value: Any, what: str = "", where: str = "the trace's header line") -> Any:
    """A value of the trace header or of an earlier run, of the type that its setting has. Raises BenchctlError."""
    default = _DEFAULTS.get(key)
    if isinstance(default, bool):
        right = isinstance(value, bool)
    elif isinstance(default, str):
        right = isinstance(value, str)
    else:
        kinds = (int, float) if isinstance(default, float) else int
        right = isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= MAX_LIMIT
    if not right:
        raise BenchctlError(
            f"{what or f'limits.{key}'} is {value!r}", where=where, fix=f"give it as {flag(key)} takes it"
        )
    return value
