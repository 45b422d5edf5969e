"""What a simulated engine knows of a device: a model's shape, fitted coefficients, where they were fitted, and their error.

A profile is one JSON file. Read and written as bytes here; whoever calls owns the file. No torch, no clock, no files.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from traces.errors import BenchctlError

FORMAT = 4  # of the file; readers refuse another. 4: of the last layer, rows that yield a token alone
Family = Literal["decode", "prefill"]
FAMILIES: tuple[Family, ...] = ("decode", "prefill")  # rounds of decodes alone; rounds that feed a prompt (mixed too)

# Columns whose fitted range is kept, for each family: beyond it, by more than MARGIN, a duration is extrapolated.
MARGIN = 1.1
RANGED = ("num_seqs", "num_tokens", "context_tokens", "chunk_keys", "single_keys")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that a round's operations and bytes follow from."""

    name: str
    vocab_size: int
    max_position_embeddings: int  # tokens
    hidden_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    matrix_parameters: int  # of the layers' matrices; the head and the embedding not counted
    # Of them, what follows the last layer's attention: beside chunks it is computed for the head's rows alone.
    last_parameters: int
    bytes_per_value: int

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Read whole in every round: the layers and the head. The embedding is read by row."""
        return (self.matrix_parameters + self.head_parameters) * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value


class Graphs(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of captured CUDA graphs, ascending: a round is padded to the next one. Empty: nothing is padded."""

    decode: tuple[int, ...] = ()  # sequences
    prefill: tuple[int, ...] = ()  # tokens
    prefill_max_seqs: int = 0  # sequences that each of them holds, where its tokens are not fewer
    prefill_most_seqs: int = 0  # and that a second one of each size holds; 0: there is no second


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Straight lines between points; `at` ascends."""

    at: tuple[float, ...]
    value: tuple[float, ...]


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Device seconds of rounds of decodes alone, beyond the matrix products' roofline. Curves go over the padded sequences."""

    rest: Curve  # seconds: launches, norms, sampling, what the products take beyond their roofline
    per_key: Curve  # seconds a key of all contexts together: attention that draws the memory's bandwidth
    per_longest_key: Curve  # seconds a key of the longest context: attention that waits for its longest walk
    unhidden: float  # share of the lesser of the two that does not hide behind the greater; 0 to 1


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True):
    """The same of rounds that feed a prompt, with or without decodes beside it. The curve goes over the padded tokens."""

    rest: Curve
    per_seq_s: float
    per_tile_s: float  # a tile of a chunk's attention: query tokens that walk their keys together
    per_own_key_s: float  # a key of a tile, summed over all tiles: of this round
    per_older_key_s: float  # of earlier rounds
    per_block_key_s: float  # any, in rounds that have another kernel read them all (`Features.block_keys`)
    per_chunk_key_s: float  # a key of the longest chunk's last tile: no tile is shared out
    per_key_s: float  # a key of the sequences that feed one token, summed
    per_longest_key_s: float  # a key of the longest of them
    unhidden_chunk: float  # as in DecodeCost: of tiles and the longest walk
    unhidden_single: float
    # Share of products and rest by which a device slows down that is kept on such rounds; over padded tokens. Not in any
    # duration: designed rounds, repeated one after the other, are slower by it than the same round in a run.
    heat: Curve = Curve(at=(1.0,), value=(0.0,))


class HostCost(msgspec.Struct, frozen=True, kw_only=True):
    """Host seconds of a round: `launch` before the device starts (schedule, prepare), `after` (update, record)."""

    launch_intercept_s: float
    launch_per_seq_s: float = 0.0
    launch_per_token_s: float = 0.0  # fed tokens of prompts
    launch_per_known_token_s: float = 0.0  # known tokens of the requests admitted, cached ones too: ids and hashes
    launch_prefill_s: float = 0.0  # of a round that feeds a prompt: admitting, tables, positions
    after_intercept_s: float = 0.0
    after_per_seq_s: float = 0.0
    gap_s: float = 0.0  # between two rounds that follow each other on the device
    wake_s: float = (
        0.0  # the first round after the loop slept; without overlap: every round, what nothing else explains
    )
    arrive_s: float = 0.0  # from an arrival to the start of its round, where the loop slept until then
    # Launching the kernels of a round without a graph, one by one: the host is busy so long, and the device no faster.
    issue_s: float = 0.0
    issue_beyond_tokens: float = 0.0  # rounds with prefill have no graph beyond so many tokens
    issue_beyond_seqs: float = 0.0  # or so many sequences


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """What remains for one padded size after the formula: a factor near 1, drawn towards 1 where rounds were few."""

    family: Family
    padded_tokens: int
    factor: float
    rounds: int


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Least and greatest value of a feature among the rounds of a family that were fitted."""

    family: Family
    feature: str
    least: float
    greatest: float


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """|predicted - measured| / measured of device time, over the fitted rounds of one kind."""

    kind: str
    rounds: int
    p50: float
    p95: float


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was fitted, or a file of points: its trace is then `designed rounds`."""

    scheduler: str
    trace: str
    trace_sha256: str
    digest: str | None
    started: str | None
    block_size: int
    rounds: int


