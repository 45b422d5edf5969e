"""Large traces stream: memory stays bounded, and rows are read while they are asked for. Rates are asserted far below what was measured.

BENCHCTL_SCALE_ROWS sets the rows of the CSV test (200,000; 27,303,999 is the public file's size).
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest

from traces.formats.base import ImportOptions
from traces.importing import import_trace
from traces.load import open_trace
from traces.streamed import open_stream

ROWS = int(os.environ.get("BENCHCTL_SCALE_ROWS", "200000"))

IN_ITS_OWN_PROCESS = """
import json, sys, time
from traces.formats.base import ImportOptions
from traces.importing import import_trace
start = time.process_time()
report = import_trace(sys.argv[1], sys.argv[2], ImportOptions())
# Not getrusage: its peak includes the parent's, from before exec.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"rows": report.num_requests, "cpu_s": time.process_time() - start, "peak_mb": peak / 1024}))
"""


def write_azure(path: Path, rows: int) -> None:
    """A file of Azure's week-long shape, sorted, offsets and all."""
    at = 0
    with open(path, "w", newline="") as out:
        out.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
        for i in range(rows):
            at += (i * 2654435761) % 44301  # about 22 ms apart
            seconds, micros = divmod(at, 10**6)
            minutes, second = divmod(seconds, 60)
            hours, minute = divmod(minutes, 60)
            day, hour = divmod(hours, 24)
            fraction = f".{micros:06d}" if micros else ""
            out.write(
                f"2024-05-{10 + day:02d} {hour:02d}:{minute:02d}:{second:02d}{fraction}+00:00,{1 + i * 7919 % 8000},{1 + i * 104729 % 900}\r\n"
            )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_a_csv_of_azures_shape_imports_by_streaming(tmp_path: Path) -> None:
    write_azure(tmp_path / "week.csv", ROWS)
    command = [sys.executable, "-c", IN_ITS_OWN_PROCESS, str(tmp_path / "week.csv"), str(tmp_path / "out.jsonl.gz")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["rows"] == ROWS
    assert found["peak_mb"] < 100  # whatever the number of rows
    assert found["rows"] / found["cpu_s"] > 50_000
    with gzip.open(tmp_path / "out.jsonl.gz", "rb") as out:
        assert sum(1 for _ in out) == ROWS + 1


def test_rows_are_checked_and_read_at_rate_and_held_by_41_bytes(tmp_path: Path) -> None:
    num = 100_000
    with open(tmp_path / "t.jsonl", "w") as out:
        for i in range(num):
            out.write(f'{{"arrival_s": {i / 100}, "input_length": {1 + i % 4000}, "output_length": 5}}\n')
    start = time.process_time()
    trace = open_trace(tmp_path / "t.jsonl")
    assert num / (time.process_time() - start) > 50_000
    start = time.process_time()
    assert sum(1 for _ in open_stream(tmp_path / "t.jsonl").requests()) == num
    assert num / (time.process_time() - start) > 50_000
    held = {name: value for name, value in vars(trace._scan).items() if hasattr(value, "__len__") and len(value) >= num}
    assert sum(len(value) * getattr(value, "itemsize", 1) for value in held.values()) == 41 * num
    assert {type(value) for value in held.values()} == {array, bytearray}


def test_hash_ids_are_checked_at_rate(tmp_path: Path) -> None:
    num_ids = 0
    with open(tmp_path / "m.jsonl", "w") as out:
        for i in range(4000):
            num = 1 + i * 7919 % 120
            out.write(
                json.dumps(
                    {
                        "timestamp": i,
                        "input_length": 512 * num,
                        "output_length": 5,
                        "hash_ids": list(range(num_ids, num_ids + num)),
                    }
                )
                + "\n"
            )
            num_ids += num
    start = time.process_time()
    trace = open_trace(tmp_path / "m.jsonl")
    assert num_ids / (time.process_time() - start) > 500_000
    start = time.process_time()
    report = import_trace(tmp_path / "m.jsonl", tmp_path / "out.jsonl", ImportOptions())
    assert num_ids / (time.process_time() - start) > 500_000
    assert report.num_requests == trace.num_requests


def test_the_first_request_comes_before_the_rest_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.jsonl").write_text(
        "".join(f'{{"arrival_s": {i}, "input_length": 4, "output_length": 1}}\n' for i in range(50_000))
    )
    trace = open_trace(tmp_path / "t.jsonl")
    import traces.load as load

    read = 0
    given = load.read_lines

    def counted(path: Path):  # type: ignore[no-untyped-def]
        nonlocal read
        for line in given(path):
            read += 1
            yield line

    monkeypatch.setattr(load, "read_lines", counted)
    first = next(trace.requests())
    assert first.arrival_s == 0 and read == 1
