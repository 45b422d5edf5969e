"""Opening run folders: parts, killed runs, compact tables, what is no run, and the words that reports repeat."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from engines.schedulers import decisions
from reports import glossary, records
from reports.run import find_runs, open_run, open_runs
from tests.fake_run import record_golden
from tests.laws import assert_laws
from traces.errors import BenchctlError


@pytest.mark.parametrize("words", ["DECISION_KINDS", "REASONS", "STOPS", "BLOCK_EVENTS"])
def test_the_glossary_repeats_the_schedulers_words_exactly(words: str) -> None:
    assert getattr(glossary, words) == getattr(decisions, words)


def test_every_table_reads_with_the_schemas_columns_and_types(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "nano", "nano", "article_rounds"))
    for table in records.TABLES:
        assert run.read(table).schema == pl.Schema(records.schema(table)), table


@pytest.mark.parametrize(("policy", "case"), [("nano", "stress_b16_very_tight"), ("vllm", "stress_prio_a")])
def test_compact_records_expand_to_the_full_tables(tmp_path: Path, policy: str, case: str) -> None:
    full = open_run(record_golden(tmp_path / "full", policy, case))
    compact = open_run(record_golden(tmp_path / "compact", policy, case, compact=True, part_rounds=50))
    on_disk = sum(pl.read_parquet(file).height for file in compact.path.glob("batches-*.parquet"))
    assert on_disk < full.read("batches").height / 2
    assert len(records.parts(compact.path)) > 1
    for table in records.TABLES:
        key = [column for column in ("round", "order", "request", "index") if column in records.schema(table)]
        assert compact.read(table).sort(key).equals(full.read(table).sort(key)), table


def test_a_part_without_its_rounds_is_not_read(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "nano", "nano", "article_rounds", part_rounds=8)
    manifest = json.loads((path / "manifest.json").read_text())
    assert records.parts(path) == ["00000", "00001", "00002", "00003"]
    (path / "rounds-00003.parquet").unlink()
    (path / "rounds-00002.parquet").rename(path / "rounds-00002.parquet.tmp")
    (path / "manifest.json").write_text(json.dumps(manifest | {"status": "running"}))
    run = assert_laws(path)
    assert run.status == "running"
    assert run.read("rounds")["round"].to_list() == list(range(1, 17))
    assert run.read("batches")["round"].max() == 16
    assert run.read("requests").height == 3  # R1, R2 and R4 have ended by then


def test_a_run_that_recorded_only_rounds_has_empty_other_tables(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "nano", "nano", "article_rounds", manifest={"records": "summary"})
    for table in ("batches", "decisions", "blocks", "tokens"):
        for file in path.glob(f"{table}-*"):
            file.unlink()
    run = assert_laws(path)
    assert not run.has("batches") and run.has("rounds")
    assert run.read("batches").height == 0 and run.read("batches").columns == list(records.schema("batches"))


def test_a_column_that_an_older_writer_did_not_know_is_null_and_an_extra_one_is_kept(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "nano", "nano", "article_rounds")
    file = path / "rounds-00000.parquet"
    pl.read_parquet(file).drop("flops").with_columns(pl.lit(7).alias("mine")).write_parquet(file)
    rounds = open_run(path).read("rounds")
    assert rounds["flops"].null_count() == rounds.height and rounds["mine"][0] == 7


def test_what_is_no_run_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    with pytest.raises(BenchctlError, match="no run at"):
        open_run(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchctlError, match="is not a folder"):
        open_run(tmp_path / "file")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BenchctlError, match=r"it has no manifest\.json"):
        open_run(empty)
    record_golden(tmp_path / "out" / "nano", "nano", "article_rounds")
    with pytest.raises(BenchctlError, match="it holds runs: nano") as caught:
        open_run(tmp_path / "out")
    assert str(tmp_path / "out" / "nano") in str(caught.value.fix)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": "new"}'])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BenchctlError):
        open_run(tmp_path)


def test_a_newer_schema_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": records.SCHEMA_VERSION + 1}))
    with pytest.raises(
        BenchctlError,
        match=f"schema version {records.SCHEMA_VERSION + 1}; this benchctl reads up to {records.SCHEMA_VERSION}",
    ):
        open_run(tmp_path)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "nano", "nano", "article_rounds")
    (path / "tokens-00000.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(BenchctlError, match="table tokens cannot be read"):
        open_run(path).read("tokens")


def test_runs_are_found_in_the_folder_of_a_replay(tmp_path: Path) -> None:
    for policy, case in (("vllm", "worked_example"), ("nano", "article_rounds")):
        record_golden(tmp_path / policy, policy, case)
    assert [path.name for path in find_runs(tmp_path)] == ["nano", "vllm"]
    assert find_runs(tmp_path / "nano") == [tmp_path / "nano"]
    assert find_runs(tmp_path / "absent") == []
    assert [run.scheduler for run in open_runs([tmp_path])] == ["nano", "vllm"]


def test_labels_are_ids_while_they_are_short_and_rows_otherwise(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "nano", "nano", "article_rounds"))
    assert run.labels[3] == "R4"
    file = run.path / "admissions-00000.parquet"
    pl.read_parquet(file).with_columns(("chatcmpl-" + pl.col("id")).alias("id")).write_parquet(file)
    assert open_run(run.path).labels[3] == "#3"
