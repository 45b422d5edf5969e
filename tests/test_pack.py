"""Runs packed into one file and read again: every byte, in parts, and what is said of damaged packs."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchctl.commands_pack import size
from reports import pack
from reports.pack import INDEX, pieces, unpack
from reports.run import find_runs, open_run
from reports.salvage import open_all
from reports.summary import summarize
from tests.fake_run import record_golden
from traces.errors import BenchctlError


def benchctl(*argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchctl", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "walk"
    for policy, case in (("nano", "article_rounds"), ("vllm", "worked_example")):
        record_golden(folder / policy, policy, case, part_rounds=6, manifest={"trace": {"name": "walkthrough"}})
    (folder / "vllm" / "outputs.jsonl").write_text('{"id": "a"}\n')
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar.xz", ".tar"])
def test_a_pack_gives_back_every_byte(pair: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"walk{suffix}"
    assert pack.pack(find_runs(pair), file) == [file]
    assert [run.name for run in unpack(file, tmp_path / "back")] == ["nano", "vllm"]
    assert contents(tmp_path / "back") == contents(pair)
    with tarfile.open(file) as tar:  # any tar opens it
        assert {member.name for member in tar} == {*contents(pair), INDEX}


def test_equal_runs_make_equal_packs(pair: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    pack.pack(find_runs(pair), once)
    pack.pack(find_runs(pair), twice)
    assert once.read_bytes() == twice.read_bytes()


def test_parts_join_to_the_whole_and_are_checked(pair: Path, tmp_path: Path) -> None:
    whole, split = tmp_path / "whole.tar.gz", tmp_path / "split.tar.gz"
    pack.pack(find_runs(pair), whole)
    *parts, sums = pack.pack(find_runs(pair), split, 4_000)
    count = -(-whole.stat().st_size // 4_000)
    digits = len(str(count))
    assert [part.name for part in parts] == [f"split.tar.gz.part{k:0{digits}}of{count}" for k in range(1, count + 1)]
    assert sorted(parts) == parts and max(part.stat().st_size for part in parts) == 4_000
    assert b"".join(part.read_bytes() for part in parts) == whole.read_bytes()
    assert pack.base_of(sums) == split and pack.pieces(sums) == parts  # what `split.tar.gz*` of a shell names besides
    told = [line.split("  ") for line in sums.read_text().splitlines()]
    assert told == [[hashlib.sha256(part.read_bytes()).hexdigest(), part.name] for part in parts]
    for named in (split, parts[0], parts[-1]):  # any of them stands for all
        assert pieces(named) == parts
    unpack(parts[1], tmp_path / "back")
    assert contents(tmp_path / "back") == contents(pair)
    pack.pack(find_runs(pair), split)  # whole once more: no part is left that could be taken for its
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == ["split.tar.gz", "whole.tar.gz"]


def test_a_missing_or_damaged_part_is_named(pair: Path, tmp_path: Path) -> None:
    *parts, sums = pack.pack(find_runs(pair), tmp_path / "w.tar.gz", 6_000)
    count = len(parts)
    data = bytearray(parts[1].read_bytes())
    data[3_000] ^= 1
    parts[1].write_bytes(data)
    with pytest.raises(BenchctlError, match="part2of.* is damaged: its sha256 is not that of w.tar.gz.sha256"):
        unpack(parts[0], tmp_path / "back")
    sums.unlink()
    with pytest.raises(BenchctlError, match="w.tar.gz (cannot be read in or before part|is damaged)"):
        unpack(parts[0], tmp_path / "back2")
    parts[1].unlink()
    with pytest.raises(BenchctlError, match=f"part 2 of {count} of w.tar.gz is missing"):
        unpack(parts[0], tmp_path / "back3")


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.xz", ".tar"])
def test_any_flipped_or_missing_byte_is_found(pair: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"w{suffix}"
    pack.pack(find_runs(pair)[:1], file)
    whole = file.read_bytes()
    cut = [whole[: len(whole) * k // 7] for k in range(7)]
    flipped = []
    for k in range(1, 12):
        data = bytearray(whole)
        data[len(data) * k // 12] ^= 0x55
        flipped.append(bytes(data))
    for number, data in enumerate([*cut, *flipped]):
        file.write_bytes(data)
        try:
            unpack(file, tmp_path / str(number))
        except BenchctlError as error:
            assert str(error).count("\n") == 1  # one line, and what to do
        else:  # a header's owner or padding: nothing of the run
            assert contents(tmp_path / str(number)) == {f"nano/{name}": data for name, data in contents(pair / "nano").items()}  # fmt: skip
            assert data not in cut


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "nano/deep/evil", "evil"])
def test_an_archive_cannot_write_elsewhere(tmp_path: Path, name: str) -> None:
    file = tmp_path / "x.tar"
    with tarfile.open(file, "w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
    with pytest.raises(BenchctlError, match="no pack of benchctl"):
        unpack(file, tmp_path / "in" / "to")
    assert not list(tmp_path.rglob("evil"))


def test_links_and_devices_are_not_made(tmp_path: Path) -> None:
    file = tmp_path / "x.tar"
    with tarfile.open(file, "w") as tar:
        link = tarfile.TarInfo("nano/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        index = json.dumps({"format": 1, "runs": {"nano": {"link": [0, ""]}}}).encode()
        member = tarfile.TarInfo(INDEX)
        member.size = len(index)
        tar.addfile(member, io.BytesIO(index))
    with pytest.raises(BenchctlError, match="nano/link is not the file that was packed"):
        unpack(file, tmp_path / "to")
    assert not (tmp_path / "to" / "nano" / "link").exists()


def test_a_half_written_run_is_packed_up_to_its_last_part(pair: Path, tmp_path: Path) -> None:
    run = tmp_path / "nano"
    run.mkdir()
    for name, data in contents(pair / "nano").items():
        if name not in ("rounds-00002.parquet", "rounds-00003.parquet"):
            (run / name).write_bytes(data)
    (run / ".rounds-00004.parquet.tmp").write_bytes(b"half")
    assert {file.name for file in pack.run_files(run)} == {
        name for name in contents(pair / "nano") if "-00002." not in name and "-00003." not in name
    }


def test_a_pack_inside_the_run_is_not_packed_again(pair: Path, tmp_path: Path) -> None:
    run = record_golden(tmp_path / "nano", "nano", "article_rounds", manifest={"status": "running"})
    before = [file.name for file in pack.run_files(run)]
    done = benchctl("pack", run, "-o", run / "nano.tar.gz", "--split", "4KiB")
    assert done.returncode == 0 and "is still running, or was killed: its finished parts are packed" in done.stderr
    assert len(done.stdout.splitlines()) > 2 and [file.name for file in pack.run_files(run)] == before


def test_runs_of_one_name_keep_apart(pair: Path, tmp_path: Path) -> None:
    record_golden(tmp_path / "again" / "nano", "nano", "article_rounds")
    assert pack.run_names([pair / "nano", tmp_path / "again" / "nano"]) == ["walk-nano", "again-nano"]


def test_reports_read_a_pack_like_a_folder(pair: Path, tmp_path: Path) -> None:
    *parts, _ = pack.pack(find_runs(pair), tmp_path / "walk.tar.gz", 5_000)
    with open_all(map(str, parts)) as (runs, wrong):  # `report walk.tar.gz.part*`: each run once
        assert [run.name for run in runs] == ["nano", "vllm"] and not wrong
        assert [run.shown for run in runs] == [str(tmp_path / "walk.tar.gz" / name) for name in ("nano", "vllm")]
        mine, own = summarize(runs[0]), summarize(open_run(pair / "nano"))
        mine["benchctl"]["run"].pop("path"), own["benchctl"]["run"].pop("path")
        assert mine == own
    said, plain = benchctl("compare", tmp_path / "walk.tar.gz", "--json"), benchctl("compare", pair, "--json")
    assert said.returncode == 0 and said.stdout.replace(str(tmp_path / "walk.tar.gz"), str(pair)) == plain.stdout
    page = benchctl("report", tmp_path / "walk.tar.gz")
    assert page.returncode == 0 and page.stdout.strip() == str(tmp_path / "report.html")
    assert "/benchctl-pack-" not in (tmp_path / "report.html").read_text()


def test_one_run_of_a_pack_is_named_or_is_the_only_one(pair: Path, tmp_path: Path) -> None:
    (several,) = pack.pack(find_runs(pair), tmp_path / "walk.tar.gz")
    (one,) = pack.pack([pair / "nano"], tmp_path / "one.tar.gz")
    plain = json.loads(benchctl("explain", pair / "nano", "--round", "2", "--json").stdout)
    for named in (one, several / "nano"):
        said = benchctl("explain", named, "--round", "2", "--json")
        assert said.returncode == 0, said.stderr
        found = json.loads(said.stdout)
        assert found | {"run": None} == plain | {"run": None} and found["run"] != plain["run"]
    refused = benchctl("explain", several, "--round", "2")
    assert refused.returncode == 2 and f"give one of them, e.g. {several / 'nano'}" in refused.stderr
    refused = benchctl("replay", "--from", several, "--set", "seed=1")
    assert refused.returncode == 2 and f"--from {several / 'nano'}" in refused.stderr
    page = benchctl("report", several / "vllm")
    assert page.returncode == 0 and page.stdout.strip() == str(tmp_path / "report.html"), page.stderr
    missing = benchctl("explain", several / "sjf", "--round", "2")
    assert missing.returncode == 2 and f"no run at {several / 'sjf'}" in missing.stderr


def test_the_commands_pack_and_unpack(pair: Path, tmp_path: Path) -> None:
    done = benchctl("pack", pair, "-o", tmp_path / "w.tar.gz", "--split", "8KiB")
    assert done.returncode == 0, done.stderr
    files = done.stdout.splitlines()
    assert files[0].endswith(f".part1of{len(files) - 1}") and files[-1].endswith(".sha256")
    assert done.stderr.startswith("2 runs, 0.") and f"in {len(files) - 1} parts" in done.stderr
    done = benchctl("unpack", *files[:-1])
    assert done.stdout.splitlines() == [str(tmp_path / "w" / name) for name in ("nano", "vllm")], done.stderr
    assert contents(tmp_path / "w") == contents(pair)
    again = benchctl("unpack", files[0])
    assert again.returncode == 2 and "is there already" in again.stderr
    assert contents(tmp_path / "w") == contents(pair)
    Path(files[1]).write_bytes(b"no")
    broken = benchctl("unpack", files[0], "-o", tmp_path / "other")
    assert broken.returncode == 2 and "is damaged" in broken.stderr and "Traceback" not in broken.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "argv, said",
    [
        (["pack", "{pair}", "-o", "x.zip"], "does not say how to compress"),
        (["pack", "{pair}", "--split", "much"], "--split is 'much'"),
        (["pack", "{pair}", "--split", "10"], "1KiB or more"),
        (["pack", "nowhere"], "no run at nowhere"),
        (["unpack", "nowhere.tar.gz"], "no file nowhere.tar.gz"),
        (["report", "nowhere.tar.gz"], "no run at nowhere.tar.gz"),
    ],
)
def test_mistakes_are_said_in_a_few_lines(pair: Path, argv: list[str], said: str) -> None:
    done = benchctl(*(word.format(pair=pair) for word in argv))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_a_suffix_that_this_python_cannot_write_is_refused_with_those_it_can(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "_zstd", lambda: None)
    with pytest.raises(BenchctlError) as refused:
        pack.pack(find_runs(pair), tmp_path / "sub" / "x.tar.zst")
    assert refused.value.what == "x.tar.zst: this Python has no Zstandard" and refused.value.where == "--out"
    assert str(refused.value.fix).startswith(f"-o {tmp_path}/sub/x.tar.gz, or .tgz, .tar.xz, .tar; .tar.zst needs")
    with pytest.raises(BenchctlError) as refused:
        pack.pack(find_runs(pair), tmp_path / "x.zip")
    assert refused.value.fix == "let it end in .tar.gz, or .tgz, .tar.xz, .tar"
    assert list(tmp_path.iterdir()) == []
    # Where there is Zstandard it is one of them.
    monkeypatch.setattr(pack, "_zstd", lambda: object())
    assert ".tar.zst" in pack.writable()


def test_sizes_are_read_as_people_write_them() -> None:
    told = {"15MiB": 15 * 2**20, "15M": 15 * 2**20, "15MB": 15 * 10**6, "1.5 kib": 1536, "2000": 2000, "1G": 2**30}
    assert {text: size(text, "--split") for text in told} == told


def test_packing_needs_no_package_of_the_page() -> None:
    code = "import sys, reports.pack, benchctl.cli; print([m for m in ('plotly', 'jinja2', 'torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
