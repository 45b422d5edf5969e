"""The laws of a recorded run, checked exactly. `assert_laws(path)` raises AssertionError with the rows that break one.

They hold for every policy, engine and clock; what a run did not record (`--records summary`) is left out. The order of the
free list is a rule of nano and vllm alone, so it is not asked of a policy that is of neither family. Used by the tests and by
`benchctl check-scheduler`.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from reports import records
from reports.blocks import Pool, events_by_round
from reports.queues import walk
from reports.run import Run, open_run

# Stops of the waiting loop that come from looking at its head; the others are the loop's own.
EXAMINED = {"blocks", "not_first", "chunking_disabled", "reserve_full_isl", "watermark"}


def assert_laws(path: str | Path) -> Run:
    """Assert every law on the run at `path`; returns the opened run."""
    run = open_run(path)
    if not run.has("rounds"):
        return run
    _schema(run)
    _times(run)
    _rounds_are_consistent(run)
    _requests_are_consistent(run)
    if run.has("batches"):
        _tokens_are_the_yielding_rows(run)
        _rows_follow_each_other(run)
        _token_equation(run)
        _counts_equal_the_tables(run)
        _queues_and_reasons(run)
        _blocks(run)
    return run


def _none(frame: pl.DataFrame | pl.LazyFrame, law: str) -> None:
    """No row may break `law`; shows the first that do."""
    found = frame.lazy().head(5).collect()
    assert not found.height, f"{law}\n{found.to_dicts()}"


def _schema(run: Run) -> None:
    for table in records.TABLES:
        frame = run.read(table)
        for column, dtype in records.schema(table).items():
            assert frame.schema[column] == dtype, (table, column, frame.schema[column])
    for table, key in {
        "admissions": ["request"],
        "requests": ["request"],
        "rounds": ["round"],
        "batches": ["round", "request"],
    }.items():
        frame = run.read(table)
        assert frame.select(key).is_unique().all(), f"{table}: {key} is no key"
    batch_order = run.read("batches").group_by("round").agg(pl.col("order").sort())
    _none(
        batch_order.filter(pl.col("order").list.last() != pl.col("order").list.len() - 1), "batch order counts from 0"
    )
    both = pl.concat([run.read(table).select("round", "order") for table in ("decisions", "blocks")])
    assert both.is_unique().all(), "decisions and blocks share one order within a round"


def _times(run: Run) -> None:
    rounds = run.read("rounds")
    assert rounds["round"].is_sorted(), "rounds are written in order"
    for first, second in (
        ("t_start_s", "t_scheduled_s"),
        ("t_scheduled_s", "t_executed_s"),
        ("t_executed_s", "t_end_s"),
    ):
        _none(rounds.filter(pl.col(first) > pl.col(second)), f"{first} <= {second}")
    _none(rounds.filter(pl.col("t_end_s") < pl.col("t_end_s").shift(1)), "tokens come out in the order of rounds")
    if run.manifest.get("overlapped"):
        _none(
            rounds.filter(pl.col("t_start_s") < pl.col("t_end_s").shift(2)),
            "with overlap a round starts after the last but one ended",
        )
    else:
        _none(
            rounds.filter(pl.col("t_start_s") < pl.col("t_end_s").shift(1)), "a round starts after the last one ended"
        )
    _none(
        run.read("admissions").filter(pl.col("admitted_s") < pl.col("arrival_s") - 1e-9),
        "nobody is admitted before arriving",
    )
    order = run.read("admissions")
    assert order["admitted_s"].is_sorted() and order["admitted_round"].is_sorted(), "admissions are in order"


def _rounds_are_consistent(run: Run) -> None:
    rounds = run.read("rounds")
    tokens = pl.col("prefill_tokens") + pl.col("decode_tokens")
    kind = (
        pl.when(pl.col("num_seqs") == 0).then(pl.lit("empty"))
        .when(pl.col("decode_tokens") == 0).then(pl.lit("prefill"))
        .when(pl.col("prefill_tokens") == 0).then(pl.lit("decode"))
        .otherwise(pl.lit("mixed"))
    )  # fmt: skip
    _none(rounds.filter(pl.col("kind") != kind), "kind says what was fed")
    budget = run.token_budget
    if budget is not None:
        # nano's decode rounds do not look at the budget, and its seats may outnumber the tokens.
        bound = pl.col("kind") != "decode" if run.family == "nano" else pl.lit(True)
        _none(rounds.filter(bound & (tokens > budget)), "the budget is never exceeded")
        _none(rounds.filter(pl.col("budget_left") != budget - tokens), "budget_left = budget - tokens")
    if run.max_num_seqs is not None:
        _none(rounds.filter(pl.col("num_seqs") > run.max_num_seqs), "no more than max_num_seqs in a round")
    total = run.usable_blocks
    known = run.setting("usable_blocks")
    assert known is None or not rounds.height or known == total, (
        f"all {known} blocks are free at the start, not {total}"
    )
    for column in ("free_blocks_start", "free_blocks_scheduled", "free_blocks_end"):
        _none(rounds.filter(~pl.col(column).is_between(0, total)), f"0 <= {column} <= {total}")
    _none(
        rounds.filter(pl.col("free_blocks_start") != pl.col("free_blocks_end").shift(1)),
        "free blocks stay between rounds",
    )
    _none(rounds.filter(pl.col("cached_free_blocks") > pl.col("free_blocks_end")), "cached free blocks are free")
    _none(rounds.filter(pl.col("skipped") > pl.col("waiting")), "the skipped are waiting")
    if run.status == "complete" and rounds.height:
        last = rounds.row(-1, named=True)
        assert (last["waiting"], last["running"], last["free_blocks_end"]) == (0, 0, total), (
            f"a complete run ends empty: {last}"
        )


def _requests_are_consistent(run: Run) -> None:
    requests, admissions = run.read("requests"), run.read("admissions")
    assert set(requests["status"]) <= {"finished", "rejected", "unfinished"}, requests["status"].unique()
    finished = requests.filter(pl.col("status") == "finished")
    _none(
        finished.filter(
            pl.any_horizontal(pl.col("first_scheduled_s", "first_token_s", "finished_s", "reason").is_null())
        ),
        "finished have all times",
    )
    for first, second in (
        ("first_scheduled_s", "first_token_s"),
        ("first_token_s", "finished_s"),
        ("admitted_s", "first_scheduled_s"),
    ):
        _none(finished.filter(pl.col(first) > pl.col(second)), f"{first} <= {second}")
    _none(
        requests.filter(
            (pl.col("status") == "rejected") & ((pl.col("emitted_tokens") > 0) | pl.col("reason").is_null())
        ),
        "rejected emit nothing",
    )
    if run.status == "complete":
        assert not (requests["status"] == "unfinished").any(), "a complete run has nobody unfinished"
        expected = run.manifest.get("num_requests")
        assert expected is None or requests.height == expected, (requests.height, expected)
    orphans = finished.join(admissions, on="request", how="anti")
    _none(orphans, "who finished was admitted")
    joined = finished.join(admissions, on="request", suffix="_asked")
    for column in ("id", "arrival_s", "admitted_s", "prompt_tokens"):
        _none(
            joined.filter(pl.col(column) != pl.col(f"{column}_asked")),
            f"{column} is the same in admissions and requests",
        )
    _none(joined.filter(pl.col("emitted_tokens") > pl.col("output_tokens")), "no more output than asked for")
    whole = joined.filter(pl.col("reason") == "max_tokens")
    _none(whole.filter(pl.col("emitted_tokens") != pl.col("output_tokens")), "max_tokens: all output was emitted")
    if run.has("tokens"):
        ends = (
            run.read("tokens").sort("request", "index").group_by("request", maintain_order=True)
            .agg(pl.col("t_s").first().alias("first"), pl.col("t_s").last().alias("last"), pl.len().alias("count"))
        )  # fmt: skip
        both = requests.filter(pl.col("status") != "rejected").join(ends, on="request", how="left")
        _none(both.filter(pl.col("emitted_tokens") != pl.col("count").fill_null(0)), "emitted_tokens counts the tokens")
        _none(both.filter(pl.col("first_token_s").ne_missing(pl.col("first"))), "first_token_s is the first token's")
        done = both.filter(pl.col("status") == "finished")
        _none(done.filter(pl.col("finished_s") != pl.col("last")), "finished_s is the last token's")


def _tokens_are_the_yielding_rows(run: Run) -> None:
    ends = run.read("rounds").select("round", "t_end_s")
    rows = run.read("batches").filter("yields_token").select("round", "request").join(ends, on="round", how="left")
    tokens = run.read("tokens").select("round", "request", "t_s", "index")
    assert rows.height == tokens.height, f"{rows.height} rows yield a token, {tokens.height} tokens"
    joined = tokens.join(rows, on=["round", "request"], how="left")
    _none(
        joined.filter(pl.col("t_end_s").is_null() | (pl.col("t_end_s") != pl.col("t_s"))),
        "a token's time is its round's end",
    )
    ordered = tokens.sort("request", "round")
    place = pl.int_range(pl.len()).over("request")
    _none(ordered.filter(pl.col("index") != place), "tokens are numbered from 0 in order")
    _none(ordered.filter(pl.col("t_s") < pl.col("t_s").shift(1).over("request")), "token times never decrease")


def _rows_follow_each_other(run: Run) -> None:
    """A row starts where the request's last row ended, or at its cache hit where it was admitted anew."""
    rows = run.read("batches").sort("request", "round")
    before = (pl.col("start") + pl.col("num_tokens")).shift(1).over("request")
    admitted = pl.col("cached_tokens").is_not_null()
    _none(rows.filter(admitted & (pl.col("start") != pl.col("cached_tokens"))), "an admission starts after its hit")
    _none(rows.filter(~admitted & (pl.col("start").ne_missing(before))), "a row starts where the last one ended")
    _none(rows.filter(pl.col("num_tokens") < 1), "a row feeds something")
    _none(
        rows.filter((pl.col("phase") == "decode") & ((pl.col("num_tokens") != 1) | ~pl.col("yields_token"))),
        "a decode feeds one token and gives one",
    )
    size = run.block_size
    if size:
        needed = (pl.col("start") + pl.col("num_tokens") + size - 1) // size
        _none(rows.filter(pl.col("num_blocks") < needed), "every fed token has a slot")
    prompts = pl.concat([run.read(t).select("request", "prompt_tokens") for t in ("admissions", "requests")]).unique(
        "request"
    )
    emitted = pl.col("yields_token").cast(pl.Int64).cum_sum().over("request") - pl.col("yields_token").cast(pl.Int64)
    known = rows.with_columns(emitted.alias("emitted")).join(prompts, on="request", how="left")
    reaches = pl.col("start") + pl.col("num_tokens") == pl.col("prompt_tokens") + pl.col("emitted")
    _none(
        known.filter(pl.col("yields_token") != reaches),
        "a row yields a token exactly when it computes the last known one",
    )
    _none(
        known.filter(pl.col("start") + pl.col("num_tokens") > pl.col("prompt_tokens") + pl.col("emitted")),
        "nothing unknown is fed",
    )


