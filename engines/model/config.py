"""What shape a model has: read from a Hugging Face `config.json`, or one of the presets.

Needs no torch. A config is accepted only if all it asks for is implemented: anything else is refused by name, since a
model that runs with a feature left out gives wrong logits in silence.
Source: the config classes of transformers 5 (`models/{llama,qwen2,qwen3}`), old and new spelling of RoPE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.errors import BenchctlError

ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3's stretching of RoPE: long wavelengths by `factor`, short ones not at all, a blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama line: pre-norm RMSNorm, RoPE, grouped-query attention, SiLU-gated MLP."""

    model_type: str  # llama, qwen2, qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of every query and key head, before RoPE
    eos_token_ids: tuple[int, ...] = ()  # empty for presets: dummy weights have no end of sequence

    @property
    def num_parameters(self) -> int:
        """Weights in all, a tied embedding counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv) + (q + 2 * kv if self.qkv_bias else 0)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + norms + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size


PRESETS: dict[str, ModelConfig] = {
    # Small enough for two CPU cores, yet with every trait of its family: QK-norm, grouped queries, tied embeddings.
    "tiny": ModelConfig(
        model_type="qwen3",
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        qk_norm=True,
    ),
    "qwen3-0.6b": ModelConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        qk_norm=True,
    ),
    "qwen3-8b": ModelConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        qk_norm=True,
    ),
    "llama-3.1-8b": ModelConfig(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
    ),
}


def read_config(folder: Path) -> ModelConfig:
    """The config of a local Hugging Face folder. Raises BenchctlError naming what is missing or not implemented."""
    path = folder / "config.json"
    if not path.is_file():
        raise BenchctlError(
            "the model folder has no config.json", where=str(folder), fix="name a folder in Hugging Face layout"
        )
    raw = _read_json(path)
    generation = folder / "generation_config.json"
    if generation.is_file():  # as in transformers, its word on the end of sequence comes first
        raw["eos_token_id"] = _read_json(generation).get("eos_token_id", raw.get("eos_token_id"))
    return parse_config(raw, where=str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchctlError(f"not readable as JSON: {error}", where=str(path)) from None
    if not isinstance(raw, dict):
        raise BenchctlError("the file holds no JSON object", where=str(path))
    return raw


def parse_config(raw: Mapping[str, Any], *, where: str) -> ModelConfig:
    """A `config.json` as read. Raises BenchctlError; `where` names its place in messages."""
    fields = _Fields(raw, where)
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        raise fields.refusal(
            f"model_type {model_type!r}", f"use a model of one of these families: {', '.join(ARCHITECTURES)}"
        )
    _refuse_what_is_not_implemented(fields, model_type)
    num_heads = fields.integer("num_attention_heads")
    # Llama's first checkpoints have no such key; the Qwen families' default is a number of its own.
    num_kv_heads = fields.integer(
        "num_key_value_heads", num_heads if model_type == "llama" or "num_key_value_heads" in raw else None
    )
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer(
        "head_dim", 128 if model_type == "qwen3" and "head_dim" not in raw else max(hidden_size // num_heads, 1)
    )
    if num_heads % num_kv_heads:
        raise fields.fault(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise fields.fault(f"head_dim {head_dim} is odd: RoPE turns pairs")
    rope_theta, rope_scaling = _read_rope(fields)
    return ModelConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


class _Fields:
    """Typed look-ups in a config that name the key where one fails."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def fault(self, what: str) -> BenchctlError:
        return BenchctlError(what, where=self.where, fix="the model's config.json is broken; fetch it again")

    def refusal(self, what: str, fix: str) -> BenchctlError:
        return BenchctlError(f"{what} is not supported", where=self.where, fix=fix)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fault(f"the key {key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fault(f"{key} is {value!r}, not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fault(f"the key {key} is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fault(f"{key} is {value!r}, not a positive number")
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise self.fault(f"{key} is {value!r}, not a token id or a list of them")
        return tuple(ids)


def _refuse_what_is_not_implemented(fields: _Fields, model_type: str) -> None:
    raw = fields.raw
    dense = "use a dense, unquantized checkpoint of " + ", ".join(ARCHITECTURES.values())
    for architecture in raw.get("architectures") or ():
        if architecture != ARCHITECTURES[model_type]:
            raise fields.refusal(f"architecture {architecture}", dense)
    if raw.get("auto_map"):
        raise fields.refusal("code that comes with the model (auto_map)", dense)
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            method = raw[key].get("quant_method", "?") if isinstance(raw[key], dict) else raw[key]
            raise fields.refusal(f"quantization ({key}: {method})", dense)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise fields.refusal(f"mixture of experts ({key} {raw[key]})", dense)
    if raw.get("hidden_act", "silu") != "silu":
        raise fields.refusal(f"hidden_act {raw['hidden_act']!r}", "the MLP here is gated by silu")
    if model_type != "qwen2" and raw.get("attention_bias"):
        raise fields.refusal(f"attention_bias in {model_type}", "biases are implemented for qwen2's q, k and v only")
    if raw.get("mlp_bias"):
        raise fields.refusal("mlp_bias", dense)
    window = raw.get("sliding_window")
    layer_types = raw.get("layer_types") or ()
    if set(layer_types) - {"full_attention"}:
        raise fields.refusal(
            f"layer type {sorted(set(layer_types) - {'full_attention'})[0]!r}", "every layer has to be full_attention"
        )
    # Qwen configs carry a window that is switched off; without layer_types the first max_window_layers are full attention.
    full_layers = raw.get("max_window_layers", 0)
    if (
        raw.get("use_sliding_window")
        and window
        and not layer_types
        and full_layers < fields.integer("num_hidden_layers")
    ):
        raise fields.refusal(
            f"a sliding window of {window} tokens in use", "use a model with full attention in every layer"
        )


def _read_rope(fields: _Fields) -> tuple[float, Llama3RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    raw = fields.raw
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.fault(f"the RoPE parameters are {scaling!r}, not an object")
    rope = _Fields({"rope_theta": raw.get("rope_theta"), **scaling}, fields.where)
    theta = rope.number("rope_theta", 10_000.0)
    # "type" is the older spelling of "rope_type".
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    for source in (raw, scaling):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise fields.refusal(
                f"partial_rotary_factor {source['partial_rotary_factor']}", "RoPE has to cover the whole head"
            )
    if kind is None or kind == "default":
        if any(isinstance(value, dict) for value in scaling.values()):
            raise fields.refusal("RoPE that differs by layer", "use a model with one RoPE for every layer")
        return theta, None
    if kind != "llama3":
        raise fields.refusal(f"RoPE type {kind!r}", "use a model whose RoPE is default or llama3")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise fields.fault(f"RoPE's low_freq_factor {low} is not below its high_freq_factor {high}")
    return theta, Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )
