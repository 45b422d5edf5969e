"""Replays of a sweep on a Ray cluster (`pip install 'benchctl[ray]'`). Ray is imported when this is used, not before.

A cell is a task of one CPU; one of the torch engine asks for a GPU where the cluster has any, and has a process to itself.
The sweep's own code goes with the job, its dependencies have to be installed on every node. Files that a cell names (trace,
profile) are sent, once each; the run folder comes back with the result. So no file system need be shared. A model folder is
not sent. A worker that dies has its cell tried again, RETRIES times; then the cell is recorded as failed.
"""

from __future__ import annotations

import io
import json
import shutil
import socket
import tarfile
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchctl.sweep_spec import FILES, Cell, place_of
from benchctl.sweep_workers import Result, needs_device, replay_here, result_of, words_of
from traces.errors import BenchctlError

RETRIES = 2
SENT = (*FILES, "from")  # settings that name files or folders a cell reads


def import_ray() -> Any:
    """The package. Raises BenchctlError where it is not installed."""
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise BenchctlError("--ray needs Ray, which is not installed", fix="pip install 'benchctl[ray]'") from None
    return ray


def check_answers(address: str) -> None:
    """Raises BenchctlError where nothing listens at HOST:PORT. Ray would end the whole process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise no_cluster(address, str(error)) from None


def no_cluster(address: str, why: str) -> BenchctlError:
    return BenchctlError(
        f"no Ray cluster answers at {address}: {why}",
        where="--ray",
        fix="ray start --head here, or --ray HOST:6379 of a running one, or --ray local",
    )


class RayWorkers:
    """Tasks on a cluster. `address`: as `ray.init` takes it; "local" starts one on this machine. Mutable, owned by its sweep."""

    def __init__(self, address: str, out: Path) -> None:
        self._ray = ray = import_ray()
        self._out, self._refs = out, dict[Future[Result], Any]()
        self._objects: dict[str, Any] = {}
        self._own = not ray.is_initialized()
        here = Path(__file__).resolve().parent.parent
        packages = [str(here / name) for name in ("benchctl", "engines", "reports", "traces")]
        if self._own:
            check_answers(address)
            try:
                ray.init(
                    address=None if address == "local" else address,
                    runtime_env={"py_modules": packages, "excludes": ["**/__pycache__"], "env_vars": {"OMP_NUM_THREADS": "1"}},
                    log_to_driver=False, logging_level="error", include_dashboard=False if address == "local" else None,
                )  # fmt: skip
            except Exception as error:  # ConnectionError, ValueError, RuntimeError, by version
                raise no_cluster(address, str(error).splitlines()[0][:200]) from None
        found = ray.cluster_resources()
        self.cpus, self.gpus = int(found.get("CPU", 0)), int(found.get("GPU", 0))
        self.nodes = sum(1 for node in ray.nodes() if node.get("Alive"))
        self._task = ray.remote(max_retries=RETRIES, num_cpus=1)(run_on_node)
        # A process keeps the card that it first used, and the memory it took there, whatever Ray assigns to it next. So such
        # a cell ends its process; asked for by `.options(num_gpus=1)` of the task above, it would not.
        self._on_card = ray.remote(max_retries=RETRIES, num_cpus=1, num_gpus=1, max_calls=1)(run_on_node)

    @property
    def slots(self) -> int:
        """Cells at a time, at most."""
        return max(self.cpus, 1)

    def submit(self, cell: Cell) -> Future[Result]:
        files = {name: self._sent(place_of(name, str(cell.settings[name]))) for name in SENT if name in cell.settings}
        files = {name: sent for name, sent in files.items() if sent is not None}
        task = self._on_card if needs_device(cell) and self.gpus else self._task
        ref = task.remote(dict(cell.settings), list(files), *files.values())
        done: Future[Result] = Future()
        self._refs[done] = ref
        ref.future().add_done_callback(lambda answer: self._ended(cell, done, answer))
        return done

    def close(self, *, now: bool) -> None:
        if now:
            for ref in self._refs.values():
                self._ray.cancel(ref, force=True)
        if self._own:
            self._ray.shutdown()

    def _sent(self, path: str) -> Any:
        """The file or folder in the object store, once; None where there is none."""
        if not Path(path).exists():
            return None
        if path not in self._objects:
            self._objects[path] = self._ray.put(packed(Path(path)))
        return self._objects[path]

    def _ended(self, cell: Cell, done: Future[Result], answer: Future[Any]) -> None:
        self._refs.pop(done, None)
        try:
            code, stdout, stderr, run, node = answer.result()
            folder = self._out / "runs" / cell.key
            if run:
                shutil.rmtree(folder, ignore_errors=True)
                unpack(run, folder)
            result = result_of(cell, code, stdout, stderr, folder) | {"node": node}
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            result = {
                "status": "failed",
                "reason": f"its worker was lost: {type(error).__name__}: {text}",
                "figures": {},
            }
        if not done.cancelled():
            done.set_result(result)


def run_on_node(settings: dict[str, Any], names: list[str], *files: bytes) -> tuple[int, str, str, bytes, str]:
    """On a node: a cell in a temporary folder. Exit code, stdout, stderr, the run folder packed (empty: none), the node's id."""
    node = str(import_ray().get_runtime_context().get_node_id())
    with tempfile.TemporaryDirectory(prefix="benchctl-") as text:
        here = Path(text)
        given = str(settings["trace"])
        for name, data in zip(names, files, strict=True):
            unpack(data, here / name)
            settings[name] = str(next((here / name).iterdir()))
        code, stdout, stderr = replay_here(words_of(Cell(settings), here / "out"))
        out = here / "out" / str(settings["scheduler"])
        stdout, stderr = (words.replace(f"{here}/", "") for words in (stdout, stderr))
        if not out.is_dir():
            return code, stdout, stderr, b"", node
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
        manifest["trace"]["path"] = given  # not where the copy lay
        (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        return code, stdout, stderr, packed(out), node


def packed(path: Path) -> bytes:
    """A file or folder as a tar of one entry."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        tar.add(path, arcname=path.name)
    return target.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder, filter="data")