def _token_equation(run: Run) -> None:
    """Σ scheduled = prompt + emitted - 1 - Σ cached + Σ discarded, for each finished request."""
    rows = run.read("batches")
    sums = rows.group_by("request").agg(pl.col("num_tokens").sum(), pl.col("cached_tokens").sum().alias("cached"))
    finished = run.read("requests").filter(pl.col("status") == "finished").join(sums, on="request", how="left")
    expected = pl.col("prompt_tokens") + pl.col("emitted_tokens") - 1 - pl.col("cached") + pl.col("discarded_tokens")
    _none(
        finished.filter(pl.col("num_tokens").ne_missing(expected)),
        "Σ scheduled = prompt + emitted - 1 - Σ cached + Σ discarded",
    )
    high_water = (pl.col("start") + pl.col("num_tokens")).cum_max().shift(1).over("request").fill_null(0)
    again = pl.min_horizontal(high_water, pl.col("start") + pl.col("num_tokens")) - pl.col("start")
    recomputed = (
        rows.sort("request", "round").with_columns(again.clip(lower_bound=0).alias("again"))
        .group_by("request").agg(pl.col("again").sum(), pl.col("cached_tokens").drop_nulls().first().alias("first_hit"))
    )  # fmt: skip
    both = run.read("requests").filter(pl.col("status") == "finished").join(recomputed, on="request", how="left")
    _none(
        both.filter(pl.col("recomputed_tokens") != pl.col("again")),
        "recomputed_tokens: scheduled at positions computed before",
    )
    _none(both.filter(pl.col("cached_tokens") != pl.col("first_hit")), "cached_tokens: the hit of the first admission")
    preempts = run.read("decisions").filter(pl.col("kind") == "preempt").group_by("request").len("count")
    known = run.read("requests").join(preempts, on="request", how="left")
    _none(known.filter(pl.col("preemptions") != pl.col("count").fill_null(0)), "preemptions counts the decisions")


