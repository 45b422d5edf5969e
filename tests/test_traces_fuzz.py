"""Damaged sources of every format: never a traceback, never a hang, never an invalid trace, however large a field's claim.

BENCHCTL_FUZZ_ROUNDS: damaged files of each format (100; a campaign: 3000). With BENCHCTL_TRACE_SAMPLES the heads of those
files are damaged too. Each attempt has 20 s of processor time and 1 GB of memory.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_traces_formats import SAMPLES, lines
from traces.errors import BenchctlError
from traces.formats.base import ImportOptions
from traces.importing import ImportReport, import_trace
from traces.load import open_trace
from traces.validation import validate

ROUNDS = int(os.environ.get("BENCHCTL_FUZZ_ROUNDS", "100"))  # of each format
FOLDER = os.environ.get("BENCHCTL_TRACE_SAMPLES")
LIMIT_S, LIMIT_BYTES = 20, 1 << 30
STATUS = Path("/proc/self/status")
VALUE = re.compile(rb'-?\d+(?:\.\d+)?|"[^"\\]*"|null|\[[^\[\]]*\]')
PUT = [
    b"null", b"-1", b"0", b"1e309", b"NaN", b'"x"', b"[]", b"{}", b"true", b"1e9", b"1000000000", b"9" * 30, b"3.0", b'"13"', b"", b"\xff", b"\x00",
    b"\\ud800", b"[[[[", b'"', b",", b"\n", b"{", b"}", b'"2024-13-45 99:00:00"', b'[1,"a",null]', b'{"a":{"b":[1]}}',
]  # fmt: skip


def damaged(content: bytes, rng: random.Random) -> bytes:
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) or 1)
        kind = rng.random()
        if kind < 0.6 and (found := list(VALUE.finditer(bytes(out)))):
            match = rng.choice(found)
            out[match.start() : match.end()] = rng.choice(PUT)
        elif kind < 0.75:
            out[at : at + rng.randrange(6)] = rng.choice(PUT)
        elif kind < 0.85:
            del out[at:]
        else:
            out[at:at] = out[at : at + rng.randrange(40)]
    return bytes(out)


@contextmanager
def bounded() -> Iterator[None]:
    """No hang, and no memory by what a field claims."""

    def too_long(number: int, frame: object) -> None:
        raise AssertionError(f"more than {LIMIT_S} s of processor time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = soft
    if STATUS.exists():
        used = next(int(line.split()[1]) << 10 for line in STATUS.read_text().splitlines() if line.startswith("VmSize"))
        limit = used + LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(used + LIMIT_BYTES, hard)
    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def try_import(tmp_path: Path, content: bytes, options: ImportOptions) -> bool:
    """Whether it was imported; what was written is then valid, strictly, whole."""
    source, target = tmp_path / "source", tmp_path / "out.jsonl"
    source.write_bytes(content)
    target.unlink(missing_ok=True)
    try:
        with bounded():
            report = import_trace(source, target, options)
    except BenchctlError as error:
        assert error.what and "\n" not in error.what and not target.exists()
        return False
    except BaseException:
        print(repr(content), options)
        raise
    # Nothing is lost in silence: a record gave a request at least, or is counted with its reason.
    dropped = sum(report.dropped.values())
    assert report.num_requests + dropped + len(report.warnings) + sum(report.counts.values()) > 0
    assert not report.dropped["bad"] or report.examples
    # A canonical header's unknown keys pass through, as on loading.
    trace = open_trace(target, strict=report.format != "canonical")
    assert trace.num_requests == report.num_requests == len(list(trace.requests()))
    if options.skip_bad is False:
        assert "bad" not in report.dropped
    return True


def some_options(rng: random.Random, **more: Any) -> ImportOptions:
    return ImportOptions(
        skip_bad=rng.random() < 0.7,
        failed=rng.choice(("skip", "keep-as-1", "error")),
        on_descent=rng.choice(("error", "sort", "fold=100")),
        spread=rng.choice(("none", "uniform")),
        text=rng.choice((None, True, False)),
        output_length=rng.choice((None, 5)),
        single_turn=rng.random() < 0.2,
        **more,
    )


@pytest.mark.parametrize("name", sorted(set(SAMPLES) - {"servegen-clients"}))
def test_a_damaged_source_gives_one_clear_error_or_a_valid_trace(tmp_path: Path, name: str) -> None:
    rng = random.Random(name)
    content = SAMPLES[name].encode()
    if not content.startswith(b"[") and name not in ("otel", "weka", "sglang-agentic", "payloads"):
        head, _, rest = content.partition(b"\n")
        content = head + b"\n" + ((rest or head).rstrip() + b"\n") * 3
    good = sum(try_import(tmp_path, damaged(content, rng), some_options(rng)) for _ in range(ROUNDS))
    assert good < ROUNDS and (good or ROUNDS < 100)


def test_client_data_of_servegen_is_bounded_too(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text('{"0": {"input_tokens": "{10: 1.0}", "output_tokens": "{3: 1.0}"}}')
    rng = random.Random(5)
    for _ in range(60):
        # Small numbers only: a rate is a promise of as many requests.
        content = damaged(b"0,1.5,1.1,Gamma,0.75,0.015\n600,1.5,1,,0,0\n", rng)
        if b"1e9" not in content and b"1000000000" not in content and b"999" not in content:
            try_import(tmp_path, content, some_options(rng, side_files=(tmp_path / "lengths.json",), duration_s=5.0))


LINES = sorted(set(SAMPLES) - {"servegen-clients", "otel", "weka", "sharegpt", "sglang-agentic", "payloads"})


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line_is_named_or_counted(tmp_path: Path, name: str) -> None:
    """One line of five is damaged, the others are good: the first fault is at that line, or just below it."""
    rng = random.Random(f"line {name}")
    head, _, rest = SAMPLES[name].encode().partition(b"\n")
    row = ((rest or head).rstrip()).split(b"\n")[0]
    good = [head, *[row] * 4] if rest or name == "canonical" else [row] * 5
    whole = import_report(tmp_path, b"\n".join(good) + b"\n")
    assert not whole.dropped["bad"]
    faults = 0
    for _ in range(ROUNDS):
        at = rng.randrange(1, 5)
        bad = damaged(good[at], rng).replace(b"\x00", b"\x01")  # a NUL near the start tells a binary file
        lines_now = [*good[:at], bad, *good[at + 1 :]]
        content = b"\n".join(lines_now) + b"\n"
        report = import_report(tmp_path, content)
        try:
            import_trace(tmp_path / "source", tmp_path / "strict.jsonl", ImportOptions(output_length=5))
        except BenchctlError as error:
            faults += 1
            named = re.search(r"line (\d+)", error.where or "")
            assert named is None or at < int(named[1]) <= at + 2 + bad.count(b"\n"), (content, str(error))
            assert named or str(tmp_path / "source") in (error.where or "") or error.where == "--on-descent", str(error)
        if report.dropped["bad"]:
            numbers = [int(n) for text in report.examples for n in re.findall(r"^line (\d+)", text)]
            assert numbers and at < min(numbers) <= at + 1 + bad.count(b"\n"), (content, report.examples)
    assert faults


def import_report(tmp_path: Path, content: bytes) -> ImportReport:
    (tmp_path / "source").write_bytes(content)
    options = ImportOptions(skip_bad=True, on_descent="sort", output_length=5)
    with bounded():
        return import_trace(tmp_path / "source", tmp_path / "out.jsonl", options)


@pytest.mark.skipif(not FOLDER, reason="BENCHCTL_TRACE_SAMPLES names no folder of samples")
@pytest.mark.parametrize("name", sorted(p.name for p in Path(FOLDER or ".").iterdir()) if FOLDER else [])
def test_damaged_heads_of_public_files(tmp_path: Path, name: str) -> None:
    assert FOLDER is not None
    if name in ("README.md",) or name.startswith("servegen"):
        pytest.skip("a promise of as many requests as a rate claims")
    rng = random.Random(name)
    content = (Path(FOLDER) / name).read_bytes()
    lines = content.splitlines(keepends=True)
    for _ in range(ROUNDS):
        start = rng.randrange(1, max(2, len(lines) - 20))
        head = content if len(content) < 20_000 else b"".join([lines[0], *lines[start : start + 20]])
        try_import(tmp_path, damaged(head, rng), some_options(rng))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay", "messages", "text_input", "chat_id", "turns", "requests", "conversations", "spans", "prompt", "body", "custom_id"]  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5), min_size=1, max_size=3),
    skip=st.booleans(),
)
def test_any_json_is_imported_or_refused(tmp_path: Path, records: list[dict[str, Any]], skip: bool) -> None:
    try_import(
        tmp_path, lines(*records).encode("utf-8", "surrogatepass"), ImportOptions(skip_bad=skip, output_length=1)
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cells=st.lists(
        st.lists(st.text(max_size=6) | st.sampled_from(["2024-05-10 00:00:00", "5", "-1"]), min_size=3, max_size=3),
        max_size=4,
    )
)
def test_any_cells_are_imported_or_refused(tmp_path: Path, cells: list[list[str]]) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(",".join(row) for row in cells)
    try_import(tmp_path, text.encode("utf-8", "replace"), ImportOptions(skip_bad=True))


def test_validate_reads_any_damage_to_its_end(tmp_path: Path) -> None:
    rng = random.Random(11)
    row = b'{"id": "a", "arrival_s": 1.5, "input_length": 40, "hash_ids": [1], "output_length": 3}\n'
    for _ in range(200):
        (tmp_path / "t.jsonl").write_bytes(damaged(row * 3, rng))
        try:
            found = validate(tmp_path / "t.jsonl")
        except BenchctlError:
            continue
        assert found.num_requests + len(found.faults) <= 10
