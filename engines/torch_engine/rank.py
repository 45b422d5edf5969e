"""A rank other than 0: does what rank 0 announces until the socket ends. Started by engines/torch_engine/parallel.py.

Decides nothing and records nothing. Ends with its parent, however that ends.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from engines.model.load import load_model
from engines.model.memory import card_memory
from engines.model.parallel import Parallel
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.parallel import join_group, share_threads
from engines.torch_engine.verify import reference_logits, widen
from traces.errors import BenchctlError


def serve(socket: Connection, spec: dict[str, Any]) -> None:
    """Until rank 0 says the end or is gone."""
    rank, size = spec["rank"], spec["size"]
    device = torch.device("cuda", rank) if spec["device"] == "cuda" else torch.device("cpu")
    share_threads(size, device)
    socket.send(("ok", None))
    join_group(rank, size, spec["port"], device)
    model: Any = None
    wide: Any = None
    engine: Any = None
    while True:
        what, content = socket.recv()
        if what == "round":
            engine.follow(content)
        elif what == "load":
            name, options = content
            model = load_model(name, device=device, parallel=Parallel(rank, size), **options)
            socket.send(("ok", None))
        elif what == "build":
            kind, options = content
            wide = None
            engine = build(kind, model, options)
        elif what == "release":
            if engine is not None:
                engine.close()
            engine = None
            free(device)
        elif what == "memory":
            free(device)
            socket.send(("ok", card_memory(device)))
        elif what == "reference":
            wide = wide or widen(model)
            for _ in reference_logits(wide, *content):
                pass
        elif what == "end":
            torch.distributed.destroy_process_group()
            return


def build(kind: str, model: Any, options: dict[str, Any]) -> Any:
    if kind == "TorchEngine":
        return TorchEngine(model, **options)
    from engines.torch_engine.triton_engine import TritonEngine

    return TritonEngine(model, **options)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def end_with(parent: int) -> None:
    """End this process as soon as `parent` is no longer its parent: also from inside a collective."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = json.loads(sys.argv[1])
    threading.Thread(target=end_with, args=(spec["parent"],), daemon=True).start()
    socket = Connection(spec["socket"])
    try:
        serve(socket, spec)
    except EOFError:
        os._exit(0)  # rank 0 is gone, or has given the team up: nothing to be put in order here
    except BaseException as error:
        text = str(error).strip().splitlines()
        known = error if isinstance(error, BenchctlError) else None
        report = {
            "what": known.what
            if known
            else f"rank {spec['rank']} broke: {type(error).__name__}: {text[0] if text else ''}",
            "where": known.where if known else None,
            "fix": known.fix if known else None,
            "code": known.exit_code if known else 1,
        }
        try:
            socket.send(("error", report))
        except OSError:
            pass
        os._exit(1)


if __name__ == "__main__":
    main()