def _counts_equal_the_tables(run: Run) -> None:
    rounds = run.read("rounds")
    prefill = pl.col("phase") == "prefill"
    batch = run.read("batches").group_by("round").agg(
        pl.len().alias("num_seqs"),
        pl.col("num_tokens").filter(prefill).sum().alias("prefill_tokens"),
        pl.col("num_tokens").filter(~prefill).sum().alias("decode_tokens"),
        pl.col("cached_tokens").sum(),
    )  # fmt: skip
    counts = {"admitted": ["admit", "resume"], "preempted": ["preempt"], "finished": ["finish"], "evicted": ["evict"]}
    decided = run.read("decisions").group_by("round").agg(
        *(pl.col("kind").is_in(kinds).sum().cast(pl.Int64).alias(name) for name, kinds in counts.items())
    )  # fmt: skip
    events = (
        run.read("blocks").group_by("round").agg((pl.col("event") == "evict").sum().cast(pl.Int64).alias("evicted"))
    )
    for frame in (batch, decided, events):
        joined = rounds.join(frame, on="round", how="left", suffix="_found")
        for column in frame.columns[1:]:
            _none(
                joined.filter(pl.col(column) != pl.col(f"{column}_found").fill_null(0)),
                f"rounds.{column} equals the tables",
            )
    for table in ("batches", "blocks", "tokens"):
        _none(run.read(table).join(rounds, on="round", how="anti"), f"every row of {table} has its round")
    # A refusal belongs to the moment of arrival, which need not be a round with a record.
    _none(
        run.read("decisions").filter(pl.col("kind") != "reject").join(rounds, on="round", how="anti"),
        "every decision has its round",
    )


