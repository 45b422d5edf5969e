"""`benchctl replay --from RUN --set name=value`: the recorded run once more, with something else, held against the original.

Everything that is not asked for is the run's: trace, policy, settings, pool, arrivals by the same rule and seed. Arrivals are
free (`--clock recorded` keeps the admissions instead). Where the engine changes with it, the run as it was is replayed on the
new engine too, so that what the question changes and what the engine changes stand apart.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchctl.config import KNOB_NAMES, ReplayOptions
from engines.schedulers.registry import SCHEDULERS
from reports.packed import origin_of
from reports.run import Run, find_runs, open_run
from traces.errors import BenchctlError

# Settings of a run that are handed on whatever the engine is.
HANDED_ON = (
    "seed", "outputs", "temperature", "round_seconds", "max_concurrency", "request_rate", "burstiness", "time_scale", "num_prompts",
    "num_warmups", "warm_cache", "over_length", "skip_bad",
)  # fmt: skip
OF_ENGINE = ("load_format", "dtype", "enforce_eager", "overlap", "attention_backend")  # only where the engine stays
OF_ARRIVALS = (
    "request_rate",
    "burstiness",
    "arrivals",
    "max_concurrency",
    "time_scale",
    "num_prompts",
)  # not of --clock recorded
NOT_SETTINGS = (
    "trace", "from_run", "set", "out", "force", "json", "report", "records", "map", "format", "help", "num_repeats",
    "percentile_metrics", "metric_percentiles", "goodput", "verify",
)  # fmt: skip
DERIVED = ("model", "pool", "device memory", "profile")  # sources of a value that another engine has its own of
ALSO = {"num_gpu_blocks_override": "num_blocks", "e2e": "e2el"}
AS_RECORDED = "as-recorded"  # folder of the run as it was, on the new engine
PAGE = "comparison.html"


@dataclass(frozen=True, slots=True)
class Question:
    """A run, and what is to be different. `given`: parameters of `benchctl replay`; `baseline`: those without the changes."""

    original: Run
    changes: Mapping[str, Any]  # setting -> (as recorded, wanted)
    given: Mapping[str, Any]
    baseline: Mapping[str, Any] | None
    inherited: frozenset[str]  # parameters that are the run's
    notes: tuple[str, ...]


def ask(given: Mapping[str, Any], typed: set[str], command: Callable[..., None]) -> Question:
    """What the command line asks of the run at `--from`. `typed`: parameters that were given as flags.

    `command`: the function behind `benchctl replay`, whose parameters are what can be set. Raises BenchctlError.
    """
    run = open_one(str(given["from_run"]))
    wanted = parse_sets(given.get("set") or [], parameters_of(command))
    for name in wanted:
        if name in typed:
            raise BenchctlError(
                f"{name} is given twice", where="--set", fix=f"--{dashed(name)} or --set {name}=..., not both"
            )
    wanted = {name: given[name] for name in typed if name not in NOT_SETTINGS} | wanted
    notes: list[str] = []
    if wanted.get("engine") == "simulated" and "profile" not in wanted and (found := profile_for(run)) is not None:
        wanted["profile"] = found
        notes.append(f"profile {found} is of the run's model and device")
    own = dict(given) | {"trace": given["trace"] or find_trace(run), "set": None}
    if given["clock"] != "recorded" and wanted.get("clock") != "recorded":
        own["from_run"] = None
    recorded = as_given(run, wanted, notes)
    changed = own | recorded | wanted
    if wanted.get("num_blocks") is not None:
        changed["kv_cache_tokens"] = None
    elif wanted.get("kv_cache_tokens") is not None:
        changed["num_blocks"] = None
    else:
        changed |= pool_of(run, changed, notes)
    if own["from_run"] is not None:
        for name in OF_ARRIVALS:
            if name not in wanted:
                changed[name] = own[name]
    check_device(run, changed, given_profile="profile" in typed)
    if "engine" not in wanted:
        check_card(run)
    engine: dict[str, Any] = {
        name: wanted[name] for name in ("engine", "profile", "model", "round_cost", "clock") if name in wanted
    }
    baseline = None
    before, after = str(run.manifest.get("engine")), changed["engine"]
    same = after == before or (after == "auto" and before == "torch")
    if not same and set(wanted) - set(engine):
        quiet: list[str] = []
        baseline = own | as_given(run, engine, quiet) | engine
        baseline |= pool_of(run, baseline, quiet)
    if not wanted and own["from_run"] is None:
        notes.append("nothing is asked to be different: --set NAME=VALUE changes a setting")
    before_of = {name: was(run, name) for name in wanted}
    changes = {name: (before_of[name], value) for name, value in wanted.items() if before_of[name] != value}
    inherited = frozenset(name for name, value in changed.items() if name not in wanted and value != own.get(name))
    return Question(run, changes, changed, baseline, inherited, tuple(notes))


def open_one(path: str) -> Run:
    """The run at `path`. Raises BenchctlError where there are several."""
    found = find_runs(path)
    if len(found) > 1:
        raise BenchctlError(
            f"{path} holds {len(found)} runs, and a what-if starts from one",
            where="--from",
            fix=f"--from {origin_of(found[0])}",
        )
    return open_run(found[0] if found else path)


def trace_of(path: str) -> str:
    """The trace of the run, or runs, at `path`. Raises BenchctlError."""
    found = find_runs(path)
    return find_trace(open_run(found[0] if found else path))


def find_trace(run: Run) -> str:
    """The run's trace, by its path and sha256, else a bundled one of its name. Raises BenchctlError where it moved."""
    from traces.load import open_trace

    about = run.manifest.get("trace") or {}
    path, known = str(about.get("path")), about.get("sha256")
    why = "is not there any more"
    for place in dict.fromkeys([path, f"traces/{Path(path).name}", str(run.path.parent / Path(path).name)]):
        try:
            trace = open_trace(place)
            if known is None or trace.sha256 == known:
                return place
        except BenchctlError:
            continue
        if place == path:
            why = f"is another one by now (sha256 {trace.sha256[:12]})"
    raise BenchctlError(
        f"the run's trace {path} (sha256 {str(known)[:12]}) {why}",
        where=str(run.path),
        fix="name it: benchctl replay TRACE --from RUN ...",
    )


