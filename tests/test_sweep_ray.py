"""Sweeps on Ray: a cluster of two nodes on this machine gives what processes give, and a lost worker costs one try.

Skipped where Ray is not installed (`pip install 'benchctl[ray]'`); only the refusal without it is always tested.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from benchctl import sweep_ray
from benchctl.sweep import Store, sweep
from benchctl.sweep_ray import RayWorkers, packed, unpack
from benchctl.sweep_spec import Cell, make_cell
from benchctl.sweep_workers import LocalWorkers, Result
from tests.command_line import call, rows, write_trace

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def cells(trace: Path, number: int = 6, **more: Any) -> list[Cell]:
    base = {"trace": str(trace), "scheduler": "vllm", "engine": "null"} | more
    return [make_cell(base | {"max-num-seqs": seats}) for seats in range(1, number + 1)]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_command_says_how_to_get_it(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0.0, 20, 5)))
    answer = call(
        capfd,
        "sweep",
        trace,
        "--set",
        "scheduler=vllm",
        "--set",
        "engine=null",
        "--ray",
        "local",
        "--out",
        tmp_path / "o",
    )
    assert answer.code == 2 and "pip install 'benchctl[ray]'" in answer.err and "Traceback" not in answer.err


def test_a_folder_travels_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a" / "run").mkdir(parents=True)
    (tmp_path / "a" / "run" / "x").write_text("1")
    unpack(packed(tmp_path / "a" / "run"), tmp_path / "b")
    assert (tmp_path / "b" / "run" / "x").read_text() == "1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each, and what a node calls a GPU on the second."""
    from ray.cluster_utils import Cluster

    memory = 100 * 2**20
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": 0, "object_store_memory": memory, "include_dashboard": False},
    )
    made.add_node(num_cpus=1, num_gpus=1, object_store_memory=memory)
    yield made
    made.shutdown()


def run(workers: Any, wanted: list[Cell], out: Path) -> list[Result]:
    store = Store(out)
    store.prepare()
    try:
        return sweep(wanted, store, workers, lambda cell, result, earlier: None)
    finally:
        workers.close(now=False)


@needs_ray
def test_a_cluster_of_two_nodes_gives_what_processes_give(cluster: Any, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*((i * 0.05, 64, 8) for i in range(40))))
    wanted = [*cells(trace), make_cell({"trace": str(trace), "scheduler": "nano", "engine": "null", "block-size": 1})]
    here = run(LocalWorkers(1, tmp_path / "here"), wanted, tmp_path / "here")
    there = run(RayWorkers(cluster.address, tmp_path / "there"), wanted, tmp_path / "there")
    assert len({result["node"] for result in there}) == 2, "both nodes worked"
    for one, other in zip(here, there, strict=True):
        assert (one["status"], one["figures"]) == (other["status"], other["figures"])
    assert there[-1]["status"] == "failed" and "block-size" in there[-1]["reason"]
    # Runs came back whole, and say where the trace lies, not where its copy lay.
    for one, other in zip(here[:-1], there[:-1], strict=True):
        manifests = [json.loads((Path(result["path"]) / "manifest.json").read_text()) for result in (one, other)]
        assert manifests[0]["digest"] == manifests[1]["digest"]
        assert manifests[1]["trace"]["path"] == str(trace)


