"""One process a rank: rank 0, which is the command itself, starts the others, tells them what to do and looks after them.

A rank builds the engines that rank 0 builds and runs each round that it announces; the ranks then meet in the model's
collectives (engines/model/parallel.py). What is announced goes through a socket a rank, so that nobody waits in a collective
while nothing runs. Whatever ends this process ends the others too.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from engines.interface import Int64Array
from engines.model.load import find_config, load_model, resolve_device
from engines.model.parallel import Parallel, check_divides
from engines.model.transformer import Model
from traces.errors import BenchctlError

MAX_RANKS = 64
START_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 5.0
# On a card a dead rank is found by looking, not by an error: between two looks, in seconds.
LOOK_S = 0.05


def join_group(rank: int, size: int, port: int, device: torch.device) -> None:
    """Make torch.distributed's default group: NCCL between cards, gloo between CPUs, all on this machine."""
    from torch import distributed

    # The machine's name need not lead anywhere: all ranks are here.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=START_TIMEOUT_S)
    store = distributed.TCPStore("127.0.0.1", port, size, is_master=False, timeout=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # A dead rank is found by the team, which says so; torch would end this process where it stands.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        distributed.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    else:
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)


def share_threads(size: int, device: torch.device) -> None:
    """CPU ranks compute at the same time: each takes its share of the cores."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))


class Team:
    """The other ranks, as rank 0 sees them. Raises BenchctlError (exit code 1) as soon as one of them is found dead."""

    current: Team | None = None  # one at a time: torch.distributed's default group is the process's

    def __init__(self, size: int, device: torch.device) -> None:
        from torch import distributed

        assert Team.current is None, "another team is still there"
        Team.current = self
        self.size = size
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sockets: list[Connection] = []
        self.joined = self.closed = self.broken = False
        self._looked = 0.0
        atexit.register(self.close)
        try:
            # The store's server lives here; its port is the system's choice, so that no two commands meet.
            self._store = distributed.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
            for rank in range(1, size):
                self._start(rank, device)
            share_threads(size, device)
            self.replies(START_TIMEOUT_S)  # each has imported what it needs: from here on joining takes no time
            join_group(0, size, self._store.port, device)
            self.joined = True
            if device.type == "cuda":
                threading.Thread(target=self._guard, daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, device: torch.device) -> None:
        ours, theirs = Pipe()
        spec = {
            "rank": rank,
            "size": self.size,
            "port": self._store.port,
            "device": device.type,
            "socket": theirs.fileno(),
            "parent": os.getpid(),
        }
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "engines.torch_engine.rank", json.dumps(spec)],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # What goes wrong comes through the socket; NCCL's own log is for who asked for it.
                stderr=None if "NCCL_DEBUG" in os.environ else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for rank 0, which ends the others in order
            )
        )
        theirs.close()
        self.sockets.append(ours)

    # -- what the other ranks do

    def load(self, name: str, options: dict[str, Any]) -> None:
        self._announce("load", (name, options))

    def build(self, engine: str, **options: Any) -> None:
        self._announce("build", (engine, options))

    def round(self, inputs: Any) -> None:
        self._announce("round", inputs)

    def release(self) -> None:
        """Rank 0's engine is closed: theirs too. Not an error where they are gone."""
        if not self.closed and self.fault() is None:
            self._announce("release", None)

    def reference(self, ids: Int64Array, positions: Int64Array) -> None:
        self._announce("reference", (ids, positions))

    def memory(self) -> list[tuple[int, int]]:
        """(free, in all) bytes of each of their cards."""
        self._announce("memory", None)
        return self.replies()

    def _announce(self, what: str, content: Any) -> None:
        self.look()
        for socket in self.sockets:
            try:
                socket.send((what, content))
            except OSError:
                raise self.fault() or lost("a rank closed its socket") from None

    def replies(self, timeout_s: float | None = None) -> list[Any]:
        """One answer of each rank. Raises BenchctlError where one failed, died or says nothing for too long."""
        out = []
        began = time.monotonic()
        for socket in self.sockets:
            while not socket.poll(0.05):
                self.look(at_once=True)
                if timeout_s is not None and time.monotonic() - began > timeout_s:
                    raise lost(f"no answer for {timeout_s:.0f} s")
            out.append(self._receive(socket))
        return out

    def _receive(self, socket: Connection) -> Any:
        try:
            what, content = socket.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if what == "error":
            raise BenchctlError(content["what"], where=content["where"], fix=content["fix"], exit_code=content["code"])
        return content

    # -- whether they live

    def look(self, *, at_once: bool = False) -> None:
        """Raise if a rank has failed or died; at most every LOOK_S."""
        now = time.monotonic()
        if at_once or now - self._looked > LOOK_S:
            self._looked = now
            if (fault := self.fault()) is not None:
                raise fault

    def fault(self) -> BenchctlError | None:
        """Why the team cannot go on; None: it can."""
        for rank, (process, socket) in enumerate(zip(self.processes, self.sockets, strict=True), 1):
            code = process.poll()
            if code is None:
                continue
            with contextlib.suppress(EOFError, OSError):
                while socket.poll(0):
                    what, content = socket.recv()
                    if what == "error":
                        return BenchctlError(
                            content["what"], where=content["where"], fix=content["fix"], exit_code=content["code"]
                        )
            return lost(f"rank {rank} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")
        return None

    def _death(self) -> BenchctlError:
        """A socket is at its end: the process will have ended in a moment."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while time.monotonic() < deadline:
            if (fault := self.fault()) is not None:
                return fault
            time.sleep(0.01)
        return lost("a rank closed its socket")

    def explain(self, error: Exception) -> None:
        """A round or a collective failed here: raise the rank's death instead, if that was why."""
        self.broken = True  # the others may be waiting for this rank in a collective
        if any(word in str(error) for word in ("gloo", "Gloo", "NCCL", "onnection", "Socket")):
            raise self._death() from error

    def _guard(self) -> None:
        """A kernel that waits for a dead rank never ends, nor does whoever waits for the kernel: give the group up then."""
        while not self.closed:
            if any(process.poll() is not None for process in self.processes):
                abort_group()
                return
            time.sleep(4 * LOOK_S)

    def wait(self, event: torch.cuda.Event) -> None:
        """Until the device has come to `event`; a collective that misses a rank never comes to its end, so look at them."""
        while not event.query():
            self.look()

    def close(self) -> None:
        """End the other ranks: in order where they are well, else at once."""
        if self.closed:
            return
        self.closed = True
        Team.current = None
        atexit.unregister(self.close)
        well = self.joined and not self.broken and self.fault() is None and sys.exc_info()[0] is None
        for socket in self.sockets:
            with contextlib.suppress(OSError):
                if well:
                    socket.send(("end", None))
                socket.close()
        from torch import distributed

        if well:
            with contextlib.suppress(Exception):
                distributed.destroy_process_group()
        deadline = time.monotonic() + (EXIT_TIMEOUT_S if well else 0)
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.joined and not well:
            abort_group()  # with the others gone nothing can be waited for


