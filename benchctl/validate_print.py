"""What calibrate and validate print: tables for people, on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchctl.validate import Validation
from engines.simulated.cost import on_curve
from engines.simulated.profile import Profile
from reports.simulated_error import error_text


def profile_tables(profile: Profile, path: Path) -> None:
    """The fit, its ceilings, its error by kind and the range it holds for."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        Text(f"{profile.name}: {profile.model.name} on {profile.device}, {profile.attention_backend} attention")
    )
    for fit in profile.fits:
        d, p = fit.decode, fit.prefill
        console.print(
            Text(
                f"block size {fit.block_size}: ceilings {fit.bytes_per_s / 1e12:.2f} TB/s and {fit.flops_per_s / 1e12:.0f} TFLOP/s "
                f"({fit.ceilings}); beyond its products a decode takes {d.rest.value[0] * 1e6:.0f} µs and 64 of them "
                f"{on_curve(d.rest, 64) * 1e6:.0f} µs; attention draws {drawn(profile, on_curve(d.per_key, 1)):.2f} TB/s with one "
                f"decode, {drawn(profile, on_curve(d.per_key, 64)):.2f} with 64 and {drawn(profile, on_curve(d.per_key, 512)):.2f} "
                f"with 512; 512 tokens of prefill take {on_curve(p.rest, 512) * 1e6:.0f} µs beyond their products"
            )
        )
        table = Table(
            "kind", "rounds", "error p50", "error p95", title="|predicted - measured| / measured, fitted rounds"
        )
        for r in fit.residuals:
            table.add_row(r.kind, f"{r.rounds:,}", f"{r.p50:.2%}", f"{r.p95:.2%}")
        console.print(table)
        for family in ("decode", "prefill"):
            parts = [
                f"{r.feature} {r.least:,.0f} to {r.greatest:,.0f}"
                for r in fit.ranges
                if r.family == family and r.greatest > 0
            ]
            console.print(Text(f"fitted range, {family}: {', '.join(parts)}"))
    console.print(Text(str(path)))


def drawn(profile: Profile, per_key_s: float) -> float:
    """TB/s at which attention reads its keys and values."""
    return profile.model.kv_bytes_per_token / per_key_s / 1e12 if per_key_s > 0 else 0.0


def validation_tables(profile: Profile, v: Validation) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"{v.run}: {v.model}, {v.scheduler}, trace {v.trace}, by profile {profile.name}", style="bold"))
    for note in v.notes:
        console.print(Text(f"note: {note}"))
    if v.device_share is not None:
        table = Table(
            "kind", "rounds", "error p50", "error p95", "bias", "outside the fit", title="device time of a round"
        )
        for k in v.kinds:
            table.add_row(k.kind, f"{k.rounds:,}", f"{k.p50:.2%}", f"{k.p95:.2%}", f"{k.bias:+.2%}", f"{k.outside:,}")
        console.print(table)
        console.print(
            Text(f"all device time {v.device_share:+.2%}; host time before a launch, median error {v.host_p50:.0%}")
        )
    if v.worst:
        table = Table(
            "round", "kind", "measured ms", "predicted ms", "sequences", "tokens", "context", title="worst rounds"
        )
        for w in v.worst:
            table.add_row(
                str(w.round), w.kind, f"{w.measured_s * 1e3:.3f}", f"{w.predicted_s * 1e3:.3f}",
                str(w.num_seqs), str(w.num_tokens), str(w.context_tokens),
            )  # fmt: skip
        console.print(table)
    if v.end_to_end:
        table = Table("figure", "measured", "simulated", "error", title="end to end (ms; tokens/s; s)")
        for e in v.end_to_end:
            name = e.metric if e.percentile is None else f"{e.metric} p{e.percentile:g}"
            table.add_row(name, f"{e.measured:,.3f}", f"{e.simulated:,.3f}", f"{e.error:+.2%}")
        console.print(table)
    console.print()


def profile_list(rows: Sequence[Mapping[str, Any]]) -> None:
    """The profiles known by name."""
    console = Console(highlight=False, soft_wrap=True)
    for row in rows:
        console.print(Text(str(row["name"]), style="bold"))
        sizes, torch = ", ".join(map(str, row["block_sizes"])), row["versions"].get("torch")
        console.print(
            Text(
                f"  {row['model']} on {row['device']}, driver {row['driver']}, torch {torch}; block sizes {sizes}; "
                f"{row['kv_cache_tokens']:,} tokens of KV cache; fitted {row['created'][:10]}"
            )
        )
        console.print(Text(f"  {error_text(row['error'])}"))
        console.print(Text(f"  {'bundled' if row['bundled'] else row['path']}"))