def _queues_and_reasons(run: Run) -> None:
    """The rebuilt queues are as long as recorded, and whoever waits or stands still has a reason."""
    refused = run.read("decisions").filter(pl.col("kind") == "reject").select("request")
    arrivals = run.read("admissions").join(refused, on="request", how="anti").group_by("admitted_round").len("count")
    arrived = dict(arrivals.iter_rows())
    last, waiting, running = 0, 0, 0
    for view in walk(run):
        row, where = view.row, f"round {view.round}: {view}"
        new = sum(arrived.get(number, 0) for number in range(last + 1, view.round + 1))
        assert (len(view.waiting) - new, len(view.running)) == (waiting, running), (
            f"recorded {waiting, running} after the last round, {where}"
        )
        fed = {entry["request"] for entry in view.batch}
        own = {entry["request"] for entry in view.decisions if entry["kind"] in ("hold", "skip", "preempt")}
        barred = row["stop_waiting"] not in (None, "waiting_empty")
        for request in view.waiting:
            assert request in fed or request in own or barred, f"{request} waits without a reason, {where}"
        held = [
            entry["reason"] for entry in view.decisions if entry["kind"] == "hold" and entry["request"] in view.waiting
        ]
        assert held in ([], [row["stop_waiting"]]), f"the waiting loop stops where it holds, {where}"
        assert held or row["stop_waiting"] not in EXAMINED, f"the waiting loop stops without saying at whom, {where}"
        halted = row["stop_running"] != "running_empty"
        for request in view.running:
            assert request in fed or request in own or halted, f"{request} stands still without a reason, {where}"
        last, waiting, running = view.round, row["waiting"], row["running"]


