"""Request bodies ready to be sent: the inputs.json of AIPerf and GenAI-Perf, and lines of raw payloads.

`{"data": [{"session_id"?, "payloads": [body, ...]}]}` (GenAI-Perf: `payload`), or `{"payload": body}` on each line. The bodies of one session follow
each other, each with the whole conversation in it. No times. Source: ai-dynamo/aiperf and triton-inference-server/perf_analyzer, docs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, Reader, Sample, list_of, object_of, rest, text_of
from traces.formats.chat import SAMPLING_KEYS, read_payload
from traces.formats.mooncake import fill
from traces.rows import Row, RowFault

USED = frozenset(
    {"messages", "prompt", "input", "tools", "model", "max_tokens", "max_completion_tokens", *SAMPLING_KEYS}
)


class PayloadReader(Reader):
    synthesizes_times = True

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft | RowFault]:
        if "data" not in record:
            return self._bodies(record, number, None)
        drafts: list[Draft | RowFault] = []
        for place, entry in enumerate(list_of(record["data"], "data")):
            try:
                drafts += self._bodies(object_of(entry, "an entry of data"), number, place)
            except RowFault as fault:
                drafts.append(RowFault(f"data[{place}]: {fault.what}", fix=fault.fix))
        return drafts

    def _bodies(self, entry: dict[str, Any], number: int, place: int | None) -> list[Draft]:
        given = entry.get("payloads", entry.get("payload"))
        if given is None:
            raise RowFault("no payload", fix="mend the entry, or --skip-bad")
        bodies = given if isinstance(given, list) else [given]
        session = text_of(entry.get("session_id"), "session_id")
        if session is None and len(bodies) > 1:
            session = f"session-{number if place is None else place}"
        drafts: list[Draft] = []
        for turn, item in enumerate(bodies, 1):
            body = object_of(item, "a payload")
            payload = read_payload(body)
            row = Row(session=session, prompt_token_ids=payload.prompt_token_ids)
            fill(row, payload)
            row.src = {"row": number, **({} if place is None else {"entry": place}), **rest(body, USED)}
            if session is not None:
                row.id, row.turn = f"{session}-t{turn}", turn
                if drafts:
                    row.parents = (f"{session}-t{turn - 1}",)
            drafts.append(Draft(row))
        return drafts


def tell(sample: Sample) -> bool:
    if sample.kind == "csv" or sample.first.keys() & {"timestamp", "delay", "response", "custom_id"}:
        return False
    data = sample.first.get("data")
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return bool(data[0].keys() & {"payload", "payloads"})
    return isinstance(sample.first.get("payload"), dict) or sample.first.keys() == {"data"} and data is None


FORMAT = Format("payloads", "inputs.json of AIPerf and GenAI-Perf, lines of raw payloads", tell, PayloadReader)