def was(run: Run, name: str) -> Any:
    """A setting of the run as its manifest has it."""
    if name == "scheduler":
        return [run.manifest.get("place") or run.manifest.get("scheduler")]
    if name == "kv_cache_tokens":
        return (run.manifest.get("limits") or {}).get("usable_tokens")
    if name == "num_blocks":
        return (run.manifest.get("limits") or {}).get("num_blocks")
    if name in ("engine", "clock", "arrivals"):
        return run.manifest.get(name)
    return run.setting(name)


def as_given(run: Run, wanted: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The run's settings as parameters of `benchctl replay`, as far as they hold under what is wanted."""
    manifest = run.manifest
    config = {name: entry for name, entry in (manifest.get("config") or {}).items() if isinstance(entry, dict)}
    value = {name: entry.get("value") for name, entry in config.items()}
    engine = wanted.get("engine") or manifest.get("engine")
    stays = engine == manifest.get("engine")
    own = str(manifest.get("place") or manifest.get("scheduler"))
    schedulers = list(wanted.get("scheduler") or [own])
    out: dict[str, Any] = {"scheduler": schedulers, "engine": engine}
    same_policy = schedulers == [own]
    known = set().union(*(SCHEDULERS[name].knobs for name in schedulers if name in SCHEDULERS)) | {"max_model_len"}
    for name in KNOB_NAMES:
        if value.get(name) is None or (name == "block_size" and not same_policy):
            continue
        if name not in known and not same_policy:
            continue
        if config[name].get("source") in DERIVED and not (stays and name in wanted):
            continue
        out[name] = value[name]
    out |= {name: value[name] for name in HANDED_ON if value.get(name) is not None}
    if "request_rate" in out:
        out["request_rate"] = repr(float(value["request_rate"] or 0))
    else:
        out.pop("burstiness", None)
    if stays:
        out |= {name: value[name] for name in OF_ENGINE if value.get(name) is not None}
        out["profile"] = value.get("profile")
        if engine == "torch":
            out["model"] = value.get("model") or manifest.get("model")
    elif engine in ("simulated", "torch") and manifest.get("model"):
        out["model"] = manifest.get("model")
    if engine == "null" and (cost := value.get("round_cost")) and config["round_cost"].get("source") != "default":
        out["round_cost"] = ",".join(repr(number) for number in cost)
    clock = manifest.get("clock")
    if clock == "rounds" or (stays and clock in ("wall", "virtual")):
        out["clock"] = clock
    elif clock == "recorded":
        notes.append("the run itself repeated the admissions of another: here requests arrive by the trace")
    if manifest.get("arrivals") in ("trace", "session") and value.get("request_rate") is None:
        out["arrivals"] = manifest.get("arrivals")
    goodput = manifest.get("goodput") or {}
    if goodput:
        out["goodput"] = [f"{name.removesuffix('_ms')}:{limit:g}" for name, limit in goodput.items()]
    return out


def pool_of(run: Run, changed: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The run's pool: its blocks where policy and block size stay, else as many tokens as whole blocks hold."""
    limits = run.manifest.get("limits") or {}
    own = str(run.manifest.get("place") or run.manifest.get("scheduler"))
    asked: list[str] = changed["scheduler"] or []  # None: the flag left out, which is every policy
    name = asked[0] if len(asked) == 1 else None
    info = SCHEDULERS.get(str(name))
    size = int(changed.get("block_size") or (info.default_block_size if info else limits.get("block_size")) or 1)
    if name == own and size == limits.get("block_size"):
        return {"num_blocks": limits.get("num_blocks"), "kv_cache_tokens": None}
    tokens = int(limits.get("usable_tokens") or 0)
    whole = tokens // size * size
    if whole != tokens:
        notes.append(f"the pool is {whole:,} tokens, not {tokens:,}: whole blocks of {size}")
    return {"kv_cache_tokens": whole or size, "num_blocks": None}


def profile_for(run: Run) -> str | None:
    """The one profile, of those that go by name, of the run's model and device; None where there is none, or several."""
    from benchctl.profiles import load_profile, named_profiles

    wanted = run.manifest.get("model"), run.manifest.get("device")
    if run.manifest.get("engine") != "torch" or None in wanted:
        return None
    found = []
    for name in named_profiles():
        with contextlib.suppress(BenchctlError):  # a broken one of the user's: not asked for
            profile = load_profile(name)
            found += [name] if (profile.model.name, profile.device) == wanted else []
    return found[0] if len(found) == 1 else None


def check_device(run: Run, changed: Mapping[str, Any], *, given_profile: bool) -> None:
    """Raises BenchctlError where a profile is of another card than the one that the run was measured on."""
    if changed["engine"] != "simulated" or run.manifest.get("engine") != "torch" or not changed.get("profile"):
        return
    from benchctl.profiles import load_profile

    profile, device = load_profile(str(changed["profile"])), run.manifest.get("device")
    if device and profile.device != device and given_profile:
        raise BenchctlError(
            f"profile {profile.name} was measured on {profile.device}, the run on {device}",
            where="--profile",
            fix=f"a profile of that device; or, if another device is the question, --set profile={changed['profile']}",
        )


def check_card(run: Run) -> None:
    """Raises BenchctlError where the run needs the card that it was recorded on, and none is here."""
    device = str(run.manifest.get("device") or "CPU")
    if run.manifest.get("engine") != "torch" or device == "CPU":
        return
    try:
        import torch

        found = torch.cuda.is_available()
    except ImportError:
        found = False
    if not found:
        raise BenchctlError(
            f"the run was recorded on {device}, and there is no card here",
            where="--from",
            fix="--engine simulated --profile NAME of that card, or --engine null for decisions alone",
        )


# -- --set


def dashed(name: str) -> str:
    return name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of replay: what one value is, whether it is a list of them, and what stands for not given."""

    kind: type
    several: bool
    default: Any


def parameters_of(command: Callable[..., None]) -> dict[str, Parameter]:
    """Names that `--set` takes: the flags of replay that are settings of a run."""
    hints = typing.get_type_hints(command)
    out = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if name in NOT_SETTINGS or name not in hints or name == "ctx":
            continue
        kinds = [kind for kind in typing.get_args(hints[name]) or (hints[name],) if kind is not type(None)]
        several = typing.get_origin(kinds[0]) is list
        kind = typing.get_args(kinds[0])[0] if several else kinds[0]
        out[name] = Parameter(kind, several, parameter.default)
    return out


def parse_sets(texts: Sequence[str], known: Mapping[str, Parameter]) -> dict[str, Any]:
    """`--set name=value` as parameters of replay. Raises BenchctlError."""
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, word = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        name = ALSO.get(name, name)
        if not equals:
            raise BenchctlError(f"--set is {text!r}", fix="--set max_num_seqs=64")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {near[0]}?" if near else "one of " + ", ".join(known)
            raise BenchctlError(f"a run has no setting {name!r}", where="--set", fix=fix)
        if name in out:
            raise BenchctlError(f"{name} is set twice", where="--set", fix="once")
        out[name] = convert(name, known[name], word.strip())
    return out


SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}


def convert(name: str, parameter: Parameter, word: str) -> Any:
    """A word as its flag would take it; `none` is the flag left out. Raises BenchctlError."""
    if word.lower() in ("none", "default"):
        return parameter.default
    try:
        value = SWITCH[word.lower()] if parameter.kind is bool else parameter.kind(word)
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "on or off"}.get(parameter.kind, "text")
        raise BenchctlError(f"{name} is {word!r}", where="--set", fix=f"give {wanted}, or none") from None
    return [value] if parameter.several else value


# -- running it


def run_what_if(question: Question, options: ReplayOptions, baseline: ReplayOptions | None) -> int:
    """Replay, compare, print. Returns the exit code. Raises BenchctlError."""
    from rich.console import Console
    from rich.text import Text

    from benchctl.command import line, new_folder, run_replay
    from reports.summary import summarize
    from reports.terminal import summary_table

    if options.records == "none":
        raise BenchctlError("without a record there is nothing to compare", where="--records", fix="leave it out")
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    line(err, "from", f"{question.original.shown}: {question.original.scheduler}, {question.original.engine}")
    for name, (before, after) in question.changes.items():
        line(err, "set", f"{name}: {word_of(before)} → {word_of(after)}")
    for note in question.notes:
        line(err, "note", note)
    changes = {name: {"was": before, "is": after} for name, (before, after) in question.changes.items()}
    asked = {"of": question.original.shown, "changes": changes}
    options = replace(options, inherited=question.inherited, what_if=asked)
    if baseline is not None:
        own = frozenset(question.baseline or {}) - {"engine", "profile", "round_cost", "clock"}
        baseline = replace(baseline, inherited=own, what_if=asked | {"changes": {}})
    out = Path(options.out) if options.out is not None else new_folder(f"what-if-{question.original.path.name}")
    runs, codes = [question.original], []
    steps = [(baseline, out / AS_RECORDED)] if baseline is not None else []
    for step, folder in [*steps, (options, out)]:
        assert step is not None
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            codes.append(run_replay(replace(step, out=str(folder), report=False, json=True)))
        try:
            answer = json.loads(stdout.getvalue())
        except ValueError:  # it was interrupted, or failed as was said
            return max(codes) or 1
        runs += [open_run(each["benchctl"]["path"]) for each in answer.get("runs", [answer])]
    summaries = [
        summarize(run, percentile_metrics=options.percentile_metrics, percentiles=options.metric_percentiles)
        for run in runs
    ]
    names = ["original", *(["original, simulated"] if baseline is not None else []), "what if"]
    page = write_page(runs, out, baseline is not None, err) if options.report else None
    if options.json:
        keys = ["original", *(["as_recorded"] if baseline is not None else []), "what_if"]
        print(
            json.dumps(dict(zip(keys, summaries, strict=False)) | {"page": page and str(page)}, indent=1, default=str)
        )
        return max(codes)
    for name, summary in zip(names, summaries, strict=False):
        summary["benchctl"]["run"]["name"] = name
    stdout_console = Console(highlight=False)
    stdout_console.print(summary_table(summaries, percentile_metrics=options.percentile_metrics))
    if baseline is not None:
        stdout_console.print()
        stdout_console.print(Text(engine_text(summaries)))
    wide = Console(highlight=False, soft_wrap=True)
    for name, run in zip(names[1:], runs[1:], strict=False):
        line(wide, "run", f"{run.path}  {name}")
    if page is not None:
        line(wide, "page", str(page))
    return max(codes)


def word_of(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "not set" if value is None else "on" if value is True else "off" if value is False else str(value)


def engine_text(summaries: Sequence[Mapping[str, Any]]) -> str:
    """How far the new engine is off on the run as it was: that much of a difference is not the setting's."""
    measured, simulated = summaries[0], summaries[1]
    texts = []
    for name in ("ttft", "tpot", "itl", "e2el"):
        for percent in ("p50", "p99"):
            a, b = (summary.get(f"{percent}_{name}_ms") for summary in (measured, simulated))
            if a and b is not None:
                texts.append(f"{name} {percent} {b / a - 1:+.1%}")
    head = "the engine itself, on the run as it was (original, simulated against original): "
    return head + (", ".join(texts) or "no percentile that both carry")


def write_page(runs: Sequence[Run], out: Path, simulated: bool, err: Any) -> Path | None:
    """DIR/comparison.html: the change on one engine compared, all runs drawn. None where it could not be made, as was said."""
    from benchctl.command import line

    try:
        from reports.compare import compare
        from reports.compare_head import Side
        from reports.compare_page import comparison_section
        from reports.page import render
    except ImportError as error:
        line(err, "note", f"no {PAGE}: {error.name or error} is not installed (pip install plotly jinja2)")
        return None
    a, b = runs[-2], runs[-1]
    names = ("original, simulated" if simulated else "original", "what if")
    page = out / PAGE
    try:
        section = comparison_section(compare(Side(names[0], (a,)), Side(names[1], (b,))))
        page.write_text(render(runs, section), encoding="utf-8")
    except OSError as error:
        raise BenchctlError(
            f"{page} cannot be written: {error.strerror}", where="--out", fix="make room there"
        ) from None
    return page
