"""Weka / Claude Code agent traces: one object a session, its calls in order, sub-agents nested; hash ids of 64 tokens, local to the session.

`t` is seconds from the session's start; a nested `t` counts from its sub-agent's start where it is smaller than that. A call waits for the one before
it; the call after a sub-agent waits for that one's last call too. Sessions have no start of their own: it is drawn by rate. Source:
callanjfox/kv-cache-tester; semianalysisai/cc-traces-weka; AIPerf's documentation of the format.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from traces.draws import draw_gamma
from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, list_of, object_of, rest, text_of, whole
from traces.rows import Row

USED = frozenset({"t", "model", "in", "out", "hash_ids", "think_time", "ttft", "api_time", "stop", "requests"})


class WekaReader(Reader):
    sorts = True
    origin = "zero"

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        size = options.block_size or whole(sample.first.get("block_size"), "block_size") or 64
        scope = "file" if sample.first.get("hash_id_scope") in ("global", "file") else "session"
        self.header |= {"block_size": size, "hash_scope": scope}
        self._block_size = size
        self._gaps = random.Random(f"{options.seed} arrivals")
        self._rate = options.request_rate or 0.1
        self._start = 0.0
        self.assumed += [
            f"session starts: gamma with shape {options.burstiness:g}, {self._rate:g} sessions/s, seed {options.seed}",
            "a call waits for the one before it in its agent, and for sub-agents started between",
        ]

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        session = text_of(record.get("id"), "id") or f"session-{number}"
        base = round(self._start * 1e9)
        drafts = self._agent(list_of(record.get("requests"), "requests"), session, "", base, None, number)[0]
        self._start = round(self._start + draw_gamma(self._gaps, self.options.burstiness) / self._rate, 6)
        return sorted(drafts, key=lambda draft: draft.time_ns or 0)

    def _agent(
        self, calls: list[Any], session: str, path: str, base: int, parent: str | None, number: int
    ) -> tuple[list[Draft], str | None]:
        """(the rows of one agent and its sub-agents, the id of its last own call)."""
        drafts: list[Draft] = []
        last, joined, turn, agents = parent, [], 0, 0
        for entry in calls:
            call = object_of(entry, "a request")
            time = base + self.time(call.get("t") or 0, "s", "t")
            if call.get("type") == "subagent" or "requests" in call:
                agents += 1
                inner = list_of(call.get("requests") or [], "requests")
                first = object_of(inner[0], "a request").get("t") or 0 if inner else 0
                relative = self.time(first, "s", "t") < self.time(call.get("t") or 0, "s", "t")
                nested, end = self._agent(inner, session, f"{path}{agents}.", time if relative else base, last, number)
                drafts += nested
                if end is not None and end != last:
                    joined.append(end)
                continue
            turn += 1
            row = self._call(call, f"{session}/{path}{turn}", session, number)
            parents = tuple(dict.fromkeys([*([last] if last else []), *joined]))
            row.parents = parents or None
            row.turn = turn if not path else None
            if parents and call.get("think_time") is not None:
                row.think_s = max(self.time(call["think_time"], "s", "think_time"), 0) / 1e9
            drafts.append(Draft(row, time))
            last, joined = row.id, []
        return drafts, last

    def _call(self, call: dict[str, Any], id: str, session: str, number: int) -> Row:
        row = Row(
            id=id,
            session=session,
            input_length=whole(call.get("in"), "in"),
            output_length=whole(call.get("out"), "out"),
            model=text_of(call.get("model"), "model"),
            src={"row": number, **rest(call, USED)},
        )
        hash_ids = list_of(call.get("hash_ids") or [], "hash_ids")
        if hash_ids and row.input_length:
            if len(hash_ids) == row.input_length // self._block_size and row.input_length % self._block_size:
                # The rest of the last block has no id in these files: it gets one that nobody shares.
                hash_ids = [*hash_ids, f"rest of {id}"]
                self.counts["prompts whose last, partly filled block has no id: it is unique"] += 1
            row.hash_ids = tuple(hash_ids)
        observed: dict[str, Any] = {}
        for key, ours in (("ttft", "ttft_s"), ("api_time", "e2e_s")):
            if call.get(key) is not None:
                observed[ours] = self.time(call[key], "s", key) / 1e9
        if call.get("stop"):
            observed["finish_reason"] = call["stop"]
        row.observed = observed or None
        return row


def tell(sample: Sample) -> bool:
    requests = sample.first.get("requests")
    if sample.kind == "csv" or "requests" not in sample.first or "timestamp" in sample.first:
        return False
    first = requests[0] if isinstance(requests, list) and requests else {"in": 0}
    return "hash_id_scope" in sample.first or isinstance(first, dict) and ("in" in first or "t" in first)


FORMAT = Format("weka", "Weka / Claude Code agent sessions (hash ids of 64 tokens, local)", tell, WekaReader)
