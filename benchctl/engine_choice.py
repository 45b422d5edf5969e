"""Which engine a command runs, with which model, and an engine of its own for each run.

Concrete engines are imported here, by name, when they are asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchctl.config import PolicySettings, ReplayOptions
from benchctl.profiles import check_model, headline, load_profile
from engines.interface import Engine, EngineLimits
from engines.null_engine import NullEngine
from engines.simulated.engine import SimulatedEngine
from engines.simulated.profile import Profile
from traces.errors import BenchctlError
from traces.load import Trace


@dataclass(slots=True)
class EngineChoice:
    """Which engine, and the model it runs. `model` is loaded once and shared by the runs of a command."""

    kind: str  # torch, simulated or null
    why: str
    model: Any = None
    tokenizer: Any = None
    device: str | None = None
    attention: str | None = None  # triton or reference
    notes: list[str] = field(default_factory=list)
    profile: Profile | None = None  # of the simulated engine

    @property
    def model_name(self) -> str | None:
        if self.profile is not None:
            return self.profile.model.name
        return None if self.model is None else str(self.model.name)

    @property
    def vocab_size(self) -> int | None:
        if self.profile is not None:
            return self.profile.model.vocab_size
        return None if self.model is None else int(self.model.config.vocab_size)

    @property
    def max_model_len(self) -> int | None:
        if self.profile is not None:
            return self.profile.model.max_position_embeddings
        return None if self.model is None else int(self.model.config.max_position_embeddings)


def choose_engine(options: ReplayOptions, trace: Trace) -> EngineChoice:
    """`auto`: the torch engine on CUDA with qwen3-0.6b, else on the CPU with tiny. Raises BenchctlError."""
    if options.engine in ("null", "simulated"):
        profile = None
        if options.profile is not None:
            profile = load_profile(options.profile)
            check_model(profile, options.model)
        choice = EngineChoice(options.engine, "asked for", profile=profile)
        if profile is not None:
            choice.device, choice.notes = profile.device, [headline(profile)]
        if not trace.has_text:
            return choice
        if options.model is None:
            raise BenchctlError(
                f"the trace has text, and the {options.engine} engine has no tokenizer",
                where=str(trace.path),
                fix="--model FOLDER with a tokenizer in it, or a trace of token ids or lengths",
            )
        from engines.model.load import load_tokenizer

        choice.tokenizer = load_tokenizer(options.model)
        return choice
    try:
        import torch
    except ImportError:
        raise BenchctlError(
            "the torch engine needs torch, which is not installed", fix="pip install torch, or --engine null"
        ) from None
    from engines.model.load import load_tokenizer
    from engines.torch_engine.parallel import load_parallel_model

    on_card = torch.cuda.is_available()
    name = options.model or ("qwen3-0.6b" if on_card else "tiny")
    is_folder = Path(name).expanduser().is_dir()
    if trace.has_text and not is_folder:
        raise BenchctlError(
            f"the trace has text, and {name} has no tokenizer",
            where=str(trace.path),
            fix="--model FOLDER with a tokenizer in it, or a trace of token ids or lengths",
        )
    attention = choose_attention(options, on_card)
    size = options.tensor_parallel_size
    model = load_parallel_model(
        name, size, dtype=options.dtype or "auto", load_format=options.load_format, seed=options.seed
    )
    choice = EngineChoice("torch", "asked for" if options.engine == "torch" else "auto", model=model)
    choice.device = torch.cuda.get_device_name(0) if on_card else "CPU"
    if size > 1:
        choice.notes.append(
            f"tensor parallel: {size} processes, {'one a card, over NCCL' if on_card else 'over gloo'}; FLOPs and bytes of a round "
            "are those of one rank"
        )
    choice.attention = attention
    if options.engine == "auto":
        choice.notes.append(f"--engine auto: torch on {choice.device} with {name}")
    if is_folder and (trace.has_text or options.outputs == "sampled"):
        choice.tokenizer = load_tokenizer(name)
    return choice


def close_team() -> None:
    """End the other ranks of a model in parts, if any were started."""
    parallel = sys.modules.get("engines.torch_engine.parallel")
    if parallel is not None and parallel.Team.current is not None:
        parallel.Team.current.close()


def choose_attention(options: ReplayOptions, on_card: bool) -> str:
    """`auto`: triton on CUDA, reference elsewhere. Raises BenchctlError for triton without a card."""
    name = options.attention_backend
    if name not in ("auto", "triton", "reference"):
        raise BenchctlError(
            f"no attention backend is called {name!r}", where="--attention-backend", fix="auto, triton or reference"
        )
    if name == "triton" and not on_card:
        raise BenchctlError(
            "the triton backend needs a CUDA card, and torch sees none",
            where="--attention-backend",
            fix="--attention-backend reference, or auto",
        )
    return ("triton" if on_card else "reference") if name == "auto" else name


def build_engine(choice: EngineChoice, options: ReplayOptions, policy: PolicySettings) -> Engine:
    """An engine of its own for a run: pools are not shared."""
    config = policy.config
    if choice.profile is not None:
        length = policy.settings["max_model_len"].value
        limits = EngineLimits(config.num_blocks, config.block_size, length, choice.vocab_size)
        return SimulatedEngine(limits, choice.profile)
    if choice.model is None:
        limits = EngineLimits(config.num_blocks, config.block_size, policy.settings["max_model_len"].value, None)
        return NullEngine(limits) if options.round_cost is None else NullEngine(limits, options.round_cost)
    if choice.attention == "triton":
        from engines.torch_engine.triton_engine import TritonEngine

        return TritonEngine(
            choice.model,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=policy.settings["max_model_len"].value,
            temperature=options.temperature,
            seed=options.seed,
            enforce_eager=options.enforce_eager,
        )
    from engines.torch_engine.engine import TorchEngine

    return TorchEngine(
        choice.model,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=policy.settings["max_model_len"].value,
        temperature=options.temperature,
        seed=options.seed,
    )
