"""Profiles as files: found by name, read, written, held against what a command asks for, and what is said of them."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

from engines.simulated.engine import SimulatedEngine
from engines.simulated.profile import Profile, dump_profile, parse_profile
from reports.simulated_error import error_text
from traces.errors import BenchctlError

FOLDER = Path("profiles")  # where a bare NAME is looked for, before the bundled ones
BUNDLED = Path(str(resources.files("engines.simulated"))) / "profiles"
PHRASES = {
    "num_seqs": "sequences",
    "num_tokens": "fed tokens",
    "context_tokens": "context tokens",
    "chunk_keys": "keys of a chunk",
    "single_keys": "keys of a single token",
}


def find_profile(text: str) -> Path:
    """A file, or NAME of profiles/NAME.json or of a bundled profile. Raises BenchctlError."""
    path = Path(text).expanduser()
    if path.is_file():
        return path
    named = None if os.sep in text or path.suffix == ".json" else named_profiles().get(text)
    if named is None and path.is_dir():
        inside = sorted(entry for entry in path.glob("*.json") if entry.is_file())
        raise BenchctlError(
            f"{text} is a folder; a profile is one JSON file, or a name",
            where="--profile",
            fix=f"--profile {inside[0]}"
            if inside
            else f"{', '.join(named_profiles())}, or a file of benchctl calibrate",
        )
    if named is None:
        raise BenchctlError(
            f"no profile {text!r}: no such file, and none of that name",
            where="--profile",
            fix=f"{', '.join(named_profiles())}, or one made by benchctl calibrate RUN... -o FILE",
        )
    return named


def load_profile(text: str) -> Profile:
    """The profile of that file or name. Raises BenchctlError."""
    path = find_profile(text)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BenchctlError(f"the profile cannot be read: {error.strerror}", where=str(path)) from None
    return parse_profile(raw, str(path))


def named_profiles() -> dict[str, Path]:
    """Name -> file, of those that need no path: the current folder's own ones, then the bundled ones."""
    own = {entry.stem: entry for entry in sorted(FOLDER.glob("*.json"))}
    return own | {entry.stem: entry for entry in sorted(BUNDLED.glob("*.json")) if entry.stem not in own}


def save_profile(profile: Profile, path: Path) -> None:
    """Written under a temporary name and renamed. Raises BenchctlError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(dump_profile(profile))
        os.replace(temporary, path)
    except OSError as error:
        raise BenchctlError(
            f"{path} cannot be written: {error.strerror}", where="--output", fix="name another file"
        ) from None


def check_model(profile: Profile, asked: str | None) -> None:
    """Raises BenchctlError where --model names another model than the profile's."""
    if asked is not None and asked != profile.model.name:
        raise BenchctlError(
            f"profile {profile.name} was measured with {profile.model.name}, not {asked}",
            where="--model",
            fix=f"leave --model out, or calibrate a profile of {asked}",
        )


def check_block_size(profile: Profile, block_size: int, policy: str) -> None:
    """Raises BenchctlError where no run of this block size was fitted: kernels are tuned by it."""
    if profile.fit_for(block_size) is None:
        known = ", ".join(map(str, profile.block_sizes))
        raise BenchctlError(
            f"profile {profile.name} was measured at block size {known}; {policy} has {block_size}",
            where="--block-size",
            fix=f"--block-size {profile.block_sizes[0]}, or calibrate with a run of block size {block_size}",
        )


def headline(profile: Profile) -> str:
    """One line: what is simulated, and how far off it was."""
    return f"durations by profile {profile.name} of {profile.device}: {error_text(about_error(profile))}"


def about_error(profile: Profile) -> dict[str, Any]:
    """For a manifest: the errors that a report states."""
    fitted: dict[str, float] = {}
    for fit in profile.fits:
        for residual in fit.residuals:
            fitted[residual.kind] = max(fitted.get(residual.kind, 0.0), residual.p50)
    held = profile.held_out
    return {
        "fitted_p50": fitted,
        "held_out": None
        if held is None
        else {"runs": len(held.runs), "round_p50": held.round_p50, "end_to_end": held.end_to_end, "worst": held.worst},
    }


def listed() -> list[dict[str, Any]]:
    """What `benchctl profiles` shows. Raises BenchctlError where one of them is broken."""
    rows = []
    for name, path in named_profiles().items():
        profile = load_profile(str(path))
        rows.append(
            {
                "name": name,
                "model": profile.model.name,
                "device": profile.device,
                "driver": profile.driver,
                "versions": profile.versions,
                "created": profile.created,
                "block_sizes": list(profile.block_sizes),
                "kv_cache_tokens": profile.kv_cache_tokens,
                "error": about_error(profile),
                "bundled": path.parent == BUNDLED,
                "path": str(path),
            }
        )
    return rows


def about(profile: Profile, block_size: int) -> dict[str, Any]:
    """For a manifest."""
    fit = profile.nearest_fit(block_size)
    return {
        "profile": profile.name,
        "created": profile.created,
        "device": profile.device,
        "driver": profile.driver,
        "block_size_fitted": fit.block_size,
        "error": about_error(profile),
        "residuals": [{"kind": r.kind, "rounds": r.rounds, "p50": r.p50, "p95": r.p95} for r in fit.residuals],
        "fitted_on": [
            {"scheduler": s.scheduler, "trace": s.trace, "digest": s.digest, "started": s.started} for s in fit.sources
        ],
    }


def account_of(engine: SimulatedEngine) -> dict[str, Any]:
    """Rounds simulated, and those outside the fitted range, for a manifest."""
    return {"rounds": engine.account.rounds, "outside": engine.account.outside, "beyond": beyond_texts(engine)}


def beyond_texts(engine: SimulatedEngine) -> list[str]:
    """`sequences of decodes up to 57, fitted 1 to 5 (812 rounds)`, most rounds first."""
    ranges = {(r.family, r.feature): (r.least, r.greatest) for r in engine.fit.ranges}
    texts = []
    for (family, feature), (count, least, greatest) in sorted(
        engine.account.beyond.items(), key=lambda item: -item[1][0]
    ):
        low, high = ranges[family, feature]
        reach = f"up to {greatest:,.0f}" if greatest > high else f"down to {least:,.0f}"
        where = "decode rounds" if family == "decode" else "rounds with prefill"
        texts.append(f"{PHRASES[feature]} in {where} {reach}, fitted {low:,.0f} to {high:,.0f} ({count:,.0f} rounds)")
    return texts


def outside_text(engine: SimulatedEngine) -> str | None:
    """One line, or None where every round lay within what was fitted."""
    account = engine.account
    if not account.outside:
        return None
    share = account.outside / account.rounds
    return (
        f"{account.outside:,} of {account.rounds:,} rounds ({share:.1%}) lie outside what profile {engine.profile.name} was "
        f"fitted on, their durations are extrapolated: {'; '.join(beyond_texts(engine))}"
    )
