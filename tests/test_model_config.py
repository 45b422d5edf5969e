"""Configs: what is read from config.json, what the presets are, and what is refused, by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.model.config import PRESETS, Llama3RopeScaling, parse_config, read_config
from traces.errors import BenchctlError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_presets_have_the_size_of_their_models() -> None:
    """0.6B counts its tied embedding once: 0.44 B without it, as its card says."""
    sizes = {name: config.num_parameters for name, config in PRESETS.items()}
    assert sizes["qwen3-0.6b"] == 596_049_920
    assert sizes["qwen3-8b"] == 8_190_735_360
    assert sizes["llama-3.1-8b"] == 8_030_261_248
    assert 200_000 < sizes["tiny"] < 900_000


def test_families_differ_in_bias_norm_and_defaults() -> None:
    llama, qwen2, qwen3 = (parse_config(raw, where="here") for raw in (LLAMA, QWEN2, QWEN3))
    assert [(c.qkv_bias, c.qk_norm) for c in (llama, qwen2, qwen3)] == [(False, False), (True, False), (False, True)]
    assert (llama.head_dim, llama.rope_theta, llama.rms_norm_eps, llama.tie_word_embeddings) == (8, 10_000, 1e-6, False)
    assert parse_config({k: v for k, v in QWEN3.items() if k != "head_dim"}, where="").head_dim == 128
    assert parse_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, where="").num_kv_heads == 4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
    ],
)
def test_llama3_rope_is_read_in_every_spelling(rope: dict[str, Any]) -> None:
    config = parse_config({**LLAMA, **rope}, where="here")
    assert (config.rope_theta, config.rope_scaling) == (5e5, Llama3RopeScaling(8.0, 1.0, 4.0, 8192))


def test_a_window_that_is_switched_off_is_no_window() -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1}
    beyond = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2}
    listed = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    for keys in (off, beyond, listed):
        assert parse_config({**QWEN2, **keys}, where="").num_layers == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({**LLAMA, "model_type": "mixtral"}, "model_type 'mixtral'"),
    "no family": ({k: v for k, v in LLAMA.items() if k != "model_type"}, "model_type None"),
    "architecture": ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "code": ({**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
    "quantized": ({**QWEN3, "quantization_config": {"quant_method": "fp8"}}, "quantization_config: fp8"),
    "compressed": ({**QWEN3, "compression_config": {"format": "int"}}, "compression_config"),
    "experts": ({**QWEN3, "num_experts": 8}, "mixture of experts (num_experts 8)"),
    "local experts": ({**LLAMA, "num_local_experts": 4}, "num_local_experts 4"),
    "activation": ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "llama bias": ({**LLAMA, "attention_bias": True}, "attention_bias in llama"),
    "qwen3 bias": ({**QWEN3, "attention_bias": True}, "attention_bias in qwen3"),
    "mlp bias": ({**LLAMA, "mlp_bias": True}, "mlp_bias"),
    "window": (
        {**QWEN2, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
        "a sliding window of 64 tokens",
    ),
    "layer type": ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
    "yarn": ({**QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type 'yarn'"),
    "linear, old": ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE type 'linear'"),
    "dynamic, new": ({**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
    "rope by layer": (
        {**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "RoPE that differs by layer",
    ),
    "partial rope": ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "rope key": ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    "rope order": (
        {**LLAMA, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "low_freq_factor": 4.0}},
        "low_freq_factor 4.0 is not below",
    ),
    "rope no object": ({**LLAMA, "rope_scaling": "llama3"}, "RoPE parameters are 'llama3'"),
    "missing key": ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size is missing"),
    "no kv heads": ({k: v for k, v in QWEN2.items() if k != "num_key_value_heads"}, "num_key_value_heads is missing"),
    "not a number": ({**LLAMA, "vocab_size": "100"}, "vocab_size is '100'"),
    "zero": ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "eps": ({**LLAMA, "rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
    "heads": ({**LLAMA, "num_key_value_heads": 3}, "num_attention_heads 4 is no multiple"),
    "odd head": ({**QWEN3, "head_dim": 7}, "head_dim 7 is odd"),
    "eos": ({**LLAMA, "eos_token_id": "</s>"}, "eos_token_id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(case: str) -> None:
    raw, words = REFUSED[case]
    with pytest.raises(BenchctlError) as refused:
        parse_config(raw, where="m/config.json")
    assert words in refused.value.what
    assert refused.value.where == "m/config.json" and refused.value.fix


def test_end_of_sequence_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_config(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("text", "words"), [(None, "no config.json"), ("{", "not readable as JSON"), ("[]", "no JSON object")]
)
def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BenchctlError) as refused:
        read_config(tmp_path)
    assert words in refused.value.what and str(tmp_path) in str(refused.value.where)


def test_configs_need_no_torch() -> None:
    assert (
        subprocess.run(
            [sys.executable, "-c", "import sys, engines.model.config; sys.exit('torch' in sys.modules)"]
        ).returncode
        == 0
    )
