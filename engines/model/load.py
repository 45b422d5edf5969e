"""From a name to a model on a device, and to its tokenizer. Local only: no hub, no pickle, no code from a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from engines.model.config import PRESETS, ModelConfig, read_config
from engines.model.memory import is_out_of_memory, require_model_fits, ways_to_fit
from engines.model.parallel import SINGLE, Parallel
from engines.model.transformer import Model
from engines.model.weights import allocate_weights, fill_with_dummy_weights, read_weights
from traces.errors import BenchctlError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
LOAD_FORMATS = ("auto", "dummy")
# Below this many parameters an operator takes microseconds, and a second CPU thread is a gamble: on two idle cores a round
# takes two thirds of the time, but where another process holds one of them every operator waits for a time slice, and rounds take
# ten to a hundred times as long.
ONE_THREAD_PARAMETERS = 10_000_000


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto`: the first CUDA card if there is one, else the CPU. Raises BenchctlError for one that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise BenchctlError(f"no device is called {device!r}", fix="use auto, cpu or cuda") from None
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            raise BenchctlError(
                f"{device} is not there: torch sees {count} CUDA cards", fix="use cpu, or look at the driver"
            )
        return torch.device("cuda", resolved.index or 0)
    if resolved.type != "cpu":
        raise BenchctlError(f"device type {resolved.type} is not supported", fix="use auto, cpu or cuda")
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto`: float32 on the CPU, bfloat16 on a card. Raises BenchctlError for any other unknown name."""
    if isinstance(dtype, str):
        if dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        if dtype not in DTYPES:
            raise BenchctlError(
                f"no dtype is called {dtype!r}", where="--dtype", fix=f"use one of auto, {', '.join(DTYPES)}"
            )
        return DTYPES[dtype]
    return dtype


def find_config(name_or_path: str) -> tuple[ModelConfig, Path | None]:
    """The config of a preset (no folder) or of a local folder. Raises BenchctlError where it is neither."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path], None
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        raise BenchctlError(
            f"{name_or_path!r} is neither a preset nor a folder",
            where="--model",
            fix=f"use one of {', '.join(PRESETS)}, or a local Hugging Face folder (nothing is downloaded)",
        )
    return read_config(folder), folder


@torch.inference_mode()
def load_model(
    name_or_path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    load_format: str = "auto",
    seed: int = 0,
    parallel: Parallel = SINGLE,
) -> Model:
    """A preset or a local Hugging Face folder as a model on a device.

    A small model on the CPU sets torch to one thread, for the whole process, unless OMP_NUM_THREADS is set.
    `load_format` `auto`: the folder's safetensors, random weights from `seed` for a preset; `dummy`: random for both.
    Raises BenchctlError: unknown name, unsupported model, broken checkpoint, not enough memory.
    """
    if load_format not in LOAD_FORMATS:
        raise BenchctlError(
            f"no load format is called {load_format!r}",
            where="--load-format",
            fix=f"use one of {', '.join(LOAD_FORMATS)}",
        )
    config, folder = find_config(name_or_path)
    resolved_device = resolve_device(device)
    resolved_dtype = resolve_dtype(dtype, resolved_device)
    if (
        resolved_device.type == "cpu"
        and config.num_parameters < ONE_THREAD_PARAMETERS
        and "OMP_NUM_THREADS" not in os.environ
    ):
        torch.set_num_threads(1)
    what = f"{name_or_path} with {config.num_parameters / 1e9:.3g} B parameters in {str(resolved_dtype).removeprefix('torch.')}"
    local = parallel.local(config)
    if parallel.size > 1:
        what = f"rank {parallel.rank}'s part of {what}"
    try:
        require_model_fits(local, resolved_dtype, resolved_device, what=what, num_ranks=parallel.size)
        weights = allocate_weights(local, resolved_dtype, resolved_device)
        if folder is None or load_format == "dummy":
            fill_with_dummy_weights(config, weights, seed, parallel)
        else:
            read_weights(folder, config, weights, parallel)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        try:
            fix = ways_to_fit(local, resolved_dtype, resolved_device, num_ranks=parallel.size)
        except RuntimeError:  # a card so full that it answers nothing
            fix = "end what else takes its memory"
        raise BenchctlError(f"{what} does not fit {resolved_device}", fix=fix) from None
    return Model(name_or_path, config, weights, parallel)


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's tokenizer (transformers' AutoTokenizer), from local files, without its code. Raises BenchctlError."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise BenchctlError(
            f"{str(folder)!r} is no folder, so it has no tokenizer", fix="name a local Hugging Face folder"
        )
    from transformers import AutoTokenizer  # seconds to import, and only text needs it

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen types here; each is a fault of the folder
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BenchctlError(
            f"no tokenizer can be loaded: {reason}", where=str(path), fix="put its tokenizer.json there"
        ) from None
