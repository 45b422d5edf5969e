"""A sweep's spec: which replays to make. TOML, or the same as flags.

    [base]                                   # flags of `benchctl replay` that all cells share
    trace = "traces/sharegpt.jsonl"
    engine = "simulated"
    profile = "profiles/demo.json"
    [grid]                                   # every combination
    scheduler = ["nano", "vllm"]
    max-num-seqs = [64, 256]
    [[list]]                                 # beside the grid: cells one by one
    scheduler = "vllm"
    max-num-seqs = 1024

`sample = N` at the top draws N cells of the grid, by `seed`; `repeat = N` makes each cell N times, with seeds one apart.
"""

from __future__ import annotations

import itertools
import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import xxhash

from benchctl.app import app
from traces.errors import BenchctlError

Value = str | int | float | bool
TOP = ("base", "grid", "list", "sample", "seed", "repeat")
# The sweep's own: where cells write, and what they print.
RESERVED = ("out", "json", "report", "force", "help", "num-repeats")
MAX_CELLS = 100_000


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay. `settings`: flag without its dashes -> value; `trace` and `scheduler` among them."""

    settings: Mapping[str, Value]

    @property
    def key(self) -> str:
        """The same for the same settings, in any sweep: by it a finished cell is found again."""
        return xxhash.xxh3_64_hexdigest(json.dumps(dict(sorted(self.settings.items()))).encode())

    def argv(self) -> list[str]:
        """Arguments of `benchctl replay`, without where to write."""
        words = ["replay", str(self.settings["trace"])]
        for name, value in sorted(self.settings.items()):
            if name == "trace":
                continue
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words += [f"--{name}", str(value)]
        return words


def read_spec(path: Path) -> dict[str, Any]:
    """The TOML file. Raises BenchctlError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchctlError(f"the spec cannot be read: {error.strerror}", where=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BenchctlError(
            f"the spec is no TOML: {error}", where=str(path), fix="docs/simulator.md shows one"
        ) from None


def cells_of(spec: Mapping[str, Any], where: str) -> list[Cell]:
    """Every cell, in order, each once. Raises BenchctlError naming the key that is wrong."""
    for name in spec:
        if name not in TOP:
            raise BenchctlError(f"the spec has a key {name!r}", where=where, fix="one of " + ", ".join(TOP))
    base, grid, listed = spec.get("base", {}), spec.get("grid", {}), spec.get("list", [])
    if not isinstance(base, dict) or not isinstance(grid, dict) or not isinstance(listed, list):
        raise BenchctlError("[base] and [grid] are tables, [[list]] is a list of tables", where=where)
    known = flags_of_replay()
    for table in (base, *listed):
        check_table(table, known, where)
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise BenchctlError(f"grid.{name} is {values!r}", where=where, fix=f"a list of values: {name} = [1, 2]")
        for value in values:
            check_table({name: value}, known, where)
    total = 1
    for values in grid.values():
        total *= len(values)
    if total > MAX_CELLS:
        raise BenchctlError(f"the grid has {total:,} cells, more than {MAX_CELLS:,}", where=where, fix="fewer values")
    made = [base | dict(zip(grid, chosen, strict=True)) for chosen in itertools.product(*grid.values())]
    if not grid and listed:
        made = []
    if (sample := whole(spec, "sample", where)) is not None and sample < len(made):
        made = random.Random(whole(spec, "seed", where) or 0).sample(made, sample)
    made += [base | one for one in listed]
    cells = []
    for settings in made:
        for name in ("trace", "scheduler"):
            if name not in settings:
                raise BenchctlError(f"a cell names no {name}", where=where, fix=f'[base] {name} = "..."')
        for k in range(whole(spec, "repeat", where) or 1):
            cells.append(Cell(settings | ({"seed": int(settings.get("seed", 0)) + k} if k else {})))
    return list({cell.key: cell for cell in cells}.values())


def whole(spec: Mapping[str, Any], name: str, where: str) -> int | None:
    value = spec.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < (name != "seed")):
        raise BenchctlError(f"{name} is {value!r}", where=where, fix="a whole number")
    return value


def check_table(table: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(table, dict):
        raise BenchctlError(f"a cell is {table!r}", where=where, fix="a table of flags and values")
    for name, value in table.items():
        if name in RESERVED:
            raise BenchctlError(f"{name} is the sweep's own", where=where, fix="leave it out")
        if name != "trace" and name not in known:
            near = [flag for flag in known if name.replace("_", "-") in flag]
            raise BenchctlError(
                f"benchctl replay has no flag --{name}",
                where=where,
                fix=near[0] if near else "benchctl replay --help lists them",
            )
        if not isinstance(value, str | int | float):
            raise BenchctlError(f"{name} is {value!r}", where=where, fix="a string, a number, true or false")


def flags_of_replay() -> list[str]:
    """Long names, without dashes."""
    group: Any = typer.main.get_command(app)
    return [o[2:] for p in group.commands["replay"].params for o in p.opts if o.startswith("--")]


def from_flags(trace: str, sets: Sequence[str], repeat: int) -> dict[str, Any]:
    """A spec of `--set name=value[,value…]`: several values make an axis of the grid. Raises BenchctlError."""
    base: dict[str, Value] = {"trace": trace}
    grid: dict[str, list[Value]] = {}
    for text in sets:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise BenchctlError(f"--set is {text!r}", fix="--set max-num-seqs=64,256")
        parsed = [parse(word) for word in values.split(",")]
        if len(parsed) > 1:
            grid[name] = parsed
        else:
            base[name] = parsed[0]
    return {"base": base, "grid": grid, "repeat": repeat}


def parse(word: str) -> Value:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(word, word)
