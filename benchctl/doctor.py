"""What is installed, which device there is, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from benchctl import __version__
from benchctl.manifest import hardware, versions
from traces.errors import BenchctlError

# Package -> (what needs it, how to get it).
NEEDED: dict[str, tuple[str, str]] = {
    "numpy": ("everything", "pip install numpy"),
    "polars": ("records and reports", "pip install polars"),
    "msgspec": ("traces", "pip install msgspec"),
    "xxhash": ("schedulers and digests", "pip install xxhash"),
    "torch": ("--engine torch", "pip install torch"),
    "triton": ("kernels on a card", "pip install triton (Linux)"),
    "transformers": ("tokenizers", "pip install transformers"),
    "safetensors": ("weights of a model folder", "pip install safetensors"),
    "plotly": ("report.html", "pip install plotly"),
    "jinja2": ("report.html", "pip install jinja2"),
}
REQUIRED = ("numpy", "polars", "msgspec", "xxhash")


def diagnose(measure: bool = False) -> dict[str, Any]:
    """JSON-able. With `measure` the device's ceilings are measured (and kept); without, those kept earlier are told. `problems`: [{what, fix}], those that keep benchctl from working at all with `required` true."""
    problems = []
    for name, (what, fix) in NEEDED.items():
        if importlib.util.find_spec(name) is None:
            problems.append(
                {"what": f"{name} is not installed: {what} needs it", "fix": fix, "required": name in REQUIRED}
            )
    torch_says: dict[str, Any] = {"installed": False}
    if importlib.util.find_spec("torch") is not None:
        try:
            import torch
        except Exception as error:  # a broken build raises OSError, ImportError and others
            problems.append({"what": f"torch does not load: {error}", "fix": "install torch anew", "required": False})
        else:
            torch_says = {"installed": True, "cuda_build": torch.version.cuda, "cuda": torch.cuda.is_available()}
            if torch.version.cuda and not torch.cuda.is_available():
                problems.append(
                    {
                        "what": "torch is a CUDA build and sees no card",
                        "fix": "look at the NVIDIA driver (nvidia-smi)",
                        "required": False,
                    }
                )
    ceilings = None
    if torch_says["installed"]:
        from benchctl import measure as measuring

        if measure:
            ceilings = measuring.measure(lambda text: print(f"measuring: {text}", file=sys.stderr, flush=True))
        else:
            ceilings = measuring.stored("cuda" if torch_says["cuda"] else "cpu")
    elif measure:
        raise BenchctlError("measuring needs torch, which is not installed", where="--measure", fix="pip install torch")
    found = hardware()
    on_card = found["gpu"] is not None
    return {
        "benchctl": __version__,
        "versions": versions(),
        "hardware": found,
        "torch": torch_says,
        "engine_auto": "torch on CUDA with qwen3-0.6b"
        if on_card
        else "torch on the CPU with tiny"
        if torch_says["installed"]
        else None,
        "ceilings": ceilings,
        "problems": problems,
    }


def print_diagnosis(found: dict[str, Any], *, as_json: bool) -> int:
    """To stdout. The exit code: 1 where something required is missing."""
    code = int(any(problem["required"] for problem in found["problems"]))
    if as_json:
        print(json.dumps(found, indent=1))
        return code
    out = Console(highlight=False, soft_wrap=True)
    machine = found["hardware"]

    def say(head: str, text: object) -> None:
        out.print(Text(f"{head:<9} ", style="bold") + Text(str(text)))

    say("benchctl", found["benchctl"])
    say("versions", ", ".join(f"{name} {version or '–'}" for name, version in found["versions"].items()))
    memory = machine["memory_bytes"]
    say("cpu", f"{machine['cpu']}, {machine['cores']} cores, {memory / 2**30:.1f} GiB" if memory else machine["cpu"])
    gpu = machine["gpu"]
    say(
        "gpu",
        "none"
        if gpu is None
        else f"{gpu['count']} × {gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB, driver {gpu['driver']}",
    )
    say(
        "auto",
        f"--engine auto takes {found['engine_auto']}" if found["engine_auto"] else "--engine null is what works here",
    )
    ceilings = found["ceilings"]
    if ceilings is not None:
        from benchctl.measure import lines

        say("ceilings", f"measured {ceilings['measured']} with torch {ceilings['torch']}; later runs state them")
        for label, value in lines(ceilings):
            say("", f"{label:<44} {value}")
    elif found["torch"]["installed"]:
        say("ceilings", "not measured on this device; try: benchctl doctor --measure, with nothing else running")
    for problem in found["problems"]:
        say("missing" if "installed" in problem["what"] else "problem", f"{problem['what']}; try: {problem['fix']}")
    if not found["problems"]:
        say("ok", "nothing is missing")
    return code
