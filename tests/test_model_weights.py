"""Weights: safetensors in one file or several, faults named, dummy weights that are seeded and sane, tokenizers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.model import load, memory
from engines.model.config import PRESETS
from engines.model.load import load_model, load_tokenizer, resolve_device, resolve_dtype
from engines.model.transformer import Model
from engines.model.weights import INDEX_FILE, allocate_weights, fill_with_dummy_weights
from engines.torch_engine.engine import TorchEngine
from tests.engine_harness import DEVICES, FAMILIES, PoisonedCache, Sequence, make_oracle, random_ids
from traces.errors import BenchctlError

everywhere = pytest.mark.parametrize("device", DEVICES)


def all_tensors(model: Model) -> list[torch.Tensor]:
    weights = model.weights
    layers = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    return [t for t in (weights.embedding, weights.norm, weights.lm_head, *layers) if t is not None]


def refusal(folder: Path | str, **options: str) -> BenchctlError:
    with pytest.raises(BenchctlError) as refused:
        load_model(str(folder), dtype="float32", device="cpu", **options)
    return refused.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tied Qwen3 that a test may break."""
    return Path(shutil.copytree(make_oracle("qwen3").folder, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_give_the_same_model_as_one_file(family: str, tmp_path: Path) -> None:
    oracle = make_oracle(family)
    oracle.reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and (tmp_path / INDEX_FILE).is_file()
    sharded, single = (load_model(str(path), dtype="float32", device="cpu") for path in (tmp_path, oracle.folder))
    pairs = list(zip(all_tensors(sharded), all_tensors(single), strict=True))
    assert len(pairs) > 10 and all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_file_under_any_name_is_found_when_it_is_the_only_one(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert load_model(str(folder), dtype="float32", device="cpu").config.num_layers == 2
    shutil.copy(folder / "weights.safetensors", folder / "more.safetensors")
    assert "2 safetensors files and no model.safetensors.index.json" in refusal(folder).what


def test_weights_are_converted_to_the_dtype_asked_for(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    model = load_model(str(folder), dtype="float32", device="cpu")
    assert stored.dtype == torch.bfloat16 and torch.equal(model.weights.norm, stored.float())
    assert load_model(str(folder), dtype="half", device="cpu").weights.layers[0].qkv.dtype == torch.float16


def test_a_head_beside_tied_embeddings_and_old_buffers_are_passed_over(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(folder, add)
    weights = load_model(str(folder), dtype="float32", device="cpu").weights
    assert weights.lm_head is weights.embedding and weights.lm_head.abs().max() > 0


def test_missing_unexpected_and_misshapen_tensors_are_named_together(folder: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_norm.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(80, 48)
        tensors["model.norm.weight"] = torch.zeros(47)
        tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].to(torch.int32)

    rewrite(folder, damage)
    error = refusal(folder)
    for words in (
        "1 missing: model.layers.1.self_attn.k_norm.weight",
        "1 unexpected: model.layers.2.mlp.up_proj.weight",
        "model.norm.weight is [47], not [48]",
        "model.layers.0.mlp.down_proj.weight is torch.int32",
    ):
        assert words in error.what, error.what
    assert error.where == str(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "layer_types": None}))
    assert "22 missing: model.layers.2.input_layernorm.weight" in refusal(folder).what
    assert "and 19 more" in refusal(folder).what


def test_an_index_that_names_absent_files_is_refused(folder: Path) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00002.safetensors"}}))
    assert "model-00002.safetensors" in refusal(folder).what
    (folder / INDEX_FILE).write_text("{}")
    assert "no weight_map" in refusal(folder).what


def test_a_file_that_is_cut_off_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    error = refusal(folder)
    assert "not readable as safetensors" in error.what and error.where == str(path)


def test_pickles_are_refused_and_dummy_weights_offered(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refusal(folder)
    assert "pickles (pytorch_model.bin)" in error.what and "--load-format dummy" in str(error.fix)
    assert load_model(str(folder), dtype="float32", device="cpu", load_format="dummy").config.vocab_size == 211
    (folder / "pytorch_model.bin").unlink()
    assert "no safetensors" in refusal(folder).what


def test_names_formats_dtypes_and_devices_that_do_not_exist_are_refused() -> None:
    error = refusal("meta-llama/Llama-3.1-8B")
    assert "neither a preset nor a folder" in error.what and "qwen3-0.6b" in str(error.fix)
    assert "'gguf'" in refusal("tiny", load_format="gguf").what
    for wrong, call in (
        ("'int8'", lambda: resolve_dtype("int8", torch.device("cpu"))),
        ("'gpu'", lambda: resolve_device("gpu")),
        ("cuda:63", lambda: resolve_device("cuda:63")),
        ("meta", lambda: resolve_device("meta")),
    ):
        with pytest.raises(BenchctlError) as refused:
            call()
        assert wrong in refused.value.what
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16


def test_a_model_larger_than_memory_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 << 30)
    error = refusal("qwen3-8b")
    assert error.what == "qwen3-8b with 8.19 B parameters in float32 needs 30.51 GiB; cpu has 3.00 GiB free"
    assert error.fix == "--model qwen3-0.6b"  # 2.22 GiB of the 2.7 that nine tenths of it are
    monkeypatch.setattr(memory, "available_bytes", lambda device: 20 << 30)
    assert refusal("qwen3-8b").fix == "--dtype bfloat16, or --model qwen3-0.6b"
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 10)
    assert refusal("qwen3-8b").fix == "end what else takes its memory"


def test_a_model_larger_than_one_card_names_how_many_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 8 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(BenchctlError) as refused:
        memory.require_model_fits(PRESETS["qwen3-8b"], torch.bfloat16, card, what="qwen3-8b", num_ranks=1)
    assert refused.value.what == "qwen3-8b needs 15.26 GiB; cuda:0 has 8.00 GiB free"
    assert str(refused.value.fix).startswith(
        "--tensor-parallel-size 4, or --model qwen3-0.6b"
    )  # a half is 7.6 of 7.2 GiB


def test_torch_failing_to_allocate_is_the_same_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(load, "allocate_weights", fail)
    assert "does not fit cpu" in refusal("tiny").what


@everywhere
def test_dummy_weights_depend_on_the_seed_alone(device: str) -> None:
    one, same, other = (load_model("tiny", dtype="float32", device=device, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(all_tensors(one), all_tensors(same), strict=True))
    assert not torch.equal(one.weights.layers[0].qkv, other.weights.layers[0].qkv)
    assert sum(t.numel() for t in all_tensors(one)) - one.weights.lm_head.numel() == one.config.num_parameters


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b"])
def test_dummy_logits_are_finite_and_depend_on_the_whole_prefix(name: str, dtype: str, device: str) -> None:
    """The large preset in its whole depth, a sixteenth as wide. All prompts end in one and the same token."""
    config = PRESETS[name]
    if name != "tiny":
        config = replace(config, hidden_size=256, num_heads=4, num_kv_heads=1, intermediate_size=896, vocab_size=2048)
    with torch.inference_mode():
        weights = allocate_weights(config, load.DTYPES[dtype], resolve_device(device))
        fill_with_dummy_weights(config, weights, seed=0)
    engine = TorchEngine(
        Model(name, config, weights), num_blocks=24, block_size=16, max_model_len=128, return_logits=True
    )
    prompts = [Sequence(i, np.append(random_ids(i, 19), 5)) for i in range(12)]
    logits = torch.stack(list(PoisonedCache(engine).step([(seq, 20) for seq in prompts]).values()))
    assert logits.isfinite().all() and 0.3 < logits.std() < 3
    # Were the last token all that counts, the twelve would be equal.
    assert (logits - logits.mean(0)).std() > 0.2 * logits.std()
    assert len(set(logits.argmax(-1).tolist())) >= 6


def test_a_tokenizer_is_read_from_local_files_only(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("world hello you")["input_ids"] == [1, 0, 2]
    for path in (tmp_path / "absent", make_oracle("llama").folder):
        with pytest.raises(BenchctlError) as refused:
            load_tokenizer(path)
        assert "tokenizer" in refused.value.what


@pytest.mark.parametrize(("variable", "threads"), [(None, 1), ("2", min(2, os.cpu_count() or 1))])
def test_a_small_model_on_the_cpu_runs_on_one_thread_unless_told_otherwise(variable: str | None, threads: int) -> None:
    code = "import torch\nfrom engines.model.load import load_model\nload_model('tiny', device='cpu')\nprint(torch.get_num_threads())"
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if variable is not None:
        env["OMP_NUM_THREADS"] = variable
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == threads