@pytest.fixture
def cards() -> Iterator[Any]:
    """One node that calls two things GPUs, and has CPUs for four cells at a time."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    yield made
    made.shutdown()


@needs_ray
def test_each_cell_of_the_torch_engine_has_a_gpu_of_its_own_and_a_process_of_its_own(
    cards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real cells of the tiny model; the GPUs are Ray's bookkeeping, so this runs without one."""
    trace = write_trace(tmp_path / "t.jsonl", rows(*((i * 0.01, 20, 5) for i in range(4))))
    (tmp_path / "seen").mkdir()
    replayed, folder = sweep_ray.run_on_node, str(tmp_path / "seen")

    def watched(settings: dict[str, Any], names: list[str], *files: bytes) -> Any:
        import ray

        assigned, began = ray.get_runtime_context().get_accelerator_ids()["GPU"], time.time()
        answer = replayed(settings, names, *files)
        seen = {"engine": settings["engine"], "pid": os.getpid(), "assigned": assigned, "began": began, "ended": time.time(),
                "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}  # fmt: skip
        (Path(folder) / f"{settings['engine']}-{settings['max-num-seqs']}.json").write_text(json.dumps(seen))
        return answer

    monkeypatch.setattr(sweep_ray, "run_on_node", watched)
    wanted = [*cells(trace, 5, engine="torch", model="tiny"), *cells(trace, 2)]
    workers = RayWorkers(cards.address, tmp_path / "o")
    assert (workers.cpus, workers.gpus) == (4, 2)
    results = run(workers, wanted, tmp_path / "o")
    assert [result["status"] for result in results] == ["complete"] * 7, results
    found = [json.loads(file.read_text()) for file in sorted((tmp_path / "seen").iterdir())]
    on_card = [seen for seen in found if seen["engine"] == "torch"]
    assert len(on_card) == 5 and len(found) == 7
    # Exactly one each, and that one is what CUDA will show.
    assert all(len(seen["assigned"]) == 1 and seen["visible"] == seen["assigned"][0] for seen in on_card), on_card
    assert {seen["visible"] for seen in on_card} == {"0", "1"}
    assert not any(seen["assigned"] for seen in found if seen["engine"] == "null")
    # A process keeps the card that it first used, and its memory: the next cell needs another process.
    assert len({seen["pid"] for seen in on_card}) == 5, on_card
    at_a_time = [sum(one["began"] <= seen["began"] < one["ended"] for one in on_card) for seen in on_card]
    assert max(at_a_time) == 2, on_card
    # Never two on one card.
    for card in ("0", "1"):
        spans = sorted((seen["began"], seen["ended"]) for seen in on_card if seen["visible"] == card)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans)), spans


@needs_ray
def test_a_lost_worker_has_its_cell_tried_again(cluster: Any, tmp_path: Path) -> None:
    """Every worker that is at a cell is killed once; all cells still come to their end."""
    trace = write_trace(tmp_path / "t.jsonl", rows(*((i * 0.01, 64, 200) for i in range(400))))
    killed: list[int] = []
    stop = threading.Event()

    def kill() -> None:
        while not stop.is_set() and not killed:
            found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
            pids = [
                int(line.split()[0]) for line in found.splitlines() if "ray::run_on_node" in line and "ps " not in line
            ]
            mine = [pid for pid in pids if _of(pid, os.getpid())]
            if mine:
                time.sleep(0.3)
                os.kill(mine[0], signal.SIGKILL)
                killed.append(mine[0])
            time.sleep(0.05)

    thread = threading.Thread(target=kill)
    thread.start()
    results = run(RayWorkers(cluster.address, tmp_path / "o"), cells(trace, 4), tmp_path / "o")
    stop.set()
    thread.join()
    assert killed and [result["status"] for result in results] == ["complete"] * 4


def _of(pid: int, ancestor: int) -> bool:
    """Whether `pid` descends from `ancestor`."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
        if pid == ancestor:
            return True
    return False


@needs_ray
def test_no_cluster_at_the_address_is_one_clear_message(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0.0, 20, 5)))
    words = ["sweep", str(trace), "--set", "scheduler=vllm", "--ray", "127.0.0.1:1", "--out", str(tmp_path / "o")]
    answer = subprocess.run([sys.executable, "-m", "benchctl", *words], capture_output=True, text=True, timeout=300)
    assert answer.returncode == 2 and "no Ray cluster answers" in answer.stderr and "Traceback" not in answer.stderr


@needs_ray
def test_the_command_writes_table_and_page(cluster: Any, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*((i * 0.05, 64, 8) for i in range(40))))
    words = ["sweep", str(trace), "--set", "scheduler=nano,vllm", "--set", "engine=null", "--set", "max-num-seqs=2,4",
             "--goodput", "ttft:500", "--ray", cluster.address, "--out", str(tmp_path / "o")]  # fmt: skip
    answer = subprocess.run([sys.executable, "-m", "benchctl", *words], capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert "ray: 2 nodes, 2 CPUs, 1 GPUs" in answer.stderr
    assert pl.read_parquet(tmp_path / "o" / "sweep.parquet")["attainment"].null_count() == 0
    assert "Which setting should I use?" in (tmp_path / "o" / "sweep.html").read_text()
