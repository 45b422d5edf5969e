"""A gate's result for people, machines and CI: terminal, JSON, JUnit XML, GitHub's step summary and annotations, benchmark JSON."""

from __future__ import annotations

import shlex
from typing import Any
from xml.etree import ElementTree

from benchctl.gate import EntryResult, Finding, FirstChange, GateResult, Update
from benchctl.gate_counters import TIMED
from reports.compare_head import plain
from reports.compare_text import signed
from reports.document import Block, Element, Grid, Heading, Items, Text
from reports.explain import as_json as explanation_json
from reports.explain import document as explanation_document
from reports.terminal import number

JSON_VERSION = 1
CAUSES = 3  # differences of the chain that are told
GATED_UNITS = {"mean_blocks": "blocks", "peak_blocks": "blocks", "evictions": "blocks"}


def document(result: GateResult) -> list[Element]:
    """What passed in a line each, what failed in full."""
    failed = [entry for entry in result.entries if not entry.ok]
    checked = [entry for entry in result.entries if entry.runs]
    out: list[Element] = [
        Heading(
            f"gate against {result.baseline}: "
            + (
                f"{len(failed)} of {len(checked)} entries changed"
                if failed
                else f"{len(checked)} {'entry' if len(checked) == 1 else 'entries'} as in the baseline"
            )
        )
    ]
    idle = [entry.entry.name for entry in result.entries if not entry.runs]
    rest = [f"not checked, no run was given: {', '.join(idle)}"] if idle else []
    out.append(Items((*(_line(entry) for entry in checked), *rest)))
    for entry in failed:
        out += _failure(entry)
    advice = [
        f"{entry.entry.name}: {finding.name} {_pair(finding)} ({finding.note})"
        for entry in checked
        for finding in entry.findings
        if finding.kind == "timing" and finding.note
    ]
    if advice:
        out += [Heading("Timings"), Items(tuple(advice))]
    return out


def _line(entry: EntryResult) -> str:
    gated = [finding for finding in entry.findings if not finding.advisory]
    bad = [finding for finding in gated if not finding.ok]
    more = f", {len(entry.runs)} runs" if len(entry.runs) > 1 else ""
    if not bad:
        return f"{entry.entry.name}: ok, {len(gated)} figures{more}"
    names = ", ".join(dict.fromkeys(finding.name for finding in bad[:6])) + (
        f" and {len(bad) - 6} more" if len(bad) > 6 else ""
    )
    return f"{entry.entry.name}: CHANGED, {len(bad)} of {len(gated)} figures{more}: {names}"


def _failure(entry: EntryResult) -> list[Element]:
    rows = tuple(
        (finding.name, _cell(finding.baseline), _cell(finding.found), _change(finding), finding.limit)
        for finding in entry.findings
        if not finding.ok and not finding.advisory
    )
    out: list[Element] = [
        Heading(f"{entry.entry.name}: what changed"),
        Grid(("", "baseline", "now", "", "allowed"), rows, frozenset({1, 2, 3})),
    ]
    out += [
        Text(finding.note)
        for finding in entry.findings
        if finding.note and not finding.ok and finding.kind == "counter"
    ]
    out += [Text(note) for note in entry.notes]
    if entry.first is not None:
        out += _first(entry.first)
    out += [Heading("To see it again"), Block(tuple(commands(entry)))]  # not wrapped: to be copied
    return out


def _first(first: FirstChange) -> list[Element]:
    out: list[Element] = [Heading("The first decision that differs, and what followed")]
    out.append(Items(tuple(divergence.text for divergence in first.diff.chain[:CAUSES])))
    if first.before is not None:
        out += explanation_document(first.before)
    if first.now is not None:
        out += explanation_document(first.now)
    return out


def commands(entry: EntryResult) -> list[str]:
    """The command that made the run, and those that look into it."""
    run = entry.runs[0]
    words = run.manifest.get("command") or []
    words = shlex.split(words) if isinstance(words, str) else list(words)
    if any(word.partition("=")[0] in ("--out", "-o") for word in words) and "--force" not in words:
        words.append("--force")  # the run is there: it is made anew
    out = [shlex.join(words)]
    if entry.first is not None and entry.first.round_now is not None:
        out.append(shlex.join(["benchctl", "explain", str(run.path), "--round", str(entry.first.round_now)]))
    return out


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value[:11] + "…" if len(value) > 12 else value
    return "–" if value is None else number(value)


def _pair(finding: Finding) -> str:
    return f"{_cell(finding.baseline)} → {_cell(finding.found)}"


def _change(finding: Finding) -> str:
    base, now = finding.baseline, finding.found
    if isinstance(base, str) or isinstance(now, str) or base is None or now is None:
        return ""
    share = f" ({signed(f'{abs(now - base) / base:.1%}', now - base)})" if base else ""
    amount = abs(now - base)
    return signed(f"{amount:,.4g}" if isinstance(amount, float) else f"{amount:,}", now - base) + share


def update_document(updates: list[Update], path: str) -> list[Element]:
    """What `--update` wrote."""
    out: list[Element] = [Heading(f"{path} is rewritten")]
    for each in updates:
        if each.new:
            out.append(Items((f"{each.name}: new",)))
        elif not each.changes:
            out.append(Items((f"{each.name}: as before",)))
        else:
            rows = tuple((name, _shown(old), _shown(new)) for name, (old, new) in each.changes.items())
            out += [Text(f"{each.name}:"), Grid(("", "before", "now"), rows, frozenset({1, 2}))]
    return out


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_cell(each) for each in value)
    return (
        "–"
        if value is None
        else _cell(value)
        if isinstance(value, (int, float, str)) and not isinstance(value, bool)
        else plain(value)
    )


