"""What a manifest says about a run before it starts: its settings with their sources, trace, policy, engine, clock.

Must not change anything that is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchctl.config import VLLM_DIFFERS, PolicySettings, ReplayOptions
from benchctl.manifest import base
from benchctl.measure import stored
from benchctl.profiles import about
from benchctl.recorded import num_recorded
from benchctl.sources import num_to_replay
from traces.load import Trace

if TYPE_CHECKING:
    from benchctl.build import Command

# Settings that are not a policy's: option -> what its default is called in the manifest.
RUN_OPTIONS = (
    "engine", "profile", "model", "load_format", "dtype", "seed", "outputs", "temperature", "enforce_eager", "tensor_parallel_size", "verify", "overlap", "gpu_memory_utilization", "round_seconds",
    "from_run", "max_concurrency", "request_rate", "burstiness", "time_scale", "num_prompts", "num_warmups", "warm_cache",
    "num_repeats", "over_length", "skip_bad",
)  # fmt: skip


def describe(command: Command, policy: PolicySettings, notes: list[str]) -> dict[str, Any]:
    """The manifest's fixed part, JSON-able (`reports.records.MANIFEST` lists what reports read)."""
    options, trace, engine = command.options, command.trace, command.engine
    earlier = command.earlier.get(policy.name)
    num = command.num_requests if earlier is None else num_recorded(earlier)
    num = num_to_replay(options, trace) if num is None else num
    config: dict[str, Any] = {
        name: {"value": setting.value, "source": setting.source} for name, setting in policy.settings.items()
    }
    defaults = ReplayOptions(trace="")
    for name in RUN_OPTIONS:
        value = getattr(options, name)
        config[name] = {
            "value": value,
            "source": "default" if value == getattr(defaults, name) else options.source_of(name),
        }
    config["clock"] = {"value": command.clock, "source": "flag" if options.clock else "default"}
    config["arrivals"] = {
        "value": command.arrivals,
        "source": "flag" if options.arrivals else "recorded run" if command.earlier else "default",
    }
    if engine.kind == "null":
        config["round_cost"] = {
            "value": options.round_cost or (5e-3, 20e-6, 2e-9),
            "source": "flag" if options.round_cost else "default",
        }
    return base() | {
        "scheduler": policy.name,
        "policy": policy.info.policy,
        "family": policy.info.family,
        "place": policy.info.place,
        "policy_differs": differences(policy),
        "engine": engine.kind,
        "engine_why": engine.why,
        "device": engine.device,
        "model": engine.model_name,
        "num_parameters": None if engine.model is None else engine.model.config.num_parameters,
        "attention_backend": engine.attention,
        "ceilings": None if engine.model is None else stored(engine.model.device.type),
        "dtype": None if engine.model is None else str(engine.model.dtype).removeprefix("torch."),
        "simulation": None if engine.profile is None else about(engine.profile, policy.config.block_size),
        "clock": command.clock,
        "arrivals": command.arrivals,
        "load": "closed" if options.max_concurrency is not None else "open",
        "records": options.records,
        "command": list(options.command),
        "config": config,
        "limits": {
            "num_blocks": policy.config.num_blocks,
            "usable_blocks": policy.usable_blocks,
            "usable_tokens": policy.usable_tokens,
            "block_size": policy.config.block_size,
            "max_model_len": policy.settings["max_model_len"].value,
        },
        "trace": about_trace(trace),
        "num_requests": num,
        "cache": "warm" if options.warm_cache and options.num_warmups else "cold",
        "seeds": {"seed": options.seed},
        "goodput": dict(options.goodput),
        "from": None if earlier is None else str(earlier.path),
        "what_if": None if options.what_if is None else dict(options.what_if),
        "notes": [*command.notes, *(n for n in trace.notes if n not in command.notes), *policy.notes, *notes],
        "digest": None,
    }


def about_trace(trace: Trace) -> dict[str, Any]:
    """What only a reading to the end tells is null until then."""
    known = trace.complete
    return {
        "name": trace.name,
        "path": str(trace.path),
        "sha256": trace.sha256 if known else None,
        "num_requests": trace.num_requests if known else None,
        "num_bad": trace.num_bad if known else None,
        "span_s": trace.span_s if known else None,
    }


def differences(policy: PolicySettings) -> dict[str, str]:
    """For vllm: every setting whose value here is not vLLM 0.33.0's own default, and what that is."""
    if policy.name != "vllm":
        return {}
    out = dict(VLLM_DIFFERS)
    if policy.config.scheduler_reserve_full_isl:
        del out["scheduler_reserve_full_isl"]
    if policy.config.max_model_len is not None:
        del out["max_model_len"]
    return out
