"""A sweep's spec: which replays to make. TOML, or the same as flags.

    goodput = "ttft:200 tpot:50"             # SLOs by which cells are judged
    [base]                                   # flags of `benchctl replay` that all cells share
    trace = "traces/sharegpt.jsonl"
    engine = "simulated"
    profile = "profiles/demo.json"
    [grid]                                   # every combination
    scheduler = ["nano", "vllm"]
    max-num-seqs = [64, 256]
    [random]                                 # drawn, `sample` times
    max-num-batched-tokens = { min = 512, max = 16384, log = true, step = 256 }
    [[list]]                                 # beside the grid: cells one by one
    scheduler = "vllm"
    max-num-seqs = 1024

`sample = N` at the top draws N cells of the grid, by `seed`; `repeat = N` makes each cell N times, with seeds one apart.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from benchctl.parse import parse_goodput
from benchctl.sweep_values import Value, check_trace, check_value, flags_of_replay, placed, words_of
from traces.errors import BenchctlError
from traces.files import resolve

TOP = ("base", "grid", "random", "list", "sample", "seed", "repeat", "goodput", "attainment")
# The sweep's own: where cells write, what they print, and the SLOs, which are held against the records afterwards.
RESERVED = ("out", "json", "report", "force", "help", "num-repeats", "goodput")
FILES = ("trace", "profile")  # settings that may name a file: its content is part of what a cell is
RANGE = ("min", "max", "log", "step")
MAX_CELLS = 100_000


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay. `settings`: flag without its dashes -> value; `trace` and `scheduler` among them."""

    settings: Mapping[str, Value]
    inputs: Mapping[str, str] = field(default_factory=dict)  # setting that names a file -> digest of the file

    @property
    def key(self) -> str:
        """The same for the same settings and files, in any sweep: by it a finished cell is found again."""
        known = dict(sorted(self.settings.items())) | ({"": dict(self.inputs)} if self.inputs else {})
        return xxhash.xxh3_64_hexdigest(json.dumps(known).encode())

    def argv(self) -> list[str]:
        """Arguments of `benchctl replay`, without where to write."""
        words = ["replay", str(self.settings["trace"])]
        for name, value in sorted(self.settings.items()):
            if name == "trace":
                continue
            words += words_of(name, value)
        return words

    def text(self, leave_out: Sequence[str] = ("trace",)) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items() if name not in leave_out)


def make_cell(settings: Mapping[str, Value]) -> Cell:
    """A cell that knows its files by content. One that is not there is the replay's to complain of."""
    named = {name: digest_of(place_of(name, str(settings[name]))) for name in FILES if name in settings}
    return Cell(settings, {name: digest for name, digest in named.items() if digest})


def place_of(name: str, value: str) -> str:
    """Where the file lies that a setting names: a trace and a profile may go by their names alone."""
    if name == "trace":
        try:
            return str(resolve(value)[0])
        except BenchctlError:
            return value
    if name == "profile" and not Path(value).is_file():
        from benchctl.profiles import named_profiles

        return str(named_profiles().get(value, value))
    return value


@cache
def digest_of(path: str) -> str | None:
    """xxh3 of a file's bytes; None where it is no file."""
    digest = xxhash.xxh3_64()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Place:
    """Where the spec was given, for messages. `text`: of the TOML file, to name the line."""

    name: str
    text: str = ""

    def of(self, key: str, value: Any = None) -> str:
        """`s.toml, line 7` for the first line that sets `key`, best one on which `value` stands."""
        spelled = "[-_]".join(map(re.escape, re.split("[-_]", key)))
        wanted = re.compile(rf"""(^\s*|[{{,]\s*)["']?{spelled}["']?\s*=|^\s*\[+\s*{spelled}\s*\]""")
        found = [(number, line) for number, line in enumerate(self.text.splitlines(), 1) if wanted.search(line)]
        if value is not None:
            found = [entry for entry in found if str(value) in entry[1]] or found
        return f"{self.name}, line {found[0][0]}" if found else self.name


def read_spec(path: Path) -> tuple[dict[str, Any], Place]:
    """The TOML file, and where its keys stand. Raises BenchctlError."""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), Place(str(path), text)
    except OSError as error:
        raise BenchctlError(
            f"the spec cannot be read: {error.strerror}",
            where=str(path),
            fix="a TOML file; or a trace, with --set NAME=VALUES",
        ) from None
    except UnicodeDecodeError:
        raise BenchctlError("the spec is no UTF-8 text", where=str(path), fix="docs/sweep.md shows one") from None
    except tomllib.TOMLDecodeError as error:
        hint = "a trace goes with --set NAME=VALUES" if path.suffix in (".jsonl", ".json", ".gz") else ""
        raise BenchctlError(
            f"the spec is no TOML: {error}", where=str(path), fix=hint or "docs/sweep.md shows one"
        ) from None


