"""What this device can do at most: measured once (`benchctl doctor --measure`), kept in the user's cache, put in later manifests.

Medians of repeats after warm-up, the raw values beside them; on a card by its own events, clocks and settings left alone.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchctl.manifest import cpu_name, driver_version
from traces.errors import BenchctlError

COPY_BYTES = 4 << 30
CPU_COPY_BYTES = 1 << 30
MIN_FREE_BYTES = 3 << 29  # of a card: the largest product's three matrices, and a workspace
REPEATS = 5
TINY_KERNELS = 300  # of the graph
RESTLESS = 0.25  # of a figure's median, between the largest and the smallest of its repeats
FORMAT = 1


def device_key(device: str) -> dict[str, Any]:
    """What measured figures belong to: the card and its driver, or the CPU and the threads torch uses."""
    import torch

    if device == "cuda":
        return {"device": torch.cuda.get_device_name(0), "driver": driver_version() or torch.version.cuda}
    return {"device": cpu_name() or "CPU", "threads": torch.get_num_threads()}


def cache_path(key: dict[str, Any]) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(str(value) for value in key.values())).strip("-").lower()
    return Path(root).expanduser() / "benchctl" / "ceilings" / f"{name}.json"


def stored(device: str) -> dict[str, Any] | None:
    """What was measured on such a device; None: nothing, or nothing that can be read."""
    key = device_key(device)
    try:
        found = json.loads(cache_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    fits = isinstance(found, dict) and found.get("format") == FORMAT
    return found if fits and all(found.get(name) == value for name, value in key.items()) else None


def measure(say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure this machine's card, or its CPU where there is none, and keep it. Raises BenchctlError where it cannot be kept."""
    import torch

    if torch.cuda.is_available():
        return keep("cuda", measure_card(say))
    # Small models run on one thread, others on all.
    threads = torch.get_num_threads()
    found = {}
    try:
        for n in sorted({1, threads}):
            torch.set_num_threads(n)
            found = keep("cpu", measure_cpu(lambda text, n=n: say(f"{text}, {n} threads")))  # type: ignore[misc]
    finally:
        torch.set_num_threads(threads)
    return found