def _blocks(run: Run) -> None:
    """free + used = total at every moment; block tables fit the batches; the free list and the cached blocks follow from events."""
    total = run.usable_blocks or 0
    pool, events = Pool(total), dict(events_by_round(run))
    batches = {key[0]: frame for key, frame in run.read("batches").partition_by("round", as_dict=True).items()}
    free_list: list[int] | None = None
    for row in run.read("rounds").iter_rows(named=True):
        number, mine = row["round"], events.get(row["round"], [])
        where = f"round {number}"
        assert pool.num_free == row["free_blocks_start"], where
        rows = dict(batches[number].select("request", "num_blocks").iter_rows()) if number in batches else {}
        widest = {request: len(pool.tables.get(request, {})) for request in rows}
        for block, event, request, index in mine:
            assert 0 <= block <= total, f"{where}: block {block} of {total}"  # the null block has id 0
            pool.apply(block, event, request, index)
            assert 0 <= pool.num_free <= total, where
            if request in widest:
                widest[request] = max(widest[request], len(pool.tables.get(request, {})))
        assert widest == rows, f"{where}: num_blocks {rows}, by the events {widest}"
        assert pool.num_free == row["free_blocks_end"], (
            f"{where}: {pool.num_free} free by the events, {row['free_blocks_end']} recorded"
        )
        if row["free_list"] is not None:
            assert len(row["free_list"]) == row["free_blocks_end"]
            assert not set(row["free_list"]) & set(pool.owners), f"{where}: a free block has an owner"
            if free_list is not None and run.family is not None:
                expected = _next_free_list(run, free_list, mine, row["hashed_blocks"], pool)
                assert expected == row["free_list"], f"{where}: free list {row['free_list']}, by the events {expected}"
            free_list = row["free_list"]
            hashed = set(row["hashed_blocks"])
            assert hashed <= pool.cached, f"{where}: {hashed - pool.cached} can be found but were never cached"
            if run.family == "vllm":
                # In nano an equal block cached later takes over the entry of the first, without an event of the first.
                assert hashed == pool.cached, f"{where}: {pool.cached - hashed} were cached but cannot be found"
            assert row["cached_free_blocks"] == len(hashed & set(row["free_list"])), where
    if run.status == "complete":
        assert not pool.owners and not pool.tables, f"held at the end: {pool.tables}"


def _next_free_list(
    run: Run, before: list[int], events: list[tuple[int, str, int, int | None]], hashed: list[int], after: Pool
) -> list[int]:
    """Take at the head; nano gives back at the end, vllm puts what has no hash in front, as one group a request."""
    free, cached = list(before), set(after.cached)
    # Which blocks held a hash when they were freed: walk the round's own cache and evict events back to its start.
    for block, event, _, _ in reversed(events):
        if event == "cache":
            cached.discard(block)
        elif event == "evict":
            cached.add(block)
    group: list[int] = []
    owner: int | None = None
    for block, event, request, _ in events:
        if group and (event not in ("free", "release") or request != owner):
            free[:0] = group
            group = []
        if event == "allocate":
            assert free and free[0] == block, f"block {block} was taken, but {free[:1]} heads the free list"
            free.pop(0)
        elif event == "share" and block in free:
            free.remove(block)
        elif event == "free":
            if run.family == "nano" or block in cached:
                free.append(block)
            else:
                owner = request
                group.append(block)
        elif event == "cache":
            cached.add(block)
        elif event == "evict":
            cached.discard(block)
    return group + free