def cells_of(spec: Mapping[str, Any], where: str | Place) -> list[Cell]:
    """Every cell, in order, each once. Raises BenchctlError naming the key that is wrong, and its line."""
    place = where if isinstance(where, Place) else Place(where)
    for name in spec:
        if name not in TOP:
            near = difflib.get_close_matches(name, TOP, 1)
            fix = f"did you mean {near[0]}?" if near else "one of " + ", ".join(TOP)
            if name.replace("_", "-") in flags_of_replay() or name == "trace":
                fix = f"under [base]: {name} = ..."
            raise BenchctlError(f"the spec has a key {name!r}", where=place.of(name), fix=fix)
    base, grid, drawn = (table_of(spec, name, place) for name in ("base", "grid", "random"))
    listed = spec.get("list", [])
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise BenchctlError(
            f"list is {listed!r}", where=place.of("list"), fix="a table a cell, each under [[list]]: max-num-seqs = 64"
        )
    base = checked({name: value for name, value in base.items() if name != "goodput"}, place)  # goodput: `slo_of`
    listed = [checked(one, place) for one in listed]
    axes = {axis_name(name, values, place): values for name, values in grid.items()}
    ranges = {next(iter(checked({name: 0}, place))): check_range(name, value, place) for name, value in drawn.items()}
    check_values([base, *listed], axes, ranges, place)
    total = math.prod(len(values) for values in axes.values())
    if total > MAX_CELLS:
        raise BenchctlError(
            f"the grid has {total:,} cells, more than {MAX_CELLS:,}", where=place.name, fix="fewer values"
        )
    made = [base | dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]
    if not grid and not drawn and listed:
        made = []
    sample, seed = whole(spec, "sample", place), whole(spec, "seed", place) or 0
    if ranges:
        if sample is None:
            raise BenchctlError(
                "[random] is drawn from, and nothing says how often",
                where=place.of("random"),
                fix="sample = 50 at the top",
            )
        if sample > MAX_CELLS:
            raise BenchctlError(f"sample is {sample:,}", where=place.of("sample"), fix=f"{MAX_CELLS:,} or fewer")
        chance = random.Random(seed)
        made = [
            chance.choice(made) | {name: draw(about, chance) for name, about in ranges.items()} for _ in range(sample)
        ]
    elif sample is not None and sample < len(made):
        made = random.Random(seed).sample(made, sample)
    made += [base | one for one in listed]
    cells = []
    for settings in made:
        for name in ("trace", "scheduler"):
            if name not in settings:
                raise BenchctlError(f"a cell names no {name}", where=place.name, fix=f'[base] {name} = "..."')
        for k in range(whole(spec, "repeat", place) or 1):
            cells.append(make_cell(settings | ({"seed": int(settings.get("seed", 0)) + k} if k else {})))
    return list({cell.key: cell for cell in cells}.values())


def table_of(spec: Mapping[str, Any], name: str, place: Place) -> dict[str, Any]:
    table = spec.get(name, {})
    if not isinstance(table, dict):
        raise BenchctlError(f"{name} is {table!r}", where=place.of(name), fix=f"a table: [{name}], flags under it")
    return table


def check_values(
    tables: Sequence[Mapping[str, Value]],
    axes: Mapping[str, Sequence[Value]],
    ranges: Mapping[str, Mapping[str, Any]],
    place: Place,
) -> None:
    """Raises BenchctlError for the first value that its flag does not take, whatever the rest of a cell is."""
    values = [entry for table in tables for entry in table.items()]
    values += [(name, value) for name, of in axes.items() for value in of]
    values += [(name, value) for name, about in ranges.items() for value in ends(about)]
    for name, value in {(name, repr(value)): (name, value) for name, value in values}.values():  # True is not 1
        if name != "trace":
            check_value(name, value, place.of(name, value))


def check_traces(cells: Sequence[Cell], place: Place, typed: str | None = None) -> None:
    """Raises BenchctlError for a trace that is missing or broken. `typed`: the one that the command line names by itself."""
    seen: dict[str, bool] = {}
    for cell in cells:
        name = str(cell.settings["trace"])
        if not {"map", "format", "from"} & set(cell.settings):  # a file of another format, or an earlier run's
            seen[name] = seen.get(name, False) or bool(cell.settings.get("skip-bad", False))
    for name, skip_bad in seen.items():
        check_trace(name, None if name == typed else place.of("trace", name), skip_bad=skip_bad)


def slo_of(spec: Mapping[str, Any], flags: Sequence[str], place: Place) -> dict[str, float]:
    """SLOs, metric -> ms: those of the command line, else the spec's `goodput`. Raises BenchctlError."""
    if flags:
        return parse_goodput(list(flags))
    given = spec.get(
        "goodput", (spec.get("base") or {}).get("goodput", []) if isinstance(spec.get("base"), dict) else []
    )
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BenchctlError(f"goodput is {given!r}", where=place.of("goodput"), fix='goodput = "ttft:200 tpot:50"')
    try:
        return parse_goodput(words)
    except BenchctlError as error:
        raise placed(error, place.of("goodput")) from None


