"""Weights of a model: made from a seed on the device, or read from safetensors.

Only safetensors are read: never a pickle, never code from the folder. Every tensor of a checkpoint has its one place in
the merged weights (q, k, v and gate, up lie in one matrix each), and is copied there as it is read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.model.config import ModelConfig
from engines.model.parallel import SINGLE, Parallel, take_rows
from engines.model.transformer import LayerWeights, Weights
from traces.errors import BenchctlError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def allocate_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Every weight, uninitialized."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, inner = config.hidden_size, config.intermediate_size
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    embedding = empty(config.vocab_size, hidden)
    layers = tuple(
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(q + 2 * kv, hidden),
            qkv_bias=empty(q + 2 * kv) if config.qkv_bias else None,
            q_norm=empty(config.head_dim) if config.qk_norm else None,
            k_norm=empty(config.head_dim) if config.qk_norm else None,
            out=empty(hidden, q),
            post_attention_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
        )
        for _ in range(config.num_layers)
    )
    lm_head = embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
    return Weights(embedding=embedding, layers=layers, norm=empty(hidden), lm_head=lm_head)


def fill_with_dummy_weights(config: ModelConfig, weights: Weights, seed: int, parallel: Parallel = SINGLE) -> None:
    """Random weights of a scale at which logits are of order 1 and depend on the whole prefix.

    Normal with standard deviation 1 / sqrt(inputs), so no product grows or shrinks what passes through it; norms are 1,
    biases of 0.02. A tied embedding has the head's scale: then it is small beside what the layers add, and the model does
    not merely repeat its last token. Equal for a seed on devices of one type, not between CPU and CUDA; a rank of several
    draws each whole matrix and keeps its part, so that together they have the weights of one.
    """
    generator = torch.Generator(device=weights.embedding.device).manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    split = parallel.size > 1
    vocab = slice(*parallel.vocab_share(config.vocab_size))

    def normal(
        weight: Tensor,
        shape: tuple[int, ...],
        std: float,
        rows: list[slice] | None = None,
        columns: slice | None = None,
    ) -> None:
        if not split:
            weight.normal_(0.0, std, generator=generator)
            return
        whole = torch.empty(shape, dtype=weight.dtype, device=weight.device).normal_(0.0, std, generator=generator)
        part = take_rows(whole, rows) if rows is not None else whole[:, columns]
        weight[: len(part)].copy_(part)
        weight[len(part) :].zero_()  # the vocabulary's last share may be shorter

    def matrix(
        weight: Tensor, outputs: int, inputs: int, rows: list[slice] | None = None, columns: slice | None = None
    ) -> None:
        normal(weight, (outputs, inputs), 1.0 / math.sqrt(inputs), rows, columns)

    matrix(weights.embedding, config.vocab_size, hidden, [vocab])
    for layer in weights.layers:
        matrix(layer.qkv, q + 2 * kv, hidden, parallel.qkv_rows(config))
        matrix(layer.out, hidden, q, columns=parallel.share(q))
        matrix(layer.gate_up, 2 * inner, hidden, parallel.gate_up_rows(config))
        matrix(layer.down, hidden, inner, columns=parallel.share(inner))
        if layer.qkv_bias is not None:
            normal(layer.qkv_bias, (q + 2 * kv,), 0.02, parallel.qkv_rows(config))
        for norm in (layer.input_norm, layer.post_attention_norm, layer.q_norm, layer.k_norm):
            if norm is not None:
                norm.fill_(1.0)
    weights.norm.fill_(1.0)
    if not config.tie_word_embeddings:
        matrix(weights.lm_head, config.vocab_size, hidden, [vocab])


def places_of_tensors(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Name in a Hugging Face checkpoint -> the part of our weights that it fills."""
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    places = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        places["lm_head.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        places[prefix + "input_layernorm.weight"] = layer.input_norm
        places[prefix + "post_attention_layernorm.weight"] = layer.post_attention_norm
        for name, part in zip("qkv", layer.qkv.split([q, kv, kv]), strict=True):
            places[f"{prefix}self_attn.{name}_proj.weight"] = part
        if layer.qkv_bias is not None:
            for name, part in zip("qkv", layer.qkv_bias.split([q, kv, kv]), strict=True):
                places[f"{prefix}self_attn.{name}_proj.bias"] = part
        if layer.q_norm is not None and layer.k_norm is not None:
            places[prefix + "self_attn.q_norm.weight"] = layer.q_norm
            places[prefix + "self_attn.k_norm.weight"] = layer.k_norm
        places[prefix + "self_attn.o_proj.weight"] = layer.out
        places[prefix + "mlp.gate_proj.weight"], places[prefix + "mlp.up_proj.weight"] = layer.gate_up.split(
            [inner, inner]
        )
        places[prefix + "mlp.down_proj.weight"] = layer.down
    return places


def read_weights(folder: Path, config: ModelConfig, weights: Weights, parallel: Parallel = SINGLE) -> None:
    """Fill `weights` from the folder's safetensors, converting to their dtype; a rank of several reads its part alone.

    Raises BenchctlError naming every fault's first tensors: missing, unexpected, of another shape, not floating point.
    A `lm_head.weight` beside tied embeddings and stored `rotary_emb.inv_freq` buffers are passed over, as in transformers.
    """
    places = places_of_tensors(parallel.local(config), weights)
    missing = dict.fromkeys(places)
    unexpected: list[str] = []
    misshapen: list[str] = []
    for path, listed in files_of_checkpoint(folder).items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping: it cannot be iterated)
                    if listed is not None and name not in listed:
                        continue  # the index takes this one from another file
                    place = places.get(name)
                    if place is None:
                        if not (
                            name.endswith("rotary_emb.inv_freq")
                            or (name == "lm_head.weight" and config.tie_word_embeddings)
                        ):
                            unexpected.append(name)
                        continue
                    missing.pop(name, None)
                    part = parallel.part_of_tensor(name, config)
                    shape, want = list(file.get_slice(name).get_shape()), list(place.shape)
                    if part is not None:
                        axis, share, want[part[0]] = part
                    if shape != want:
                        misshapen.append(f"{name} is {shape}, not {want}")
                        continue
                    if part is None:
                        tensor = file.get_tensor(name)
                    else:
                        tensor = file.get_slice(name)[share] if axis == 0 else file.get_slice(name)[:, share]
                    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                        misshapen.append(f"{name} is {tensor.dtype}, not a 16- or 32-bit float")
                    else:
                        place[: len(tensor)].copy_(tensor)
                        place[len(tensor) :].zero_()  # the vocabulary's last share may be shorter
        except (SafetensorError, OSError) as error:
            raise BenchctlError(
                f"not readable as safetensors: {error}", where=str(path), fix="fetch the file again"
            ) from None
    faults = []
    for what, names in (("missing", list(missing)), ("unexpected", unexpected), ("wrong", misshapen)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            faults.append(f"{len(names)} {what}: {', '.join(names[:3])}{more}")
    if faults:
        raise BenchctlError(
            f"tensors do not match config.json: {'; '.join(faults)}",
            where=str(folder),
            fix="take config.json and safetensors of one and the same model",
        )


def files_of_checkpoint(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors of a folder, each with the names that the index takes from it; None: all. Raises BenchctlError."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            listed: dict[Path, set[str] | None] = {}
            for name, file in sorted(weight_map.items()):
                listed.setdefault(folder / Path(file).name, set()).add(name)  # type: ignore[union-attr]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchctlError(
                f"no weight_map can be read: {error!r}", where=str(index), fix="fetch the file again"
            ) from None
        absent = [path.name for path in listed if not path.is_file()]
        if absent:
            raise BenchctlError(
                f"{len(absent)} of {len(listed)} files named by the index are not there: {', '.join(absent[:3])}",
                where=str(index),
                fix="fetch the missing files",
            )
        return listed
    files = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE_FILE in files:
        return {folder / SINGLE_FILE: None}
    if len(files) == 1:
        return {files[0]: None}
    if files:
        raise BenchctlError(
            f"{len(files)} safetensors files and no {INDEX_FILE}", where=str(folder), fix="fetch the index too"
        )
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise BenchctlError(
            f"the weights are pickles ({pickles[0]}), which can run code when they are read",
            where=str(folder),
            fix="convert the model to safetensors, or pass --load-format dummy",
        )
    raise BenchctlError(
        "no safetensors in the model folder", where=str(folder), fix="pass --load-format dummy for random weights"
    )
