"""What the page embeds of a run: every round, every batch, every decision, in as few bytes as keep them exact.

A decoding request is in the batch of every round that decodes at all, one token further each time. So a stretch of its
decodes is one row (request, first round, number of decoding rounds, start); whatever does not fit that rule (prefill
chunks, odd rows) is a row of its own. From both, the page finds the batch of any round. Times are kept to 1 µs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from reports.blocks import replay, turning_points
from reports.page_pack import DELTA, FLOAT, NULLABLE, Ints, Pack, micros
from reports.run import Run

CHUNK_ROWS = 1_000_000  # of `batches` in memory at a time
MAX_MAP_BLOCKS = 64  # pools up to this size carry every event of every block
MAX_EXPLICIT_ORDER = 300_000  # rows of rounds whose order does not follow from admissions
LONGEST_ID = 60

HOST_TIMES = ("schedule_s", "prepare_s", "device_s", "update_s", "record_s")
COUNTS = (
    "num_seqs", "prefill_tokens", "decode_tokens", "cached_tokens", "queried_tokens", "budget_left", "waiting", "running", "skipped",
    "free_blocks_start", "free_blocks_scheduled", "free_blocks_end", "cached_free_blocks", "admitted", "preempted", "finished", "evicted",
)  # fmt: skip
ENUMS = ("kind", "mode", "stop_waiting", "stop_running")


@dataclass(frozen=True, slots=True)
class Detail:
    """How much of a run is embedded. `notes` say on the page what is left out."""

    blocks: bool = True
    host_times: bool = True
    batches: bool = True

    @property
    def notes(self) -> list[str]:
        left_out = {
            "block events": self.blocks,
            "host times of each round": self.host_times,
            "batches and decisions of each round": self.batches,
        }
        missing = [what for what, there in left_out.items() if not there]
        return (
            [f"left out to keep the page small: {', '.join(missing)} (in the run folder's tables)"] if missing else []
        )


DETAILS = (Detail(), Detail(blocks=False), Detail(blocks=False, host_times=False), Detail(False, False, False))


def embed(run: Run, detail: Detail = DETAILS[0]) -> str:
    """The run as base64 text (`page_pack`), at most as detailed as `detail`."""
    rounds = run.read("rounds").sort("round")
    pack = Pack()
    words: dict[str, list[str | None]] = {}
    _add_rounds(pack, rounds, detail, words)
    requests = _add_requests(pack, run, rounds, words)
    with_batches = detail.batches and run.has("batches")
    ordered = True
    if with_batches:
        admissions = _add_decisions(pack, run, rounds, words)
        ordered = _add_batches(pack, run, rounds, admissions)
    has_map = (
        detail.blocks
        and run.has("blocks")
        and run.usable_blocks is not None
        and 0 < run.usable_blocks <= MAX_MAP_BLOCKS
    )
    if has_map:
        _add_blocks(pack, run, rounds, words)
    elif with_batches and run.has("blocks"):
        _add_moments(pack, run, rounds)
    labels = run.labels
    pack.extra = {
        "words": words,
        "ids": [_short(run.ids[request]) for request in requests],
        "labels": [_short(labels.get(request, f"#{request}")) for request in requests],
        "facts": {
            "scheduler": run.scheduler,
            "priority": run.setting("scheduling_policy") == "priority" and run.family != "nano",
            "budget": run.token_budget,
            "max_num_seqs": run.max_num_seqs,
            "usable_blocks": run.usable_blocks,
            "block_size": run.block_size,
            "first_block": 0 if run.family == "nano" else 1,
            "clock": run.clock,
            "overlapped": bool(run.manifest.get("overlapped")),
            "duration_s": run.duration_s,
            "batches": with_batches,
            "map": has_map,
            "ordered": ordered,
        },
    }
    return pack.text()


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_ID else text[: LONGEST_ID - 1] + "…"


def _codes(series: pl.Series, known: list[str | None]) -> Ints:
    """Each word as its place in `known`, which grows; null is a word too."""
    found = series.unique(maintain_order=True).to_list()
    known += [word for word in found if word not in known]
    return (
        series.replace_strict(known, range(len(known)), return_dtype=pl.Int64).to_numpy()
        if None not in found
        else np.array([known.index(word) for word in series.to_list()], dtype=np.int64)
    )


def _add_rounds(pack: Pack, rounds: pl.DataFrame, detail: Detail, words: dict[str, list[str | None]]) -> None:
    moments = [micros(rounds[name]).to_numpy() for name in ("t_start_s", "t_scheduled_s", "t_executed_s", "t_end_s")]
    columns: dict[str, Any] = {
        "round": rounds["round"],
        "idle": moments[0] - np.concatenate([[0], moments[3][:-1]]) if rounds.height else moments[0],
        "scheduling": moments[1] - moments[0],
        "executing": moments[2] - moments[1],
        "updating": moments[3] - moments[2],
    }
    for name in ENUMS:
        columns[name] = _codes(rounds[name], words.setdefault(name, []))
    columns |= {name: rounds[name] for name in COUNTS}
    how = dict.fromkeys(("round", "num_seqs", "decode_tokens", "waiting", "running", "free_blocks_start", "free_blocks_scheduled", "free_blocks_end", "cached_free_blocks"), DELTA)  # fmt: skip
    columns["padded_tokens"] = rounds["padded_tokens"]
    how["padded_tokens"] = NULLABLE
    if detail.host_times:
        for name in HOST_TIMES:
            if rounds[name].null_count() < rounds.height:
                columns[name], how[name] = micros(rounds[name]), NULLABLE
        for name in ("flops", "bytes"):
            if rounds[name].null_count() < rounds.height:
                columns[name], how[name] = rounds[name], FLOAT
    pack.add("rounds", columns, how)


def _places(rounds: pl.DataFrame, numbers: pl.Series) -> Ints:
    """The place among the recorded rounds of each round number: of the first that is not before it."""
    return np.searchsorted(rounds["round"].to_numpy(), numbers.to_numpy()).astype(np.int64)


def _add_requests(pack: Pack, run: Run, rounds: pl.DataFrame, words: dict[str, list[str | None]]) -> list[int]:
    """Requests in the order in which the scheduler was given them, then those it refused. Returns their rows of the trace."""
    seen = run.read("admissions").with_row_index("given").select("request", "given", "priority", "admitted_round", "id", *_TIMES, "prompt_tokens", "output_tokens")  # fmt: skip
    ended = run.read("requests").drop("id", *_TIMES, "prompt_tokens")
    refused = run.read("requests").join(seen, on="request", how="anti").with_columns(
        pl.lit(None, dtype=pl.UInt32).alias("given"), pl.lit(0, dtype=pl.Int64).alias("priority"),
        pl.lit(None, dtype=pl.Int64).alias("admitted_round"), pl.lit(None, dtype=pl.Int64).alias("output_tokens"),
    )  # fmt: skip
    frame = pl.concat(
        [seen.join(ended, on="request", how="left", maintain_order="left"), refused], how="diagonal_relaxed"
    )
    ranks = frame.with_row_index("place").sort("priority", "arrival_s", "id", maintain_order=True)["place"]
    rank = np.empty(frame.height, dtype=np.int64)
    rank[ranks.to_numpy()] = np.arange(frame.height)
    admitted = frame["admitted_round"]
    rejected = frame["status"].fill_null("unfinished") == "rejected"
    at = pl.Series(_places(rounds, admitted.fill_null(0)))
    columns: dict[str, Any] = {
        "request": frame["request"],
        "rank": rank,
        "joined": pl.select(pl.when(admitted.is_null() | rejected).then(None).otherwise(at)).to_series(),
        "status": _codes(frame["status"].fill_null("unfinished"), words.setdefault("status", [])),
        "reason": _codes(frame["reason"], words.setdefault("end", [])),
    }
    times = (*_TIMES, "first_scheduled_s", "first_token_s", "finished_s", "stalled_s", "preempted_s")
    columns |= {name: micros(frame[name]) for name in times}
    counts = ("prompt_tokens", "output_tokens", "emitted_tokens", "cached_tokens", "discarded_tokens", "recomputed_tokens", "preemptions")  # fmt: skip
    columns |= {name: frame[name] for name in counts}
    plain = ("rank", "status", "reason")
    pack.add("requests", columns, {name: NULLABLE for name in columns if name not in plain} | {"request": DELTA})
    return frame["request"].to_list()


_TIMES = ("arrival_s", "admitted_s")


def _add_decisions(pack: Pack, run: Run, rounds: pl.DataFrame, words: dict[str, list[str | None]]) -> pl.DataFrame:
    """Every decision but evictions, and those as counts for each round and request. Returns the admissions (round, request, place)."""
    frame = (
        run.scan("decisions").filter(pl.col("kind") != "evict").sort("round", "order", maintain_order=True).collect()
    )
    pack.add(
        "decisions",
        {
            "at": _places(rounds, frame["round"]),
            "kind": _codes(frame["kind"], words.setdefault("decision", [])),
            "request": frame["request"],
            "other": frame["other"],
            "reason": _codes(frame["reason"], words.setdefault("reason", [])),
            "needed": frame["needed"],
            "available": frame["available"],
            "unit": _codes(frame["unit"], words.setdefault("unit", [])),
        },
        {"at": DELTA, "request": DELTA, "other": NULLABLE, "needed": NULLABLE, "available": NULLABLE},
    )
    lost = (
        run.scan("decisions").filter(pl.col("kind") == "evict").group_by("round", "request").len("count").sort("round", "request").collect()
    )  # fmt: skip
    pack.add(
        "evictions",
        {"at": _places(rounds, lost["round"]), "request": lost["request"], "count": lost["count"]},
        {"at": DELTA},
    )
    return (
        frame.with_row_index("place")
        .filter(pl.col("kind").is_in(["admit", "resume"]))
        .select("round", "request", "place")
    )


def _chunks(run: Run, rounds: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """`batches` in order, a stretch of rounds at a time."""
    if not rounds.height:
        return
    group = rounds["num_seqs"].cum_sum() // CHUNK_ROWS
    for stretch in rounds.select("round").with_columns(group.alias("group")).partition_by("group", maintain_order=True):
        within = pl.col("round").is_between(stretch["round"][0], stretch["round"][-1])
        yield run.scan("batches").filter(within).sort("round", "order").collect()


def _add_batches(pack: Pack, run: Run, rounds: pl.DataFrame, admissions: pl.DataFrame) -> bool:
    """Stretches of decodes, single rows, and the order of rows where it is not that of the admissions.

    Returns False where the order had to be left out.
    """
    decoding: Ints = np.cumsum(rounds["decode_tokens"].to_numpy() > 0, dtype=np.int64)
    keys, places = _admission_keys(rounds, admissions)
    stretches: list[tuple[Ints, ...]] = []
    singles: list[pl.DataFrame] = []
    explicit: list[pl.DataFrame] = []
    for frame in _chunks(run, rounds):
        frame = frame.with_columns(pl.Series("at", _places(rounds, frame["round"])))
        # Polars: a row that follows the rule of decodes; everything else stands for itself.
        regular = (pl.col("phase") == "decode") & (pl.col("num_tokens") == 1) & pl.col("yields_token") & pl.col("cached_tokens").is_null()  # fmt: skip
        steady = frame.filter(regular).sort("request", "round", maintain_order=True)
        request, at, start = (steady[name].to_numpy() for name in ("request", "at", "start"))
        stretches.append(_runs(request, at, start, np.ones(len(at), dtype=np.int64), decoding))
        singles.append(frame.filter(~regular))
        wanted = request_order(frame, keys, places, rounds.height)
        if wanted is not None:
            explicit.append(wanted)
    merged = [np.concatenate(column) for column in zip(*stretches, strict=True)] or [np.zeros(0, dtype=np.int64)] * 4
    order = np.lexsort((merged[1], merged[0]))
    request, at, count, start = _runs(merged[0][order], merged[1][order], merged[3][order], merged[2][order], decoding)
    pack.add(
        "stretches", {"request": request, "at": at, "count": count, "start": start}, {"request": DELTA, "start": DELTA}
    )
    rows = pl.concat(singles) if singles else run.scan("batches").with_columns(pl.lit(0).alias("at")).head(0).collect()
    pack.add(
        "singles",
        {
            "at": rows["at"],
            "request": rows["request"],
            "start": rows["start"],
            "num_tokens": rows["num_tokens"],
            "decode": rows["phase"] == "decode",
            "cached_tokens": rows["cached_tokens"],
            "yields_token": rows["yields_token"],
            "num_blocks": rows["num_blocks"],
        },
        {"at": DELTA, "request": DELTA, "cached_tokens": NULLABLE},
    )
    told = pl.concat(explicit) if explicit else pl.DataFrame(schema={"at": pl.Int64, "request": pl.Int64})
    complete = told.height <= MAX_EXPLICIT_ORDER
    told = told if complete else told.head(0)
    pack.add("orders", {"at": told["at"], "request": told["request"]}, {"at": DELTA})
    return complete


def _runs(request: Ints, at: Ints, start: Ints, count: Ints, decoding: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Join rows, sorted by request and place, that continue each other: (request, place, count, start) of each stretch."""
    if not len(at):
        return request, at, count, start
    follows = (
        (request[1:] == request[:-1])
        & (decoding[at[1:]] == decoding[at[:-1]] + count[:-1])
        & (start[1:] == start[:-1] + count[:-1])
    )
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return request[first], at[first], np.add.reduceat(count, first), start[first]


