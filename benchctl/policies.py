"""Policies of the user's own: `package.module:Class`, or a name of the entry-point group `benchctl.schedulers`.

A class is looked at before it is built: what it lacks is said by name. Once found it stands in the registry beside `nano`
and `vllm` under the name that it gives itself. docs/schedulers.md says what a class must have.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from engines.interface import Scheduler, SchedulerConfig
from engines.schedulers.registry import SCHEDULERS, PolicyInfo
from traces.errors import BenchctlError

GROUP = "benchctl.schedulers"
METHODS = (
    "add", "has_unfinished", "schedule", "update", "waiting_requests", "running_requests", "free_list", "hashed_blocks", "block_table",
)  # fmt: skip
KNOBS = tuple(f.name for f in fields(SchedulerConfig) if f.name != "num_blocks")
FAMILIES = ("nano", "vllm")
BUILTIN = ("nano", "vllm")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_loaded: dict[str, tuple[str, type]] = {}  # what was asked for -> (name, class)


def find_policy(asked: str) -> str:
    """The registry's name for what `--scheduler` says, loaded if need be. Raises BenchctlError."""
    if asked in _loaded:
        return _loaded[asked][0]
    if asked in SCHEDULERS:
        return asked
    if asked.lower() in BUILTIN:  # vLLM, as it spells itself
        return asked.lower()
    if ":" in asked:
        place = asked
    else:
        found = {point.name: point.value for point in metadata.entry_points(group=GROUP)}
        if asked not in found:
            known = [*BUILTIN, *sorted(found)]
            close = [name for name in known if asked.lower().startswith(name)]  # nano-vllm, vllm-v1
            close = close or difflib.get_close_matches(asked.lower(), known, 1, 0.5)
            raise BenchctlError(
                f"no scheduler named {asked!r}" + (f"; did you mean {close[0]}?" if close else ""),
                where="--scheduler",
                fix=_class_in_file(asked) or " or ".join(known) + ", or package.module:Class of your own",
            )
        place = found[asked]
    cls = import_class(place)
    name = register(cls, place)
    _loaded[asked] = (name, cls)
    return name


def _class_in_file(asked: str) -> str | None:
    """How the scheduler in a file is named, where a file was asked for."""
    path = Path(asked)
    if path.suffix != ".py" or not path.is_file() or path.is_absolute() or ".." in path.parts:
        return None
    return f"{'.'.join(path.with_suffix('').parts)}:CLASS, with the name of its class"


def import_class(place: str) -> type:
    """The class at `package.module:Class`; the folder that one stands in counts as a place of modules. Raises BenchctlError."""
    module_name, _, class_name = place.partition(":")
    if not module_name or not class_name.isidentifier():
        raise BenchctlError(f"--scheduler is {place!r}", fix="package.module:Class")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise BenchctlError(
                f"there is no module {module_name}",
                where=f"--scheduler {place}",
                fix="run it in the folder that holds it, or install it",
            ) from None
        raise _import_fault(place, error) from None
    except Exception as error:  # a user's module may raise anything
        raise _import_fault(place, error) from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [
            name for name, value in vars(module).items() if isinstance(value, type) and hasattr(value, "schedule")
        ]
        raise BenchctlError(
            f"module {module_name} has no class {class_name}",
            where=f"--scheduler {place}",
            fix=f"{module_name}:{classes[-1]}" if classes else "check the name",
        )
    return found


def _import_fault(place: str, error: Exception) -> BenchctlError:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f"{frame.tb_frame.f_code.co_filename}, line {frame.tb_lineno}" if frame is not None else place
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
    return BenchctlError(
        f"the module of --scheduler {place} cannot be imported: {type(error).__name__}: {error}",
        where=where,
        fix="mend the module",
    )


def register(cls: type, place: str) -> str:
    """Put a class into the registry under its own name. Raises BenchctlError where it lacks something."""
    where = f"--scheduler {place}"
    missing = [method for method in METHODS if not callable(getattr(cls, method, None))]
    if missing:
        raise BenchctlError(
            f"{cls.__name__} is no scheduler: it has no {', '.join(missing)}",
            where=where,
            fix="engines.interface.Scheduler is the whole of what one needs; docs/schedulers.md shows one",
        )
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BenchctlError(
            f"{cls.__name__}.name is {name!r}",
            where=where,
            fix='a short name for folders and tables, such as name = "shortest-first"',
        )
    taken = [loaded for loaded, owner in _loaded.values() if owner is not cls]
    if name in BUILTIN or name in taken:
        raise BenchctlError(
            f"{cls.__name__} calls itself {name!r}, which is taken", where=where, fix="give the class a name of its own"
        )
    knobs = tuple(_attribute(cls, "KNOBS", KNOBS))
    unknown = [knob for knob in knobs if knob not in KNOBS]
    if unknown:
        raise BenchctlError(
            f"{cls.__name__}.KNOBS names {', '.join(unknown)}", where=where, fix=f"of {', '.join(KNOBS)}"
        )
    family = _attribute(cls, "FAMILY", None)
    if family is not None and family not in FAMILIES:
        raise BenchctlError(
            f"{cls.__name__}.FAMILY is {family!r}", where=where, fix=f"{' or '.join(FAMILIES)}, or leave it out"
        )
    SCHEDULERS[name] = PolicyInfo(
        policy=str(_attribute(cls, "POLICY", place)),
        build=cast(Callable[..., Scheduler], cls),
        default_block_size=_size(cls, "DEFAULT_BLOCK_SIZE", 16, 1, where),
        null_blocks=_size(cls, "NULL_BLOCKS", 0, 0, where),
        knobs=knobs,
        family=family,
        place=place,
    )
    return name


def _attribute(cls: type, name: str, default: Any) -> Any:
    """Of the class itself or of one above it, or of their modules: there the policies that come with benchctl keep theirs."""
    for each in cls.__mro__:
        if name in vars(each):
            return vars(each)[name]
        module = sys.modules.get(each.__module__)
        if each.__module__.startswith("engines.schedulers."):
            # A subclass of NanoScheduler or VllmScheduler has their knobs, blocks and rules of order.
            if name == "FAMILY":
                return vars(each).get("name")
            if hasattr(module, name):
                found = getattr(module, name)
                return f"{cls.__name__}, from {found}" if name == "POLICY" else found
        elif name != "POLICY" and hasattr(module, name):  # a copy of nano.py or vllm.py, say
            return getattr(module, name)
    return default


def _size(cls: type, name: str, default: int, least: int, where: str) -> int:
    value = _attribute(cls, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BenchctlError(f"{cls.__name__}.{name} is {value!r}", where=where, fix=f"an integer of {least} or more")
    return value