def abort_group() -> None:
    """NCCL's kernels are given up, gloo's sockets closed."""
    from torch import distributed

    with contextlib.suppress(Exception):
        distributed.distributed_c10d._abort_process_group()


def lost(what: str) -> BenchctlError:
    return BenchctlError(
        f"tensor parallel: {what}",
        fix="look at the machine's log (out of memory?); NCCL_DEBUG=INFO shows what NCCL does",
        exit_code=1,
    )


def load_parallel_model(
    name: str, size: int, *, dtype: str = "auto", device: str = "auto", load_format: str = "auto", seed: int = 0
) -> Model:
    """`load_model`, split over `size` ranks: rank 0's part, with the team of the others in `Model.team`.

    Raises BenchctlError before anything is started where the model does not divide, or cards are too few; and whatever a rank
    raises while loading.
    """
    if size == 1:
        return load_model(name, dtype=dtype, device=device, load_format=load_format, seed=seed)
    config, _ = find_config(name)
    check_divides(config, size, name)
    where = resolve_device(device)
    if where.type == "cuda" and size > torch.cuda.device_count():
        raise BenchctlError(
            f"{size} ranks need {size} cards; torch sees {torch.cuda.device_count()}",
            where="--tensor-parallel-size",
            fix=f"--tensor-parallel-size {torch.cuda.device_count()} or less",
        )
    if where.type == "cpu" and size > MAX_RANKS:
        raise BenchctlError(
            f"{size} processes on one machine", where="--tensor-parallel-size", fix=f"{MAX_RANKS} or less"
        )
    if where.type == "cuda":
        where = torch.device("cuda", 0)
    team = Team(size, where)
    try:
        options: dict[str, Any] = {"dtype": dtype, "load_format": load_format, "seed": seed}
        team.load(name, options)
        model = load_model(name, device=where, parallel=Parallel(0, size), **options)
        team.replies()
    except BaseException:
        team.close()
        raise
    model.team = team
    return model