def _admission_keys(rounds: pl.DataFrame, admissions: pl.DataFrame) -> tuple[Ints, Ints]:
    """(request · (rounds + 1) + place of the round, sorted; the admission's place among the decisions)."""
    keys = admissions["request"].to_numpy() * (rounds.height + 1) + _places(rounds, admissions["round"])
    order = np.argsort(keys, kind="stable")
    return keys[order], admissions["place"].to_numpy().astype(np.int64)[order]


def request_order(frame: pl.DataFrame, keys: Ints, places: Ints, num_rounds: int) -> pl.DataFrame | None:
    """(at, request) of every round whose rows are not in the order in which their requests were admitted last."""
    at = frame["at"].to_numpy()
    wanted = frame["request"].to_numpy() * (num_rounds + 1) + at
    found = np.searchsorted(keys, wanted, side="right") - 1
    rank = np.where(found >= 0, places[np.maximum(found, 0)] if len(places) else -1, -1)
    wrong = (at[1:] == at[:-1]) & (rank[1:] <= rank[:-1])
    if not wrong.any():
        return None
    return frame.filter(pl.col("at").is_in(np.unique(at[1:][wrong]).tolist())).select("at", "request")


def _add_blocks(pack: Pack, run: Run, rounds: pl.DataFrame, words: dict[str, list[str | None]]) -> None:
    """Every event of every block, and after each round the blocks that a lookup can find, as two masks of 32 bits."""
    frame = run.read("blocks").sort("round", "order", maintain_order=True)
    pack.add(
        "blocks",
        {
            "at": _places(rounds, frame["round"]),
            "block": frame["block"],
            "event": _codes(frame["event"], words.setdefault("event", [])),
            "request": frame["request"],
            "index": frame["index"],
        },
        {"at": DELTA, "request": DELTA, "index": NULLABLE},
    )
    first = 0 if run.family == "nano" else 1
    masks = np.zeros((2, rounds.height), dtype=np.int64)
    told = rounds.select(pl.int_range(pl.len()).alias("at"), "hashed_blocks")
    if told["hashed_blocks"].null_count():
        # Not recorded for this pool: what was cached and not lost since. nano, whose entries can move, always records it here.
        hashed = [sorted(pool.cached) for _, pool in replay(run)]
        told = told.with_columns(pl.Series("hashed_blocks", hashed, dtype=pl.List(pl.Int64)))
    found = told.explode("hashed_blocks").drop_nulls()
    at, bit = found["at"].to_numpy(), found["hashed_blocks"].to_numpy() - first
    for half in (0, 1):
        mine = (bit >= 32 * half) & (bit < 32 * half + 32)
        np.bitwise_or.at(masks[half], at[mine], np.left_shift(1, bit[mine] - 32 * half))
    pack.add("hashed", {"low": masks[0], "high": masks[1]}, {"low": DELTA, "high": DELTA})