class HeldOutError(msgspec.Struct, frozen=True, kw_only=True):
    """What `benchctl validate` found on runs that no fit saw. Errors are shares of what was measured, without sign.

    `end_to_end`: percentile (50, 90, 99) -> the median over TTFT, TPOT, ITL and E2E of all runs; `worst` the largest of them.
    """

    validated: str  # ISO 8601
    runs: tuple[str, ...]  # scheduler, trace
    round_p50: dict[str, float]  # kind -> the largest median error of a round, of the runs with 20 of them or more
    end_to_end: dict[str, float]
    worst: dict[str, float]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients for one block size: kernels are tuned by it."""

    block_size: int
    bytes_per_s: float
    flops_per_s: float
    ceilings: str  # where the two come from
    tile_tokens: int  # query tokens in a tile of a chunk's attention
    decode: DecodeCost
    prefill: PrefillCost
    host: HostCost
    buckets: tuple[Bucket, ...]
    ranges: tuple[Range, ...]
    residuals: tuple[Residual, ...]
    sources: tuple[Source, ...]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A device, a model and an engine, as a formula. `docs/simulator.md` explains it."""

    benchctl_profile: int = FORMAT
    name: str
    created: str  # ISO 8601
    device: str
    driver: str | None
    versions: dict[str, str | None]
    attention_backend: str | None
    overlapped: bool  # rounds were scheduled while the one before ran
    kv_cache_tokens: int  # usable, of the fitted runs
    max_num_seqs: int
    max_num_batched_tokens: int
    model: ModelShape
    graphs: Graphs
    fits: tuple[Fit, ...]  # by block size, ascending; at least one
    held_out: HeldOutError | None = None

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(fit.block_size for fit in self.fits)

    def fit_for(self, block_size: int) -> Fit | None:
        """The fit of exactly this block size."""
        return next((fit for fit in self.fits if fit.block_size == block_size), None)

    def nearest_fit(self, block_size: int) -> Fit:
        """The fit of this block size, or of the one nearest by ratio."""
        return min(self.fits, key=lambda fit: max(fit.block_size / block_size, block_size / fit.block_size))


def parse_profile(raw: bytes, where: str) -> Profile:
    """Raises BenchctlError naming the key where `raw` is no profile, or one whose numbers cannot be."""
    fix = "make it anew with benchctl calibrate RUN... -o FILE"
    try:
        version = msgspec.json.decode(raw, type=dict[str, Any]).get("benchctl_profile")
    except msgspec.DecodeError as error:
        raise BenchctlError(f"no profile: {error}", where=where, fix=fix) from None
    if version != FORMAT:
        raise BenchctlError(
            f"no profile of format {FORMAT}: its key benchctl_profile is {version!r}", where=where, fix=fix
        )
    try:
        profile = msgspec.json.decode(raw, type=Profile)
    except msgspec.DecodeError as error:
        raise BenchctlError(f"the profile is broken: {error}", where=where, fix=fix) from None
    if not profile.fits:
        raise BenchctlError("the profile holds no fit", where=where, fix=fix)
    for fit in profile.fits:
        at = f"{where}, block size {fit.block_size}"
        for key in ("bytes_per_s", "flops_per_s"):
            if not 0 < getattr(fit, key) < float("inf"):
                raise BenchctlError(f"the profile's {key} is {getattr(fit, key)}", where=at, fix=fix)
        for part in (fit.decode, fit.prefill, fit.host):
            for key in part.__struct_fields__:
                value = getattr(part, key)
                for number in value.value if isinstance(value, Curve) else (value,):
                    if not 0 <= number < float("inf"):
                        raise BenchctlError(f"the profile's {key} is {number}", where=at, fix=fix)
                if isinstance(value, Curve) and not ascends(value):
                    raise BenchctlError(f"the profile's {key} is no curve: {value.at}", where=at, fix=fix)
        if fit.tile_tokens < 1:
            raise BenchctlError(f"the profile's tile_tokens is {fit.tile_tokens}", where=at, fix=fix)
        for bucket in fit.buckets:
            if not 0.1 <= bucket.factor <= 10:
                raise BenchctlError(
                    f"the profile's factor for {bucket.padded_tokens} padded tokens is {bucket.factor}",
                    where=at,
                    fix=fix,
                )
    return profile


def ascends(curve: Curve) -> bool:
    return len(curve.at) == len(curve.value) > 0 and all(a < b for a, b in zip(curve.at, curve.at[1:], strict=False))


def dump_profile(profile: Profile) -> bytes:
    """JSON, indented, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"