def whole(spec: Mapping[str, Any], name: str, place: Place) -> int | None:
    value = spec.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < (name != "seed")):
        least = int(name != "seed")
        raise BenchctlError(f"{name} is {value!r}", where=place.of(name), fix=f"a whole number from {least}")
    return value


def axis_name(name: str, values: Any, place: Place) -> str:
    """The flag of a grid's axis, its values checked."""
    if not isinstance(values, list) or not values:
        raise BenchctlError(
            f"grid.{name} is {values!r}", where=place.of(name), fix=f"a list of values: {name} = [1, 2]"
        )
    return [next(iter(checked({name: value}, place))) for value in values][0]


def checked(table: Mapping[str, Any], place: Place) -> dict[str, Value]:
    """A table of flags with its names as the flags are spelled. Raises BenchctlError."""
    known = flags_of_replay()
    out: dict[str, Value] = {}
    for given, value in table.items():
        name = given.replace("_", "-").removeprefix("--")
        if name == "goodput":
            raise BenchctlError(
                "goodput judges all cells", where=place.of(given), fix='once, at the top: goodput = "ttft:200 tpot:50"'
            )
        if name in RESERVED:
            raise BenchctlError(f"{name} is the sweep's own", where=place.of(given), fix="leave it out")
        if name != "trace" and name not in known:
            near = difflib.get_close_matches(name, known, 1) or [flag for flag in known if name in flag]
            raise BenchctlError(
                f"benchctl replay has no flag --{name}",
                where=place.of(given),
                fix=f"did you mean {near[0]}?" if near else "benchctl replay --help lists them",
            )
        if not isinstance(value, str | int | float):
            raise BenchctlError(f"{given} is {value!r}", where=place.of(given), fix="a string, a number, true or false")
        out[name] = value
    return out


def check_range(name: str, about: Any, place: Place) -> Mapping[str, Any]:
    """`{ min, max, log, step }` of [random], or a list to choose from. Raises BenchctlError."""
    if isinstance(about, list) and about:
        for value in about:
            checked({name: value}, place)
        return {"of": about}
    wrong = not isinstance(about, dict) or set(about) - set(RANGE) or not {"min", "max"} <= set(about)
    if not wrong:
        low, high, step = about["min"], about["max"], about.get("step", 1)
        numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in (low, high, step))
        if numbers and low > high:
            raise BenchctlError(
                f"random.{name} goes from min {low} to max {high}, which is less",
                where=place.of(name),
                fix=f"min = {high}, max = {low}",
            )
        wrong = not numbers or not low <= high or step <= 0 or (about.get("log") and low <= 0)
    if wrong or not isinstance(about, dict):
        raise BenchctlError(
            f"random.{name} is {about!r}",
            where=place.of(name),
            fix="{ min = 512, max = 16384, log = true, step = 256 }",
        )
    return about


def ends(about: Mapping[str, Any]) -> list[Value]:
    """The values of a list, or the least and the greatest of a range, whole or not as they would be drawn."""
    if "of" in about:
        return list(about["of"])
    return [end if draws_whole(about) else float(end) for end in (about["min"], about["max"])]


def draws_whole(about: Mapping[str, Any]) -> bool:
    return all(isinstance(about.get(key, 1), int) for key in ("min", "max", "step"))


def draw(about: Mapping[str, Any], chance: random.Random) -> Value:
    """A value of the range: whole where its ends are, on its steps where it has some."""
    if "of" in about:
        chosen: Value = chance.choice(about["of"])
        return chosen
    low, high = about["min"], about["max"]
    value = math.exp(chance.uniform(math.log(low), math.log(high))) if about.get("log") else chance.uniform(low, high)
    if "step" in about:
        value = low + round((value - low) / about["step"]) * about["step"]
        value = value if value <= high else value - about["step"]
    if draws_whole(about):
        return round(value)
    return float(f"{value:.6g}")


def from_flags(
    trace: str, sets: Sequence[str], repeat: int, sample: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """A spec of `--set name=value[,value…]`: several values make an axis of the grid. Raises BenchctlError."""
    base: dict[str, Value] = {"trace": trace}
    grid: dict[str, list[Value]] = {}
    for text in sets:
        name, equals, values = text.partition("=")
        name = name.replace("_", "-").removeprefix("--")
        if not equals or not name or not values:
            raise BenchctlError(f"--set is {text!r}", fix="--set max-num-seqs=64,256")
        if name in grid or (name in base and name != "trace"):
            raise BenchctlError(f"{name} is set twice", where="--set", fix=f"all its values at once: --set {name}=A,B")
        # Values that hold commas themselves are a spec's business.
        parsed: list[Value] = [parse(word) for word in values.split(",")] if name != "round-cost" else [values]
        if len(parsed) > 1:
            grid[name] = parsed
        else:
            base[name] = parsed[0]
    spec: dict[str, Any] = {"base": base, "grid": grid, "repeat": repeat, "seed": seed}
    return spec | ({"sample": sample} if sample is not None else {})


def parse(word: str) -> Value:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(word, word)