def _add_moments(pack: Pack, run: Run, rounds: pl.DataFrame) -> None:
    """Free blocks at each turning point of the rounds that preempt: only there do they rise and fall within one schedule()."""
    wild = rounds.filter(pl.col("preempted") > 0)
    last = pl.col("event").shift(1).over("block", order_by=["round", "order"])
    change = (
        pl.when((pl.col("event") == "allocate") | ((pl.col("event") == "share") & (last == "free"))).then(-1)
        .when(pl.col("event") == "free").then(1).otherwise(0).alias("change")
    )  # fmt: skip
    at: list[int] = []
    free: list[int] = []
    if wild.height:
        events = (
            run.scan("blocks").filter(pl.col("event").is_in(["allocate", "share", "release", "free"])).with_columns(change)
            .filter(pl.col("round").is_in(wild["round"].to_list())).sort("round", "order")
            .group_by("round", maintain_order=True).agg("change").collect()
        )  # fmt: skip
        before = dict(wild.select("round", "free_blocks_start").iter_rows())
        for place, (number, changes) in zip(_places(rounds, events["round"]), events.iter_rows(), strict=True):
            counts = turning_points([before[number], *(before[number] + np.cumsum(changes)).tolist()])
            at += [int(place)] * len(counts)
            free += counts
    pack.add("moments", {"at": np.array(at, dtype=np.int64), "free": np.array(free, dtype=np.int64)}, {"at": DELTA})
