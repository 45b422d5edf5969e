"""The laws hold on what real schedulers decide, and each of them bites when a table is bent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from tests.fake_run import record_golden
from tests.golden_cases import case_names, load_case
from tests.laws import assert_laws

SMALL = [
    (policy, name) for policy in ("nano", "vllm") for name in case_names(policy) if len(load_case(policy, name)["rounds"]) <= 400
]  # fmt: skip


@pytest.mark.parametrize(("policy", "case"), SMALL)
def test_the_laws_hold_on_every_logged_case(tmp_path: Path, policy: str, case: str) -> None:
    assert_laws(record_golden(tmp_path / case, policy, case))


def at(condition: pl.Expr, column: str, value: pl.Expr | object) -> pl.Expr:
    changed = value if isinstance(value, pl.Expr) else pl.lit(value)
    return pl.when(condition).then(changed).otherwise(pl.col(column)).alias(column)


R, Q = pl.col("round"), pl.col("request")
LISTS = pl.col("free_list").list.reverse().alias("free_list")

# name: (table, change): in the article's run under nano
BENDS: dict[str, tuple[str, Callable[[pl.DataFrame], pl.DataFrame]]] = {
    "a batch row too many": ("batches", lambda t: pl.concat([t, t.tail(1).with_columns(R + 1)])),
    "a row lost": ("batches", lambda t: t.filter(~((R == 3) & (Q == 3)))),
    "a row that feeds one token more": ("batches", lambda t: t.with_columns(at((R == 2), "num_tokens", pl.col("num_tokens") + 1))),
    "a row that starts elsewhere": ("batches", lambda t: t.with_columns(at((R == 3), "start", pl.col("start") + 1))),
    "a token unsaid": ("batches", lambda t: t.with_columns(at((R == 3), "yields_token", False))),
    "a wrong width of a table": ("batches", lambda t: t.with_columns(at((R == 6) & (Q == 2), "num_blocks", 1))),
    "a token lost": ("tokens", lambda t: t.filter(~((Q == 0) & (pl.col("index") == 3)))),
    "a token too early": ("tokens", lambda t: t.with_columns(at((Q == 0) & (pl.col("index") == 3), "t_s", 0.5))),
    "discarded tokens forgotten": ("requests", lambda t: t.with_columns(pl.lit(0, pl.Int64).alias("discarded_tokens"))),
    "recomputed tokens forgotten": ("requests", lambda t: t.with_columns(pl.lit(0, pl.Int64).alias("recomputed_tokens"))),
    "a preemption not counted": ("requests", lambda t: t.with_columns(pl.lit(0, pl.Int64).alias("preemptions"))),
    "an emitted token not counted": ("requests", lambda t: t.with_columns(at(Q == 1, "emitted_tokens", pl.col("emitted_tokens") - 1))),
    "a first token that comes later": ("requests", lambda t: t.with_columns(at(Q == 1, "first_token_s", pl.col("first_token_s") + 1))),
    "a request lost": ("requests", lambda t: t.filter(Q != 2)),
    "an arrival moved": ("requests", lambda t: t.with_columns(at(Q == 4, "arrival_s", 1.0))),
    "an admission lost": ("admissions", lambda t: t.filter(Q != 4)),
    "over the budget": ("rounds", lambda t: t.with_columns(at(R == 2, "budget_left", -1))),
    "a free block invented": ("rounds", lambda t: t.with_columns(at(R == 5, "free_blocks_end", 1))),
    "free blocks that jump between rounds": ("rounds", lambda t: t.with_columns(at(R == 5, "free_blocks_start", 2))),
    "a wrong kind": ("rounds", lambda t: t.with_columns(at(R == 4, "kind", "mixed"))),
    "a wrong sum of tokens": ("rounds", lambda t: t.with_columns(at(R == 5, "prefill_tokens", 199), at(R == 5, "budget_left", 825))),
    "a preemption not in the round": ("rounds", lambda t: t.with_columns(at(R == 6, "preempted", 0))),
    "a waiting request not counted": ("rounds", lambda t: t.with_columns(at(R == 7, "waiting", 0))),
    "a waiting loop without a reason": ("rounds", lambda t: t.with_columns(at(R == 1, "stop_waiting", "waiting_empty"))),
    "rounds that overlap": ("rounds", lambda t: t.with_columns(at(R == 5, "t_start_s", 3.0))),
    "another order of the free list": ("rounds", lambda t: t.with_columns(LISTS)),
    "a hashed block invented": ("rounds", lambda t: t.with_columns(pl.col("hashed_blocks").list.concat(pl.lit([10], pl.List(pl.Int64))))),
    "a cached block miscounted": ("rounds", lambda t: t.with_columns(at(R == 24, "cached_free_blocks", 0))),
    "a hold forgotten": ("decisions", lambda t: t.filter(pl.col("kind") != "preempt")),
    "a finish forgotten": ("decisions", lambda t: t.filter(~((pl.col("kind") == "finish") & (Q == 2)))),
    "an admission forgotten": ("decisions", lambda t: t.filter(~((pl.col("kind") == "admit") & (Q == 2)))),
    "a block never given back": ("blocks", lambda t: t.filter(~((pl.col("event") == "free") & (Q == 2) & (pl.col("index") == 0)))),
    "a block given twice": ("blocks", lambda t: t.with_columns(at((pl.col("event") == "allocate") & (Q == 4), "block", 3))),
    "blocks given back in table order": ("blocks", lambda t: t.with_columns(at((R == 9) & (pl.col("event") == "free"), "order", 100 - pl.col("order")))),
    "an event in a round that was not": ("blocks", lambda t: t.with_columns(at(R == 24, "round", 25))),
}  # fmt: skip


@pytest.fixture(scope="module")
def article(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_golden(
        tmp_path_factory.mktemp("runs") / "nano", "nano", "article_rounds", manifest={"num_requests": 5}
    )


@pytest.mark.parametrize("bend", BENDS)
def test_a_law_breaks_when_the_record_says(article: Path, tmp_path: Path, bend: str) -> None:
    table, change = BENDS[bend]
    path = tmp_path / "nano"
    shutil.copytree(article, path)
    file = path / f"{table}-00000.parquet"
    before = pl.read_parquet(file)
    after = change(before)
    assert not after.equals(before), "this bend changes nothing"
    after.select(pl.col(name).cast(dtype) for name, dtype in before.schema.items()).write_parquet(file)
    with pytest.raises(AssertionError):
        assert_laws(path)


def test_a_run_that_says_complete_but_is_not(article: Path, tmp_path: Path) -> None:
    cut = record_golden(tmp_path / "cut", "nano", "article_rounds", stop_after=12)
    assert_laws(cut)
    manifest = json.loads((cut / "manifest.json").read_text())
    (cut / "manifest.json").write_text(json.dumps(manifest | {"status": "complete"}))
    with pytest.raises(AssertionError, match="ends empty"):
        assert_laws(cut)
