"""`--verify N`: a watch in the engine during a run, the reference afterwards, and what came of it in manifest and terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.text import Text

from benchctl.config import ReplayOptions
from benchctl.engine_choice import EngineChoice
from benchctl.manifest import write_manifest
from benchctl.runner import RunResult
from engines.interface import Engine
from traces.errors import BenchctlError


def watch_engine(engine: Engine, choice: EngineChoice, options: ReplayOptions) -> Any:
    """Have the engine keep logits of the requests to verify; -> the watch, None without `--verify`."""
    if not options.verify:
        return None
    from engines.torch_engine.verify import Watch

    assert choice.vocab_size is not None, "--verify is refused for engines without a model"
    watch = Watch(options.verify, seed=options.seed, vocab_size=choice.vocab_size)
    engine.watch = watch  # type: ignore[attr-defined]
    return watch


def verify_run(watch: Any, choice: EngineChoice, options: ReplayOptions, result: RunResult, err: Console) -> RunResult:
    """Compute anew what the watch kept, once the engine is closed. A run beyond tolerance has failed."""
    if watch is None or result.status != "complete":
        return result
    from engines.model.memory import is_out_of_memory
    from engines.torch_engine.verify import verify

    manifest = dict(result.manifest)
    error: BaseException | None = None
    try:
        found = verify(choice.model, watch, temperature=options.temperature, seed=options.seed)
    except BenchctlError as fault:
        error = fault
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault):
            raise
        error = BenchctlError(
            "out of memory while requests were verified in float32",
            where="--verify",
            fix="verify fewer or shorter requests (--num-prompts), or leave --verify out",
            exit_code=1,
        )
    else:
        report = found.as_json()
        manifest["verify"] = report
        err.print(Text("verify  ", style="bold") + Text(f"{result.name}: {verify_text(report)}"))
        if not report["passed"]:
            error = BenchctlError(
                f"the engine's logits are not the reference's: relative error up to {report['max_error']:.2g}, {report['mean_error']:.2g} on "
                f"average (tolerance {report['tolerance']:g}, twice that at one position), same token at {report['agreement_beyond_rounding']:.1%} of positions but for rounding "
                f"(least {report['least_agreement']:.0%})",
                where=f"{worst_text(report)}",
                fix="--attention-backend reference and --enforce-eager tell kernels and graphs apart; the run is kept",
                exit_code=1,
            )
    status = result.status
    if error is not None:
        status, manifest["status"], manifest["error"] = "failed", "failed", str(error)
    if result.folder is not None:
        write_manifest(result.folder, manifest)
    return RunResult(result.name, result.folder, status, result.outcome, manifest, error)


def verify_text(report: dict[str, Any]) -> str:
    """One line: of how many requests and positions, how far off, how often the same token."""
    if not report["positions"]:
        return "no request yielded a token: nothing was verified"
    kinds = Counter(request["kind"] for request in report["requests"])
    how = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    near = report["agreement_beyond_rounding"]
    tokens = f"same token at {report['agreement']:.2%}"
    if near != report["agreement"]:
        tokens += f" ({near:.2%} but for logits that rounding decides)"
    return (
        f"{len(report['requests'])} requests ({how}), {report['positions']} positions against float32: relative error of logits "
        f"max {report['max_error']:.2g}, mean {report['mean_error']:.2g} (tolerance {report['tolerance']:g}); {tokens}"
    )


def worst_text(report: dict[str, Any]) -> str:
    worst = max(report["requests"], key=lambda r: (r["max_error"] != r["max_error"], r["max_error"]))
    return f"request {worst['request']} of the trace ({worst['kind']})"