def keep(device: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Write what was measured to the user's cache, whole or not at all."""
    import torch

    key = device_key(device)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    found = {"format": FORMAT, **key, "type": device, "torch": torch.__version__, "measured": now, **figures}
    path = cache_path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise BenchctlError(
            f"what was measured cannot be kept: {error.strerror or error}",
            where=str(path),
            fix="set XDG_CACHE_HOME to a folder that can be written",
            exit_code=1,
        ) from None
    return found | {"path": str(path)}


def figure(values: list[float], unit: str, **about: Any) -> dict[str, Any]:
    return {"value": statistics.median(values), "unit": unit, "raw": values, **about}


# -- a card


def measure_card(say: Callable[[str], None]) -> dict[str, Any]:
    import torch

    from engines.model.memory import gib

    free, _ = torch.cuda.mem_get_info()
    if free < MIN_FREE_BYTES:
        raise BenchctlError(
            f"measuring needs {gib(MIN_FREE_BYTES)} of the card; {gib(free)} are free",
            where="--measure",
            fix="end what else runs on the card (nvidia-smi lists it)",
        )
    say("copy within the card")
    num_bytes = min(COPY_BYTES, free // 4 >> 20 << 20)
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    seconds = timed_on_card(partial(target.copy_, source), inner=10)
    out = {
        "copy": figure(
            [2 * num_bytes / s for s in seconds], "bytes/s", size_bytes=num_bytes, counted="read and written"
        )
    }
    del source, target  # room for what follows
    for name in ("bfloat16", "float16", "float32"):
        for n in (4096, 8192):
            say(f"product of {n} × {n}, {name}")
            a, b = (torch.randn(n, n, device="cuda").to(getattr(torch, name)) for _ in range(2))
            product = torch.empty_like(a)
            seconds = timed_on_card(partial(torch.mm, a, b, out=product), inner=10 if name != "float32" else 2)
            out[f"gemm_{name}_{n}"] = figure([2 * n**3 / s for s in seconds], "FLOP/s")
        say("launches, graphs, copies from the host")
    out |= launches()
    for name, size in (("h2d", 1 << 30), ("d2h", 1 << 30)):
        size = min(size, free // 8)
        host, card = (
            torch.empty(size, dtype=torch.uint8, pin_memory=True),
            torch.empty(size, dtype=torch.uint8, device="cuda"),
        )
        to, of = (card, host) if name == "h2d" else (host, card)
        seconds = timed_on_card(partial(to.copy_, of, non_blocking=True), inner=3)
        out[name] = figure([size / s for s in seconds], "bytes/s", size_bytes=size, memory="pinned")
        del host, card, to, of
    torch.cuda.empty_cache()
    return out


def timed_on_card(work: Callable[[], Any], inner: int) -> list[float]:
    """Seconds of one call, by events around `inner` of them, REPEATS times after warm-up."""
    import torch

    for _ in range(3):
        work()
    out = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            work()
        end.record()
        end.synchronize()
        out.append(start.elapsed_time(end) * 1e-3 / inner)
    return out


def launches() -> dict[str, Any]:
    """Host time of a launch, of a launch that is waited for, of a graph's replay; device time of a graph's kernel."""
    import torch

    x = torch.zeros(1, device="cuda")
    x.add_(1)
    torch.cuda.synchronize()
    host, waited, replay, kernel = [], [], [], []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TINY_KERNELS):
            x.add_(1)
    graph.replay()
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(500):  # fewer than a stream's queue holds, so that no launch waits
            x.add_(1)
        host.append((time.perf_counter() - began) / 500)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            x.add_(1)
            torch.cuda.synchronize()
        waited.append((time.perf_counter() - began) / 100)
        began = time.perf_counter()
        graph.replay()
        replay.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    kernel = [s / TINY_KERNELS for s in timed_on_card(graph.replay, inner=3)]
    return {
        "launch_host": figure(host, "s"),
        "launch_and_wait": figure(waited, "s"),
        "graph_replay_host": figure(replay, "s", kernels=TINY_KERNELS),
        "graph_kernel": figure(kernel, "s", kernels=TINY_KERNELS),
    }


# -- a CPU


def measure_cpu(say: Callable[[str], None]) -> dict[str, Any]:
    import torch

    from engines.model.memory import available_bytes

    say("copy within memory")
    num_bytes = max(1 << 20, min(CPU_COPY_BYTES, available_bytes(torch.device("cpu")) // 8 >> 20 << 20))
    source = torch.zeros(num_bytes // 4, dtype=torch.float32)
    target = torch.zeros_like(source)  # touched: fresh pages cost more than a copy
    seconds = timed_on_cpu(partial(target.copy_, source))
    out = {
        "copy": figure(
            [2 * num_bytes / s for s in seconds], "bytes/s", size_bytes=num_bytes, counted="read and written"
        )
    }
    del source, target
    for n in (1024, 2048):
        say(f"product of {n} × {n}, float32")
        a, b = torch.randn(n, n), torch.randn(n, n)
        product = torch.empty_like(a)
        seconds = timed_on_cpu(partial(torch.mm, a, b, out=product))
        out[f"gemm_float32_{n}"] = figure([2 * n**3 / s for s in seconds], "FLOP/s")
    x = torch.zeros(1)
    seconds = timed_on_cpu(lambda: [x.add_(1) for _ in range(1000)])
    out["launch_host"] = figure([s / 1000 for s in seconds], "s")
    return out


def timed_on_cpu(work: Callable[[], Any]) -> list[float]:
    work()
    out = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        out.append(time.perf_counter() - began)
    return out


# -- in words

LABELS = {
    "copy": "copy within the device, read and written",
    "launch_host": "host time of a launch",
    "launch_and_wait": "a launch that is waited for",
    "graph_replay_host": "host time of a graph's replay",
    "graph_kernel": "device time of a tiny kernel in a graph",
    "h2d": "host to device, pinned",
    "d2h": "device to host, pinned",
}


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value with its unit and how far the repeats lay apart) of every figure."""
    out = []
    for name, entry in found.items():
        if not isinstance(entry, dict) or "raw" not in entry:
            continue
        label = LABELS.get(name)
        if label is None:
            _, dtype, n = name.split("_")
            label = f"product of {n} × {n}, {dtype}"
        apart = (max(entry["raw"]) - min(entry["raw"])) / entry["value"] if entry["value"] else 0.0
        restless = ", restless: did something else run?" if apart > RESTLESS else ""
        out.append(
            (label, f"{amount(entry['value'], entry['unit'])}  (±{apart / 2:.0%} over {len(entry['raw'])}{restless})")
        )
    return out


def amount(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e6:.2f} µs"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.2f} {prefix}{'B' if unit == 'bytes/s' else 'FLOP'}/s"
    return f"{value:.3g} {unit}"