def as_json(result: GateResult) -> dict[str, Any]:
    """docs/gate.md gives the schema."""

    def finding(each: Finding) -> dict[str, Any]:
        return {
            "name": each.name, "kind": each.kind, "baseline": each.baseline, "found": each.found, "limit": each.limit, "ok": each.ok,
            "advisory": each.advisory, "note": each.note or None,
        }  # fmt: skip

    def first(each: FirstChange | None) -> dict[str, Any] | None:
        if each is None:
            return None
        return {
            "round_baseline": each.round_before,
            "round_now": each.round_now,
            "differences": [divergence.text for divergence in each.diff.chain],
            "explain_baseline": None if each.before is None else explanation_json(each.before),
            "explain_now": None if each.now is None else explanation_json(each.now),
        }

    return {
        "benchctl_gate": JSON_VERSION,
        "baseline": str(result.baseline),
        "ok": result.ok,
        "entries": [
            {
                "name": entry.entry.name,
                "scheduler": entry.entry.scheduler,
                "trace": entry.entry.trace.name,
                "ok": entry.ok,
                "runs": [str(run.path) for run in entry.runs],
                "findings": [finding(each) for each in entry.findings],
                "first": first(entry.first),
                "notes": list(entry.notes),
                "commands": commands(entry) if entry.runs else [],
            }
            for entry in result.entries
        ],
    }


def junit(result: GateResult) -> str:
    """One suite an entry, one case a figure; advisory figures and entries without a run are skipped cases."""
    root = ElementTree.Element("testsuites", name="benchctl gate")
    for entry in result.entries:
        cases = entry.findings
        bad = [f for f in cases if not f.ok and not f.advisory]
        skipped = [f for f in cases if f.advisory]
        suite = ElementTree.SubElement(
            root, "testsuite", name=entry.entry.name, tests=str(max(len(cases), 1)), failures=str(len(bad)),
            skipped=str(len(skipped) if entry.runs else 1),
        )  # fmt: skip
        if not entry.runs:
            case = ElementTree.SubElement(suite, "testcase", classname=entry.entry.name, name="run")
            ElementTree.SubElement(case, "skipped", message="no run was given")
        for each in cases:
            case = ElementTree.SubElement(suite, "testcase", classname=entry.entry.name, name=each.name)
            message = f"{_pair(each)}, allowed: {each.limit}"
            if each.advisory:
                ElementTree.SubElement(case, "skipped", message=each.note or each.limit)
            elif not each.ok:
                failure = ElementTree.SubElement(case, "failure", message=message)
                failure.text = "\n".join(_causes(entry)) or message
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + _xml_safe(ElementTree.tostring(root, encoding="unicode")) + "\n"


def _xml_safe(text: str) -> str:
    """Without the control characters that XML 1.0 has no way to write; an id of a trace may hold them."""
    return "".join(c for c in text if c in "\t\n\r" or ord(c) >= 32)


def _causes(entry: EntryResult) -> list[str]:
    return [] if entry.first is None else [divergence.text for divergence in entry.first.diff.chain[:CAUSES]]


def annotation_lines(result: GateResult) -> list[str]:
    """GitHub's workflow commands: one error an entry that changed, at the baseline's file; a notice for timings that gate nothing."""
    out = []
    for entry in result.entries:
        bad = [finding for finding in entry.findings if not finding.ok and not finding.advisory]
        if bad:
            texts = [f"{finding.name}: {_pair(finding)} (allowed: {finding.limit})" for finding in bad[:10]]
            body = "\n".join([*texts, *_causes(entry)])
            out.append(
                f"::error file={_property(str(result.baseline))},title={_property(f'{entry.entry.name} changed')}::{_data(body)}"
            )
        for finding in entry.findings:
            if finding.kind == "timing" and finding.advisory and not finding.ok:
                title = _property(f"{entry.entry.name}: {finding.name} is slower (advisory)")
                out.append(f"::notice title={title}::{_data(f'{_pair(finding)}; {finding.note}')}")
    return out


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def smaller_is_better(result: GateResult) -> list[dict[str, Any]]:
    """`customSmallerIsBetter` of github-action-benchmark: counters and timings where less is better, of the runs now."""
    out = []
    for entry in result.entries:
        for finding in entry.findings:
            if isinstance(finding.found, str) or finding.found is None or not _smaller(finding):
                continue
            unit = (
                TIMED[finding.name][0]
                if finding.kind == "timing"
                else GATED_UNITS.get(finding.name, _unit(finding.name))
            )
            out.append({"name": f"{entry.entry.name}: {finding.name}", "unit": unit, "value": finding.found})
    return out


def _smaller(finding: Finding) -> bool:
    if finding.kind == "timing":
        return TIMED[finding.name][1] == "lower"
    return finding.name in (
        "rounds",
        "scheduled_tokens",
        "recomputed_tokens",
        "discarded_tokens",
        "preemptions",
        "evictions",
        "rejected",
        "peak_blocks",
        "mean_blocks",
    )


def _unit(name: str) -> str:
    return "tokens" if name.endswith("_tokens") else "rounds" if name.startswith("rounds") else "count"
